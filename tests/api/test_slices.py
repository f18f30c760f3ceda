"""Row ids and lengths on every legal axis: named slices are right, the others are left alone."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.structs import Lengths, Rows, SparsitySpec
from tests.api.cases import LEGAL, Legal
from tests.api.patterns import PATTERNS, slice_pattern
from tests.api.running import (
    assert_close,
    compiled,
    every_candidate,
    random_inputs,
    result_dtype,
    truth_of,
    untouched,
)

AXES = [(legal, axis) for legal in LEGAL for axis in legal.axes]


def check(
    legal: Legal,
    axis: str,
    spec: SparsitySpec,
    dtype: str,
    pattern: str,
    dead: str,
    rng: np.random.Generator,
) -> None:
    """All candidates: named slices equal the truth, others are untouched, or zero if so asked."""
    case, operand = legal.case, legal.operand
    arrays = random_inputs(case, dtype, rng)
    dim = case.inputs[operand].index(axis)
    size = arrays[operand].shape[dim]
    live, sparsity = slice_pattern(spec, pattern, size, rng)
    operator = compiled(case, dtype, operand, spec, dead)
    if axis in case.reduced:
        where = [1] * arrays[operand].ndim
        where[dim] = size
        kept = np.where(live.reshape(where), arrays[operand], 0).astype(arrays[operand].dtype)
        truth, place = truth_of(case, {**arrays, operand: kept}), 0
        live = np.ones(len(truth), bool)  # of the result: every sum is written
    else:
        truth, place = truth_of(case, arrays), case.output.index(axis)
    runs = every_candidate(
        operator, tuple(arrays.values()), sparsity, truth.shape, result_dtype(dtype)
    )
    for candidate, out in runs:
        found, wanted = np.moveaxis(out, place, 0), np.moveaxis(truth, place, 0)
        rest = found[~live]
        assert (rest == 0).all() if dead == "zero" else untouched(rest), str(candidate)
        assert_close(found[live], wanted[live], f"{candidate}, {sparsity}")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("legal", "axis"), AXES, ids=str)
def test_named_slices_are_right_and_the_others_untouched(
    legal: Legal, axis: str, pattern: str, rng: np.random.Generator
) -> None:
    dim = legal.case.inputs[legal.operand].index(axis)
    check(legal, axis, Rows(dim), "float32", pattern, "skip", rng)


@pytest.mark.parametrize(
    ("pattern", "cumulative"), [*((p, False) for p in PATTERNS), ("random", True)]
)
@pytest.mark.parametrize(("legal", "axis"), AXES, ids=str)
def test_padding_is_not_computed(
    legal: Legal, axis: str, pattern: str, cumulative: bool, rng: np.random.Generator
) -> None:
    dim = legal.case.inputs[legal.operand].index(axis)
    check(legal, axis, Lengths(dim, cumulative), "float32", pattern, "zero", rng)
