"""Extents of 0 and 1, what dead memory may hold, and sums that need wide accumulators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.memory import numpy_dtype
from pit_tvm.structs import (
    BitMask,
    BlockMask,
    Groups,
    Lengths,
    Mask,
    Rows,
    SparsitySpec,
    Values,
)
from tests.api.cases import (
    BATCHED,
    CONV2D,
    ELEMENTWISE,
    GROUPED,
    GROUPS,
    LINEAR,
    MATMUL,
    REDUCE_SUM,
    Case,
)
from tests.api.running import (
    assert_close,
    compiled,
    every_candidate,
    poison,
    random_array,
    result_dtype,
    untouched,
)


def empty_pattern(spec: SparsitySpec, shape: tuple[int, ...]) -> Any:
    """What the call passes for an operand without rows."""
    if isinstance(spec, Mask):
        return np.empty(shape, bool)
    if isinstance(spec, BitMask):
        return np.empty((*shape[:-1], -(-shape[-1] // 8)), np.uint8)
    if isinstance(spec, BlockMask):
        counts = [-(-s // e) for s, e in zip(shape, spec.extents, strict=True)]
        return np.empty(counts, bool)
    if isinstance(spec, Lengths):
        return np.zeros(3, np.int32)
    return None if isinstance(spec, Values) else np.empty(0, np.int64)


@pytest.mark.parametrize(
    "spec",
    [Mask(), Mask(8, 16), BitMask(), BlockMask(2, 3), Values(), Rows(), Lengths()],
    ids=str,
)
@pytest.mark.parametrize("dead", ["skip", "zero"])
def test_no_rows_give_no_rows(spec: SparsitySpec, dead: str) -> None:
    operator = compiled(LINEAR, "float32", "lhs", spec, dead)
    lhs, weight, bias = (np.ones(s, np.float32) for s in ((0, 131), (71, 131), (71,)))
    pattern = empty_pattern(spec, lhs.shape)
    assert operator(lhs, weight, bias, sparsity=pattern).shape == (0, 71)
    out = poison((0, 71), "float32")
    assert operator(lhs, operator.pack(rhs=weight), bias, sparsity=pattern, out=out) is out
    assert operator.profile(lhs, weight, bias, sparsity=pattern).kernel == "nothing to do"


@pytest.mark.parametrize(
    ("case", "operand", "shapes", "result"),
    [
        (MATMUL, "rhs", ((7, 5), (5, 0)), (7, 0)),
        (BATCHED, "lhs", ((0, 7, 5), (0, 5, 3)), (0, 7, 3)),
        (BATCHED, "lhs", ((2, 0, 5), (2, 5, 3)), (2, 0, 3)),
        (REDUCE_SUM, "data", ((0, 5),), (0,)),
        (ELEMENTWISE, "data", ((0, 5), (0, 5)), (0, 5)),
        (ELEMENTWISE, "rhs", ((5, 0), (5, 0)), (5, 0)),
        (CONV2D, "data", ((0, 2, 7, 7), (3, 2, 3, 2)), (0, 3, 5, 6)),
        (CONV2D, "weight", ((2, 2, 7, 7), (0, 2, 3, 2)), (2, 0, 5, 6)),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_empty_extents_give_empty_results(
    case: Case, operand: str, shapes: tuple[tuple[int, ...], ...], result: tuple[int, ...]
) -> None:
    operator = compiled(case, "float32", operand, Mask())
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    mask = np.ones(arrays[list(case.inputs).index(operand)].shape, bool)
    assert operator(*arrays, sparsity=mask).shape == result


@pytest.mark.parametrize("spec", [Mask(), Values(), Rows(), Lengths()], ids=str)
def test_sums_of_nothing_are_zero_before_the_epilogue(spec: SparsitySpec) -> None:
    tensors = op.matmul(None, 5, None, bias=True, activation="gelu")
    operator = pit_tvm.compile(tensors, sparse={"lhs": spec})
    lhs, rhs = np.empty((6, 0), np.float32), np.empty((0, 5), np.float32)
    bias = np.linspace(-2, 2, 5).astype(np.float32)
    pattern: dict[type, Any] = {Rows: np.arange(6), Lengths: [3, 3], Mask: np.empty((6, 0), bool)}
    out = poison((6, 5), "float32")
    operator(lhs, rhs, bias, sparsity=pattern.get(type(spec)), out=out)
    from math import erf

    wanted = [[0.5 * b * (1 + erf(b / 2**0.5)) for b in bias.tolist()]] * 6
    assert_close(out, np.array(wanted))


@pytest.mark.parametrize("columns", [5, 32, 33, 71])
def test_sums_of_nothing_meet_packed_weights_without_elements(columns: int) -> None:
    lhs, weight = np.empty((4, 0), np.float32), np.empty((columns, 0), np.float32)
    bias = np.linspace(1, 2, columns, dtype=np.float32)
    wanted = np.outer([0, 1, 0, 0], bias)
    linear = pit_tvm.compile(
        op.linear(None, None, None), sparse={"lhs": Rows()}, dead="zero", library=False
    )
    for rhs in (weight, linear.pack(rhs=weight), weight):
        assert_close(linear(lhs, rhs, bias, sparsity=np.array([1])), wanted)
    groups, ids = np.empty((2, 0, columns), np.float32), np.array([0, 1, 1, 0], np.int32)
    tensors = op.grouped_matmul(None, None, None, 2)
    grouped = pit_tvm.compile(tensors, sparse={"lhs": Groups(2)})
    for rhs in (groups, grouped.pack(rhs=groups)):
        out = grouped(lhs, rhs, ids, out=poison((4, columns), "float32"))
        assert_close(out, np.zeros((4, columns)))


@pytest.mark.parametrize("spec", [Mask(), Values(), Rows(), Lengths()], ids=str)
def test_one_element_is_enough(spec: SparsitySpec) -> None:
    operator = compiled(MATMUL, "float32", "lhs", spec)
    three, four = np.full((1, 1), 3, np.float32), np.full((1, 1), 4, np.float32)
    pattern: dict[type, Any] = {Rows: [0], Lengths: [1], Mask: np.ones((1, 1), bool)}
    runs = every_candidate(operator, (three, four), pattern.get(type(spec)), (1, 1), "float32")
    for candidate, out in runs:
        assert out[0, 0] == 12, str(candidate)


@pytest.mark.parametrize("pattern", ["rows", "lengths"])
def test_nan_in_rows_that_do_not_exist_does_not_matter(
    pattern: str, rng: np.random.Generator
) -> None:
    spec: SparsitySpec = Rows() if pattern == "rows" else Lengths()
    lhs, rhs = random_array((60, 53), "float32", rng), random_array((53, 29), "float32", rng)
    lengths = np.array([0, 20, 7])
    live = (np.arange(20) < lengths[:, None]).ravel()
    truth = lhs.astype(np.float64) @ rhs
    lhs[~live] = np.nan
    given = rng.permutation(np.flatnonzero(live)) if pattern == "rows" else lengths
    operator = compiled(MATMUL, "float32", "lhs", spec)
    for candidate, out in every_candidate(operator, (lhs, rhs), given, truth.shape, "float32"):
        assert_close(out[live], truth[live], str(candidate))
        assert untouched(out[~live])


def test_nan_in_terms_that_do_not_exist_does_not_matter(rng: np.random.Generator) -> None:
    """Along the summed axis both operands hold NaN where no term is."""
    lhs, rhs = random_array((37, 131), "float32", rng), random_array((131, 29), "float32", rng)
    live = rng.random(131) < 0.4
    truth = lhs[:, live].astype(np.float64) @ rhs[live]
    lhs[:, ~live], rhs[~live] = np.nan, np.nan
    operator = compiled(MATMUL, "float32", "lhs", Rows(dim=1))
    ids = rng.permutation(np.flatnonzero(live))
    for candidate, out in every_candidate(operator, (lhs, rhs), ids, truth.shape, "float32"):
        assert_close(out, truth, str(candidate))


def test_negative_zero_and_denormals_are_values_like_others() -> None:
    lhs = np.zeros((37, 131), np.float32)
    lhs[5, 7], lhs[6, 8], lhs[7, 9] = -0.0, 1e-42, np.float32(2) ** 100
    rhs = np.ones((131, 29), np.float32)
    operator = compiled(MATMUL, "float32", "lhs", Values())
    for candidate, out in every_candidate(operator, (lhs, rhs), None, (37, 29), "float32"):
        assert (out[7] == np.float32(2) ** 100).all(), str(candidate)
        assert np.count_nonzero(out[[0, 5]]) == 0, str(candidate)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # numpy's BLAS
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_are_live_values(value: float) -> None:
    lhs = np.zeros((37, 131), np.float32)
    lhs[3, 100] = value
    operator = compiled(MATMUL, "float32", "lhs", Values())
    rhs = np.ones((131, 29), np.float32)
    for candidate, out in every_candidate(operator, (lhs, rhs), None, (37, 29), "float32"):
        np.testing.assert_array_equal(out[3], value, err_msg=str(candidate))
        assert (np.delete(out, 3, axis=0) == 0).all(), str(candidate)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_short_types_are_kept_in_float32(dtype: str) -> None:
    """4099 ones: a 16-bit accumulator would stop at 2048 or 256."""
    lhs, rhs = np.ones((3, 4099), numpy_dtype(dtype)), np.ones((4099, 5), numpy_dtype(dtype))
    operator = compiled(MATMUL, dtype, "lhs", Mask())
    truth = np.full((3, 5), 4099.0)
    mask = np.ones(lhs.shape, bool)
    for candidate, out in every_candidate(operator, (lhs, rhs), mask, truth.shape, dtype):
        assert_close(out, truth, str(candidate))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nothing_is_written_behind_the_output(dtype: str, rng: np.random.Generator) -> None:
    """Nine columns are a vector and one element."""
    tensors = op.matmul(None, 9, None, out_dtype=dtype, activation="silu")
    operator = pit_tvm.compile(tensors, sparse={"lhs": Mask()})
    lhs, rhs = random_array((5, 53), "float32", rng), random_array((53, 9), "float32", rng)
    mask, memory = np.ones(lhs.shape, bool), poison((5 * 9 + 64,), dtype)
    out = memory[: 5 * 9].reshape(5, 9)
    plan = operator.explain(lhs, rhs, sparsity=mask)
    for candidate in plan.candidates:
        operator.repeat(candidate, lhs, rhs, sparsity=mask, out=out)
        sums = lhs.astype(np.float64) @ rhs
        assert_close(out, sums / (1 + np.exp(-sums)), str(candidate))
        assert untouched(memory[5 * 9 :]), str(candidate)


def test_extremes_of_int8_are_summed_exactly(rng: np.random.Generator) -> None:
    lhs = rng.choice(np.array([-128, 127], np.int8), (37, 211))
    rhs = rng.choice(np.array([-128, 127], np.int8), (211, 29))
    lhs[:, 0], rhs[0, :] = -128, -128
    truth = lhs.astype(np.int64) @ rhs.astype(np.int64)
    operator = compiled(MATMUL, "int8", "lhs", Mask())
    mask, kind = np.ones(lhs.shape, bool), result_dtype("int8")
    for candidate, out in every_candidate(operator, (lhs, rhs), mask, truth.shape, kind):
        assert (out == truth).all(), str(candidate)


def test_all_tokens_of_one_group_are_as_right_as_any(rng: np.random.Generator) -> None:
    rows = 307  # more than one register block, tile and list capacity
    lhs, rhs = (
        random_array((rows, 53), "float32", rng),
        random_array((GROUPS, 53, 29), "float32", rng),
    )
    bias = random_array((GROUPS, 29), "float32", rng)
    ids = np.full(rows, 3, np.int32)
    truth = GROUPED.truth(lhs, rhs, bias, ids)
    operator = compiled(GROUPED, "float32", "lhs", Groups(GROUPS))
    for candidate, out in every_candidate(
        operator, (lhs, rhs, bias, ids), None, truth.shape, "float32"
    ):
        assert_close(out, truth, str(candidate))
