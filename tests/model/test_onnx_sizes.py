"""Arithmetic on symbolic sizes against onnx's own evaluator on numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import sym, tirx

from pit_tvm.analysis.expr import replace_vars
from pit_tvm.model.onnx_sizes import (
    as_sizes,
    bounds_of_slice,
    extents_as_sizes,
    fold,
    is_natural,
    resolve_expand,
    resolve_shape,
)

onnx = pytest.importorskip("onnx")

B, T = tirx.Var("batch", "int64"), tirx.Var("tokens", "int64")
SIZES = {B: 3, T: 7}
FAR = 2**63 - 1


def sizes(*values: Any) -> np.ndarray:
    """A vector of numbers and symbols; one alone in a list is a scalar."""
    if len(values) == 1 and isinstance(values[0], list):
        return np.array(values[0][0], object)
    return extents_as_sizes(values)


def numbers(found: np.ndarray) -> np.ndarray:
    """Known sizes with the symbols' values."""
    flat = [_number(value) for value in found.reshape(-1)]
    return np.array(flat).reshape(found.shape)


def _number(value: Any) -> Any:
    if isinstance(value, bool | int | np.integer):
        return value
    constants = {var: tirx.IntImm("int64", size) for var, size in SIZES.items()}
    return int(sym.Analyzer().simplify(replace_vars(value, constants)))


def evaluated(op: str, given: list[np.ndarray], attrs: dict[str, Any]) -> np.ndarray:
    """The result by onnx's evaluator."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    names = [f"in_{i}" for i in range(len(given))]
    if "fill" in attrs:
        attrs = {"value": onnx.numpy_helper.from_array(attrs["fill"].reshape(1))}
    node = helper.make_node(op, names, ["out"], **attrs)
    types = [helper.np_dtype_to_tensor_dtype(array.dtype) for array in given]
    inputs = [
        helper.make_tensor_value_info(n, t, a.shape)
        for n, t, a in zip(names, types, given, strict=True)
    ]
    output = helper.make_empty_tensor_value_info("out")
    graph = helper.make_graph([node], "one", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    (found,) = ReferenceEvaluator(model).run(None, dict(zip(names, given, strict=True)))
    return np.asarray(found)


CASES = [
    ("Identity", [sizes(B, 4)], {}),
    ("Gather", [sizes(B, T, 5), sizes([1])], {"axis": 0}),
    ("Gather", [sizes(B, T, 5), sizes(-1, 0)], {"axis": 0}),
    ("Concat", [sizes(B), sizes(T, -1), sizes(16)], {"axis": 0}),
    ("Squeeze", [sizes(T)], {}),
    ("Squeeze", [sizes(T), sizes(0)], {}),
    ("Unsqueeze", [sizes([T]), sizes(0)], {}),
    ("Unsqueeze", [sizes(B, T), sizes(0, -1)], {}),
    ("Slice", [sizes(B, 2, T, 8), sizes(-1), sizes(FAR)], {}),
    ("Slice", [sizes(B, 2, T, 8), sizes(-(2**63)), sizes(-2)], {}),
    ("Slice", [sizes(B, 2, T, 8), sizes(0), sizes(4), sizes(0), sizes(2)], {}),
    ("Reshape", [sizes(B, T), sizes(-1)], {}),
    ("Reshape", [sizes([T]), sizes(1, 1)], {}),
    ("Cast", [sizes(B, T)], {"to": 7}),
    ("Where", [np.array([True, False, True], object), sizes(B, 1, 2), sizes(T)], {}),
    ("ConstantOfShape", [sizes(3)], {"fill": np.array(1)}),
    ("Add", [sizes(B, T), sizes(1)], {}),
    ("Sub", [sizes([T]), sizes([1])], {}),
    ("Mul", [sizes(B, 3), sizes(T, -1)], {}),
    ("Div", [sizes(T * 4, 9), sizes(2, 4)], {}),
    ("Div", [sizes([B * T]), sizes([B])], {}),
    ("Equal", [sizes(B, -1, 4, 4), sizes(-1, -1, 4, 5)], {}),
    ("Equal", [sizes(B * T), sizes(T * B)], {}),
]


@pytest.mark.parametrize(
    ("op", "given", "attrs"), CASES, ids=[f"{c[0]} {i}" for i, c in enumerate(CASES)]
)
def test_folded_as_onnx_computes_it(op: str, given: list[np.ndarray], attrs: Any) -> None:
    found = fold(op, given, attrs)
    assert found is not None
    expected = evaluated(op, [numbers(one) for one in given], attrs)
    np.testing.assert_array_equal(numbers(found), expected)
    assert found.shape == expected.shape


@pytest.mark.parametrize(
    ("op", "given", "attrs"),
    [
        ("Softmax", [sizes(B)], {}),
        ("Gather", [sizes(B, T), sizes([T])], {"axis": 0}),
        ("Slice", [sizes(B, T), sizes(0), sizes(T)], {}),
        ("Slice", [sizes(B, T), sizes(-1), sizes(-(2**63)), sizes(0), sizes(-1)], {}),
        ("Reshape", [sizes(B, T), sizes(0)], {}),
        ("Cast", [sizes(B)], {"to": 1}),
        ("Where", [sizes(T), sizes(1), sizes(2)], {}),
        ("ConstantOfShape", [sizes(T)], {"fill": np.array(1)}),
        ("ConstantOfShape", [sizes(65)], {"fill": np.array(1)}),
        ("ConstantOfShape", [sizes(2)], {"fill": np.float32(1)}),
        ("Div", [sizes(T - 5), sizes(2)], {}),
        ("Div", [sizes(-3), sizes(2)], {}),
        ("Div", [sizes(T), sizes(T - 1)], {}),
        ("Equal", [sizes(B), sizes(T)], {}),
        ("Equal", [sizes(B), sizes(1)], {}),
    ],
)
def test_what_depends_on_a_size_is_left(op: str, given: list[np.ndarray], attrs: Any) -> None:
    assert fold(op, given, attrs) is None


def test_only_small_tensors_of_integers_are_followed() -> None:
    found = as_sizes(np.array([1, -2]))
    assert found is not None and found.tolist() == [1, -2]
    assert as_sizes(np.array([1.0])) is None and as_sizes(np.array([1], np.uint8)) is None
    assert as_sizes(np.zeros(65, np.int64)) is None


def test_constant_extents_become_integers() -> None:
    assert extents_as_sizes([tirx.IntImm("int64", 4)]).tolist() == [4]


@pytest.mark.parametrize(
    ("wanted", "data", "zero_copies", "expected"),
    [
        (sizes(B, T, -1, 8), (B, T, 32), False, [3, 7, 4, 8]),
        (sizes(0, -1), (B, T, 4), True, [3, 28]),
        (sizes(-1, T, 16), (B, 2, T, 16), False, [6, 7, 16]),
        (sizes(0, 4), (0, 4), False, [0, 4]),
        (sizes(T, B), (B, T), True, [7, 3]),
    ],
)
def test_reshapes(wanted: np.ndarray, data: Any, zero_copies: bool, expected: list[int]) -> None:
    assert [_number(e) for e in resolve_shape(wanted, data, zero_copies)] == expected


@pytest.mark.parametrize(
    ("wanted", "data", "expected"),
    [
        (sizes(B, 1, 1, T), (B, 1, 1, 1), [3, 1, 1, 7]),
        (sizes(T), (B, 1), [3, 7]),
        (sizes(B, 1, T), (T,), [3, 1, 7]),
        (sizes(1), (T,), [7]),
        (sizes(-1, T), (1, 1), [1, 7]),
    ],
)
def test_broadcasts(wanted: np.ndarray, data: Any, expected: list[int]) -> None:
    assert [_number(e) for e in resolve_expand(wanted, data)] == expected


@pytest.mark.parametrize(
    ("extent", "start", "end", "expected"),
    [
        (24, 0, T, (0, 7)),
        (T, 0, FAR, (0, 7)),
        (T, -2, FAR, (5, 7)),
        (T, -(2**63), -1, (0, 6)),
        (9, 2, -3, (2, 6)),
    ],
)
def test_ends_of_slices_count_from_the_start(
    extent: Any, start: Any, end: Any, expected: tuple[int, int]
) -> None:
    found = bounds_of_slice(extent, start, end, 1)
    assert found is not None and tuple(map(_number, found)) == expected


@pytest.mark.parametrize(
    ("size", "natural"), [(0, True), (-1, False), (T, True), (B * T, True), (T - 5, False)]
)
def test_sizes_that_cannot_be_negative(size: Any, natural: bool) -> None:
    assert is_natural(size) is natural


@pytest.mark.parametrize("step", [2, -1, T])
def test_slices_with_steps_are_left(step: Any) -> None:
    assert bounds_of_slice(T, 0, FAR, step) is None
