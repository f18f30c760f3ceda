"""The schedule for any function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from pit_tvm import op
from pit_tvm.reference import ops as reference
from pit_tvm.schedules import generic
from pit_tvm.structs import MicroTile
from pit_tvm.transform.insert_sread_swrite import SparseForm, insert_sread_swrite
from pit_tvm.transform.pipeline import lower
from pit_tvm.transform.unalign import unalign
from tests.primitive.replay import assert_schedules, fresh
from tests.schedules import sparse


def kernel(tensors: list[te.Tensor]) -> Callable[..., None]:
    sch = s_tir.Schedule(unalign(te.create_prim_func(tensors)))
    generic.apply(sch)
    return sparse.build(lower(sch.mod))


def lowered(func: Any) -> str:
    sch = s_tir.Schedule(func)
    generic.apply(sch)
    return lower(sch.mod).script()


def test_blocks_are_parallel_dynamic_and_initialised_apart():
    @T.prim_func(s_tir=True)
    def before(
        A: T.Buffer((8, 5), "float32"),
        count: T.Buffer((1,), "int32"),
        out: T.Buffer((8,), "float32"),
    ):
        for m, k in T.grid(8, 5):
            with T.sblock("out"):
                i, c = T.axis.remap("SR", [m, k])
                T.reads(count[0], A[i, c])
                T.writes(out[i])
                with T.init():
                    out[i] = T.float32(0)
                if i < count[0]:
                    out[i] = out[i] + A[i, c]

    @T.prim_func(s_tir=True)
    def after(
        A: T.Buffer((8, 5), "float32"),
        count: T.Buffer((1,), "int32"),
        out: T.Buffer((8,), "float32"),
    ):
        for m in T.serial(8, annotations={"pit.dynamic_extent": 1, "pit.parallel_tiles": 1}):
            with T.sblock("out_init"):
                i = T.axis.spatial(8, m)
                T.reads()
                T.writes(out[i])
                out[i] = T.float32(0)
            for k in range(5):
                with T.sblock("out_update"):
                    i, c = T.axis.remap("SR", [m, k])
                    T.reads(out[i], count[0], A[i, c])
                    T.writes(out[i])
                    if i < count[0]:
                        out[i] = out[i] + A[i, c]

    sch = fresh(before)
    generic.apply(sch)
    assert_schedules(sch, before, after)


@pytest.mark.parametrize(
    ("shape", "shared"), [((1, 1, 6, 5), 6), ((1, 6, 5), 6), ((4, 6, 5), 4), ((5,), 5)]
)
def test_threads_share_the_first_loop_of_several_steps(shape: tuple[int, ...], shared: int):
    x = te.placeholder(shape, name="x")
    out = te.compute(shape, lambda *at: x[at] + 1.0, name="out")
    assert f"T.parallel({shared})" in lowered(unalign(te.create_prim_func([x, out])))
    got = sparse.poisoned(shape, "float32")
    kernel([x, out])(np.ones(shape, np.float32), got)
    assert (got == 2).all()


def test_threads_share_more_loops_where_one_inside_takes_nobody_knows_how_many():
    few, rows = te.var("few"), te.var("rows")
    x = te.placeholder((few, 3, rows, 5), name="x")
    out = te.compute(x.shape, lambda *at: x[at] + 1.0, name="out")
    script = lowered(unalign(te.create_prim_func([x, out])))
    shared = script.split("T.parallel(")[1].splitlines()[0]
    assert script.count("for ") == 2 and "few" in shared and "rows" in shared and "3" in shared
    for shape in ((2, 3, 7, 5), (0, 3, 7, 5), (2, 3, 0, 5)):
        got = sparse.poisoned(shape, "float32")
        kernel([x, out])(np.ones(shape, np.float32), got)
        assert (got == 2).all()


def test_added_results_are_not_written_by_two_threads():
    func = te.create_prim_func(op.matmul(6, 5, 7))
    split = insert_sread_swrite(func, MicroTile("lhs", "m", 0, (1, 4)), SparseForm(2))
    *sums, store = lowered(split).split("T.parallel")
    assert len(sums) == 1 and "out[" in store
    assert store.count("for ") > 1 and "T.parallel" not in store


def test_choice_of_the_operator_cuts_no_loop():
    x = te.placeholder((8,), name="x")
    out = te.compute((8,), lambda i: te.if_then_else(i < 3, x[i], 5.0), name="out")
    values = np.arange(8, dtype=np.float32)
    got = sparse.poisoned((8,), "float32")
    kernel([x, out])(values, got)
    assert got.tolist() == [0, 1, 2, 5, 5, 5, 5, 5]


def test_choice_of_the_operator_stays_beside_the_guards():
    x = te.placeholder((9, 8), name="x")
    k = te.reduce_axis((0, 8), "k")
    total = te.compute((9,), lambda i: te.sum(x[i, k], axis=k), name="total")
    out = te.compute((9,), lambda i: te.if_then_else(i < 3, total[i], 5.0), name="out")
    micro_tile = MicroTile("x", "k", 1, (4, 1))  # rows in tiles of 4, guarded by i < 9
    func = insert_sread_swrite(te.create_prim_func([x, out]), micro_tile, SparseForm(4))
    sch = s_tir.Schedule(func)
    generic.apply(sch)
    rng = np.random.default_rng()
    index = sparse.lists(rng, "random", (9, 8), micro_tile)
    values = sparse.random(rng, (9, 8), "float32")
    truth = np.where(np.arange(9) < 3, np.where(index.mask, values, 0).sum(axis=1), 5.0)
    sparse.bury(values, index.mask)
    arrays = (values, index.ids, index.count, sparse.poisoned((9,), "float32"))
    fenced = [sparse.fenced(array) for array in arrays]
    sparse.build(lower(sch.mod))(*fenced)
    sparse.assert_promise(fenced[-1], truth)


def test_padding_of_a_convolution_reaches_every_element():
    tensors = op.conv2d(2, 3, 4, 5, 6, 3, padding=2, stride=2, bias=True)
    rng = np.random.default_rng()
    shapes = ((2, 3, 5, 6), (4, 3, 3, 3), (4,))
    data, weight, bias = (sparse.random(rng, shape, "float32") for shape in shapes)
    truth = reference.conv2d(data, weight, bias, padding=2, stride=2)
    out = sparse.fenced(sparse.poisoned(truth.shape, "float32"))
    kernel(tensors)(*(sparse.fenced(a) for a in (data, weight, bias)), out)
    sparse.assert_promise(out, truth)


def test_reduction_before_its_spatial_loops_is_not_spread_over_threads():
    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((5, 8), "float32"), out: T.Buffer((8,), "float32")):
        for k, m in T.grid(5, 8):
            with T.sblock("out"):
                c, i = T.axis.remap("RS", [k, m])
                with T.init():
                    out[i] = T.float32(0)
                out[i] = out[i] + A[c, i]

    sch = s_tir.Schedule(unalign(main))
    generic.apply(sch)
    mod = lower(sch.mod)
    assert "T.parallel" not in mod.script()
    values = sparse.random(np.random.default_rng(), (5, 8), "float32")
    got = sparse.poisoned((8,), "float32")
    sparse.build(mod)(values, got)
    sparse.assert_promise(got, values.astype(np.float64).sum(axis=0))


@pytest.mark.parametrize("shape", [(), (1,), (0,)])
def test_few_or_no_elements(shape):
    x = te.placeholder(shape, name="x")
    out = te.compute(shape, lambda *i: x(*i) + tirx.const(1.0, "float32"), name="out")
    got = sparse.poisoned(shape, "float32")
    kernel([x, out])(np.ones(shape, np.float32), got)
    assert np.array_equal(got, np.full(shape, 2.0))


def test_rows_of_sums_are_vectors():
    @T.prim_func(s_tir=True)
    def before(
        A: T.Buffer((2, 6, 7), "float32"),
        B: T.Buffer((2, 7, 5), "float32"),
        out: T.Buffer((2, 6, 5), "float32"),
    ):
        for b, m, n, k in T.grid(2, 6, 5, 7):
            with T.sblock("out"):
                v, i, j, c = T.axis.remap("SSSR", [b, m, n, k])
                with T.init():
                    out[v, i, j] = T.float32(0)
                out[v, i, j] = out[v, i, j] + A[v, i, c] * B[v, c, j]

    @T.prim_func(s_tir=True)
    def after(
        A: T.Buffer((2, 6, 7), "float32"),
        B: T.Buffer((2, 7, 5), "float32"),
        out: T.Buffer((2, 6, 5), "float32"),
    ):
        for b in T.serial(2, annotations={"pit.parallel_tiles": 1}):
            for m in range(6):
                for n in range(5):
                    with T.sblock("out_init"):
                        v, i, j = T.axis.remap("SSS", [b, m, n])
                        T.reads()
                        T.writes(out[v, i, j])
                        out[v, i, j] = T.float32(0)
                for k, n in T.grid(7, 5):
                    with T.sblock("out_update"):
                        v, i, j, c = T.axis.remap("SSSR", [b, m, n, k])
                        T.reads(out[v, i, j], A[v, i, c], B[v, c, j])
                        T.writes(out[v, i, j])
                        out[v, i, j] = out[v, i, j] + A[v, i, c] * B[v, c, j]

    sch = fresh(before)
    generic.apply(sch)
    assert_schedules(sch, before, after)


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_products_of_batches_are_right_in_either_order(transpose_rhs: bool):
    tensors = op.batch_matmul(3, 9, 17, 6, transpose_rhs=transpose_rhs)
    rng = np.random.default_rng()
    shapes = ((3, 9, 6), (3, 17, 6) if transpose_rhs else (3, 6, 17))
    lhs, rhs = (sparse.random(rng, shape, "float32") for shape in shapes)
    truth = np.einsum("bmk,bnk->bmn" if transpose_rhs else "bmk,bkn->bmn", lhs, rhs)
    out = sparse.fenced(sparse.poisoned(truth.shape, "float32"))
    kernel(tensors)(*(sparse.fenced(a) for a in (lhs, rhs)), out)
    sparse.assert_promise(out, truth)


def test_loops_with_something_beside_each_other_stay_as_they_are():
    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((3, 6, 7), "float32"), out: T.Buffer((3, 7), "float32"), C: T.handle):
        copy = T.match_buffer(C, (3, 7), "float32")
        for b, n in T.grid(3, 7):
            for k in range(6):
                with T.sblock("out"):
                    v, j, c = T.axis.remap("SSR", [b, n, k])
                    with T.init():
                        out[v, j] = T.float32(0)
                    out[v, j] = out[v, j] + A[v, c, j]
            with T.sblock("copy"):
                v, j = T.axis.remap("SS", [b, n])
                copy[v, j] = out[v, j]

    sch = s_tir.Schedule(unalign(main))
    generic.apply(sch)
    values = sparse.random(np.random.default_rng(), (3, 6, 7), "float32")
    out, copy = (sparse.poisoned((3, 7), "float32") for _ in range(2))
    sparse.build(lower(sch.mod))(values, out, copy)
    np.testing.assert_allclose(copy, values.sum(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(out, copy)
