"""`sread`: the gathered copy of an operand moves to where it is consumed."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.script import tirx as T

from pit_tvm.primitive.sread import sread
from tests.primitive.replay import assert_schedules, fresh, refused


@T.prim_func(s_tir=True)
def gathered(
    A: T.Buffer((8, 5), "float32"),
    ids: T.Buffer((12,), "int32"),
    count: T.Buffer((1,), "int32"),
    B: T.Buffer((12, 5), "float32"),
):
    panel = T.sblock_alloc_buffer((3, 4, 5))
    for m_t, m_r, k in T.grid(3, 4, 5):
        with T.sblock("A_sread"):
            v_m_t, v_m_r, v_k = T.axis.remap("SSS", [m_t, m_r, k])
            T.reads(count[0], A[ids[v_m_t * 4 + v_m_r], v_k], ids[v_m_t * 4 + v_m_r])
            T.writes(panel[v_m_t, v_m_r, v_k])
            T.sblock_attr({"pit.sread": "A"})
            panel[v_m_t, v_m_r, v_k] = T.if_then_else(
                v_m_t * 4 + v_m_r < count[0], A[ids[v_m_t * 4 + v_m_r], v_k], T.float32(0)
            )
    for m_t, m_r, k in T.grid(3, 4, 5):
        with T.sblock("B"):
            v_m_t, v_m_r, v_k = T.axis.remap("SSS", [m_t, m_r, k])
            T.reads(panel[v_m_t, v_m_r, v_k])
            T.writes(B[v_m_t * 4 + v_m_r, v_k])
            B[v_m_t * 4 + v_m_r, v_k] = panel[v_m_t, v_m_r, v_k] * T.float32(2)


def parts(func: Any) -> tuple[Any, Any, list[Any]]:
    sch = fresh(func)
    return sch, sch.get_sblock("A_sread"), sch.get_loops(sch.get_sblock("B"))


def test_copy_moves_to_the_loop_and_ends_with_the_live_positions():
    @T.prim_func(s_tir=True)
    def after(
        A: T.Buffer((8, 5), "float32"),
        ids: T.Buffer((12,), "int32"),
        count: T.Buffer((1,), "int32"),
        B: T.Buffer((12, 5), "float32"),
    ):
        panel = T.sblock_alloc_buffer((3, 4, 5))
        for m_t in range(3):
            for m_r in T.serial(4, annotations={"pit.dynamic_extent": 1}):
                for k in range(5):
                    with T.sblock("A_sread"):
                        v_m_t, v_m_r, v_k = T.axis.remap("SSS", [m_t, m_r, k])
                        T.reads(count[0], A[ids[v_m_t * 4 + v_m_r], v_k], ids[v_m_t * 4 + v_m_r])
                        T.writes(panel[v_m_t, v_m_r, v_k])
                        T.sblock_attr({"pit.sread": "A"})
                        panel[v_m_t, v_m_r, v_k] = T.if_then_else(
                            v_m_t * 4 + v_m_r < count[0],
                            A[ids[v_m_t * 4 + v_m_r], v_k],
                            T.float32(0),
                        )
            for m_r, k in T.grid(4, 5):
                with T.sblock("B"):
                    v_m_t, v_m_r, v_k = T.axis.remap("SSS", [m_t, m_r, k])
                    T.reads(panel[v_m_t, v_m_r, v_k])
                    T.writes(B[v_m_t * 4 + v_m_r, v_k])
                    B[v_m_t * 4 + v_m_r, v_k] = panel[v_m_t, v_m_r, v_k] * T.float32(2)

    sch, copy, loops = parts(gathered)
    inner = sread(sch, copy, loops[0])
    assert [int(sch.get(loop).extent) for loop in inner] == [4, 5]
    assert_schedules(sch, gathered, after)


def test_copy_that_is_not_dynamic_fills_the_panel_with_zeros():
    sch, copy, loops = parts(gathered)
    inner = sread(sch, copy, loops[0], dynamic=False)
    assert [dict(sch.get(loop).annotations) for loop in inner] == [{}, {}]


def test_padded_copy_fills_whole_blocks_of_an_iterator():
    @T.prim_func(s_tir=True)
    def after(
        A: T.Buffer((8, 5), "float32"),
        ids: T.Buffer((12,), "int32"),
        count: T.Buffer((1,), "int32"),
        B: T.Buffer((12, 5), "float32"),
    ):
        panel = T.sblock_alloc_buffer((3, 4, 5))
        for m_t in range(3):
            for m_r_0 in T.serial(2, annotations={"pit.dynamic_extent": 1}):
                for m_r_1, k in T.grid(2, 5):
                    with T.sblock("A_sread"):
                        v_m_t = T.axis.spatial(3, m_t)
                        v_m_r = T.axis.spatial(4, m_r_0 * 2 + m_r_1)
                        v_k = T.axis.spatial(5, k)
                        T.reads(count[0], A[ids[v_m_t * 4 + v_m_r], v_k], ids[v_m_t * 4 + v_m_r])
                        T.writes(panel[v_m_t, v_m_r, v_k])
                        T.sblock_attr({"pit.sread": "A"})
                        panel[v_m_t, v_m_r, v_k] = T.if_then_else(
                            v_m_t * 4 + v_m_r < count[0],
                            A[ids[v_m_t * 4 + v_m_r], v_k],
                            T.float32(0),
                        )
            for m_r, k in T.grid(4, 5):
                with T.sblock("B"):
                    v_m_t, v_m_r, v_k = T.axis.remap("SSS", [m_t, m_r, k])
                    T.reads(panel[v_m_t, v_m_r, v_k])
                    T.writes(B[v_m_t * 4 + v_m_r, v_k])
                    B[v_m_t * 4 + v_m_r, v_k] = panel[v_m_t, v_m_r, v_k] * T.float32(2)

    sch, copy, loops = parts(gathered)
    inner = sread(sch, copy, loops[0], pad=("m_r", 2))
    assert [int(sch.get(loop).extent) for loop in inner] == [2, 2, 5]
    assert_schedules(sch, gathered, after)


def test_padding_of_an_iterator_that_no_guard_bounds_changes_nothing():
    plain, padded = fresh(gathered), fresh(gathered)
    for sch, pad in ((plain, None), (padded, ("k", 2))):
        loop = sch.get_loops(sch.get_sblock("B"))[0]
        sread(sch, sch.get_sblock("A_sread"), loop, pad=pad)
    assert plain.mod.script() == padded.mod.script()


@pytest.mark.parametrize(
    "pad",
    [*(("m_r", n) for n in (0, -2, 2.5, "2")), ("q", 2), ("v_m_r", 2), ("", 2), ("m_r",), "m_", 3],
)
def test_padding_to_no_multiple_or_of_no_iterator(pad):
    sch, copy, loops = parts(gathered)
    before = sch.mod.script()
    words = "sread: pad: expected an iterator of ['m_t', 'm_r', 'k'] and a multiple >= 1, got "
    with refused(f"{words}{pad}"):
        sread(sch, copy, loops[0], pad=pad)
    assert sch.mod.script() == before


def test_copy_that_was_moved_already():
    sch, copy, loops = parts(gathered)
    sread(sch, copy, loops[0])
    with refused("sread: block A_sread: expected a block that can be computed at loop m_t, got "):
        sread(sch, copy, loops[0])


def test_block_that_is_no_gathered_copy():
    sch, _, loops = parts(gathered)
    text = "sread: block B: expected annotation pit.sread, got none; call it on a function from"
    with refused(text):
        sread(sch, sch.get_sblock("B"), loops[0])


def test_loop_in_place_of_the_block():
    sch, _, loops = parts(gathered)
    with refused("sread: block: expected a block, got For"):
        sread(sch, loops[0], loops[0])


def test_block_in_place_of_the_loop():
    sch, copy, _ = parts(gathered)
    with refused("sread: loop: expected a loop, got SBlock"):
        sread(sch, copy, copy)


def test_loop_that_is_not_above_the_consumer():
    sch, copy, _ = parts(gathered)
    text = "sread: consumer of A_sread: expected a loop above it, got loop m_t, which is not"
    with refused(text):
        sread(sch, copy, sch.get_loops(copy)[0])


def test_copy_that_two_blocks_consume():
    @T.prim_func(s_tir=True)
    def func(
        A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32"), C: T.Buffer((8,), "float32")
    ):
        panel = T.sblock_alloc_buffer((8,))
        for i in range(8):
            with T.sblock("A_sread"):
                v = T.axis.spatial(8, i)
                T.sblock_attr({"pit.sread": "A"})
                panel[v] = A[v]
        for i in range(8):
            with T.sblock("B"):
                v = T.axis.spatial(8, i)
                B[v] = panel[v]
        for i in range(8):
            with T.sblock("C"):
                v = T.axis.spatial(8, i)
                C[v] = panel[v]

    sch, copy, loops = parts(func)
    with refused("sread: consumers of A_sread: expected 1, got 2"):
        sread(sch, copy, loops[0])
