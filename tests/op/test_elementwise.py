"""Elementwise chains against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.op import elementwise
from pit_tvm.op.elementwise import BINARY
from pit_tvm.op.epilogue import ACTIVATIONS
from pit_tvm.reference import ops as reference

STAGES = st.one_of(
    st.sampled_from([*BINARY, *ACTIVATIONS]),
    st.tuples(st.sampled_from(list(BINARY)), st.sampled_from([0.5, -2.0, 3])),
)


def inputs_for(operand, stages, shape, dtype):
    return [operand(shape, dtype) for _ in range(1 + sum(stage in BINARY for stage in stages))]


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    stages=st.lists(STAGES, min_size=1, max_size=4),
    shape=st.one_of(st.tuples(st.integers(0, 33)), st.tuples(st.integers(1, 9), st.just(7))),
)
def test_random_chains(run, operand, assert_close, stages, shape):
    inputs = inputs_for(operand, stages, shape, "float32")
    got = run(elementwise([None, *shape[1:]], stages), inputs, shape)
    truth = reference.elementwise(stages, *inputs)
    # One chain may cancel what another rounds: compare at the size of what went in.
    scale = max([1.0, *(abs(array).max(initial=0) for array in inputs), abs(truth).max(initial=0)])
    assert abs(got - truth).max(initial=0) <= 2e-5 * scale


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_every_storage_type(run, operand, assert_close, dtype):
    stages = ["add", "relu", ("mul", 3), "sub"]
    inputs = inputs_for(operand, stages, (5, 7), dtype)
    tensors = elementwise((5, None), stages, dtype=dtype)
    assert_close(run(tensors, inputs, (5, 7)), reference.elementwise(stages, *inputs))


def test_names_of_operands_stages_and_axes():
    tensors = elementwise((3, 4), ["add", "relu", "mul", "max"])
    assert [t.op.name for t in tensors] == ["data", "rhs", "rhs2", "rhs3", "out"]
    assert [axis.var.name for axis in tensors[-1].op.axis] == ["p", "q"]
    assert tensors[-1].op.input_tensors[0].op.name == "stage2"


@pytest.mark.parametrize(
    "stage", ["pow", ("relu", 1.0), ("add", "x"), ("add",), ("add", True), 3, ("mul", 1.0, 2.0)]
)
def test_an_unknown_stage_is_refused(stage):
    with pytest.raises(DTypeError, match="^stages: expected one of add"):
        elementwise((3,), [stage])


def test_fractions_in_an_integer_chain_are_refused():
    with pytest.raises(DTypeError, match="an integer chain takes integers"):
        elementwise((3,), [("mul", 0.5)], dtype="int8")
    with pytest.raises(DTypeError, match="^activation"):
        elementwise((3,), ["silu"], dtype="int8")


@pytest.mark.parametrize("name", [[], {}, None])
def test_a_stage_whose_name_is_no_text_is_refused(name):
    with pytest.raises(DTypeError, match="^stages: expected one of add"):
        elementwise((3,), [(name, 2)])


@pytest.mark.parametrize(
    "dtype, number",
    [("float32", 10**400), ("float32", 1e39), ("bfloat16", -1e39), ("int8", 2**31)]
    + [("int8", 2**40), ("int8", -(2**31) - 1), ("int8", 10**400)],
    ids=lambda value: str(value)[:12],
)
def test_numbers_that_the_chain_cannot_hold_are_refused(dtype, number):
    with pytest.raises(DTypeError, match="takes (numbers of float32|integers of int32)$"):
        elementwise((3,), [("add", number)], dtype=dtype)


@pytest.mark.parametrize("number", [-(2**127), 3.4028234663852886e38, float("inf"), float("nan")])
def test_extreme_numbers_of_float32_are_taken(run, operand, number):
    data = operand((3,), "float32")
    got = run(elementwise((3,), [("max", number)]), [data], (3,))
    if number == number:
        assert (got == np.maximum(data, np.float32(number))).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stage", ["max", "min"])
def test_nan_stays_nan_in_either_operand(run, operand, stage, dtype):
    data, rhs = operand((40,), dtype), operand((40,), dtype)
    data[::3], rhs[::4], data[1], rhs[2] = np.nan, np.nan, np.inf, -np.inf
    got = run(elementwise((None,), [stage], dtype=dtype), [data, rhs], (40,))
    want = reference.elementwise([stage], data, rhs)
    np.testing.assert_array_equal(got.astype(np.float64), want)
    got = run(elementwise((None,), [(stage, 0.5)], dtype=dtype), [data], (40,))
    np.testing.assert_array_equal(
        got.astype(np.float64), reference.elementwise([(stage, 0.5)], data)
    )


@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_products_with_0_keep_nan(run, operand, zero):
    data = operand((40,), "float32")
    data[::3], data[1], data[2] = np.nan, np.inf, -np.inf
    got = run(elementwise((40,), [("mul", zero), ("add", 1)]), [data], (40,))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, data * 0 + 1)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float16(-2), np.int64(3), np.uint8(7)])
def test_numbers_of_numpy_are_numbers(run, operand, number):
    data = operand((5,), "float32")
    got = run(elementwise((5,), [("mul", number)]), [data], (5,))
    np.testing.assert_array_equal(got, data * np.float32(number))


@pytest.mark.parametrize("number", [-(2**31), 2**31 - 1])
def test_extreme_integers_are_taken(run, operand, number):
    data = operand((3,), "int8")
    got = run(elementwise((3,), [("max", number)], dtype="int8"), [data], (3,))
    assert (got == np.maximum(data.astype(np.int64), number)).all()


@pytest.mark.parametrize("shape", [(), (2, 3, 4), 5, None])
def test_a_shape_of_neither_one_nor_two_extents_is_refused(shape):
    with pytest.raises(ShapeError, match="^shape: expected one or two extents"):
        elementwise(shape, ["relu"])


@pytest.mark.parametrize("stages", [[], None, 5, {"relu"}, np.array(["relu", "relu"])])
def test_what_is_no_list_of_stages_is_refused(stages):
    with pytest.raises(ShapeError, match="^stages: expected at least one, in a list"):
        elementwise((3,), stages)
