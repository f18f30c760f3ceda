"""`prefetch_rows`: a loop is marked to request the rows of the next outer iteration."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from pit_tvm.primitive.prefetch_rows import prefetch_rows
from tests.primitive.replay import assert_schedules, fresh, refused


@T.prim_func(s_tir=True)
def gathered(
    rhs: T.Buffer((4, 64, 16), "float32"),
    ids: T.Buffer((8,), "int32"),
    out: T.Buffer((4, 2, 16), "float32"),
):
    for p, b, k, lane in T.grid(4, 2, 8, 16):
        with T.sblock("out"):
            v_p, v_b, v_k, v_l = T.axis.remap("SSRS", [p, b, k, lane])
            with T.init():
                out[v_p, v_b, v_l] = T.float32(0)
            out[v_p, v_b, v_l] = out[v_p, v_b, v_l] + rhs[v_p, ids[v_k], v_l]


def schedule() -> tuple[Any, list[Any]]:
    sch = fresh(gathered)
    return sch, sch.get_loops(sch.get_sblock("out"))


def test_loop_is_annotated_with_the_buffer():
    @T.prim_func(s_tir=True)
    def after(
        rhs: T.Buffer((4, 64, 16), "float32"),
        ids: T.Buffer((8,), "int32"),
        out: T.Buffer((4, 2, 16), "float32"),
    ):
        for p in range(4):
            for b in T.serial(2, annotations={"pit.prefetch_rows": "rhs"}):
                for k, lane in T.grid(8, 16):
                    with T.sblock("out"):
                        v_p, v_b, v_k, v_l = T.axis.remap("SSRS", [p, b, k, lane])
                        with T.init():
                            out[v_p, v_b, v_l] = T.float32(0)
                        out[v_p, v_b, v_l] = out[v_p, v_b, v_l] + rhs[v_p, ids[v_k], v_l]

    sch, loops = schedule()
    prefetch_rows(sch, loops[1], "rhs")
    assert_schedules(sch, gathered, after)


def test_outermost_loop():
    sch, (p, _, _, _) = schedule()
    with refused("prefetch_rows: loop p: expected a loop around it that holds nothing else"):
        prefetch_rows(sch, p, "rhs")


def test_loop_that_is_not_serial():
    sch, (_, b, _, _) = schedule()
    sch.unroll(b)
    with refused("prefetch_rows: loop b: expected to be serial and to hold a serial loop, got"):
        prefetch_rows(sch, b, "rhs")


def test_loop_without_a_loop_in_it():
    sch, (_, _, _, lane) = schedule()
    with refused("prefetch_rows: loop lane: expected to be serial and to hold a serial loop"):
        prefetch_rows(sch, lane, "rhs")


def test_buffer_that_is_not_read_there():
    sch, (_, b, _, _) = schedule()
    with refused("prefetch_rows: loop b: expected a block below that reads lhs"):
        prefetch_rows(sch, b, "lhs")


def test_block_in_place_of_a_loop():
    sch, _ = schedule()
    with refused("prefetch_rows: loop: expected a loop, got SBlock"):
        prefetch_rows(sch, sch.get_sblock("out"), "rhs")
