"""Loops that end with the live positions, and guards that go or stay."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError
from pit_tvm.transform.lower_dynamic_extent import lower_dynamic_extent


def check(before: Any, after: Any) -> None:
    lowered = lower_dynamic_extent(before).with_attr("global_symbol", "f")
    tvm.ir.assert_structural_equal(lowered, after.with_attr("global_symbol", "f"))


def test_outer_loop_ends_with_the_last_tile_and_keeps_the_guard_inside_it():
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((40,), "float32"), count: T.Buffer((1,), "int32")):
        for t in T.serial(10, annotations={"pit.dynamic_extent": 1, "kept": 7}):
            for r in range(4):
                if t * 4 + r < count[0]:
                    A[t * 4 + r] = T.float32(1)

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((40,), "float32"), count: T.Buffer((1,), "int32")):
        for t in T.serial(T.max(T.min((count[0] + 3) // 4, 10), 0), annotations={"kept": 7}):
            for r in range(4):
                if t * 4 + r < count[0]:
                    A[t * 4 + r] = T.float32(1)

    check(before, after)


def test_guard_goes_where_its_innermost_loop_implies_it():
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((40, 5), "float32"), count: T.Buffer((1,), "int32")):
        for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
            for r in T.serial(4, annotations={"pit.dynamic_extent": 1}):
                for j in range(8):
                    if t * 4 + r < count[0] and j < 5:
                        A[t * 4 + r, j] = T.float32(1)

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((40, 5), "float32"), count: T.Buffer((1,), "int32")):
        for t in range(T.max(T.min((count[0] + 3) // 4, 10), 0)):
            for r in range(T.max(T.min(count[0] - t * 4, 4), 0)):
                for j in range(8):
                    if j < 5:
                        A[t * 4 + r, j] = T.float32(1)

    check(before, after)


def test_choice_that_a_gathered_copy_stores_is_a_guard():
    @T.prim_func(s_tir=True)
    def before(
        A: T.Buffer((10, 5), "float32"), B: T.Buffer((10, 8), "float32"), n: T.Buffer((1,), "int32")
    ):
        for r in T.serial(10, annotations={"pit.dynamic_extent": 1}):
            for j in range(8):
                with T.sblock("A_sread"):
                    T.reads(n[0], A[r, j])
                    T.writes(B[r, j])
                    T.sblock_attr({"pit.sread": "A"})
                    B[r, j] = T.if_then_else(r < n[0] and j < 5, A[r, j], T.float32(0))

    @T.prim_func(s_tir=True)
    def after(
        A: T.Buffer((10, 5), "float32"), B: T.Buffer((10, 8), "float32"), n: T.Buffer((1,), "int32")
    ):
        for r in range(T.max(T.min(n[0], 10), 0)):
            for j in range(8):
                with T.sblock("A_sread"):
                    T.reads(n[0], A[r, j])
                    T.writes(B[r, j])
                    T.sblock_attr({"pit.sread": "A"})
                    B[r, j] = T.if_then_else(j < 5, A[r, j], T.float32(0))

    check(before, after)


def test_choice_in_a_value_goes_only_with_the_bound_of_its_loop():
    @T.prim_func(s_tir=True)
    def before(
        A: T.Buffer((10,), "float32"), B: T.Buffer((10,), "float32"), n: T.Buffer((1,), "int32")
    ):
        for r in T.serial(10, annotations={"pit.dynamic_extent": 1}):
            if r < n[0]:
                B[r] = T.exp(T.if_then_else(r < n[0], A[r], T.float32(0)))
                B[r] = B[r] + T.if_then_else(r < 3, A[r], T.float32(7))

    @T.prim_func(s_tir=True)
    def after(
        A: T.Buffer((10,), "float32"), B: T.Buffer((10,), "float32"), n: T.Buffer((1,), "int32")
    ):
        for r in range(T.max(T.min(n[0], 10), 0)):
            B[r] = T.exp(A[r])
            B[r] = B[r] + T.if_then_else(r < 3, A[r], T.float32(7))

    check(before, after)


def test_outer_guard_of_a_speculative_block_goes_and_its_inner_one_stays():
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((40,), "float32"), count: T.Buffer((1,), "int32")):
        for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
            for r, k in T.grid(4, 8):
                with T.sblock("main"):
                    T.reads(count[0])
                    T.writes(A[t * 4 + r])
                    T.sblock_attr({"pit.speculative": 1, "kept": 7})
                    if t * 4 + r < count[0]:
                        if k < 7:
                            A[t * 4 + r] = A[t * 4 + r] + T.float32(1)
        for t in range(10):
            with T.sblock("other"):
                T.reads(count[0])
                T.writes(A[t])
                if t < count[0]:
                    A[t] = T.float32(0)

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((40,), "float32"), count: T.Buffer((1,), "int32")):
        for t in range(T.max(T.min((count[0] + 3) // 4, 10), 0)):
            for r, k in T.grid(4, 8):
                with T.sblock("main"):
                    T.reads(count[0])
                    T.writes(A[t * 4 + r])
                    T.sblock_attr({"kept": 7})
                    if k < 7:
                        A[t * 4 + r] = A[t * 4 + r] + T.float32(1)
        for t in range(10):
            with T.sblock("other"):
                T.reads(count[0])
                T.writes(A[t])
                if t < count[0]:
                    A[t] = T.float32(0)

    check(before, after)


def test_variable_of_a_loop_that_runs_once_is_zero_and_keeps_no_guard():
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((10,), "float32"), count: T.Buffer((1,), "int32")):
        for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
            for r in range(1):
                if t + r < count[0]:
                    A[t + r] = T.float32(1)

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((10,), "float32"), count: T.Buffer((1,), "int32")):
        for t in range(T.max(T.min(count[0], 10), 0)):
            for _ in range(1):
                A[T.Add(t, 0)] = T.float32(1)

    check(before, after)


def test_guard_whose_limit_changes_inside_the_loop_stays():
    @T.prim_func(s_tir=True)
    def before(
        A: T.Buffer((10, 3), "float32"), n: T.Buffer((1,), "int32"), each: T.Buffer((3,), "int32")
    ):
        for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
            for s in range(3):
                if t < n[0]:
                    if t < each[s]:
                        A[t, s] = T.float32(1)

    @T.prim_func(s_tir=True)
    def after(
        A: T.Buffer((10, 3), "float32"), n: T.Buffer((1,), "int32"), each: T.Buffer((3,), "int32")
    ):
        for t in range(T.max(T.min(n[0], 10), 0)):
            for s in range(3):
                if t < each[s]:
                    A[t, s] = T.float32(1)

    check(before, after)


def test_limit_that_an_outer_loop_decides_is_a_bound():
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((3, 10), "float32"), each: T.Buffer((3,), "int32")):
        for s in range(3):
            for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
                if t < each[s]:
                    A[s, t] = T.float32(1)

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((3, 10), "float32"), each: T.Buffer((3,), "int32")):
        for s in range(3):
            for t in range(T.max(T.min(each[s], 10), 0)):
                A[s, t] = T.float32(1)

    check(before, after)


@T.prim_func(s_tir=True)
def no_guard(A: T.Buffer((10,), "float32"), count: T.Buffer((1,), "int32")):
    for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
        A[t] = T.float32(count[0])


@T.prim_func(s_tir=True)
def not_linear(A: T.Buffer((100,), "float32"), count: T.Buffer((1,), "int32")):
    for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
        if t * t < count[0]:
            A[t * t] = T.float32(1)


@T.prim_func(s_tir=True)
def falling(A: T.Buffer((10,), "float32"), count: T.Buffer((1,), "int32")):
    for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
        if 9 - t < count[0]:
            A[t] = T.float32(1)


@T.prim_func(s_tir=True)
def limit_inside(A: T.Buffer((10, 3), "float32"), each: T.Buffer((3,), "int32")):
    for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
        for s in range(3):
            if t < each[s]:
                A[t, s] = T.float32(1)


@T.prim_func(s_tir=True)
def alternative(A: T.Buffer((10,), "float32"), count: T.Buffer((1,), "int32")):
    for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
        if t < count[0]:
            A[t] = T.float32(1)
        else:
            A[t] = T.float32(2)


@T.prim_func(s_tir=True)
def choice_of_a_value(A: T.Buffer((10,), "float32"), count: T.Buffer((1,), "int32")):
    for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
        A[t] = T.if_then_else(t < count[0], T.float32(1), T.float32(2))


UNBOUNDED = [no_guard, not_linear, falling, limit_inside, alternative, choice_of_a_value]


@pytest.mark.parametrize("func", UNBOUNDED)
def test_loop_without_a_bound(func):
    text = "dynamic extent of loop t: expected one bound from the guards below it, got none"
    with pytest.raises(ScheduleError, match=text):
        lower_dynamic_extent(func)


def test_loop_with_two_bounds():
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((10,), "float32"), n: T.Buffer((2,), "int32")):
        for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
            if t < n[0]:
                A[t] = T.float32(1)
            if t < n[1]:
                A[t] = T.float32(2)

    text = re.escape("got ['T.max(T.min(n[0], 10), 0)', 'T.max(T.min(n[1], 10), 0)']")
    with pytest.raises(ScheduleError, match=text):
        lower_dynamic_extent(func)
