"""`dynamic_extent`: a loop is marked to end with the live positions."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.script import tirx as T

from pit_tvm.primitive.dynamic_extent import dynamic_extent
from tests.primitive.replay import assert_schedules, fresh, refused


@T.prim_func(s_tir=True)
def filled(
    A: T.Buffer((3, 12, 5), "float32"), count: T.Buffer((3,), "int32"), n: T.Buffer((1,), "int32")
):
    for s, t, r, k, one in T.grid(3, 3, 4, 5, 1):
        with T.sblock("A"):
            i, j, c = T.axis.spatial(3, s), T.axis.spatial(12, t * 4 + r), T.axis.spatial(5, k)
            d = T.axis.spatial(1, one)
            if j < count[i] and c + d < n[0]:
                A[i, j, c] = T.float32(1)


def schedule() -> tuple[Any, dict[str, Any]]:
    sch = fresh(filled)
    loops = sch.get_loops(sch.get_sblock("A"))
    return sch, dict(zip(("s", "t", "r", "k", "one"), loops, strict=True))


def test_loop_is_annotated_and_nothing_else_changes():
    @T.prim_func(s_tir=True)
    def after(
        A: T.Buffer((3, 12, 5), "float32"),
        count: T.Buffer((3,), "int32"),
        n: T.Buffer((1,), "int32"),
    ):
        for s in range(3):
            for t in T.serial(3, annotations={"pit.dynamic_extent": 1}):
                for r in range(4):
                    for k in T.serial(5, annotations={"pit.dynamic_extent": 1}):
                        for one in range(1):
                            with T.sblock("A"):
                                i = T.axis.spatial(3, s)
                                j = T.axis.spatial(12, t * 4 + r)
                                c, d = T.axis.remap("SS", [k, one])
                                if j < count[i] and c + d < n[0]:
                                    A[i, j, c] = T.float32(1)

    sch, loops = schedule()
    dynamic_extent(sch, loops["t"])
    dynamic_extent(sch, loops["k"])
    assert_schedules(sch, filled, after)


@pytest.mark.parametrize(
    ("loop", "why"), [("s", "chooses the limit only"), ("one", "runs once at any count")]
)
def test_loop_that_no_guard_bounds(loop, why):
    sch, loops = schedule()
    expected = f"loop {loop}: expected a block below it with a guard on this loop, got no such"
    with refused(f"dynamic_extent: {expected} block"):
        dynamic_extent(sch, loops[loop])


def test_loop_whose_limit_is_known_inside_it_only():
    sch, loops = schedule()
    sch.reorder(loops["t"], loops["s"])
    with refused("dynamic_extent: loop t: expected a block below it with a guard on this loop"):
        dynamic_extent(sch, loops["t"])


def test_loop_that_is_not_serial():
    sch, loops = schedule()
    sch.parallel(loops["t"])
    with refused("dynamic_extent: loop t: expected serial, got parallel"):
        dynamic_extent(sch, loops["t"])


def test_block_in_place_of_the_loop():
    sch, _ = schedule()
    with refused("dynamic_extent: loop: expected a loop, got SBlock"):
        dynamic_extent(sch, sch.get_sblock("A"))


@T.prim_func(s_tir=True)
def summed(A: T.Buffer((8,), "float32"), count: T.Buffer((1,), "int32"), C: T.Buffer((2,))):
    for i, k in T.grid(2, 8):
        with T.sblock("C"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                C[vi] = T.float32(0)
            if vk < count[0]:
                C[vi] = C[vi] + A[vk]


def test_sum_that_nothing_would_initialise_where_nothing_lives():
    sch = fresh(summed)
    block = sch.get_sblock("C")
    loop = sch.get_loops(block)[-1]
    with refused("loop k: expected no initialisation in it, got the one of block C; decompose"):
        dynamic_extent(sch, loop)
    sch.decompose_reduction(block, loop)
    dynamic_extent(sch, loop)
