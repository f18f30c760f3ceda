"""Lowering of `pit.prefetch_rows`: which rows are requested, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError
from pit_tvm.transform.lower_prefetch_rows import lower_prefetch_rows


def request(load: Any) -> Any:
    """LLVM's prefetch for reading data, into all caches."""
    return tvm.tirx.call_intrin("void", "tirx.prefetch", T.address_of(load), 0, 3, 1)


@T.prim_func(s_tir=True)
def gathered(
    rhs: T.Buffer((4, 64, 32), "float32"),
    ids: T.Buffer((8,), "int32"),
    count: T.Buffer((1,), "int32"),
    out: T.Buffer((4, 2, 32), "float32"),
):
    for p in range(4):
        for b in T.serial(2, annotations={"pit.prefetch_rows": "rhs"}):
            for k in range(count[0]):
                for vector in T.unroll(2):
                    for lane in T.vectorized(16):
                        out[p, b, vector * 16 + lane] = (
                            out[p, b, vector * 16 + lane] + rhs[p, ids[k], vector * 16 + lane]
                        )


def test_every_iteration_requests_its_share_of_the_next_rows():
    @T.prim_func(s_tir=True)
    def after(
        rhs: T.Buffer((4, 64, 32), "float32"),
        ids: T.Buffer((8,), "int32"),
        count: T.Buffer((1,), "int32"),
        out: T.Buffer((4, 2, 32), "float32"),
    ):
        for p in range(4):
            for b in range(2):
                for ahead in range(
                    T.max(T.min((count[0] + 1) // 2, count[0] - b * ((count[0] + 1) // 2)), 0)
                ):
                    T.evaluate(request(rhs[p + 1, ids[b * ((count[0] + 1) // 2) + ahead], 0]))
                    T.evaluate(request(rhs[p + 1, ids[b * ((count[0] + 1) // 2) + ahead], 16]))
                for k in range(count[0]):
                    for vector in T.unroll(2):
                        for lane in T.vectorized(16):
                            out[p, b, vector * 16 + lane] = (
                                out[p, b, vector * 16 + lane] + rhs[p, ids[k], vector * 16 + lane]
                            )

    lowered = tvm.s_tir.transform.StmtSimplify()(
        tvm.IRModule({"main": lower_prefetch_rows(gathered)})
    )
    expected = tvm.s_tir.transform.StmtSimplify()(tvm.IRModule({"main": after}))
    tvm.ir.assert_structural_equal(
        lowered["main"].without_attr("global_symbol"),
        expected["main"].without_attr("global_symbol"),
    )


def test_requests_change_no_result():
    kernel = tvm.compile(lower_prefetch_rows(gathered), target="llvm")
    rng = np.random.default_rng()
    for live in (0, 1, 7, 8):
        rhs = rng.standard_normal((4, 64, 32)).astype(np.float32)
        ids = rng.permutation(64)[:8].astype(np.int32)
        out = np.zeros((4, 2, 32), np.float32)
        kernel(rhs, ids, np.array([live], np.int32), out)
        exact = rhs[:, ids[:live]].astype(np.float64).sum(axis=1)
        np.testing.assert_allclose(out, np.stack([exact] * 2, axis=1), rtol=1e-5, atol=1e-5)


def test_a_nest_that_was_changed_is_refused():
    @T.prim_func(s_tir=True)
    def changed(rhs: T.Buffer((4,), "float32"), out: T.Buffer((4,), "float32")):
        for b in T.serial(4, annotations={"pit.prefetch_rows": "rhs"}):
            out[b] = rhs[b]

    with pytest.raises(ScheduleError, match="prefetch_rows: loop b"):
        lower_prefetch_rows(changed)


def test_a_buffer_that_is_no_longer_read_is_refused():
    @T.prim_func(s_tir=True)
    def changed(out: T.Buffer((4, 4, 4), "float32")):
        for p in range(4):
            for b in T.serial(4, annotations={"pit.prefetch_rows": "rhs"}):
                for k in range(4):
                    out[p, b, k] = T.float32(0)

    with pytest.raises(ScheduleError, match="to read rhs"):
        lower_prefetch_rows(changed)
