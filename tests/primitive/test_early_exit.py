"""`early_exit`: CTAs are marked to leave behind the live positions."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from pit_tvm.primitive.early_exit import early_exit
from tests.primitive.replay import assert_schedules, fresh, refused


@T.prim_func(s_tir=True)
def filled(A: T.Buffer((12, 5), "float32"), count: T.Buffer((1,), "int32")):
    for t, r, k in T.grid(3, 4, 5):
        with T.sblock("A"):
            i, c = T.axis.spatial(12, t * 4 + r), T.axis.spatial(5, k)
            if i < count[0]:
                A[i, c] = T.float32(1)


def schedule(tag: str = "") -> tuple[Any, dict[str, Any]]:
    sch = fresh(filled)
    loops = dict(zip("trk", sch.get_loops(sch.get_sblock("A")), strict=True))
    if tag:
        sch.bind(loops["t"], tag)
    return sch, loops


def test_loop_is_annotated_and_nothing_else_changes():
    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((12, 5), "float32"), count: T.Buffer((1,), "int32")):
        for t in T.thread_binding(3, thread="blockIdx.x", annotations={"pit.early_exit": 1}):
            for r, k in T.grid(4, 5):
                with T.sblock("A"):
                    i, c = T.axis.spatial(12, t * 4 + r), T.axis.spatial(5, k)
                    if i < count[0]:
                        A[i, c] = T.float32(1)

    sch, loops = schedule("blockIdx.x")
    early_exit(sch, loops["t"])
    assert_schedules(sch, filled, after)


def test_loop_of_one_thread():
    sch, loops = schedule()
    with refused("early_exit: loop t: expected bound to blockIdx, got serial"):
        early_exit(sch, loops["t"])


def test_loop_of_threads():
    sch, loops = schedule("threadIdx.x")
    with refused("early_exit: loop t: expected bound to blockIdx, got threadIdx.x"):
        early_exit(sch, loops["t"])


def test_loop_that_no_guard_bounds():
    sch, loops = schedule()
    sch.reorder(loops["k"], loops["t"])
    sch.bind(loops["k"], "blockIdx.x")
    with refused("early_exit: loop k: expected a block below it with a guard on this loop, got no"):
        early_exit(sch, loops["k"])


def test_block_in_place_of_the_loop():
    sch, _ = schedule()
    with refused("early_exit: loop: expected a loop, got SBlock"):
        early_exit(sch, sch.get_sblock("A"))
