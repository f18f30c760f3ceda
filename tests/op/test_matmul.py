"""matmul and linear against the float64 reference, as plain unscheduled programs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tvm import te

from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.op import linear, matmul
from pit_tvm.reference import ops as reference

M, N, K = 13, 19, 37  # nothing divides anything


def names(tensors):
    return [tensor.op.name for tensor in tensors]


@pytest.mark.parametrize("transpose_lhs, transpose_rhs", list(product([False, True], repeat=2)))
def test_symbolic_rows_in_every_layout(run, operand, assert_close, transpose_lhs, transpose_rhs):
    flags = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs}
    lhs = operand((K, M) if transpose_lhs else (M, K), "float32")
    rhs = operand((N, K) if transpose_rhs else (K, N), "float32")
    got = run(matmul(None, N, K, **flags), [lhs, rhs], (M, N))
    assert_close(got, reference.matmul(lhs, rhs, **flags))


@pytest.mark.parametrize(
    "dtype, out_dtype, expected",
    [
        ("float32", None, "float32"),
        ("float16", None, "float16"),
        ("float16", "float32", "float32"),
        ("bfloat16", None, "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("int8", None, "int32"),
        ("int8", "float32", "float32"),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_every_storage_type_accumulates_wide(
    run, operand, assert_close, dtype, out_dtype, expected, bias
):
    tensors = matmul(None, N, K, dtype=dtype, out_dtype=out_dtype, bias=bias, activation="relu")
    assert str(tensors[-1].dtype) == expected
    inputs = [operand((M, K), dtype), operand((K, N), dtype)]
    if bias:
        inputs.append(operand((N,), "int32" if dtype == "int8" else dtype))
    got = run(tensors, inputs, (M, N))
    assert_close(got, reference.matmul(*inputs, activation="relu"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_takes_every_storage_type(run, operand, assert_close, dtype, bias):
    tensors = linear(None, N, K, dtype=dtype, bias=bias, activation="relu")
    inputs = [operand((M, K), dtype), operand((N, K), dtype)]
    if bias:
        inputs.append(operand((N,), "int32" if dtype == "int8" else dtype))
    assert_close(run(tensors, inputs, (M, N)), reference.linear(*inputs, activation="relu"))


@pytest.mark.parametrize("activation", [None, "relu", "relu2", "gelu", "gelu_tanh", "silu"])
def test_linear_is_torchs_linear_with_an_epilogue(run, operand, assert_close, activation):
    tensors = linear(None, N, K, activation=activation)
    assert names(tensors) == ["lhs", "rhs", "bias", "out"]
    inputs = [operand((M, K), "float32"), operand((N, K), "float32"), operand((N,), "float32")]
    assert_close(run(tensors, inputs, (M, N)), reference.linear(*inputs, activation=activation))


def test_all_extents_symbolic_serve_two_shapes(run, operand, assert_close):
    for m, n, k in [(3, 5, 7), (1, 1, 1)]:
        inputs = [operand((m, k), "float32"), operand((n, k), "float32")]
        got = run(linear(None, None, None, bias=False), inputs, (m, n))
        assert_close(got, reference.linear(*inputs))


def test_no_rows_is_a_result_without_elements(run, operand, assert_close):
    inputs = [operand((0, K), "float32"), operand((K, N), "float32")]
    assert_close(run(matmul(None, N, K), inputs, (0, N)), reference.matmul(*inputs))


def test_stages_and_axes_have_the_fixed_names():
    plain = matmul(M, N, K)[-1].op
    assert [axis.var.name for axis in [*plain.axis, *plain.reduce_axis]] == ["m", "n", "k"]
    *_, out = matmul(M, N, K, activation="relu")
    (acc,) = out.op.input_tensors
    assert acc.op.name == "acc"
    assert [axis.var.name for axis in out.op.axis] == ["m", "n"]


def test_a_shared_variable_is_a_shared_extent():
    tokens = te.var("tokens")
    first, second = matmul(tokens, N, K), matmul(tokens, K, N)
    assert first[0].shape[0].same_as(second[0].shape[0])


@pytest.mark.parametrize("extent", [-1, 2.5, "4", True])
def test_an_extent_that_is_no_length_is_refused(extent):
    with pytest.raises(ShapeError, match="^n: expected an integer of at least 0"):
        matmul(M, extent, K)


def test_an_extent_may_be_an_integer_of_numpy():
    assert [int(e) for e in matmul(np.int64(3), np.int32(5), 7)[-1].shape] == [3, 5]


def test_a_sum_over_nothing_is_refused():
    with pytest.raises(ShapeError, match="^k: expected an integer of at least 1, got 0"):
        matmul(M, N, 0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dtype": "float8_e4m3fn"}, "^dtype: expected one of float32"),
        ({"dtype": "int8", "out_dtype": "int8"}, "^out_dtype: expected one of int32"),
        ({"out_dtype": "float64"}, "^out_dtype: expected one of float32"),
        ({"dtype": ["float32"]}, "^dtype: expected one of float32"),
        ({"out_dtype": ""}, "^out_dtype: expected one of float32"),
        ({"activation": ["relu"]}, "^activation: expected None or one of relu"),
        ({"activation": "swish"}, "^activation: expected None or one of relu"),
        ({"dtype": "int8", "activation": "gelu"}, "pass out_dtype='float32'"),
    ],
)
def test_a_wrong_type_or_activation_is_refused(arguments, message):
    with pytest.raises(DTypeError, match=message):
        matmul(M, N, K, **arguments)


@pytest.mark.parametrize("flag", ["bias", "transpose_lhs", "transpose_rhs"])
@pytest.mark.parametrize("value", [np.zeros(N), "no", None])
def test_flags_are_true_or_false(flag, value):
    with pytest.raises(ShapeError, match=f"^{flag}: expected True or False, got"):
        matmul(M, N, K, **{flag: value})


@pytest.mark.parametrize("extent", [2**31, 10**30])
def test_extents_are_int32(extent):
    assert matmul(2**31 - 1, 4, 4)
    with pytest.raises(ShapeError, match="^m: expected an integer of at most 2147483647"):
        matmul(extent, 4, 4)
