"""Sums and maxima along rows in lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx

from pit_tvm.schedules import generic
from pit_tvm.transform.pipeline import lower
from pit_tvm.transform.sum_in_lanes import LANES, sum_in_lanes
from pit_tvm.transform.unalign import unalign
from tests.schedules import sparse


def lowered(tensors: list[te.Tensor]) -> tirx.PrimFunc:
    sch = s_tir.Schedule(unalign(te.create_prim_func(tensors)))
    generic.apply(sch)
    return lower(sch.mod)["main"]


def rows_of(width: Any, reduce: Callable[..., Any], dtype: str = "float32") -> list[te.Tensor]:
    x = te.placeholder((te.var("rows"), width), dtype, "x")
    k = te.reduce_axis((0, width), "k")
    return [x, te.compute(x.shape[:1], lambda i: reduce(x[i, k], axis=k), name="out")]


def run(func: tirx.PrimFunc, *inputs: np.ndarray) -> np.ndarray:
    out = sparse.fenced(sparse.poisoned(inputs[0].shape[:1], "float32"))
    made = sum_in_lanes(func)
    assert "lanes" in made.script()
    sparse.build(tvm.IRModule({"main": made}))(*map(sparse.fenced, inputs), out)
    return out


@pytest.mark.parametrize("width", [0, 1, LANES - 1, LANES, LANES + 1, 5 * LANES + 3, 200])
def test_any_width_is_added_up(width: int):
    x = sparse.random(np.random.default_rng(), (7, width), "float32")
    got = run(lowered(rows_of(te.var("width"), te.sum)), x)
    np.testing.assert_allclose(got, x.astype(np.float64).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [64, 70, 128])
def test_largest_elements_are_found_wherever_they_are(width: int):
    x = -np.abs(sparse.random(np.random.default_rng(), (width, width), "float32")) - 1
    x[np.arange(width), np.arange(width)] = -0.5
    assert (run(lowered(rows_of(width, te.max)), x) == -0.5).all()


def test_nan_and_infinities_come_out_of_sums():
    x = np.ones((4, 100), np.float32)
    x[0, 3], x[1, 97], x[2, 5], x[3, 5], x[3, 99] = np.nan, np.nan, np.inf, np.inf, -np.inf
    got = run(lowered(rows_of(100, te.sum)), x)
    np.testing.assert_array_equal(got, [np.nan, np.nan, np.inf, np.nan])


def test_products_of_rows_are_added_up():
    n = te.var("n")
    x, y = (te.placeholder((te.var("rows"), n), name=name) for name in "xy")
    k = te.reduce_axis((0, n), "k")
    out = te.compute(x.shape[:1], lambda i: te.sum(x[i, k] * y[0, k] - 1.0, axis=k), name="out")
    a, b = (sparse.random(np.random.default_rng(), s, "float32") for s in ((5, 75), (2, 75)))
    got = run(lowered([x, y, out]), a, b)
    np.testing.assert_allclose(got, (a.astype(np.float64) * b[0] - 1).sum(1), rtol=1e-5, atol=1e-4)


def test_other_sums_stay_as_they_are():
    x = te.placeholder((100, 100), name="x")
    k = te.reduce_axis((0, 100), "k")
    strided = te.compute((50,), lambda j: te.sum(x[k, j], axis=k), name="out")
    backwards = te.compute((50,), lambda i: te.sum(x[i, 99 - k], axis=k), name="out")
    chosen = te.compute(
        (50,), lambda i: te.sum(te.if_then_else(k > i, x[i, k], 0.0), axis=k), name="out"
    )
    others = [[x, out] for out in (strided, backwards, chosen)]
    others += [rows_of(8, te.sum), rows_of(100, te.sum, "int32"), rows_of(100, te.sum, "float64")]
    for tensors in others:
        func = lowered(tensors)
        tvm.ir.assert_structural_equal(sum_in_lanes(func), func)
