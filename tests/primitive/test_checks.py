"""What the primitives look for in loops and conditions."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import tirx
from tvm.script import tirx as T

from pit_tvm.primitive import checks
from pit_tvm.primitive.dynamic_extent import dynamic_extent
from tests.primitive.replay import fresh, refused


@T.prim_func(s_tir=True)
def copied(
    A: T.Buffer((3, 12), "float32"), count: T.Buffer((3,), "int32"), B: T.Buffer((3, 12), "float32")
):
    for s, t, r, one in T.grid(3, 3, 4, 1):
        with T.sblock("B"):
            v_s, v_p = T.axis.spatial(3, s), T.axis.spatial(12, t * 4 + r)
            v_one = T.axis.spatial(1, one)
            if v_p < count[v_s] and v_one < 1:
                B[v_s, v_p] = T.exp(T.if_then_else(v_p + 1 < 12, A[v_s, v_p], T.float32(0)))


def loops() -> tuple[Any, dict[str, Any]]:
    sch = fresh(copied)
    return sch, checks.loop_names(sch, sch.get_sblock("B"))


def test_loops_have_the_names_of_their_variables_outermost_first():
    assert list(loops()[1]) == ["s", "t", "r", "one"]


@pytest.mark.parametrize(("name", "expected"), [("s", 0), ("t", 1), ("r", 1), ("one", 0)])
def test_guard_bounds_the_loops_of_its_position_that_run_more_than_once(name, expected):
    sch, by_name = loops()
    assert checks.guarded(sch.get(by_name[name])) == bool(expected)


@pytest.mark.parametrize(("name", "iterator"), [("s", "s"), ("t", ""), ("r", ""), ("one", "one")])
def test_iterator_that_one_loop_alone_binds(name, iterator):
    sch, by_name = loops()
    assert checks.bound_iterator(sch.get(by_name[name])) == iterator


def test_guards_are_branches_and_not_choices_in_a_value():
    found = sorted(str(c).replace(" ", "") for c in checks.guards(copied.body))
    assert found == ["v_one<1", "v_p<count[v_s]"]


@T.prim_func(s_tir=True)
def choosing(
    A: T.Buffer((8,), "float32"), count: T.Buffer((1,), "int32"), B: T.Buffer((8,), "float32")
):
    for i in range(8):
        with T.sblock("plain"):
            v = T.axis.spatial(8, i)
            B[v] = T.if_then_else(v < count[0], A[v], T.float32(0))
    for i in range(8):
        with T.sblock("copy"):
            v = T.axis.spatial(8, i)
            T.sblock_attr({"pit.sread": "A"})
            B[v] = T.if_then_else(v < count[0], A[v], T.float32(0))
    for i in range(8):
        with T.sblock("stage"):
            v = T.axis.spatial(8, i)
            T.sblock_attr({"pit.speculative": 1})
            B[v] = T.if_then_else(v < count[0], A[v], T.float32(0))
    for i in range(8):
        with T.sblock("sum"):
            v = T.axis.spatial(8, i)
            T.sblock_attr({"pit.speculative": 1})
            B[v] = B[v] + T.if_then_else(v < count[0], A[v], T.float32(0))
    for i in range(8):
        with T.sblock("branch"):
            v = T.axis.spatial(8, i)
            if v < count[0]:
                B[v] = A[v]
    for i in range(8):
        with T.sblock("alternative"):
            v = T.axis.spatial(8, i)
            if v < count[0]:
                B[v] = A[v]
            else:
                B[v] = T.float32(1)
    for i in range(8):
        with T.sblock("more"):
            v = T.axis.spatial(8, i)
            if v < count[0]:
                B[v] = A[v]
            B[v] = B[v] + T.float32(1)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("plain", False),
        ("copy", True),
        ("stage", True),
        ("sum", False),
        ("branch", True),
        ("alternative", False),
        ("more", False),
    ],
)
def test_loop_is_guarded_only_if_the_block_does_nothing_beyond(block, expected):
    sch = fresh(choosing)
    (loop,) = sch.get_loops(sch.get_sblock(block))
    assert checks.guarded(sch.get(loop)) == expected


def test_depth_of_a_loop_above_a_block():
    sch, by_name = loops()
    block = sch.get_sblock("B")
    depths = [checks.loop_depth(sch, block, loop, "block") for loop in by_name.values()]
    assert depths == [1, 2, 3, 4]


def test_variables_of_an_expression():
    x, y = tirx.Var("x", "int32"), tirx.Var("y", "int32")
    assert checks.uses_any(x * 2 + 1, {x, y})
    assert not checks.uses_any(x * 2 + 1, {y})


def test_what_is_no_part_of_the_schedule():
    sch, by_name = loops()
    block = sch.get_sblock("B")
    _, elsewhere = loops()
    gone = by_name["t"]
    sch.fuse(gone, by_name["r"])
    for loop in (None, "t", elsewhere["t"], gone):
        got = f"expected a loop of this schedule, got {type(loop).__name__}, which is none"
        with refused(f"dynamic_extent: loop: {got} (any more); get it by get_loops"):
            dynamic_extent(sch, loop)
    with refused("sread: block: expected a block of this schedule, got str, which is none"):
        checks.block_of(sch, "B", "sread")
    assert checks.block_of(sch, block, "sread").name_hint == "B"


def test_results_are_complete_after_all_loops_that_they_sum_over():
    @T.prim_func(s_tir=True)
    def summed(A: T.Buffer((3, 4, 1), "float32"), B: T.Buffer((3,), "float32")):
        for i, k, one in T.grid(3, 4, 1):
            with T.sblock("B"):
                v_i, v_k, v_one = T.axis.remap("SRR", [i, k, one])
                with T.init():
                    B[v_i] = T.float32(0)
                B[v_i] = B[v_i] + A[v_i, v_k, v_one]

    sch = fresh(summed)
    found = [checks.reducing_over(sch.get(loop)) for loop in sch.get_loops(sch.get_sblock("B"))]
    assert [[block.name_hint for block in blocks] for blocks in found] == [[], ["B"], []]
