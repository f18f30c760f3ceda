"""Group ids: every slice meets the matrix of its group, dead slices meet none."""

from __future__ import annotations

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import ShapeError
from pit_tvm.reference import ops as reference
from pit_tvm.structs import Groups, Mask, Rows, SparsitySpec
from tests.api.cases import DTYPES, GROUPED, GROUPS
from tests.api.running import (
    assert_close,
    compiled,
    every_candidate,
    poison,
    random_array,
    random_inputs,
    result_dtype,
    truth_of,
    untouched,
)

ASSIGNMENTS = ("none", "all", "one live", "one group", "random")


def assigned(kind: str, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Group ids of ``rows`` slices, -1 for dead ones."""
    ids = np.full(rows, -1)
    if kind == "one live":
        ids[rng.integers(rows)] = rng.integers(GROUPS)
    elif kind == "one group":
        ids[:] = rng.integers(GROUPS)
    elif kind == "all":
        ids = rng.integers(0, GROUPS, rows)
    elif kind == "random":
        ids = rng.integers(-1, GROUPS - 1, rows)
    return ids.astype(np.int32)


@pytest.mark.parametrize("kind", ASSIGNMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_live_slices_meet_their_group_and_dead_ones_are_untouched(
    dtype: str, kind: str, rng: np.random.Generator
) -> None:
    arrays = random_inputs(GROUPED, dtype, rng)
    arrays["group_ids"] = ids = assigned(kind, len(arrays["group_ids"]), rng)
    truth = truth_of(GROUPED, arrays)
    operator = compiled(GROUPED, dtype, "lhs", Groups(GROUPS))
    # The ids are an operand already: the pattern need not be passed again.
    given = (None, ids.astype(np.int64))[int(rng.integers(2))]
    runs = every_candidate(
        operator, tuple(arrays.values()), given, truth.shape, result_dtype(dtype)
    )
    for candidate, out in runs:
        assert untouched(out[ids < 0])
        assert_close(out[ids >= 0], truth[ids >= 0], f"{candidate}, {ids}")


@pytest.mark.parametrize("kind", ASSIGNMENTS)
def test_dead_slices_become_zero_if_asked(kind: str, rng: np.random.Generator) -> None:
    arrays = random_inputs(GROUPED, "float32", rng)
    arrays["group_ids"] = ids = assigned(kind, len(arrays["group_ids"]), rng)
    truth = truth_of(GROUPED, arrays)
    operator = compiled(GROUPED, "float32", "lhs", Groups(GROUPS), dead="zero")
    out = operator(*arrays.values(), out=poison(truth.shape, "float32"))
    assert (out[ids < 0] == 0).all()
    assert_close(out[ids >= 0], truth[ids >= 0])


def test_symbolic_groups_of_one_product_take_any_number(rng: np.random.Generator) -> None:
    tensors = op.grouped_matmul(None, None, None, None, transpose_rhs=True)
    operator = pit_tvm.compile(tensors, sparse={"lhs": Groups(3)})
    lhs, rhs = random_array((47, 19), "float32", rng), random_array((3, 23, 19), "float32", rng)
    ids = rng.integers(0, 3, 47).astype(np.int32)
    truth = reference.grouped_matmul(lhs, rhs, None, ids, transpose_rhs=True)
    out = operator(lhs, rhs, ids, out=poison((47, 23), "float32"))
    assert_close(out, truth)


def test_zero_groups_leave_every_slice_dead(rng: np.random.Generator) -> None:
    tensors = op.grouped_matmul(None, 11, 7, 0)
    operator = pit_tvm.compile(tensors, sparse={"lhs": Groups(0)})
    lhs, rhs = random_array((13, 7), "float32", rng), np.empty((0, 7, 11), np.float32)
    out = operator(lhs, rhs, np.full(13, -1, np.int32), out=poison((13, 11), "float32"))
    assert untouched(out)


def test_no_rows_give_an_empty_result() -> None:
    operator = pit_tvm.compile(op.grouped_matmul(None, 11, 7, 3), sparse={"lhs": Groups(3)})
    out = operator(
        np.empty((0, 7), np.float32), np.ones((3, 7, 11), np.float32), np.empty(0, np.int32)
    )
    assert out.shape == (0, 11)


@pytest.mark.parametrize("number", [3, 7])
def test_groups_of_the_specification_must_be_those_of_the_operand(number: int) -> None:
    with pytest.raises(ShapeError, match="Groups|num_groups"):
        operator = pit_tvm.compile(
            op.grouped_matmul(None, 11, 7, 5), sparse={"lhs": Groups(number)}
        )
        operator(
            np.ones((9, 7), np.float32),
            np.ones((5, 7, 11), np.float32),
            np.full(9, number - 1, np.int32),
        )


def test_packed_groups_are_taken_like_plain_ones(rng: np.random.Generator) -> None:
    arrays = random_inputs(GROUPED, "float32", rng)
    operator = compiled(GROUPED, "float32", "lhs", Groups(GROUPS))
    truth = truth_of(GROUPED, arrays)
    packed = operator.pack(rhs=arrays["rhs"])
    given = {**arrays, "rhs": packed}
    assert_close(operator(*given.values(), out=poison(truth.shape, "float32")), truth)


def test_nan_in_dead_slices_does_not_matter(rng: np.random.Generator) -> None:
    arrays = random_inputs(GROUPED, "float32", rng)
    arrays["group_ids"] = ids = assigned("random", len(arrays["group_ids"]), rng)
    arrays["lhs"][ids < 0] = np.nan
    truth = truth_of(GROUPED, arrays)
    operator = compiled(GROUPED, "float32", "lhs", Groups(GROUPS))
    out = operator(*arrays.values(), out=poison(truth.shape, "float32"))
    assert_close(out[ids >= 0], truth[ids >= 0])


@pytest.mark.parametrize(
    ("operand", "spec"), [("lhs", Mask()), ("lhs", Rows()), ("rhs", Mask())], ids=str
)
@pytest.mark.parametrize("wrong", [-1, GROUPS])
def test_group_ids_of_other_patterns_never_leave_the_operand(
    operand: str, spec: SparsitySpec, wrong: int, rng: np.random.Generator
) -> None:
    """Only ``Groups`` knows dead slices; for all others an id outside the matrices is an error."""
    arrays = random_inputs(GROUPED, "float32", rng)
    room = random_array((GROUPS + 2, 53, 29), "float32", rng)
    arrays["rhs"] = room[1:-1]  # what lies around it may be read without a crash
    arrays["group_ids"][7] = wrong
    rows = len(arrays["lhs"])
    given = np.arange(rows) if isinstance(spec, Rows) else np.ones(arrays[operand].shape, bool)
    out = poison((rows, 29), "float32")
    with pytest.raises(ShapeError, match="^group_ids.*expected.*got"):
        compiled(GROUPED, "float32", operand, spec)(*arrays.values(), sparsity=given, out=out)
    assert untouched(out)
