"""Lowering of `pit.prefetch_stores`: which lines are requested, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError
from pit_tvm.transform.lower_prefetch_stores import lower_prefetch_stores


def request(load: Any) -> Any:
    """LLVM's prefetch for writing data, into all caches."""
    return tvm.tirx.call_intrin("void", "tirx.prefetch", T.address_of(load), 1, 3, 1)


@T.prim_func(s_tir=True)
def scattered(
    lhs: T.Buffer((8, 32), "float32"),
    ids: T.Buffer((8,), "int32"),
    count: T.Buffer((1,), "int32"),
    out: T.Buffer((8, 32), "float32"),
):
    for b in T.serial(2, annotations={"pit.prefetch_stores": "out"}):
        with T.sblock(""):
            T.reads(lhs[0:8, 0:32], ids[0:8], count[0])
            T.writes(out[0:8, 0:32])
            acc = T.sblock_alloc_buffer((4, 32))
            for i, lane in T.grid(4, 32):
                acc[i, lane] = lhs[b * 4 + i, lane] * T.float32(2)
            for i in range(T.max(T.min(count[0] - b * 4, 4), 0)):
                for part in range(2):
                    for lane in T.vectorized(16):
                        out[ids[b * 4 + i], part * 16 + lane] = acc[i, part * 16 + lane]


@T.prim_func(s_tir=True)
def odd_columns(lhs: T.Buffer((4, 40), "float32"), out: T.Buffer((4, 40), "float32")):
    for b in T.serial(4, annotations={"pit.prefetch_stores": "out"}):
        with T.sblock(""):
            T.reads(lhs[b, 0:40])
            T.writes(out[b, 0:40])
            acc = T.sblock_alloc_buffer((40,))
            for lane in range(40):
                acc[lane] = lhs[b, lane] + T.float32(1)
            for lane in range(40):
                if lane < 39:
                    out[b, lane] = acc[lane]


def assert_lowers(before: Any, after: Any) -> None:
    simplify = tvm.s_tir.transform.StmtSimplify()
    lowered = simplify(tvm.IRModule({"main": lower_prefetch_stores(before)}))
    expected = simplify(tvm.IRModule({"main": after}))
    tvm.ir.assert_structural_equal(
        lowered["main"].without_attr("global_symbol"),
        expected["main"].without_attr("global_symbol"),
    )


def test_every_line_of_the_live_rows_is_requested_before_the_sums():
    @T.prim_func(s_tir=True)
    def after(
        lhs: T.Buffer((8, 32), "float32"),
        ids: T.Buffer((8,), "int32"),
        count: T.Buffer((1,), "int32"),
        out: T.Buffer((8, 32), "float32"),
    ):
        for b in range(2):
            with T.sblock(""):
                T.reads(lhs[0:8, 0:32], ids[0:8], count[0])
                T.writes(out[0:8, 0:32])
                acc = T.sblock_alloc_buffer((4, 32))
                for i in range(T.max(T.min(count[0] - b * 4, 4), 0)):
                    for part in range(2):
                        for _ in range(1):
                            T.evaluate(request(out[ids[b * 4 + i], part * 16]))
                for i, lane in T.grid(4, 32):
                    acc[i, lane] = lhs[b * 4 + i, lane] * T.float32(2)
                for i in range(T.max(T.min(count[0] - b * 4, 4), 0)):
                    for part in range(2):
                        for lane in T.vectorized(16):
                            out[ids[b * 4 + i], part * 16 + lane] = acc[i, part * 16 + lane]

    assert_lowers(scattered, after)


def test_guarded_stores_of_single_elements_ask_once_for_a_line():
    @T.prim_func(s_tir=True)
    def after(lhs: T.Buffer((4, 40), "float32"), out: T.Buffer((4, 40), "float32")):
        for b in range(4):
            with T.sblock(""):
                T.reads(lhs[b, 0:40])
                T.writes(out[b, 0:40])
                acc = T.sblock_alloc_buffer((40,))
                for lane in range(3):
                    if lane * 16 < 39:
                        T.evaluate(request(out[b, lane * 16]))
                for lane in range(40):
                    acc[lane] = lhs[b, lane] + T.float32(1)
                for lane in range(40):
                    if lane < 39:
                        out[b, lane] = acc[lane]

    assert_lowers(odd_columns, after)


def test_requests_change_no_result():
    kernel = tvm.compile(lower_prefetch_stores(scattered), target="llvm")
    rng = np.random.default_rng()
    for live in (0, 1, 4, 5, 8):
        lhs = rng.standard_normal((8, 32)).astype(np.float32)
        ids = rng.permutation(8).astype(np.int32)
        out = np.full((8, 32), np.nan, np.float32)
        kernel(lhs, ids, np.array([live], np.int32), out)
        expected = np.full((8, 32), np.nan, np.float32)
        expected[ids[:live]] = 2 * lhs[:live]
        np.testing.assert_array_equal(out, expected)


def test_loop_that_holds_nothing_but_the_store():
    @T.prim_func(s_tir=True)
    def alone(out: T.Buffer((8,), "float32")):
        for i in T.serial(8, annotations={"pit.prefetch_stores": "out"}):
            out[i] = T.float32(0)

    with pytest.raises(ScheduleError, match="prefetch_stores: loop i: expected statements of whic"):
        lower_prefetch_stores(alone)


def test_store_that_is_no_plain_nest():
    @T.prim_func(s_tir=True)
    def twice(lhs: T.Buffer((8,), "float32"), out: T.Buffer((8, 2), "float32")):
        for i in T.serial(8, annotations={"pit.prefetch_stores": "out"}):
            lhs[i] = T.float32(1)
            for j in range(2):
                lhs[i] = T.float32(2)
                out[i, j] = T.float32(0)

    with pytest.raises(ScheduleError, match="expected a plain nest that stores, got SeqStmt"):
        lower_prefetch_stores(twice)
