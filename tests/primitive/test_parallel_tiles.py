"""`parallel_tiles`: a nest is marked to become one parallel loop."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from pit_tvm.primitive.parallel_tiles import parallel_tiles
from tests.primitive.replay import assert_schedules, fresh, refused


@T.prim_func(s_tir=True)
def filled(A: T.Buffer((4, 3, 5), "float32")):
    for x, y, z in T.grid(4, 3, 5):
        with T.sblock("A"):
            i, j, k = T.axis.remap("SSS", [x, y, z])
            A[i, j, k] = T.float32(1)


def schedule() -> tuple[Any, list[Any]]:
    sch = fresh(filled)
    return sch, sch.get_loops(sch.get_sblock("A"))


def test_outermost_loop_is_annotated_with_the_depth_of_the_nest():
    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((4, 3, 5), "float32")):
        for x in T.serial(4, annotations={"pit.parallel_tiles": 2}):
            for y, z in T.grid(3, 5):
                with T.sblock("A"):
                    i, j, k = T.axis.remap("SSS", [x, y, z])
                    A[i, j, k] = T.float32(1)

    sch, loops = schedule()
    parallel_tiles(sch, loops[:2])
    assert_schedules(sch, filled, after)


def test_runs_are_one_more_annotation():
    sch, loops = schedule()
    parallel_tiles(sch, loops[:2], runs=True)
    notes = {name: int(value) for name, value in sch.get(loops[0]).annotations.items()}
    assert notes == {"pit.parallel_tiles": 2, "pit.parallel_runs": 1}
    after = sch.mod["main"]
    assert_schedules(sch, filled, after)


def test_no_loop():
    sch, _ = schedule()
    with refused("parallel_tiles: loops: expected at least one, got none"):
        parallel_tiles(sch, [])


def test_loops_that_are_not_directly_nested():
    sch, (x, y, z) = schedule()
    text = "parallel_tiles: loop z: expected to be all that loop x holds, got something else"
    with refused(text):
        parallel_tiles(sch, [x, z])
    with refused("parallel_tiles: loop x: expected to be all that loop y holds"):
        parallel_tiles(sch, [y, x])


def test_loop_that_is_not_serial():
    sch, (x, y, z) = schedule()
    sch.vectorize(z)
    with refused("parallel_tiles: loop z: expected serial, got vectorized"):
        parallel_tiles(sch, [x, y, z])


def test_loop_that_a_block_sums_over():
    @T.prim_func(s_tir=True)
    def summed(A: T.Buffer((4, 3), "float32"), C: T.Buffer((4,), "float32")):
        for x, k in T.grid(4, 3):
            with T.sblock("C"):
                i, j = T.axis.remap("SR", [x, k])
                with T.init():
                    C[i] = T.float32(0)
                C[i] = C[i] + A[i, j]

    sch = fresh(summed)
    with refused("parallel_tiles: loop k: expected no reduction over it, got the one of block C"):
        parallel_tiles(sch, sch.get_loops(sch.get_sblock("C")))


def test_block_in_place_of_a_loop():
    sch, _ = schedule()
    with refused("parallel_tiles: loop: expected a loop, got SBlock"):
        parallel_tiles(sch, [sch.get_sblock("A")])
