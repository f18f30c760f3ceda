"""From a scheduled function to one that TVM compiles."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import s_tir, te
from tvm.script import tirx as T

from pit_tvm import op
from pit_tvm.errors import ScheduleError
from pit_tvm.schedules import generic
from pit_tvm.structs import MicroTile
from pit_tvm.transform import (
    lower_atomic_adds,
    lower_dynamic_extent,
    lower_early_exit,
    lower_even_tiles,
    lower_prefetch_rows,
    lower_prefetch_stores,
    lower_warp_mma,
)
from pit_tvm.transform.insert_sread_swrite import SparseForm, insert_sread_swrite
from pit_tvm.transform.pipeline import lower

PASSES = [
    "s_tir.CanonicalizeLoop",
    "s_tir.LowerInitBlock",
    "s_tir.PlanAndUpdateBufferAllocationLocation",
    "s_tir.ConvertBlocksToOpaque",
    "s_tir.LiftThreadBinding",
    "s_tir.CompactBufferAllocation",
    "lower_warp_mma",
    "lower_even_tiles",
    "lower_dynamic_extent",
    "lower_early_exit",
    "lower_atomic_adds",
    "lower_prefetch_rows",
    "lower_prefetch_stores",
    "lower_parallel_tiles",
    "s_tir.UnifyThreadBinding",
    "s_tir.LowerMatchBuffer",
    "s_tir.StmtSimplify",
    "s_tir.InjectSoftwarePipeline",
    "fold_waits",
    "overlap_copies",
    "preload_fragments",
    "settle_strides",
    "s_tir.LowerOpaqueBlock",
    "s_tir.ConvertSSA",
]


def sparse_linear(scheduled: bool) -> Any:
    func = te.create_prim_func(op.linear(None, 5, 7, activation="relu"))
    micro_tile = MicroTile("lhs", "m", 0, (1, 0))
    sch = s_tir.Schedule(insert_sread_swrite(func, micro_tile, SparseForm(4, staged=("lhs",))))
    if scheduled:
        generic.apply(sch)
    return sch.mod


@pytest.mark.parametrize("scheduled", [False, True])
def test_no_annotation_of_ours_is_left(scheduled):
    mod = sparse_linear(scheduled)
    assert "pit.sread" in mod.script()
    assert ("pit.dynamic_extent" in mod.script()) == scheduled
    lowered = lower(mod)
    assert "pit." not in lowered.script()
    assert "T.sblock" not in lowered.script()
    assert [str(var.name_hint) for var in lowered.get_global_vars()] == ["main"]


def test_dump_sees_the_module_after_every_pass():
    seen: list[tuple[str, str]] = []
    lowered = lower(sparse_linear(True), lambda name, script: seen.append((name, script)))
    names, scripts = [name for name, _ in seen], dict(seen)
    assert [name.split(".")[-1] for name in names] == [name.split(".")[-1] for name in PASSES]
    assert "pit.dynamic_extent" in seen[4][1]
    assert "pit.dynamic_extent" not in scripts["lower_dynamic_extent"]
    assert "pit.parallel_tiles" in scripts["lower_dynamic_extent"]
    assert "pit.parallel_tiles" not in scripts["lower_parallel_tiles"]
    assert seen[-1][1] == lowered.script()


def test_dead_positions_cost_no_iteration():
    script = lower(sparse_linear(True)).script()
    assert "if " not in script
    assert "if_then_else" not in script
    tiles = "T.parallel(T.max((T.min(count[0], capacity) + 3) // 4, 0))"
    assert script.count(tiles) == script.count("T.parallel") == 3
    assert script.count("T.max(T.min(count[0] - m_t * 4, 4), 0)") == 3


def test_error_of_a_pass_keeps_its_type():
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((10,), "float32")):
        for t in T.serial(10, annotations={"pit.dynamic_extent": 1}):
            with T.sblock("A"):
                i = T.axis.spatial(10, t)
                A[i] = T.float32(1)

    with pytest.raises(ScheduleError, match="dynamic extent of loop t"):
        lower(tvm.IRModule({"main": func}))


@pytest.mark.parametrize(
    "module",
    [
        *(lower_atomic_adds, lower_dynamic_extent, lower_early_exit, lower_even_tiles),
        *(lower_prefetch_rows, lower_prefetch_stores, lower_warp_mma),
    ],
)
def test_functions_without_the_annotation_of_a_pass_stay_as_they_are(module: Any) -> None:
    @T.prim_func(s_tir=True)
    def plain(A: T.Buffer((10,), "float32"), count: T.Buffer((1,), "int32")):
        for t in range(10):
            if t < count[0]:
                A[t] = T.float32(1)

    lowered = getattr(module, module.__name__.rpartition(".")[2])
    assert lowered(plain).same_as(plain)
