"""First loads of a tile beside the last sums of the tile before it."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from pit_tvm.transform.preload_fragments import preload_fragments
from tests.transform.test_overlap_copies import call


def simplified(func: tvm.tirx.PrimFunc) -> tvm.IRModule:
    mod = tvm.IRModule({"f": func.with_attr("global_symbol", "f")})
    for step in (tvm.s_tir.transform.LowerOpaqueBlock(), tvm.tirx.transform.StmtSimplify()):
        mod = step(mod)
    return mod


def test_every_wait_moves_in_front_of_the_last_sums_before_it():
    @T.prim_func(s_tir=True)
    def before():
        for k in range(6):
            with T.attr(0, "async_wait_queue_scope", 0):
                with T.attr(0, "async_wait_inflight_count", 1):
                    with T.attr(0, "pit.warp_mma_steps", 2):
                        with T.sblock("warp_mma"):
                            with T.attr(0, "pit.warp_mma_first", 0):
                                T.evaluate(call("load", k * 2))
                            T.evaluate(call("load", k * 2 + 1))
                            with T.attr(0, "async_commit_queue_scope", 0):
                                T.evaluate(call("copy", k + 2))
                            with T.attr(0, "pit.warp_mma_step", 0):
                                T.evaluate(call("mma", k * 2))
                            with T.attr(0, "pit.warp_mma_step", 1):
                                T.evaluate(call("mma", k * 2 + 1))
        for k in T.unroll(2):
            with T.sblock(""):
                T.where(k + 6 < 8)
                with T.attr(0, "async_wait_queue_scope", 0):
                    with T.attr(0, "async_wait_inflight_count", 1 - k):
                        with T.attr(0, "pit.warp_mma_steps", 2):
                            with T.sblock("warp_mma"):
                                with T.attr(0, "pit.warp_mma_first", 0):
                                    T.evaluate(call("load", k * 2 + 12))
                                with T.attr(0, "pit.warp_mma_step", 0):
                                    T.evaluate(call("mma", k * 2 + 12))
                                with T.attr(0, "pit.warp_mma_step", 1):
                                    T.evaluate(call("mma", k * 2 + 13))

    @T.prim_func(s_tir=True)
    def after():
        with T.attr(0, "async_wait_queue_scope", 0):
            with T.attr(0, "async_wait_inflight_count", 1):
                T.evaluate(call("load", 0))
        for k in range(6):
            T.evaluate(call("load", k * 2 + 1))
            with T.attr(0, "async_commit_queue_scope", 0):
                T.evaluate(call("copy", k + 2))
            T.evaluate(call("mma", k * 2))
            with T.attr(0, "async_wait_queue_scope", 0):
                with T.attr(0, "async_wait_inflight_count", 1):
                    T.evaluate(call("load", (k + 1) * 2))
                    T.evaluate(call("mma", k * 2 + 1))
        T.evaluate(call("mma", 12))
        with T.attr(0, "async_wait_queue_scope", 0):
            with T.attr(0, "async_wait_inflight_count", 0):
                T.evaluate(call("load", 14))
                T.evaluate(call("mma", 13))
        T.evaluate(call("mma", 14))
        T.evaluate(call("mma", 15))

    got, expected = (simplified(f) for f in (preload_fragments(before), after))
    tvm.ir.assert_structural_equal(got, expected)


def test_a_loop_of_unknown_length_keeps_its_waits():
    @T.prim_func(s_tir=True)
    def before(n: T.int32):
        for k in range(n):
            with T.attr(0, "async_wait_queue_scope", 0):
                with T.attr(0, "async_wait_inflight_count", 0):
                    with T.attr(0, "pit.warp_mma_steps", 2):
                        with T.sblock("warp_mma"):
                            with T.attr(0, "pit.warp_mma_first", 0):
                                T.evaluate(call("load", k))
                            with T.attr(0, "pit.warp_mma_step", 1):
                                T.evaluate(call("mma", k))
        T.evaluate(call("rest"))

    @T.prim_func(s_tir=True)
    def after(n: T.int32):
        for k in range(n):
            with T.attr(0, "async_wait_queue_scope", 0):
                with T.attr(0, "async_wait_inflight_count", 0):
                    T.evaluate(call("load", k))
                    T.evaluate(call("mma", k))
        T.evaluate(call("rest"))

    got, expected = (simplified(f) for f in (preload_fragments(before), after))
    tvm.ir.assert_structural_equal(got, expected)
