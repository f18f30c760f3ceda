"""Nests of tile loops that become one parallel loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError
from pit_tvm.transform.lower_parallel_tiles import lower_parallel_tiles
from tests.schedules import sparse


def check(before: Any, after: Any) -> None:
    lowered = lower_parallel_tiles(before).with_attr("global_symbol", "f")
    tvm.ir.assert_structural_equal(lowered, after.with_attr("global_symbol", "f"))


def test_nest_with_a_dynamic_extent_is_divided_by_what_the_extent_is_at_run_time():
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((4, 10), "float32"), count: T.Buffer((1,), "int32")):
        for p in T.serial(4, annotations={"pit.parallel_tiles": 2}):
            for t in range(T.min(count[0], 10)):
                A[p, t] = T.float32(1)

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((4, 10), "float32"), count: T.Buffer((1,), "int32")):
        for f in T.parallel(T.min(count[0], 10) * 4):
            A[f // T.max(T.min(count[0], 10), 1), f % T.max(T.min(count[0], 10), 1)] = T.float32(1)

    check(before, after)


def test_loops_of_one_iteration_vanish():
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((10,), "float32"), count: T.Buffer((1,), "int32")):
        for p in T.serial(1, annotations={"pit.parallel_tiles": 3}):
            for t in range(count[0]):
                for q in range(1):
                    A[p + t + q] = T.float32(1)

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((10,), "float32"), count: T.Buffer((1,), "int32")):
        for f in T.parallel(count[0]):
            A[T.Add(T.Add(0, f), 0)] = T.float32(1)

    check(before, after)


def test_nest_of_three_counts_from_the_inside():
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((2, 3, 5), "float32")):
        for x in T.serial(2, annotations={"pit.parallel_tiles": 3}):
            for y in range(3):
                for z in range(5):
                    A[x, y, z] = T.float32(1)

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((2, 3, 5), "float32")):
        for f in T.parallel(30):
            A[f // 5 // 3, f // 5 % 3, f % 5] = T.float32(1)

    check(before, after)


def test_single_loop_and_what_is_below_the_nest():
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((4, 3), "float32")):
        for x in T.serial(4, annotations={"pit.parallel_tiles": 1}):
            for y in T.vectorized(3):
                A[x, y] = T.float32(1)
        for x in range(4):
            A[x, 0] = T.float32(2)

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((4, 3), "float32")):
        for f in T.parallel(4):
            for y in T.vectorized(3):
                A[f, y] = T.float32(1)
        for x in range(4):
            A[x, 0] = T.float32(2)

    check(before, after)


def test_nest_in_which_nothing_repeats_is_a_loop_of_one_iteration():
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((1, 1), "float32")):
        for x in T.serial(1, annotations={"pit.parallel_tiles": 2}):
            for y in range(1):
                A[x, y] = T.float32(1)

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((1, 1), "float32")):
        for _ in T.parallel(1):
            A[0, 0] = T.float32(1)

    check(before, after)


@pytest.mark.parametrize("steps", [0, 1, 5, 85, 86, 127, 128, 2000])
def test_runs_do_every_step_of_a_nest_once(steps: int):
    @T.prim_func(s_tir=True)
    def count(a: T.handle):
        n = T.int32()
        A = T.match_buffer(a, (3, n), "int32")
        for p in T.serial(3, annotations={"pit.parallel_tiles": 2, "pit.parallel_runs": True}):
            for t in range(n):
                A[p, t] = A[p, t] + 1

    lowered = lower_parallel_tiles(count)
    run, inner = lowered.body, lowered.body.body
    assert run.kind == tirx.ForKind.PARALLEL and int(run.extent) == 256
    assert inner.kind == tirx.ForKind.SERIAL and isinstance(inner.body, tirx.BufferStore)
    done = np.zeros((3, steps), np.int32)
    sparse.build(tvm.IRModule({"main": lowered.with_attr("global_symbol", "main")}))(done)
    assert (done == 1).all()


def test_nest_with_something_between_its_loops():
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, 3), "float32")):
        for x in T.serial(4, annotations={"pit.parallel_tiles": 2}):
            A[x, 0] = T.float32(0)
            for y in range(3):
                A[x, y] = T.float32(1)

    with pytest.raises(ScheduleError, match="nest at loop x: expected 2 loops, got 1"):
        lower_parallel_tiles(func)


def test_extent_that_depends_on_another_loop_of_the_nest():
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, 9), "float32"), count: T.Buffer((4,), "int32")):
        for x in T.serial(4, annotations={"pit.parallel_tiles": 2}):
            for y in range(count[x]):
                A[x, y] = T.float32(1)

    text = r"extent of loop y: expected none of the nest's loops in it, got count\[x\]"
    with pytest.raises(ScheduleError, match=text):
        lower_parallel_tiles(func)
