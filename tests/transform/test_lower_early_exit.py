"""CTAs behind the live positions return before they do anything."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError
from pit_tvm.transform.fold_waits import fold_waits
from pit_tvm.transform.lower_dynamic_extent import lower_dynamic_extent
from pit_tvm.transform.lower_early_exit import lower_early_exit


def check(lowered: Any, after: Any) -> None:
    named = (func.with_attr("global_symbol", "f") for func in (lowered, after))
    tvm.ir.assert_structural_equal(*named)


def test_a_cta_returns_where_its_first_position_is_dead() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((40,), "float32"), count: T.Buffer((1,), "int32")):
        for t in T.thread_binding(
            10, thread="blockIdx.x", annotations={"pit.early_exit": 1, "kept": 7}
        ):
            for r in T.thread_binding(4, thread="threadIdx.x"):
                if t * 4 + r < count[0]:
                    A[t * 4 + r] = T.float32(1)

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((40,), "float32"), count: T.Buffer((1,), "int32")):
        for t in T.thread_binding(10, thread="blockIdx.x", annotations={"kept": 7}):
            if T.max(T.min((count[0] + 3) // 4, 10), 0) <= t:
                T.thread_return()
            for r in T.thread_binding(4, thread="threadIdx.x"):
                if t * 4 + r < count[0]:
                    A[t * 4 + r] = T.float32(1)

    check(lower_early_exit(before), after)


def test_nothing_bounds_the_loop() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((40,), "float32")):
        for t in T.thread_binding(40, thread="blockIdx.x", annotations={"pit.early_exit": 1}):
            A[t] = T.float32(1)

    with pytest.raises(ScheduleError, match="dynamic extent of loop t: expected one bound"):
        lower_early_exit(before)


def test_functions_without_the_annotation_stay() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((40,), "float32")):
        for t in range(40):
            A[t] = T.float32(1)

    assert lower_early_exit(before).same_as(before)


def test_a_loop_whose_threads_divide_its_positions_ends_for_all_of_them_at_once() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((40, 2), "float32"), count: T.Buffer((1,), "int32")):
        for x in T.thread_binding(8, thread="threadIdx.x"):
            for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
                if t * 4 + x // 2 < count[0]:
                    A[t * 4 + x // 2, x % 2] = T.float32(1)

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((40, 2), "float32"), count: T.Buffer((1,), "int32")):
        for x in T.thread_binding(8, thread="threadIdx.x"):
            for t in range(T.max(T.min((count[0] + 3) // 4, 10), 0)):
                if t * 4 + x // 2 < count[0]:
                    A[t * 4 + x // 2, x % 2] = T.float32(1)

    check(lower_dynamic_extent(before), after)


def test_positions_that_fall_from_the_first_thread_on_are_no_bound() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((40, 2), "float32"), count: T.Buffer((1,), "int32")):
        for x in T.thread_binding(8, thread="threadIdx.x"):
            for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
                if t * 4 + (7 - x) // 2 < count[0]:
                    A[t * 4 + (7 - x) // 2, x % 2] = T.float32(1)

    with pytest.raises(ScheduleError, match="dynamic extent of loop t: expected one bound"):
        lower_dynamic_extent(before)


def test_a_pipelined_loop_runs_as_often_as_it_has_stages_before_it() -> None:
    notes = {"software_pipeline_stage": [0, 2], "software_pipeline_order": [0, 1]}

    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((40,), "float32"), count: T.Buffer((1,), "int32")):
        for t in T.serial(
            10,
            annotations={
                "pit.dynamic_extent": 1,
                "software_pipeline_stage": [0, 2],
                "software_pipeline_order": [0, 1],
            },
        ):
            for r in range(4):
                if t * 4 + r < count[0]:
                    A[t * 4 + r] = T.float32(1)

    text = lower_dynamic_extent(before).script()
    assert "T.max(T.max(T.min((count[0] + 3) // 4, 10), 0) - 2, 0)" in text
    assert "T.max(more, 0) + 2" in text and all(name in text for name in notes)


def test_waits_that_ask_whether_a_loop_has_ended_are_constants() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((40,), "float32"), n: T.Buffer((1,), "int32")):
        more: T.let = n[0]
        for t in range(T.max(more, 0)):
            with T.attr(0, "async_wait_inflight_count", T.if_then_else(t < more, 2, 0)):
                A[t] = T.float32(1)

    assert '"async_wait_inflight_count", 2' in fold_waits(before).script().replace(": 2", ", 2")
