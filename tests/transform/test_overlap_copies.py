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


@T.prim_func(s_tir=True)
def one_iteration():
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
                    with T.attr(0, "pit.warp_mma_steps", 3):
                        T.evaluate(call("load"))
                        with T.attr(0, "pit.warp_mma_step", 0):
                            T.evaluate(call("mma", 0))
                        with T.attr(0, "pit.warp_mma_step", 1):
                            T.evaluate(call("mma", 1))
                        with T.attr(0, "pit.warp_mma_step", 2):
                            T.evaluate(call("mma", 2))


def test_wait_comes_first_and_every_step_but_the_last_starts_its_share_of_copies():
    @T.prim_func(s_tir=True)
    def after():
        with T.sblock("root"):
            T.reads()
            T.writes()
            for _ in range(7):
                with T.attr(0, "async_wait_queue_scope", 0):
                    with T.attr(0, "async_wait_inflight_count", 1):
                        with T.attr(0, "pit.warp_mma_steps", 3):
                            T.evaluate(call("load"))
                            with T.attr(0, "async_scope", 1):
                                T.evaluate(call("lhs", 0))
                            with T.attr(0, "pit.warp_mma_step", 0):
                                T.evaluate(call("mma", 0))
                            with T.attr(0, "async_commit_queue_scope", 0):
                                with T.attr(0, "async_scope", 1):
                                    T.evaluate(call("lhs", 1))
                                with T.attr(0, "async_scope", 1):
                                    T.evaluate(call("rhs"))
                            with T.attr(0, "pit.warp_mma_step", 1):
                                T.evaluate(call("mma", 1))
                            with T.attr(0, "pit.warp_mma_step", 2):
                                T.evaluate(call("mma", 2))

    check(one_iteration, after)


def test_copies_in_front_of_a_loop_stay_there():
    """With two stages the tile behind the loop waits too, but its copies are the loop's."""

    @T.prim_func(s_tir=True)
    def func():
        with T.attr(0, "async_commit_queue_scope", 0):
            with T.attr(0, "async_scope", 1):
                T.evaluate(call("lhs"))
        for _ in range(7):
            T.evaluate(call("sums"))
        with T.attr(0, "async_wait_queue_scope", 0):
            with T.attr(0, "async_wait_inflight_count", 0):
                with T.attr(0, "pit.warp_mma_steps", 1):
                    with T.attr(0, "pit.warp_mma_step", 0):
                        T.evaluate(call("mma"))

    check(func, func)


def test_copies_of_two_tiles_in_a_row_stay_apart():
    """Without a loop those of the first tile stand in front of the iteration of the second."""

    @T.prim_func(s_tir=True)
    def before():
        with T.attr(0, "async_commit_queue_scope", 0):
            T.evaluate(call("first"))
        with T.sblock(""):
            with T.attr(0, "async_commit_queue_scope", 0):
                T.evaluate(call("second"))
            with T.attr(0, "async_wait_queue_scope", 0):
                with T.attr(0, "async_wait_inflight_count", 1):
                    with T.attr(0, "pit.warp_mma_steps", 1):
                        with T.attr(0, "pit.warp_mma_step", 0):
                            T.evaluate(call("mma", 0))
        with T.attr(0, "async_wait_queue_scope", 0):
            with T.attr(0, "async_wait_inflight_count", 0):
                with T.attr(0, "pit.warp_mma_steps", 1):
                    with T.attr(0, "pit.warp_mma_step", 0):
                        T.evaluate(call("mma", 1))

    @T.prim_func(s_tir=True)
    def after():
        with T.sblock("root"):
            T.reads()
            T.writes()
            with T.attr(0, "async_commit_queue_scope", 0):
                T.evaluate(call("first"))
            with T.sblock(""):
                with T.attr(0, "async_wait_queue_scope", 0):
                    with T.attr(0, "async_wait_inflight_count", 0):
                        with T.attr(0, "pit.warp_mma_steps", 1):
                            with T.attr(0, "async_commit_queue_scope", 0):
                                T.evaluate(call("second"))
                            with T.attr(0, "pit.warp_mma_step", 0):
                                T.evaluate(call("mma", 0))
            with T.attr(0, "async_wait_queue_scope", 0):
                with T.attr(0, "async_wait_inflight_count", 0):
                    with T.attr(0, "pit.warp_mma_steps", 1):
                        with T.attr(0, "pit.warp_mma_step", 0):
                            T.evaluate(call("mma", 1))

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
