"""Blocks before and after the one that reads the sparse operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from pit_tvm import op
from pit_tvm.reference import ops as reference
from pit_tvm.schedules import generic
from pit_tvm.structs import MicroTile
from pit_tvm.transform.axis_map import Remap, padded_map, rows_map
from pit_tvm.transform.insert_sread_swrite import SparseForm, insert_sread_swrite
from pit_tvm.transform.pipeline import lower
from pit_tvm.transform.remap_axes import remap_axes
from tests.schedules import sparse

M, N, K = 9, 5, 7
ROWS = MicroTile("lhs", "m", 0, (1, 0))


def product() -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    lhs, rhs = te.placeholder((M, K), name="lhs"), te.placeholder((K, N), name="rhs")
    k = te.reduce_axis((0, K), "k")
    acc = te.compute((M, N), lambda m, n: te.sum(lhs[m, k] * rhs[k, n], axis=k), name="acc")
    return lhs, rhs, acc


def kernel(func: Any, schedule: bool) -> Callable[..., None]:
    sch = s_tir.Schedule(func)
    if schedule:
        generic.apply(sch)
    return sparse.build(lower(sch.mod))


def run(
    tensors: list[te.Tensor],
    micro_tile: MicroTile,
    arrays: list[np.ndarray],
    lists: sparse.Lists,
    schedule: bool,
    sums: bool = False,
) -> np.ndarray:
    func = insert_sread_swrite(te.create_prim_func(tensors), micro_tile, SparseForm(4))
    shape = [int(extent) for extent in tensors[-1].shape]
    out = sparse.poisoned(tuple(shape), "float32")
    if sums:
        out[...] = 0
    fenced = [sparse.fenced(a) for a in (*arrays, lists.ids, lists.count, out)]
    kernel(func, schedule)(*fenced)
    return fenced[-1]


@pytest.fixture(params=[False, True], ids=["as it is", "scheduled"])
def schedule(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_stages_after_a_product_stay_in_list_order_and_idle_at_dead_positions():
    @T.prim_func(s_tir=True)
    def main(
        lhs: T.Buffer((9, 7), "float32", align=4),
        rhs: T.Buffer((7, 5), "float32", align=4),
        ids: T.Buffer((1, "capacity"), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
        out: T.Buffer((9, 5), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer(((capacity + 3) // 4, 4, 5))
        gate = T.sblock_alloc_buffer(((capacity + 3) // 4, 4, 5))
        for m_t, m_r, n, k in T.grid((capacity + 3) // 4, 4, 5, 7):
            with T.sblock("acc"):
                t, r, j, c = T.axis.remap("SSSR", [m_t, m_r, n, k])
                T.reads(count[0], lhs[0:9, c], ids[0, t * 4 + r], rhs[c, j])
                T.writes(acc[t, r, j])
                with T.init():
                    acc[t, r, j] = T.float32(0)
                if t * 4 + r < count[0]:
                    acc[t, r, j] = (
                        acc[t, r, j]
                        + lhs[T.if_then_else(t * 4 + r < count[0], ids[0, t * 4 + r], 0), c]
                        * rhs[c, j]
                    )
        for m_t, m_r, n in T.grid((capacity + 3) // 4, 4, 5):
            with T.sblock("gate"):
                t, r, j = T.axis.remap("SSS", [m_t, m_r, n])
                T.reads(count[0], acc[t, r, j])
                T.writes(gate[t, r, j])
                T.sblock_attr({"pit.speculative": 1})
                gate[t, r, j] = T.if_then_else(
                    t * 4 + r < count[0], T.max(acc[t, r, j], T.float32(0)), T.float32(0)
                )
        for m_t, m_r, n in T.grid((capacity + 3) // 4, 4, 5):
            with T.sblock("out"):
                t, r, j = T.axis.remap("SSS", [m_t, m_r, n])
                T.reads(count[0], acc[t, r, j], gate[t, r, j], ids[0, t * 4 + r])
                T.writes(out[ids[0, t * 4 + r], j])
                T.sblock_attr({"pit.swrite": 1})
                if t * 4 + r < count[0]:
                    out[ids[0, t * 4 + r], j] = acc[t, r, j] * gate[t, r, j]

    lhs, rhs, acc = product()
    zero = tirx.const(0, "float32")
    gate = te.compute((M, N), lambda m, n: tirx.max(acc[m, n], zero), name="gate")
    out = te.compute((M, N), lambda m, n: acc[m, n] * gate[m, n], name="out")
    func = te.create_prim_func([lhs, rhs, out])
    tvm.ir.assert_structural_equal(insert_sread_swrite(func, ROWS, SparseForm(4)), main)


def test_gather_by_a_stage_reads_nothing_at_dead_positions(rng, schedule):
    which = te.placeholder((M,), "int32", "which")
    table = te.placeholder((M + 1, N), "float32", "table")
    stage = te.compute((M,), lambda m: which[m] + 1, name="stage")
    row = te.compute((M, N), lambda m, n: table[stage[m], n], name="row")
    out = te.compute((M, N), lambda m, n: row[m, n] * 2.0, name="out")
    micro_tile = MicroTile("which", "m", 0, (1,))
    index = sparse.lists(rng, "random", (M,), micro_tile)
    places = rng.integers(0, M, M).astype(np.int32)
    places[~index.mask] = sparse.DEAD
    rows = sparse.random(rng, (M + 1, N), "float32")
    got = run([which, table, out], micro_tile, [places, rows], index, schedule)
    truth = 2.0 * rows[np.where(index.mask, places + 1, 0)].astype(np.float64)
    sparse.assert_promise(got, truth, index.mask[:, None])


def test_block_before_the_main_one_is_read_at_live_coordinates(rng, schedule):
    data, other = (te.placeholder((M, N), name=name) for name in ("data", "other"))
    before = te.compute((M, N), lambda m, n: other[m, n] * 2.0, name="before")
    main = te.compute((M, N), lambda m, n: before[m, n] + data[m, n], name="main")
    after = te.compute((M, N), lambda m, n: main[m, n] * before[m, n], name="after")
    out = te.compute((M, N), lambda m, n: after[m, n] + 1.0, name="out")
    micro_tile = MicroTile("data", "m", 0, (1, 0))
    index = sparse.lists(rng, "random", (M, N), micro_tile)
    x, y = sparse.random(rng, (M, N), "float32"), sparse.random(rng, (M, N), "float32")
    truth = (2.0 * y.astype(np.float64) + x) * (2.0 * y) + 1.0
    sparse.bury(x, index.mask)
    got = run([data, other, out], micro_tile, [x, y], index, schedule)
    sparse.assert_promise(got, truth, index.mask)


def test_later_sum_over_the_axis_takes_the_live_rows_only(rng, schedule):
    lhs, rhs, acc = product()
    r = te.reduce_axis((0, M), "r")
    out = te.compute((N,), lambda n: te.sum(acc[r, n] * acc[r, n], axis=r), name="out")
    index = sparse.lists(rng, "random", (M, K), ROWS)
    x, y = sparse.random(rng, (M, K), "float32"), sparse.random(rng, (K, N), "float32")
    truth = ((np.where(index.mask, x, 0).astype(np.float64) @ y) ** 2).sum(axis=0)
    sparse.bury(x, index.mask)
    sparse.assert_promise(run([lhs, rhs, out], ROWS, [x, y], index, schedule), truth)


def test_later_block_may_transpose_the_axis_and_shift_another(rng, schedule):
    lhs, rhs, acc = product()
    out = te.compute((N - 1, M), lambda j, i: acc[i, j] - acc[i, j + 1], name="out")
    index = sparse.lists(rng, "random", (M, K), ROWS)
    x, y = sparse.random(rng, (M, K), "float32"), sparse.random(rng, (K, N), "float32")
    sums = np.where(index.mask, x, 0).astype(np.float64) @ y
    sparse.bury(x, index.mask)
    got = run([lhs, rhs, out], ROWS, [x, y], index, schedule)
    sparse.assert_promise(got, (sums[:, :-1] - sums[:, 1:]).T, index.mask.any(axis=1))


def test_axes_of_a_later_product_may_be_called_like_those_of_the_first(rng, schedule):
    """Its ``r`` follows ``n``, its own ``n``, ``n_`` and ``m_t`` follow nothing."""
    lhs, rhs, acc = product()
    back, turn = te.placeholder((N, 4), name="back"), te.placeholder((2, 3), name="turn")
    r = te.reduce_axis((0, N), "r")

    def term(m: Any, n: Any, n_: Any, m_t: Any) -> Any:
        return te.sum(acc[m, r] * back[r, n] * turn[n_, m_t], axis=r)

    out = te.compute((M, 4, 2, 3), term, name="out")
    index = sparse.lists(rng, "random", (M, K), ROWS)
    x, y = sparse.random(rng, (M, K), "float32"), sparse.random(rng, (K, N), "float32")
    z, w = sparse.random(rng, (N, 4), "float32"), sparse.random(rng, (2, 3), "float32")
    sums = np.where(index.mask, x, 0).astype(np.float64) @ y @ z
    sparse.bury(x, index.mask)
    got = run([lhs, rhs, back, turn, out], ROWS, [x, y, z, w], index, schedule)
    live = index.mask.any(axis=1)[:, None, None, None]
    sparse.assert_promise(got, sums[:, :, None, None] * w, live)


def test_slots_along_the_reduction_keep_the_blocks_that_the_sums_need(rng, schedule):
    lhs, raw = te.placeholder((M, K), name="lhs"), te.placeholder((K, N), name="raw")
    unused = te.placeholder((N,), name="unused")
    scale = te.compute((N,), lambda n: unused[n] + 1.0, name="scale")
    rhs = te.compute((K, N), lambda k, n: raw[k, n] * 2.0, name="rhs")
    k = te.reduce_axis((0, K), "k")
    acc = te.compute((M, N), lambda m, n: te.sum(lhs[m, k] * rhs[k, n], axis=k), name="acc")
    out = te.compute((M, N), lambda m, n: scale[n] * acc[m, n], name="out")
    micro_tile = MicroTile("lhs", "m", 0, (1, 3))
    func = insert_sread_swrite(
        te.create_prim_func([lhs, raw, unused, out]), micro_tile, SparseForm(4)
    )
    assert [p.name for p in func.params] == ["lhs", "raw", "ids", "count", "out"]
    index = sparse.lists(rng, "random", (M, K), micro_tile)
    x, y = sparse.random(rng, (M, K), "float32"), sparse.random(rng, (K, N), "float32")
    truth = np.where(index.mask, x, 0).astype(np.float64) @ (2.0 * y)
    sparse.bury(x, index.mask)
    got = run([lhs, raw, unused, out], micro_tile, [x, y], index, schedule, sums=True)
    sparse.assert_promise(got, truth)


def test_padding_of_an_axis_does_not_reach_a_later_maximum(rng, schedule):
    lhs, rhs, acc = product()
    c = te.reduce_axis((0, N), "c")
    out = te.compute((M,), lambda m: te.max(acc[m, c], axis=c), name="out")
    maps = {"m": rows_map("m", M, 4), "n": padded_map("n", N, 8)}
    func = remap_axes(te.create_prim_func([lhs, rhs, out]), Remap("acc", maps))
    x = np.abs(sparse.random(rng, (M, K), "float32"))
    y = -np.abs(sparse.random(rng, (K, N), "float32"))  # every sum is below zero
    got = sparse.fenced(sparse.poisoned((M,), "float32"))
    kernel(func, schedule)(sparse.fenced(x), sparse.fenced(y), got)
    sparse.assert_promise(got, (x.astype(np.float64) @ y).max(axis=1))


def test_rows_of_groups_meet_the_matrix_of_their_group(rng, schedule):
    groups = 3
    tensors = op.grouped_matmul(None, N, K, groups, bias=True, activation="relu")
    form = SparseForm(4, groups=(groups, "group_ids"))
    func = insert_sread_swrite(te.create_prim_func(tensors), ROWS, form)
    of_row = rng.integers(-1, groups - 1, M)  # the last group is empty
    ids = np.full((groups, M), sparse.DEAD, np.int32)
    count = np.zeros(groups, np.int32)
    for group in range(groups):
        rows = rng.permutation(np.flatnonzero(of_row == group))
        ids[group, : len(rows)], count[group] = rows, len(rows)
    x, y, b = (sparse.random(rng, s, "float32") for s in ((M, K), (groups, K, N), (groups, N)))
    truth = reference.grouped_matmul(x, y, b, of_row, activation="relu")
    x[of_row < 0] = np.nan
    out = sparse.poisoned((M, N), "float32")
    arrays = [sparse.fenced(a) for a in (x, y, b, ids, count, out)]
    kernel(func, schedule)(*arrays)
    sparse.assert_promise(arrays[-1], truth, (of_row >= 0)[:, None])
