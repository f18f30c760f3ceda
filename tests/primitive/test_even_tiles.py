"""`even_tiles`: a loop over tiles is marked to even their heights out."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.script import tirx as T

from pit_tvm.primitive.even_tiles import even_tiles
from tests.primitive.replay import assert_schedules, fresh, refused


@T.prim_func(s_tir=True)
def rows(
    lhs: T.Buffer((32, 4), "float32"),
    count: T.Buffer((1,), "int32"),
    out: T.Buffer((32, 4), "float32"),
):
    for t, r, lane in T.grid(4, 8, 4):
        with T.sblock("out"):
            v_t, v_r, v_l = T.axis.remap("SSS", [t, r, lane])
            if v_t * 8 + v_r < count[0]:
                out[v_t * 8 + v_r, v_l] = lhs[v_t * 8 + v_r, v_l]


def schedule() -> tuple[Any, list[Any]]:
    sch = fresh(rows)
    return sch, sch.get_loops(sch.get_sblock("out"))


def test_loop_is_annotated_with_the_height_and_what_it_must_obey():
    @T.prim_func(s_tir=True)
    def after(
        lhs: T.Buffer((32, 4), "float32"),
        count: T.Buffer((1,), "int32"),
        out: T.Buffer((32, 4), "float32"),
    ):
        for t in T.serial(4, annotations={"pit.even_tiles": [8, 2, 3]}):
            for r, lane in T.grid(8, 4):
                with T.sblock("out"):
                    v_t, v_r, v_l = T.axis.remap("SSS", [t, r, lane])
                    if v_t * 8 + v_r < count[0]:
                        out[v_t * 8 + v_r, v_l] = lhs[v_t * 8 + v_r, v_l]

    sch, loops = schedule()
    even_tiles(sch, loops[0], rows=8, multiple=2, share=3)
    assert_schedules(sch, rows, after)


def test_loop_that_is_not_serial():
    sch, (t, _, _) = schedule()
    sch.parallel(t)
    with refused("even_tiles: loop t: expected serial, got parallel"):
        even_tiles(sch, t, rows=8, multiple=2, share=3)


@pytest.mark.parametrize(
    "sizes", [(8, 3, 1), (8, 0, 1), (0, 1, 1), (8, 2, 0), (8.0, 2, 1), (None, 2, 1)]
)
def test_sizes_that_are_no_heights(sizes):
    sch, (t, _, _) = schedule()
    height, multiple, share = sizes
    with refused("even_tiles: loop t: expected rows >= 1 in whole multiples, and a share >= 1, g"):
        even_tiles(sch, t, rows=height, multiple=multiple, share=share)


def test_loop_without_a_guard():
    sch, (_, _, lane) = schedule()
    with refused("even_tiles: loop lane: expected a block below it with a guard on this loop"):
        even_tiles(sch, lane, rows=8, multiple=2, share=3)


def test_block_in_place_of_a_loop():
    sch, _ = schedule()
    with refused("even_tiles: loop: expected a loop, got SBlock"):
        even_tiles(sch, sch.get_sblock("out"), rows=8, multiple=2, share=3)
