"""Row ids and lengths on every legal axis: named slices are right, the others are left alone."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.structs import Lengths, Rows, SparsitySpec
from tests.api.cases import LEGAL, Case
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

AXES = [(case, operand, axis) for case, operand, axes in LEGAL for axis in axes]
names = [f"{case.name}-{operand}-{axis}" for case, operand, axis in AXES]


def check(
    case: Case,
    operand: str,
    axis: str,
    spec: SparsitySpec,
    dtype: str,
    pattern: str,
    dead: str,
    rng: np.random.Generator,
) -> None:
    """All candidates: named slices equal the truth, others are untouched, or zero if so asked."""
    arrays = random_inputs(case, dtype, rng)
    dim = case.inputs[operand].index(axis)
    size = arrays[operand].shape[dim]
    live, sparsity = slice_pattern(spec, pattern, size, rng)
    operator = compiled(case, dtype, operand, spec, dead)
    if axis in case.reduced:
        where = [1] * arrays[operand].ndim
        where[dim] = size
        kept = np.where(live.reshape(where), arrays[operand], 0).astype(arrays[operand].dtype)
        truth, chosen = truth_of(case, {**arrays, operand: kept}), slice(None)
        place = 0
    else:
        truth, chosen = truth_of(case, arrays), live
        place = case.output.index(axis)
    runs = every_candidate(
        operator, tuple(arrays.values()), sparsity, truth.shape, result_dtype(dtype)
    )
    for candidate, out in runs:
        found, wanted = np.moveaxis(out, place, 0), np.moveaxis(truth, place, 0)
        if chosen is live:
            rest = found[~live]
            assert (rest == 0).all() if dead == "zero" else untouched(rest), str(candidate)
        assert_close(found[chosen], wanted[chosen], f"{candidate}, {sparsity}")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("case", "operand", "axis"), AXES, ids=names)
def test_named_slices_are_right_and_the_others_untouched(
    case: Case, operand: str, axis: str, pattern: str, rng: np.random.Generator
) -> None:
    dim = case.inputs[operand].index(axis)
    check(case, operand, axis, Rows(dim), "float32", pattern, "skip", rng)


@pytest.mark.parametrize("cumulative", [False, True], ids=["lengths", "running sums"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("case", "operand", "axis"), AXES, ids=names)
def test_padding_is_not_computed(
    case: Case, operand: str, axis: str, pattern: str, cumulative: bool, rng: np.random.Generator
) -> None:
    dim = case.inputs[operand].index(axis)
    check(case, operand, axis, Lengths(dim, cumulative), "float32", pattern, "zero", rng)
