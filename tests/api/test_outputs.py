"""Sparse outputs: what the mask marks is computed, pieces without a marked element are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import AxisError, ShapeError
from pit_tvm.structs import BitMask, BlockMask, Candidate, Mask, Rows, SparsitySpec
from tests.api.cases import BATCHED, CROSSED, LINEAR, MATMUL, Case
from tests.api.patterns import PATTERNS, zero_pattern
from tests.api.running import (
    assert_close,
    compiled,
    empty_database,
    poison,
    random_inputs,
    result_dtype,
    truth_of,
    untouched,
)

CASES: tuple[tuple[Case, SparsitySpec, str], ...] = (
    (MATMUL, Mask(), "float32"),
    (MATMUL, BitMask(), "bfloat16"),
    (MATMUL, BlockMask(5, 32), "float32"),
    (MATMUL, BlockMask(64, 48), "float32"),  # wide enough in rows only: those of rhs are gathered
    (MATMUL, Mask(3, 5), "int8"),
    (CROSSED, Mask(1, 29), "float32"),  # whole rows
    (CROSSED, BlockMask(32, 1), "float32"),
    (LINEAR, BlockMask(7, 64), "float16"),
    (BATCHED, Mask(1, 4, 64), "float32"),
)


def pieces(mask: np.ndarray, extents: tuple[int, ...]) -> np.ndarray:
    """Elements of micro-tiles that have a live one; an extent of 0 is the whole dimension."""
    for axis, (size, extent) in enumerate(zip(mask.shape, extents, strict=True)):
        starts = np.arange(0, size, extent or size)
        live = np.logical_or.reduceat(mask, starts, axis=axis)
        mask = np.repeat(live, extent or size, axis=axis).take(range(size), axis=axis)
    return mask


def run(
    operator: pit_tvm.Operator, arrays: tuple[Any, ...], sparsity: Any, shape: Any, dtype: str
) -> list[tuple[Candidate, np.ndarray]]:
    """Every candidate of ours, each into a poisoned output of its own."""
    plan = operator.explain(*arrays, sparsity=sparsity)
    done = []
    for candidate in plan.candidates:
        if candidate.kind != "dense":
            out = poison(shape, dtype)
            operator._dispatcher.run(arrays, sparsity, out, choose=lambda plan, c=candidate: c)
            done.append((candidate, out))
    assert done
    return done


def check(
    case: Case,
    spec: SparsitySpec,
    dtype: str,
    pattern: str,
    rng: np.random.Generator,
    dead: str = "skip",
    new: bool = True,
) -> None:
    """All candidates on one pattern, and with ``new`` a call that makes its output."""
    arrays = random_inputs(case, dtype, rng)
    truth = truth_of(case, arrays)
    mask, sparsity = zero_pattern(spec, pattern, truth.shape, rng)
    operator = compiled(case, dtype, "out", spec, dead)
    given = tuple(arrays.values())
    for candidate, out in run(operator, given, sparsity, truth.shape, result_dtype(dtype)):
        assert candidate.micro_tile is not None
        live = pieces(mask, candidate.micro_tile.extents)
        assert_close(out[live], truth[live], candidate)
        assert (out[~live] == 0).all() if dead == "zero" else untouched(out[~live])
    if new:
        whole = operator(*given, sparsity=sparsity)
        assert_close(whole[mask], truth[mask])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    ("case", "spec", "dtype"), CASES, ids=[f"{case.name}, {spec}" for case, spec, _ in CASES]
)
def test_live_pieces_are_computed_and_no_others_written(
    case: Case, spec: SparsitySpec, dtype: str, pattern: str, rng: np.random.Generator
) -> None:
    check(case, spec, dtype, pattern, rng)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), choice=st.sampled_from(CASES[:3]))
def test_any_shape_and_mask(seed: int, choice: tuple[Case, SparsitySpec, str]) -> None:
    check(*choice, "random", np.random.default_rng(seed))


def test_dead_pieces_become_zero_on_demand(rng: np.random.Generator) -> None:
    check(MATMUL, BlockMask(5, 32), "float32", "random", rng, dead="zero")


@pytest.mark.parametrize(
    ("blocks", "micro_tiles"),
    [((64, 64), {"1x64"}), ((7, 128), {"1x64", "1x128"}), ((1, 96), {"1x96"}), ((1, 1), {"1x64"})]
    + [((1, 200), {"1x*"}), ((64, 1), {"64x1"}), ((100, 3), {"*x1"})],
)
def test_pieces_divide_the_blocks_where_they_can(
    blocks: tuple[int, int], micro_tiles: set[str]
) -> None:
    operator = pit_tvm.compile(
        op.matmul(100, 200, 7), sparse={"out": Mask(*blocks)}, database=empty_database()
    )
    plan = operator.explain(sparsity=np.ones((100, 200), bool))
    assert {str(c.micro_tile) for c in plan.candidates if c.micro_tile} == micro_tiles


def test_dense_is_a_candidate_for_a_new_output_only(rng: np.random.Generator) -> None:
    arrays = tuple(random_inputs(MATMUL, "float32", rng).values())
    shape = (arrays[0].shape[0], arrays[1].shape[1])
    live = np.ones(shape, bool)
    out = poison(shape, "float32")
    operator = compiled(MATMUL, "float32", "out", Mask())
    dense = operator.explain(*arrays, sparsity=live).candidates[-1]
    assert dense.kind == "dense"
    kept = operator.profile(*arrays, sparsity=live, out=out).plan
    assert kept is not None and all(c.kind == "pit" for c in kept.candidates)
    with pytest.raises(ShapeError, match="^choice.*live parts"):
        operator.repeat(dense, *arrays, sparsity=live, out=out)
    zeroed = compiled(MATMUL, "float32", "out", Mask(), "zero")
    assert all(c.kind == "pit" for c in zeroed.explain(*arrays, sparsity=live).candidates)


@pytest.mark.parametrize(
    ("tensors", "spec", "match"),
    [
        (op.matmul(None, 29, 131), Rows(), r"^sparse\['out'\].*Mask, BitMask or BlockMask.*Rows"),
        (op.reduce_sum(None, None), Mask(), r"^sparse\['out'\].*output of matmul"),
        (op.grouped_matmul(None, 29, 53, 5), Mask(), r"^sparse\['out'\].*output of matmul"),
    ],
)
def test_other_outputs_and_patterns_are_refused(
    tensors: Any, spec: SparsitySpec, match: str
) -> None:
    with pytest.raises(AxisError, match=match):
        pit_tvm.compile(tensors, sparse={"out": spec})


def test_a_mask_is_not_applied_to_an_output() -> None:
    with pytest.raises(AxisError, match="^apply_mask.*input.*out"):
        pit_tvm.compile(op.matmul(None, 29, 131), sparse={"out": Mask()}, apply_mask=True)


def test_nothing_to_compute(rng: np.random.Generator) -> None:
    operator = compiled(MATMUL, "float32", "out", Mask())
    lhs, rhs = np.zeros((0, 5), np.float32), np.zeros((5, 9), np.float32)
    assert operator(lhs, rhs, sparsity=np.zeros((0, 9), bool)).shape == (0, 9)
