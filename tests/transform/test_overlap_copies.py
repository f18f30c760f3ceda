"""Copies of a software pipeline among the steps of tensor cores."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from pit_tvm.transform.overlap_copies import overlap_copies


def call(name: str, at: Any = 0) -> Any:
    return T.call_extern("void", name, at)


def check(before: Any, after: Any) -> None:
    lowered = overlap_copies(before).with_attr("global_symbol", "f")
    simplify = tvm.s_tir.transform.StmtSimplify()
    got, expected = (
        simplify(tvm.IRModule({"f": f.with_attr("global_symbol", "f")})) for f in (lowered, after)
    )
    tvm.ir.assert_structural_equal(got, expected)


def test_wait_comes_first_and_every_step_starts_its_share_of_copies():
    @T.prim_func(s_tir=True)
    def before():
        for _ in range(7):
            with T.sblock(""):
                with T.attr(0, "async_commit_queue_scope", 0):
                    with T.attr(0, "async_scope", 1):
                        for i, j in T.grid(1, 2):
                            T.evaluate(call("lhs", i + j))
                    with T.attr(0, "async_scope", 1):
                        T.evaluate(call("rhs"))
            with T.sblock(""):
                with T.attr(0, "async_wait_queue_scope", 0):
                    with T.attr(0, "async_wait_inflight_count", 2):
                        with T.attr(0, "pit.warp_mma_steps", 2):
                            T.evaluate(call("load"))
                            with T.attr(0, "pit.warp_mma_step", 0):
                                T.evaluate(call("mma", 0))
                            with T.attr(0, "pit.warp_mma_step", 1):
                                T.evaluate(call("mma", 1))

    @T.prim_func(s_tir=True)
    def after():
        with T.sblock("root"):
            T.reads()
            T.writes()
            for _ in range(7):
                with T.attr(0, "async_wait_queue_scope", 0):
                    with T.attr(0, "async_wait_inflight_count", 1):
                        T.evaluate(call("load"))
                        with T.attr(0, "async_scope", 1):
                            T.evaluate(call("lhs", 0))
                        T.evaluate(call("mma", 0))
                        with T.attr(0, "async_commit_queue_scope", 0):
                            with T.attr(0, "async_scope", 1):
                                T.evaluate(call("lhs", 1))
                            with T.attr(0, "async_scope", 1):
                                T.evaluate(call("rhs"))
                        T.evaluate(call("mma", 1))

    check(before, after)


def test_iterations_that_only_wait_keep_their_waits():
    @T.prim_func(s_tir=True)
    def before():
        for k in T.unroll(2):
            with T.attr(0, "async_wait_queue_scope", 0):
                with T.attr(0, "async_wait_inflight_count", 1 - k):
                    with T.attr(0, "pit.warp_mma_steps", 1):
                        with T.attr(0, "pit.warp_mma_step", 0):
                            T.evaluate(call("mma"))

    @T.prim_func(s_tir=True)
    def after():
        for k in T.unroll(2):
            with T.attr(0, "async_wait_queue_scope", 0):
                with T.attr(0, "async_wait_inflight_count", 1 - k):
                    T.evaluate(call("mma"))

    check(before, after)


def test_other_pipelines_stay_as_they_are():
    @T.prim_func(s_tir=True)
    def func():
        for _ in range(7):
            with T.attr(0, "async_commit_queue_scope", 0):
                with T.attr(0, "async_scope", 1):
                    T.evaluate(call("lhs"))
            with T.attr(0, "async_wait_queue_scope", 0):
                with T.attr(0, "async_wait_inflight_count", 2):
                    T.evaluate(call("sums"))

    check(func, func)
