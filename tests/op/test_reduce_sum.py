"""reduce_sum against the float64 reference."""

from __future__ import annotations

import pytest

from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.op import reduce_sum
from pit_tvm.reference import ops as reference

P, L = 13, 41


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_rows_of_every_storage_type(run, operand, assert_close, dtype):
    data = operand((P, L), dtype)
    assert_close(run(reduce_sum(None, L, dtype=dtype), [data], (P,)), reference.reduce_sum(data))


def test_float16_is_summed_in_float32(run, operand, assert_close):
    data = abs(operand((3, 5000), "float16"))  # a float16 sum stops growing at 2048
    tensors = reduce_sum(None, None, dtype="float16", out_dtype="float32")
    got = run(tensors, [data], (3,))
    truth = reference.reduce_sum(data)
    assert truth.min() > 3000
    assert (abs(got - truth) <= 1e-4 * truth).all()


def test_axes_have_the_names_of_the_paper():
    data, out = reduce_sum(P, L)
    assert [axis.var.name for axis in [*out.op.axis, *out.op.reduce_axis]] == ["p", "l"]
    assert [data.op.name, out.op.name] == ["data", "out"]


def test_wrong_arguments_are_refused():
    with pytest.raises(ShapeError, match="^l: expected an integer of at least 1, got 0"):
        reduce_sum(P, 0)
    with pytest.raises(DTypeError, match="^dtype"):
        reduce_sum(P, L, dtype="float64")
