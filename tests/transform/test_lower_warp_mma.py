"""Lowering of `pit.warp_mma`: fragments, instructions, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError
from pit_tvm.transform.lower_warp_mma import lower_warp_mma

Index = Callable[[Any], Any]


def deep(*, row: Index = lambda lane: lane // 4, column: Index = lambda lane: lane % 4) -> Any:
    """Two steps of 16 x 16, the reduction contiguous in both panels, beside a pipeline's copies."""

    @T.prim_func(s_tir=True)
    def func(out: T.Buffer((1,), "float32")):
        for lane in T.thread_binding(32, thread="threadIdx.x"):
            for _ in T.serial(4, annotations={"software_pipeline_async_stages": [0]}):
                with T.sblock(""):
                    T.reads()
                    T.writes()
                    acc = T.sblock_alloc_buffer((1, 2, 2, 2), "float32", scope="local")
                    lhs = T.sblock_alloc_buffer((1, 2, 8, 2, 16), "float16", scope="shared.dyn")
                    rhs = T.sblock_alloc_buffer((2, 4, 2, 2, 16), "float16", scope="shared.dyn")
                    for step in T.unroll(2, annotations={"pit.warp_mma": 1}):
                        for i, h, j, e, k in T.grid(1, 2, 2, 2, 16):
                            acc[i, h, j, e] = acc[i, h, j, e] + T.cast(
                                lhs[i, h, row(lane), step, k], "float32"
                            ) * T.cast(rhs[j, column(lane), e, step, k], "float32")

    return func


def flat(dtype: str, depth: int, gap: int = 1, sums: Any = lambda h, e, k, lane: (h, e)) -> Any:
    """One step of 16 x 16 without a pipeline, rows and columns contiguous in their panels but for
    a ``gap``."""

    @T.prim_func(s_tir=True)
    def func(out: T.Buffer((1,), "float32")):
        for lane in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock(""):
                T.reads()
                T.writes()
                acc = T.sblock_alloc_buffer((1, 2, 2, 32), "float32", scope="local")
                lhs = T.sblock_alloc_buffer((1, depth, 2, 8 * gap), dtype, scope="shared.dyn")
                rhs = T.sblock_alloc_buffer((1, depth, 2, 4, 2), dtype, scope="shared.dyn")
                for step in T.serial(1, annotations={"pit.warp_mma": 1}):
                    for i, h, j, e, k in T.grid(1, 2, 2, 2, depth):
                        acc[i, sums(h, e, k, lane)[0], sums(h, e, k, lane)[1], j] = acc[
                            i, sums(h, e, k, lane)[0], sums(h, e, k, lane)[1], j
                        ] + T.cast(rhs[step, k, j, lane % 4, e], "float32") * T.cast(
                            lhs[step, k, h, lane // 4 * gap], "float32"
                        )

    return func


def text(func: Any) -> str:
    return str(lower_warp_mma(func).script())


def refused(expected: str) -> Any:
    return pytest.raises(ScheduleError, match=re.escape(f"loop step: expected {expected}"))


def test_fragments_of_a_step_are_loaded_before_the_last_one_is_multiplied():
    script = text(deep())
    calls = re.findall(r"T\.ptx\.(\w+)|warp_mma_step\", (\d)", script)
    assert [a or b for a, b in calls] == [*["ldmatrix"] * 4, "0", "mma", "1", "mma"]
    assert script.count('"m8n8", "x4", "",') == 4
    assert script.count('"m16n8k16", "row", "col", "f32", "f16", "f16", "f32"') == 2
    assert 'pit.warp_mma"' not in script


def test_contiguous_rows_are_transposed_on_the_way_whichever_factor_comes_first():
    script = text(flat("bfloat16", 16))
    assert script.count('"m8n8", "x4", "trans"') == 2
    assert script.count('"f32", "bf16", "bf16", "f32"') == 1


def test_single_floats_that_are_not_transposed_are_loaded_one_by_one():
    script = text(flat("float32", 8))
    assert "ldmatrix" not in script
    assert script.count("T.ptx.ld(") == 6
    assert '"m16n8k8", "row", "col", "f32", "tf32", "tf32", "f32"' in script


def test_floats_are_rounded_once_each_before_they_are_multiplied():
    script = text(flat("float32", 8))
    assert script.count("T.ptx.cvt(") == script.count("T.ptx.ld(") == 6
    assert script.rindex("T.ptx.cvt(") < script.index("T.ptx.mma(")
    assert "T.ptx.cvt(" not in text(flat("float16", 16))


def test_reads_are_hidden_from_barriers_in_a_pipeline_only():
    masks = [
        set(re.findall(r", (\d)\)\), \"sync\"", text(f))) for f in (deep(), flat("float16", 16))
    ]
    assert masks == [{"0"}, {"1"}]


@pytest.mark.parametrize(
    "index", [{"row": lambda lane: lane % 8}, {"column": lambda lane: lane // 8}]
)
def test_rows_and_columns_in_other_lanes(index: dict[str, Index]):
    with refused("rows by lane // 4 and columns by lane % 4"):
        lower_warp_mma(deep(**index))


@pytest.mark.parametrize(
    "sums",
    [lambda h, e, k, lane: (h, 0), lambda h, e, k, lane: (h + e, 0)],
)
def test_sums_that_fall_together(sums: Any):
    with refused("four sums of a lane for an instruction"):
        lower_warp_mma(flat("float16", 16, sums=sums))


@pytest.mark.parametrize(
    "sums",
    [lambda h, e, k, lane: (h, e + k % 2), lambda h, e, k, lane: (h + lane % 2, e)],
)
def test_sums_that_change_on_the_way(sums: Any):
    with refused("sums of a lane, over the whole reduction"):
        lower_warp_mma(flat("float16", 16, sums=sums))


def test_rows_that_lie_apart():
    with refused("16 bytes of lhs side by side, from whole 16 bytes on"):
        lower_warp_mma(flat("float16", 16, gap=2))


def changed(func: Any, before: str, after: str) -> Any:
    """``func`` with a part of its text replaced."""
    script = func.with_attr("global_symbol", "func").script()
    assert before in script
    return tvm.script.from_source(script.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [('32, thread="threadIdx.x"', '64, thread="threadIdx.x"'), ("threadIdx.x", "threadIdx.y")],
)
def test_loop_without_a_warp_around_it(before: str, after: str):
    with refused("a loop of 32 lanes around it, bound to threadIdx.x"):
        lower_warp_mma(changed(deep(), before, after))


def test_branch_that_some_lanes_do_not_take():
    before = 'T.unroll(2, annotations={"pit.warp_mma": 1})'
    script = deep().with_attr("global_symbol", "func").script()
    line = next(x for x in script.splitlines() if "pit.warp_mma" in x)
    indent = line[: len(line) - len(line.lstrip())]
    head, nest = script.split(line)
    nest = "\n".join("    " + x if x.strip() else x for x in nest.splitlines())
    branched = f"{head}{indent}if lane < 16:\n    {line}{nest}\n"
    assert before in branched
    with refused("all lanes to meet in it"):
        lower_warp_mma(tvm.script.from_source(branched))


def test_operand_that_depends_on_rows_and_columns():
    func = changed(deep(), "rhs[j, lane % 4, e, step, k]", "rhs[j, lane % 4, h, step, k]")
    with refused("one operand of rows and one of columns"):
        lower_warp_mma(func)


def test_nest_that_was_changed():
    func = changed(deep(), "T.grid(1, 2, 2, 2, 16)", "T.grid(1, 2, 2, 2, 8)")
    with refused("(steps, any, 2, even, 2, 16) iterations"):
        lower_warp_mma(func)
