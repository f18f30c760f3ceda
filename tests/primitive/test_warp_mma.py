"""`warp_mma`: a loop is marked for tensor cores."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError
from pit_tvm.primitive.warp_mma import warp_mma
from tests.primitive.replay import assert_schedules, fresh


def product(
    dtypes: tuple[str, str] = ("float16", "float16"),
    sums: tuple[str, str] = ("float32", "local"),
    columns: int = 2,
    depth: int = 16,
    notes: dict[str, Any] | None = None,
    repeat: Any = T.serial,
    place: str = "shared",
) -> Any:
    """Two steps of a warp's product, of ``columns`` matrices of columns."""
    a_dtype, b_dtype = dtypes
    dtype, scope = sums
    kept = notes or {}

    @T.prim_func(s_tir=True)
    def func(
        lhs: T.Buffer((1, 2, 8, 2, depth), a_dtype, scope="shared"),
        rhs: T.Buffer((columns, 4, 2, 2, depth), b_dtype, scope=place),
    ):
        acc = T.sblock_alloc_buffer((1, 2, columns, 2), dtype, scope=scope)
        for lane in range(32):
            for step in repeat(2, annotations=kept):
                for i, h, j, e, k in T.grid(1, 2, columns, 2, depth):
                    with T.sblock("acc"):
                        v_l, v_s, v_i, v_h = T.axis.remap("SRSS", [lane, step, i, h])
                        v_j, v_e, v_k = T.axis.remap("SSR", [j, e, k])
                        acc[v_i, v_h, v_j, v_e] = acc[v_i, v_h, v_j, v_e] + T.cast(
                            lhs[v_i, v_h, v_l // 4, v_s, v_k], dtype
                        ) * T.cast(rhs[v_j, v_l % 4, v_e, v_s, v_k], dtype)

    return func


def loops_of(func: Any) -> tuple[Any, list[Any]]:
    sch = fresh(func)
    return sch, sch.get_loops(sch.get_sblock("acc"))


def refused(text: str) -> Any:
    return pytest.raises(ScheduleError, match=re.escape(f"warp_mma: {text}"))


@pytest.mark.parametrize(("dtype", "depth"), [("float16", 16), ("bfloat16", 16), ("float32", 8)])
def test_loop_is_annotated(dtype: str, depth: int):
    before = product((dtype, dtype), depth=depth)
    sch, loops = loops_of(before)
    warp_mma(sch, loops[1])
    assert_schedules(sch, before, product((dtype, dtype), depth=depth, notes={"pit.warp_mma": 1}))


def test_unrolled_loop():
    sch, loops = loops_of(product(repeat=T.unroll))
    warp_mma(sch, loops[1])
    assert "pit.warp_mma" in sch.get(loops[1]).annotations


def test_loop_that_is_neither_serial_nor_unrolled():
    sch, loops = loops_of(product(repeat=T.parallel))
    with refused("loop step: expected serial or unrolled, got parallel"):
        warp_mma(sch, loops[1])


def test_block_in_place_of_a_loop():
    sch, _ = loops_of(product())
    with refused("loop: expected a loop, got SBlock"):
        warp_mma(sch, sch.get_sblock("acc"))


def test_loop_whose_nest_is_another():
    sch, loops = loops_of(product())
    with refused("loop i: expected (steps, any, 2, even, 2, 16) iterations"):
        warp_mma(sch, loops[2])


@pytest.mark.parametrize(("columns", "depth"), [(3, 16), (2, 8)])
def test_nest_of_other_sizes(columns: int, depth: int):
    sch, loops = loops_of(product(columns=columns, depth=depth))
    with refused("loop step: expected (steps, any, 2, even, 2, 16) iterations"):
        warp_mma(sch, loops[1])


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16"), ("int8", "int8")])
def test_operands_that_no_instruction_takes(dtypes: tuple[str, str]):
    sch, loops = loops_of(product(dtypes))
    with refused("loop step: expected two operands of one type in"):
        warp_mma(sch, loops[1])


@pytest.mark.parametrize("sums", [("float16", "local"), ("float32", "shared")])
def test_sums_elsewhere(sums: tuple[str, str]):
    sch, loops = loops_of(product(sums=sums))
    with refused("loop step: expected a nest around acc += a * b, sums local and float32"):
        warp_mma(sch, loops[1])


def test_operand_that_is_not_in_shared_memory():
    sch, loops = loops_of(product(place="global"))
    with refused("loop step: expected a nest around acc += a * b"):
        warp_mma(sch, loops[1])


def test_block_that_does_something_else():
    @T.prim_func(s_tir=True)
    def other(lhs: T.Buffer((2, 8), "float32", scope="shared")):
        acc = T.sblock_alloc_buffer((8,), "float32", scope="local")
        for step, k in T.grid(2, 8):
            with T.sblock("acc"):
                v_s, v_k = T.axis.remap("RS", [step, k])
                acc[v_k] = acc[v_k] + lhs[v_s, v_k]

    sch, loops = loops_of(other)
    with refused("loop step: expected a nest around acc += a * b"):
        warp_mma(sch, loops[0])
