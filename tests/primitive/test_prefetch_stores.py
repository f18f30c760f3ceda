"""`prefetch_stores`: a loop is marked to request the lines that it stores to."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from pit_tvm.primitive.prefetch_stores import prefetch_stores
from tests.primitive.replay import assert_schedules, fresh, refused


@T.prim_func(s_tir=True)
def scattered(
    lhs: T.Buffer((8, 32), "float32"),
    ids: T.Buffer((8,), "int32"),
    out: T.Buffer((8, 32), "float32"),
):
    for b, i, lane in T.grid(2, 4, 32):
        with T.sblock("out"):
            v_b, v_i, v_l = T.axis.remap("SSS", [b, i, lane])
            out[ids[v_b * 4 + v_i], v_l] = lhs[v_b * 4 + v_i, v_l]


def schedule() -> tuple[Any, list[Any]]:
    sch = fresh(scattered)
    return sch, sch.get_loops(sch.get_sblock("out"))


def test_loop_is_annotated_with_the_buffer():
    @T.prim_func(s_tir=True)
    def after(
        lhs: T.Buffer((8, 32), "float32"),
        ids: T.Buffer((8,), "int32"),
        out: T.Buffer((8, 32), "float32"),
    ):
        for b in T.serial(2, annotations={"pit.prefetch_stores": "out"}):
            for i, lane in T.grid(4, 32):
                with T.sblock("out"):
                    v_b, v_i, v_l = T.axis.remap("SSS", [b, i, lane])
                    out[ids[v_b * 4 + v_i], v_l] = lhs[v_b * 4 + v_i, v_l]

    sch, loops = schedule()
    prefetch_stores(sch, loops[0], "out")
    assert_schedules(sch, scattered, after)


def test_loop_that_is_not_serial():
    sch, (b, _, _) = schedule()
    sch.unroll(b)
    with refused("prefetch_stores: loop b: expected serial, got unrolled"):
        prefetch_stores(sch, b, "out")


def test_buffer_that_is_not_written_there():
    sch, (b, _, _) = schedule()
    with refused("prefetch_stores: loop b: expected one block below that writes lhs, got none"):
        prefetch_stores(sch, b, "lhs")


def test_block_in_place_of_a_loop():
    sch, _ = schedule()
    with refused("prefetch_stores: loop: expected a loop, got SBlock"):
        prefetch_stores(sch, sch.get_sblock("out"), "out")
