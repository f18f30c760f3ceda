"""Loop nests of stages that follow each other, merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx, topi
from tvm.script import tirx as T

from pit_tvm.schedules import generic
from pit_tvm.transform.merge_loops import merge_loops
from pit_tvm.transform.pipeline import lower
from pit_tvm.transform.unalign import unalign
from tests.schedules import sparse


def nests(func: Any) -> int:
    """Loop nests beside each other at the top."""
    body = func.body.block.body
    return len(body.seq) if isinstance(body, tirx.SeqStmt) else 1


def both(tensors: list[te.Tensor]) -> list[Callable[..., None]]:
    """The functions of unmerged and of merged loops."""
    func = unalign(te.create_prim_func(tensors))
    found = []
    for made in (func, merge_loops(func)):
        sch = s_tir.Schedule(made)
        generic.apply(sch)
        found.append(sparse.build(lower(sch.mod)))
    return found


def check(tensors: list[te.Tensor], inputs: list[np.ndarray], shape: tuple[int, ...]) -> None:
    """Both functions write the same: to the bit, but for sums that are rounded once less."""
    outs = [sparse.fenced(sparse.poisoned(shape, "float32")) for _ in range(2)]
    for run, out in zip(both(tensors), outs, strict=True):
        run(*map(sparse.fenced, inputs), out)
    np.testing.assert_allclose(*outs, rtol=1e-6, atol=1e-6)


def live(*more: int, name: str = "x", rows: Any = None) -> te.Tensor:
    return te.placeholder((te.var("live") if rows is None else rows, *more), name=name)


def test_stages_share_loops_as_deep_as_they_are_alike():
    x = live(8)
    k = te.reduce_axis((0, 8), "k")
    total = te.compute(x.shape[:1], lambda i: te.sum(x[i, k], axis=k), name="total")
    twice = te.compute(x.shape[:1], lambda i: total[i] * 2.0, name="twice")
    moved = te.compute(x.shape, lambda i, j: x[i, j] - twice[i], name="moved")
    out = te.compute(x.shape, lambda i, j: moved[i, j] * moved[i, j], name="out")

    @T.prim_func(s_tir=True)
    def after(x: T.handle, y: T.handle):
        live = T.int32()
        A, out = T.match_buffer(x, (live, 8)), T.match_buffer(y, (live, 8))
        total, twice = T.sblock_alloc_buffer((live,)), T.sblock_alloc_buffer((live,))
        moved = T.sblock_alloc_buffer((live, 8))
        for i in range(live):
            for k in range(8):
                with T.sblock("total"):
                    a, c = T.axis.remap("SR", [i, k])
                    T.reads(A[a, c])
                    T.writes(total[a])
                    with T.init():
                        total[a] = T.float32(0)
                    total[a] = total[a] + A[a, c]
            with T.sblock("twice"):
                a = T.axis.spatial(live, i)
                T.reads(total[a])
                T.writes(twice[a])
                twice[a] = total[a] * T.float32(2)
            for j in range(8):
                with T.sblock("moved"):
                    a, b = T.axis.remap("SS", [i, j])
                    T.reads(A[a, b], twice[a])
                    T.writes(moved[a, b])
                    moved[a, b] = A[a, b] - twice[a]
                with T.sblock("out"):
                    a, b = T.axis.remap("SS", [i, j])
                    T.reads(moved[a, b])
                    T.writes(out[a, b])
                    out[a, b] = moved[a, b] * moved[a, b]

    merged = merge_loops(te.create_prim_func([x, out]))
    tvm.ir.assert_structural_equal(merged.body, after.body, map_free_vars=True)
    for rows in (0, 1, 5, 200):
        values = sparse.random(np.random.default_rng(), (rows, 8), "float32")
        check([x, out], [values], (rows, 8))


@pytest.mark.parametrize("rows", [0, 1, 85, 86, 255, 256, 257, 600])
def test_steps_in_runs_are_each_done_once(rows: int):
    x = live(3, 4)
    turned = te.compute((3, x.shape[0], 4), lambda h, t, d: x[t, h, d] + 1.0, name="turned")
    half = te.compute((3, x.shape[0], 2), lambda h, t, d: turned[h, t, d + 2] * 3.0, name="half")
    out = te.compute(
        (x.shape[0], 3, 4),
        lambda t, h, d: turned[h, t, d] + te.if_then_else(d < 2, half[h, t, d], 0.5),
        name="out",
    )
    assert nests(merge_loops(te.create_prim_func([x, out]))) == 1
    values = sparse.random(np.random.default_rng(), (rows, 3, 4), "float32")
    check([x, out], [values], (rows, 3, 4))


def test_nan_and_infinity_meet_zeros_as_they_did():
    x, scale = live(4), te.placeholder((4,), name="scale")
    product = te.compute(x.shape, lambda i, j: x[i, j] * scale[j], name="product")
    zero = te.compute(x.shape, lambda i, j: product[i, j] * 0.0 + 0.0 * x[i, j], name="zero")
    out = te.compute(x.shape, lambda i, j: zero[i, j] - zero[i, j], name="out")
    assert nests(merge_loops(te.create_prim_func([x, scale, out]))) == 1
    values = np.array([[np.nan, np.inf, -np.inf, 1.0]] * 70, np.float32)
    scales = np.array([0, 0, 1, 0], np.float32)
    check([x, scale, out], [values, scales], values.shape)


def shifted(x: te.Tensor) -> te.Tensor:
    last = x.shape[0] - 1
    y = te.compute(x.shape, lambda i, j: x[i, j] + 1.0, name="y")
    return te.compute(x.shape, lambda i, j: y[last - i, j], name="out")


def summed(x: te.Tensor) -> te.Tensor:
    y = te.compute(x.shape, lambda i, j: x[i, j] + 1.0, name="y")
    k = te.reduce_axis((0, x.shape[0]), "k")
    return te.compute(x.shape, lambda i, j: te.sum(y[k, j], axis=k), name="out")


def first(x: te.Tensor) -> te.Tensor:
    y = te.compute(x.shape, lambda i, j: x[i, j] + 1.0, name="y")
    return te.compute(x.shape, lambda i, j: y[i, j] + y[0, j], name="out")


@pytest.mark.parametrize("make", [shifted, summed, first])
def test_stages_that_read_other_tokens_come_after_all_of_them(make: Callable[..., te.Tensor]):
    x = live(5)
    out = make(x)
    merged = merge_loops(te.create_prim_func([x, out]))
    outer = [loop.extent for loop in merged.body.block.body.seq] if nests(merged) > 1 else []
    assert outer or merged.body.block.body.extent == 5  # columns are alike all the same
    values = sparse.random(np.random.default_rng(), (40, 5), "float32")
    check([x, out], [values], (40, 5))


@pytest.mark.parametrize("rows", [0, 1, 90])
def test_nests_that_each_have_several_stages(rows: int):
    n = te.var("n")
    x = te.placeholder((n, n), name="x")
    more = te.compute(x.shape, lambda i, j: x[i, j] + 1.0, name="more")
    twice = te.compute(x.shape, lambda i, j: more[i, j] * 2.0, name="twice")
    turned = te.compute(x.shape, lambda i, j: twice[n - 1 - i, n - 1 - j] - 1.0, name="turned")
    out = te.compute(x.shape, lambda i, j: turned[i, j] * 3.0, name="out")
    assert nests(merge_loops(te.create_prim_func([x, out]))) == 2
    values = sparse.random(np.random.default_rng(), (rows, rows), "float32")
    check([x, out], [values], values.shape)


def test_rows_stay_vectors_where_other_stages_lack_their_outer_loop():
    x, mask = live(7, 6), te.placeholder((7, 6), name="mask")
    kept = te.compute((7, 6), lambda i, j: mask[i, j] * 2.0, name="kept")
    out = te.compute(x.shape, lambda b, i, j: x[b, i, j] + kept[i, j], name="out")
    loop = merge_loops(te.create_prim_func([x, mask, out])).body.block.body
    first, second = loop.body.seq
    assert loop.extent == 7 and first.extent == 6 and second.body.extent == 6
    values = sparse.random(np.random.default_rng(), (5, 7, 6), "float32")
    check([x, mask, out], [values, values[0]], (5, 7, 6))


def test_products_keep_their_rows_of_sums():
    lhs, rhs = live(6, 4, name="lhs"), te.placeholder((4, 9), name="rhs")
    k = te.reduce_axis((0, 4), "k")
    shape = (*lhs.shape[:2], 9)
    product = te.compute(
        shape, lambda b, i, j: te.sum(lhs[b, i, k] * rhs[k, j], axis=k), name="product"
    )
    out = topi.nn.softmax(product)
    check(
        [lhs, rhs, out],
        [sparse.random(np.random.default_rng(), s, "float32") for s in ((5, 6, 4), (4, 9))],
        (5, 6, 9),
    )


def test_what_adds_to_places_by_index_is_left_alone():
    @T.prim_func(s_tir=True)
    def main(
        A: T.Buffer((6,), "float32"), at: T.Buffer((6,), "int32"), out: T.Buffer((6,), "float32")
    ):
        B = T.sblock_alloc_buffer((6,))
        for i in range(6):
            with T.sblock("B"):
                v = T.axis.spatial(6, i)
                B[v] = A[v] + T.float32(1)
        for i in range(6):
            with T.sblock("out"):
                v = T.axis.spatial(6, i)
                out[at[v]] = out[at[v]] + B[v]

    tvm.ir.assert_structural_equal(merge_loops(main), main)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: (x > 0.5).astype("int32"),
        lambda x: tirx.isnan(x),
        lambda x: x.astype("int32"),
        lambda x: tirx.floor(x),
        lambda x: tirx.nearbyint(x).astype("float32"),
        lambda x: tirx.Cast("float32", tirx.Cast("int32", x)),
    ],
)
def test_functions_whose_results_jump_stay_as_they_are(step: Callable[[Any], Any]):
    x = live(4)
    product = te.compute(x.shape, lambda i, j: x[i, j] * 3.0, name="product")
    total = te.compute(x.shape, lambda i, j: product[i, j] + 0.1, name="total")
    out = te.compute(x.shape, lambda i, j: step(total[i, j]), name="out")
    before = te.create_prim_func([x, out])
    tvm.ir.assert_structural_equal(merge_loops(before), before)
    assert nests(before) == 3 and nests(merge_loops(te.create_prim_func([x, total]))) == 1
    alone = te.compute(x.shape, lambda i, j: step(product[i, j]), name="alone")
    assert nests(merge_loops(te.create_prim_func([x, alone]))) == 1  # rounded as it was
