"""Compiled operators on permuted arrays: accepted axes keep the result, the listed rejected do not.

Whole input arrays are permuted along the dimensions that carry an axis, the operator runs as TVM
compiles it, and the output is un-permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from pit_tvm.analysis.pit_axis import as_prim_func, pit_axes
from tests.analysis import operators as ops
from tests.analysis.operators import tensor

Dims = Mapping[str, int]  # buffer name -> the dimension that carries the axis


def poisoned(shape: list[int], dtype: str) -> np.ndarray:
    filler = np.nan if np.issubdtype(np.dtype(dtype), np.floating) else -999
    return np.full(shape, filler, dtype)


class Compiled:
    """One operator for the CPU; the last ``outputs`` parameters are its results."""

    def __init__(self, operator: Any, outputs: int = 1) -> None:
        self.func = as_prim_func(operator)
        self.outputs = outputs
        self.run = tvm.compile(self.func, target="llvm")
        self.names = [p.name for p in self.func.params]

    def inputs(self, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        arrays = {}
        for param in list(self.func.params)[: -self.outputs]:
            shape, dtype = [int(s) for s in param.shape], str(param.dtype)
            if np.issubdtype(np.dtype(dtype), np.floating):
                arrays[param.name] = rng.standard_normal(shape).astype(dtype)
            else:
                arrays[param.name] = rng.integers(0, 5, shape).astype(dtype)
        return arrays

    def __call__(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = {
            p.name: poisoned([int(s) for s in p.shape], str(p.dtype))
            for p in list(self.func.params)[-self.outputs :]
        }
        tensors = {n: tvm.runtime.tensor(a) for n, a in {**arrays, **results}.items()}
        self.run(*(tensors[name] for name in self.names))
        return {name: tensors[name].numpy() for name in results}


def permuted_run(
    compiled: Compiled, arrays: dict[str, np.ndarray], dims: Dims, order: np.ndarray
) -> dict[str, np.ndarray]:
    """Results on inputs whose first ``len(order)`` slices along ``dims`` are permuted."""

    def along(array: np.ndarray, dim: int | None, by: np.ndarray) -> np.ndarray:
        if dim is None:
            return array
        rest = np.arange(len(by), array.shape[dim])
        return np.ascontiguousarray(np.take(array, np.concatenate([by, rest]), dim))

    moved = {name: along(array, dims.get(name), order) for name, array in arrays.items()}
    undo = np.argsort(order)
    return {name: along(out, dims.get(name), undo) for name, out in compiled(moved).items()}


ACCEPTED: dict[str, tuple[Any, str, Dims]] = {
    "matmul m": (ops.matmul, "m", {"A": 0, "C": 0}),
    "matmul n": (ops.matmul, "n", {"B": 1, "C": 1}),
    "matmul k": (ops.matmul, "k", {"A": 1, "B": 0}),
    "transposed matmul k": (lambda: ops.matmul(transposed=True), "k", {"A": 1, "B": 1}),
    "batch matmul b": (ops.batch_matmul, "b_", {"A": 0, "B": 0, "C": 0}),
    "conv2d n": (ops.conv2d, "n", {"A": 0, "C": 0}),
    "conv2d f": (ops.conv2d, "f", {"W": 0, "C": 1}),
    "strided conv2d c": (lambda: ops.conv2d(stride=2), "c", {"A": 1, "W": 1}),
    "dilated conv2d c": (lambda: ops.conv2d(dilation=2), "c", {"A": 1, "W": 1}),
    "depth-wise conv c": (lambda: ops.depthwise(False), "c", {"A": 1, "W": 0, "C": 1}),
    "causal attention h": (
        lambda: ops.attention_scores(lambda i, j: j <= i),
        "h",
        {"Q": 1, "K": 1, "C": 1},
    ),
    "causal attention d": (
        lambda: ops.attention_scores(lambda i, j: j <= i),
        "d",
        {"Q": 3, "K": 3},
    ),
    "softmax chain m": (ops.softmax, "m", {"S": 0, "P": 0}),
    "softmax chain n": (ops.softmax, "n", {"S": 1, "P": 1}),
    "layer norm tokens": (ops.layer_norm, "t", {"X": 0, "Y": 0}),
    "layer norm h": (ops.layer_norm, "h", {"X": 1, "scale": 0, "shift": 0, "Y": 1}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_permuting_an_accepted_axis_of_the_arrays_keeps_the_result(name):
    operator, axis, dims = ACCEPTED[name]
    compiled = Compiled(operator())
    report = pit_axes(compiled.func)
    assert any(axis in axes for axes in report.accepted.values())
    assert not any(axis in reasons for reasons in report.rejected.values())
    arrays = compiled.inputs(seed=len(name))
    expected = compiled(arrays)
    extent = next(iter({**arrays, **expected}[n].shape[d] for n, d in dims.items()))
    order = np.roll(np.arange(extent), 1)
    for result, value in permuted_run(compiled, arrays, dims, order).items():
        np.testing.assert_allclose(value, expected[result], rtol=1e-4, atol=1e-5)


def stencil() -> list[Any]:
    a, r = tensor("A", 8), te.reduce_axis((0, 3), "r")
    return [a, te.compute((6,), lambda x: te.sum(a[x + r], axis=r), name="C")]


# name -> (operator, number of outputs, block, axis, dimensions that carry it)
COUNTEREXAMPLES: dict[str, tuple[Any, int, str, str, Dims]] = {
    "stencil": (stencil, 1, "C", "x", {"A": 0, "C": 0}),
    "stencil of a strided conv2d": (
        lambda: ops.conv2d(stride=2),
        1,
        "C",
        "x",
        {"A": 2, "C": 2},
    ),
    "causal predicate": (
        lambda: ops.attention_scores(lambda i, j: j <= i),
        1,
        "C",
        "j",
        {"K": 2, "C": 3},
    ),
    "scan": (lambda: ops.cumsum, 1, "scan", "k", {"A": 1, "B": 1}),
    "recurrence": (lambda: ops.recurrence, 1, "B", "t", {"A": 0, "B": 0}),
    "ties of argmax": (ops.argmax, 2, "best", "k", {"position": 0, "value": 1}),
}


@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_permuting_a_listed_rejected_axis_changes_the_result(name):
    operator, outputs, block, axis, dims = COUNTEREXAMPLES[name]
    compiled = Compiled(operator(), outputs)
    assert axis in pit_axes(compiled.func).rejected[block]
    arrays = compiled.inputs(seed=3)
    expected = compiled(arrays)
    extent = min({**arrays, **expected}[n].shape[d] for n, d in dims.items())
    got = permuted_run(compiled, arrays, dims, np.roll(np.arange(extent), 1))
    assert any(not np.allclose(got[n], expected[n], rtol=1e-4, atol=1e-5) for n in expected)


def test_ties_of_argmax_depend_on_the_order_of_the_axis():
    compiled = Compiled(ops.argmax(), 2)
    position = np.arange(6, dtype=np.int32)
    value = np.array([[1, 7, 7, 0, 7, 2]] * 4, np.int32)
    arrays = {"position": position, "value": value}
    forward = compiled(arrays)
    backward = compiled({n: np.ascontiguousarray(a[..., ::-1]) for n, a in arrays.items()})
    first, last = next(n for n in forward if "0" in n), next(n for n in forward if "1" in n)
    assert (forward[last] == 7).all() and (backward[last] == 7).all()
    assert (forward[first] == 1).all() and (backward[first] == 4).all()


def test_a_rejected_axis_may_happen_to_be_invariant():
    a, k = tensor("A", 3, 2), te.reduce_axis((0, 4), "k")
    compiled = Compiled([a, te.compute((3,), lambda i: te.max(a[i, k // 2], axis=k), name="C")])
    assert "A[i, k // 2]" in pit_axes(compiled.func).rejected["C"]["k"]
    arrays = compiled.inputs(seed=1)
    np.testing.assert_array_equal(compiled(arrays)["C"], arrays["A"].max(axis=1))


def test_a_gather_may_permute_its_index_operand():
    a, idx = tensor("A", 6, 5), tensor("idx", 4, dtype="int32")
    gathered = te.compute((4, 5), lambda i, j: a[idx[i], j] * 2.0, name="C")
    compiled = Compiled([a, idx, gathered])
    assert pit_axes(compiled.func).accepted["C"] == {"i", "j"}
    arrays = compiled.inputs(seed=2)
    order = np.array([2, 0, 3, 1])
    got = permuted_run(compiled, arrays, {"idx": 0, "C": 0}, order)
    np.testing.assert_array_equal(got["C"], arrays["A"][arrays["idx"]] * 2)


def test_a_predicate_by_an_explicit_mask_may_permute_the_mask():
    a, mask = tensor("A", 4, 5), tensor("mask", 4, dtype="int32")
    chosen = te.compute((4, 5), lambda i, j: tirx.if_then_else(mask[i] > 2, a[i, j], 0.0), name="C")
    compiled = Compiled([a, mask, chosen])
    assert pit_axes(compiled.func).accepted["C"] == {"i", "j"}
    arrays = compiled.inputs(seed=5)
    got = permuted_run(compiled, arrays, {"A": 0, "mask": 0, "C": 0}, np.array([3, 1, 0, 2]))
    expected = np.where(arrays["mask"][:, None] > 2, arrays["A"], 0)
    np.testing.assert_array_equal(got["C"], expected)
