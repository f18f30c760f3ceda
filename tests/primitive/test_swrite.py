"""`swrite`: the indexed store moves to where its tile is complete, epilogue included."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.script import tirx as T

from pit_tvm.primitive.swrite import swrite
from tests.primitive.replay import assert_schedules, fresh, refused


@T.prim_func(s_tir=True)
def scattered(
    A: T.Buffer((3, 4, 8, 5), "float32"),
    bias: T.Buffer((8,), "float32"),
    ids: T.Buffer((12,), "int32"),
    count: T.Buffer((1,), "int32"),
    out: T.Buffer((9, 8), "float32"),
):
    acc = T.sblock_alloc_buffer((3, 4, 8))
    stage = T.sblock_alloc_buffer((3, 4, 8))
    for m_t, m_r, n, k in T.grid(3, 4, 8, 5):
        with T.sblock("acc"):
            t, r, j, c = T.axis.remap("SSSR", [m_t, m_r, n, k])
            T.reads(A[t, r, j, c])
            T.writes(acc[t, r, j])
            with T.init():
                acc[t, r, j] = T.float32(0)
            acc[t, r, j] = acc[t, r, j] + A[t, r, j, c]
    for m_t, m_r, n in T.grid(3, 4, 8):
        with T.sblock("stage"):
            t, r, j = T.axis.remap("SSS", [m_t, m_r, n])
            T.reads(acc[t, r, j], bias[j])
            T.writes(stage[t, r, j])
            stage[t, r, j] = acc[t, r, j] + bias[j]
    for m_t, m_r, n in T.grid(3, 4, 8):
        with T.sblock("out"):
            t, r, j = T.axis.remap("SSS", [m_t, m_r, n])
            T.reads(count[0], acc[t, r, j], stage[t, r, j], ids[t * 4 + r])
            T.writes(out[ids[t * 4 + r], j])
            T.sblock_attr({"pit.swrite": 1})
            if t * 4 + r < count[0]:
                out[ids[t * 4 + r], j] = acc[t, r, j] * stage[t, r, j]


def parts(func: Any) -> tuple[Any, Any, list[Any]]:
    sch = fresh(func)
    return sch, sch.get_sblock("out"), sch.get_loops(sch.get_sblock("acc"))


def test_store_takes_the_stages_along_and_its_inner_loop_in_vectors():
    @T.prim_func(s_tir=True)
    def after(
        A: T.Buffer((3, 4, 8, 5), "float32"),
        bias: T.Buffer((8,), "float32"),
        ids: T.Buffer((12,), "int32"),
        count: T.Buffer((1,), "int32"),
        out: T.Buffer((9, 8), "float32"),
    ):
        acc = T.sblock_alloc_buffer((3, 4, 8))
        for m_t in range(3):
            for m_r, n, k in T.grid(4, 8, 5):
                with T.sblock("acc"):
                    t, r, j, c = T.axis.remap("SSSR", [m_t, m_r, n, k])
                    T.reads(A[t, r, j, c])
                    T.writes(acc[t, r, j])
                    with T.init():
                        acc[t, r, j] = T.float32(0)
                    acc[t, r, j] = acc[t, r, j] + A[t, r, j, c]
            for m_r in T.serial(4, annotations={"pit.dynamic_extent": 1}):
                for n_0 in range(2):
                    for n_1 in T.vectorized(4):
                        with T.sblock("out"):
                            t, r = T.axis.remap("SS", [m_t, m_r])
                            j = T.axis.spatial(8, n_0 * 4 + n_1)
                            T.reads(ids[t * 4 + r], count[0], acc[t, r, j], bias[j])
                            T.writes(out[ids[t * 4 + r], j])
                            T.sblock_attr({"pit.swrite": 1})
                            if t * 4 + r < count[0]:
                                out[ids[t * 4 + r], j] = acc[t, r, j] * (acc[t, r, j] + bias[j])

    sch, store, loops = parts(scattered)
    inner = swrite(sch, store, loops[0], vector=4)
    assert [int(sch.get(loop).extent) for loop in inner] == [4, 2, 4]
    assert_schedules(sch, scattered, after)


@pytest.mark.parametrize("vector", [0, 3, 16])
def test_loop_that_is_not_made_of_whole_vectors_stays_serial(vector):
    sch, store, loops = parts(scattered)
    inner = swrite(sch, store, loops[0], vector=vector)
    assert [int(sch.get(loop).extent) for loop in inner] == [4, 8]
    assert "T.vectorized" not in sch.mod.script()


def test_loop_that_a_guard_bounds_is_dynamic_and_no_vector():
    @T.prim_func(s_tir=True)
    def func(
        A: T.Buffer((8, 4), "float32"),
        count: T.Buffer((1,), "int32"),
        out: T.Buffer((8,), "float32"),
    ):
        acc = T.sblock_alloc_buffer((8,))
        for m, k in T.grid(8, 4):
            with T.sblock("acc"):
                i, c = T.axis.remap("SR", [m, k])
                with T.init():
                    acc[i] = T.float32(0)
                acc[i] = acc[i] + A[i, c]
        for m in range(8):
            with T.sblock("out"):
                i = T.axis.spatial(8, m)
                T.sblock_attr({"pit.swrite": 1})
                if i < count[0]:
                    out[i] = acc[i]

    sch, store, loops = parts(func)
    outer, _ = sch.split(loops[0], [None, 4])
    inner = swrite(sch, store, outer, vector=4)
    assert [dict(sch.get(loop).annotations) for loop in inner] == [{"pit.dynamic_extent": 1}]
    assert "T.vectorized" not in sch.mod.script()


def test_store_at_the_innermost_spatial_loop_has_no_loops_of_its_own():
    sch, store, loops = parts(scattered)
    assert swrite(sch, store, loops[2], vector=4) == []
    above = [sch.get(loop).loop_var.name for loop in sch.get_loops(store)]
    assert above == ["m_t", "m_r", "n"]


def test_blocks_that_do_not_depend_on_the_sums_are_inlined_too():
    @T.prim_func(s_tir=True)
    def func(
        A: T.Buffer((8, 4), "float32"), w: T.Buffer((8,), "float32"), out: T.Buffer((8,), "float32")
    ):
        acc = T.sblock_alloc_buffer((8,))
        scale = T.sblock_alloc_buffer((8,))
        for m, k in T.grid(8, 4):
            with T.sblock("acc"):
                i, c = T.axis.remap("SR", [m, k])
                with T.init():
                    acc[i] = T.float32(0)
                acc[i] = acc[i] + A[i, c]
        for m in range(8):
            with T.sblock("scale"):
                i = T.axis.spatial(8, m)
                scale[i] = w[i] * T.float32(2)
        for m in range(8):
            with T.sblock("out"):
                i = T.axis.spatial(8, m)
                T.sblock_attr({"pit.swrite": 1})
                out[i] = acc[i] * scale[i]

    @T.prim_func(s_tir=True)
    def after(
        A: T.Buffer((8, 4), "float32"), w: T.Buffer((8,), "float32"), out: T.Buffer((8,), "float32")
    ):
        acc = T.sblock_alloc_buffer((8,))
        for m in range(8):
            for k in range(4):
                with T.sblock("acc"):
                    i, c = T.axis.remap("SR", [m, k])
                    with T.init():
                        acc[i] = T.float32(0)
                    acc[i] = acc[i] + A[i, c]
            with T.sblock("out"):
                i = T.axis.spatial(8, m)
                T.sblock_attr({"pit.swrite": 1})
                out[i] = acc[i] * (w[i] * T.float32(2))

    sch, store, loops = parts(func)
    swrite(sch, store, loops[0])
    assert_schedules(sch, func, after)


def test_loop_that_the_producer_sums_over():
    sch, store, (m_t, _, _, k) = parts(scattered)
    text = "swrite: producer of out: expected to be complete at the loop, got loop k, over which"
    with refused(text):
        swrite(sch, store, k)
    sch.reorder(k, m_t)
    with refused(text):
        swrite(sch, store, m_t)


@pytest.mark.parametrize("vector", [-1, 4.0, "4", None])
def test_vector_of_no_width(vector):
    sch, store, loops = parts(scattered)
    with refused(f"swrite: vector: expected an integer >= 0, got {vector!r}"):
        swrite(sch, store, loops[0], vector=vector)


def test_store_that_was_moved_already():
    sch, store, loops = parts(scattered)
    swrite(sch, store, loops[0])
    with refused("swrite: block out: expected a block that can be computed at loop m_t, got "):
        swrite(sch, store, loops[0])


def test_block_that_is_no_indexed_store():
    sch, _, loops = parts(scattered)
    text = "swrite: block stage: expected annotation pit.swrite, got none; call it on a function"
    with refused(text):
        swrite(sch, sch.get_sblock("stage"), loops[0])


def test_loop_in_place_of_the_block():
    sch, _, loops = parts(scattered)
    with refused("swrite: block: expected a block, got For"):
        swrite(sch, loops[0], loops[0])


def test_block_in_place_of_the_loop():
    sch, store, _ = parts(scattered)
    with refused("swrite: loop: expected a loop, got SBlock"):
        swrite(sch, store, store)


def test_loop_that_is_above_nothing_the_store_depends_on():
    sch, store, _ = parts(scattered)
    before = sch.mod.script()
    text = "swrite: producer of out: expected one block below loop m_t, got none"
    with refused(text):
        swrite(sch, store, sch.get_loops(store)[0])
    assert sch.mod.script() == before


def test_store_that_depends_on_two_blocks_below_the_loop():
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((8,), "float32"), out: T.Buffer((8,), "float32")):
        acc = T.sblock_alloc_buffer((8,))
        other = T.sblock_alloc_buffer((8,))
        for m in range(8):
            with T.sblock("acc"):
                i = T.axis.spatial(8, m)
                acc[i] = A[i]
            with T.sblock("other"):
                i = T.axis.spatial(8, m)
                other[i] = A[i]
        for m in range(8):
            with T.sblock("out"):
                i = T.axis.spatial(8, m)
                T.sblock_attr({"pit.swrite": 1})
                out[i] = acc[i] + other[i]

    sch, store, loops = parts(func)
    text = "swrite: producer of out: expected one block below loop m, got ['acc', 'other']"
    with refused(text):
        swrite(sch, store, loops[0])
