"""Expressions of parts: axes that are shorter than what they index, sums that start elsewhere,
blocks that run under conditions. They are right, or refused when they are compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import te, tirx
from tvm.script import tirx as T

import pit_tvm
from pit_tvm.errors import AxisError
from pit_tvm.structs import Mask, Rows, SparsitySpec, Values
from tests.api.running import assert_close, every_candidate, random_array, untouched

M, N, K = 9, 6, 7


def data_of(*shape: int) -> te.Tensor:
    return te.placeholder(shape, "float32", "data")


def run_all(
    tensors: Any, spec: SparsitySpec, truth: Callable[..., np.ndarray], rng: np.random.Generator
) -> None:
    """Every candidate of a mask or of named rows of ``data`` against ``truth`` of all inputs."""
    operator = pit_tvm.compile(tensors, sparse={"data": spec})
    params = operator._dispatcher.program.inputs
    arrays = [random_array(p.shape, "float32", rng) for p in params]
    live, sparsity = np.ones(M, bool), None
    if isinstance(spec, Rows):
        live = rng.random(M) < 0.5
        sparsity = rng.permutation(np.flatnonzero(live))
    else:
        mask = rng.random(arrays[0].shape) < 0.2
        arrays[0] = arrays[0] * mask
        sparsity = mask if isinstance(spec, Mask) else None
    wanted = truth(*(a.astype(np.float64) for a in arrays))
    for candidate, out in every_candidate(operator, arrays, sparsity, wanted.shape, "float32"):
        assert untouched(out[~live])
        assert_close(out[live], wanted[live], str(candidate))


def middle() -> list[te.Tensor]:
    """``out[m] = sum of data[m, 2:6]``."""
    data, k = data_of(M, K), te.reduce_axis((2, 6), "k")
    return [data, te.compute((M,), lambda m: te.sum(data[m, k], axis=k), "out")]


def product_of_parts() -> list[te.Tensor]:
    """``out = data[:, :4] @ rhs[:4, :3]``, which is no product of whole arrays."""
    data, rhs = data_of(M, K), te.placeholder((K, N), "float32", "rhs")
    k = te.reduce_axis((0, 4), "k")
    out = te.compute((M, 3), lambda m, n: te.sum(data[m, k] * rhs[k, n], axis=k), "out")
    return [data, rhs, out]


def top_of_a_product() -> list[te.Tensor]:
    """``out = relu(data @ rhs)[:, :3]``: what follows the sums keeps a part of their columns."""
    data, rhs = data_of(M, K), te.placeholder((K, N), "float32", "rhs")
    k = te.reduce_axis((0, K), "k")
    acc = te.compute((M, N), lambda m, n: te.sum(data[m, k] * rhs[k, n], axis=k), "acc")
    out = te.compute((M, 3), lambda m, n: te.max(acc[m, n], tirx.const(0, "float32")), "out")
    return [data, rhs, out]


def three_more() -> list[te.Tensor]:
    """``out[m] = 3 + sum_k data[m, k] * weight[k]``."""
    add = te.comm_reducer(lambda x, y: x + y, lambda dtype: tirx.const(3, dtype), name="add")
    data, weight = data_of(M, K), te.placeholder((K,), "float32", "weight")
    k = te.reduce_axis((0, K), "k")
    return [data, weight, te.compute((M,), lambda m: add(data[m, k] * weight[k], axis=k), "out")]


@T.prim_func(s_tir=True)
def doubled_from_a_bias(
    data: T.Buffer((9, 7), "float32"), bias: T.Buffer((9,), "float32"), out: T.Buffer((9,))
):
    acc = T.sblock_alloc_buffer((9,), "float32")
    for i, k in T.grid(9, 7):
        with T.sblock("acc"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                acc[vi] = bias[vi]
            acc[vi] = acc[vi] + data[vi, vk]
    for i in range(9):
        with T.sblock("out"):
            vi = T.axis.spatial(9, i)
            out[vi] = acc[vi] * T.float32(2)


RIGHT: dict[str, tuple[Any, Callable[..., np.ndarray]]] = {
    "middle": (middle(), lambda data: data[:, 2:6].sum(axis=1)),
    "product of parts": (product_of_parts(), lambda data, rhs: data[:, :4] @ rhs[:4, :3]),
    "top": (top_of_a_product(), lambda data, rhs: np.maximum(data @ rhs, 0)[:, :3]),
    "three more": (three_more(), lambda data, weight: 3 + data @ weight),
    "from a bias": (doubled_from_a_bias, lambda data, bias: 2 * (data.sum(axis=1) + bias)),
}


@pytest.mark.parametrize("spec", [Mask(), Values(), Rows()], ids=["mask", "values", "rows"])
@pytest.mark.parametrize("name", RIGHT)
def test_sum_of_a_part_or_from_elsewhere_is_right(
    name: str, spec: SparsitySpec, rng: np.random.Generator
) -> None:
    tensors, truth = RIGHT[name]
    run_all(tensors, spec, truth, rng)


def first_elements() -> list[te.Tensor]:
    data = data_of(M)
    return [data, te.compute((3,), lambda m: data[m] * 2.0, "out")]


def first_results() -> list[te.Tensor]:
    data = data_of(M)
    stage = te.compute((M,), lambda m: data[m] * 2.0, "stage")
    return [data, te.compute((3,), lambda m: stage[m] + 1.0, "out")]


def neighbours() -> list[te.Tensor]:
    data = data_of(M)
    stage = te.compute((M,), lambda m: data[m] * 2.0, "stage")
    return [data, te.compute((M - 1,), lambda m: stage[m] + stage[m + 1], "out")]


def polynomial() -> list[te.Tensor]:
    """``out[k] = sum_m data[m, k] * 2 ** (M - 1 - m)``, by Horner's rule."""
    horner = te.comm_reducer(lambda x, y: x * 2 + y, lambda dtype: tirx.const(0, dtype), name="h")
    data, m = data_of(M, K), te.reduce_axis((0, M), "m")
    stage = te.compute((M, K), lambda m, k: data[m, k] + 1.0, "stage")
    return [data, te.compute((K,), lambda k: horner(stage[m, k], axis=m), "out")]


@T.prim_func(s_tir=True)
def where_a_switch_is_on(
    data: T.Buffer((9,), "float32"), switch: T.Buffer((9,), "float32"), out: T.Buffer((9,))
):
    for i in range(9):
        with T.sblock("out"):
            vi = T.axis.spatial(9, i)
            T.where(switch[i] > T.float32(0))
            out[vi] = data[vi] + T.float32(1)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (first_elements(), "none: indices not bare, or of a part"),
        (first_results(), "axis m of stage[m]: expected 0 to 9, got 0 to 3"),
        (neighbours(), "axis m of stage[m]: expected 0 to 9, got 0 to 8"),
        (polynomial(), "block out, axis m: expected a commutative and associative reduction"),
        (where_a_switch_is_on, "block out: expected to run always, got switch[i] >"),
    ],
    ids=["first elements", "first results", "neighbours", "in order", "condition"],
)
def test_axis_that_no_permutation_passes_through_is_refused_when_it_is_compiled(
    tensors: Any, text: str
) -> None:
    with pytest.raises(AxisError, match=f"sparse.*{re.escape(text)}"):
        pit_tvm.compile(tensors, sparse={"data": Rows()})
