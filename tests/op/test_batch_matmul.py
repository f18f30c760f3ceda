"""batch_matmul against the float64 reference."""

from __future__ import annotations

from itertools import product

import pytest

from pit_tvm.errors import ShapeError
from pit_tvm.op import batch_matmul
from pit_tvm.reference import ops as reference

B, M, N, K = 3, 7, 11, 13


@pytest.mark.parametrize("transpose_lhs, transpose_rhs", list(product([False, True], repeat=2)))
def test_symbolic_batch_and_rows_in_every_layout(
    run, operand, assert_close, transpose_lhs, transpose_rhs
):
    flags = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs}
    lhs = operand((B, K, M) if transpose_lhs else (B, M, K), "float32")
    rhs = operand((B, N, K) if transpose_rhs else (B, K, N), "float32")
    got = run(batch_matmul(None, None, N, K, **flags), [lhs, rhs], (B, M, N))
    assert_close(got, reference.batch_matmul(lhs, rhs, **flags))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_every_storage_type_with_an_epilogue(run, operand, assert_close, dtype, transpose_rhs):
    options = {"transpose_rhs": transpose_rhs, "activation": "relu"}
    inputs = [operand((B, M, K), dtype), operand((B, N, K) if transpose_rhs else (B, K, N), dtype)]
    tensors = batch_matmul(None, M, N, K, dtype=dtype, **options)
    assert_close(run(tensors, inputs, (B, M, N)), reference.batch_matmul(*inputs, **options))


def test_axes_have_the_fixed_names():
    lhs, rhs, out = batch_matmul(B, M, N, K)
    assert [lhs.op.name, rhs.op.name, out.op.name] == ["lhs", "rhs", "out"]
    axes = [*out.op.axis, *out.op.reduce_axis]
    assert [axis.var.name for axis in axes] == ["b", "m", "n", "k"]


def test_an_empty_batch_has_an_empty_result(run, operand, assert_close):
    inputs = [operand((0, M, K), "float32"), operand((0, K, N), "float32")]
    got = run(batch_matmul(None, M, N, K), inputs, (0, M, N))
    assert_close(got, reference.batch_matmul(*inputs))


def test_a_negative_batch_is_refused():
    with pytest.raises(ShapeError, match="^b: expected an integer of at least 0, got -3"):
        batch_matmul(-3, M, N, K)
