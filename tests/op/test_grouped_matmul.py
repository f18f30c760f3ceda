"""grouped_matmul against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.errors import ShapeError
from pit_tvm.op import grouped_matmul
from pit_tvm.reference import ops as reference

M, N, K, GROUPS = 17, 11, 13, 5


def operands(operand, rng, dtype, transpose_rhs, bias, group_ids=None):
    rhs = operand((GROUPS, N, K) if transpose_rhs else (GROUPS, K, N), dtype)
    if group_ids is None:
        group_ids = rng.integers(0, GROUPS, M)
    offset = operand((GROUPS, N), "int32" if dtype == "int8" else dtype) if bias else None
    return operand((M, K), dtype), rhs, offset, group_ids.astype(np.int32)


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_each_row_meets_its_groups_matrix(
    run, operand, rng, assert_close, transpose_rhs, activation, bias
):
    flags = {"transpose_rhs": transpose_rhs, "activation": activation}
    inputs = operands(operand, rng, "float32", transpose_rhs, bias)
    tensors = grouped_matmul(None, N, K, None, bias=bias, **flags)
    got = run(tensors, [array for array in inputs if array is not None], (M, N))
    assert_close(got, reference.grouped_matmul(*inputs, **flags))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_every_storage_type(run, operand, rng, assert_close, dtype):
    inputs = operands(operand, rng, dtype, False, True)
    got = run(grouped_matmul(None, N, K, GROUPS, dtype=dtype, bias=True), inputs, (M, N))
    assert_close(got, reference.grouped_matmul(*inputs))


def test_all_rows_to_one_group(run, operand, rng, assert_close):
    inputs = operands(operand, rng, "float32", False, True, np.full(M, GROUPS - 1))
    got = run(grouped_matmul(None, N, K, GROUPS, bias=True), inputs, (M, N))
    assert_close(got, reference.grouped_matmul(*inputs))


def test_no_rows_and_no_groups(run, operand, assert_close):
    inputs = [operand((0, K), "float32"), operand((0, K, N), "float32"), np.zeros(0, np.int32)]
    got = run(grouped_matmul(None, N, K, None), inputs, (0, N))
    assert_close(got, np.zeros((0, N)))


def test_operands_and_axes_have_the_fixed_names():
    tensors = grouped_matmul(M, N, K, GROUPS, bias=True)
    assert [t.op.name for t in tensors] == ["lhs", "rhs", "bias", "group_ids", "out"]
    (acc,) = [t for t in tensors[-1].op.input_tensors if t.op.name == "acc"]
    axes = [*acc.op.axis, *acc.op.reduce_axis]
    assert [axis.var.name for axis in axes] == ["m", "n", "k"]
    assert str(tensors[3].dtype) == "int32"


def test_a_negative_number_of_groups_is_refused():
    with pytest.raises(ShapeError, match="^num_groups: expected an integer of at least 0, got -1"):
        grouped_matmul(M, N, K, -1)
