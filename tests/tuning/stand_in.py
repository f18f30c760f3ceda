"""A small search space for tests: packed matmul, four knobs, an annotation that changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import te, tirx
from tvm.s_tir import Schedule

from pit_tvm.structs import Tile, TileTask
from pit_tvm.tuning.features import tile_annotation
from pit_tvm.tuning.tasks import Space, workload_module

LANES = 8
FAMILY = "stand-in"


def workload(task: TileTask) -> tirx.PrimFunc:
    """``out[m, n] = lhs[m, k] * rhs[k, n]``, rhs packed ``[n / 8, k, 8]``."""
    lhs = te.placeholder((task.m, task.k), task.dtype, "lhs")
    rhs = te.placeholder((task.n // LANES, task.k, LANES), task.dtype, "rhs")
    k = te.reduce_axis((0, task.k), "k")
    out = te.compute(
        (task.m, task.n),
        lambda i, j: te.sum(lhs[i, k] * rhs[j // LANES, k, j % LANES], axis=k),
        name="out",
    )
    return te.create_prim_func([lhs, rhs, out])


def sample(sch: Schedule, task: TileTask) -> None:
    """24 candidates."""
    _sample(sch, rows=(1, 2), registers=(1, 2, 4))


def sample_few(sch: Schedule, task: TileTask) -> None:
    """4 candidates."""
    _sample(sch, rows=(2,), registers=(2,))


def _sample(sch: Schedule, rows: tuple[int, ...], registers: tuple[int, ...]) -> None:
    block = sch.get_sblock("out")
    i, j, k = sch.get_loops(block)
    tile_m, reg_m, panels, tile_k = (
        sch.sample_categorical(values, [1 / len(values)] * len(values))
        for values in (rows, registers, (1, 2), (8, 16))
    )
    i_outer, i_tile, i_reg = sch.split(i, [None, tile_m, reg_m])
    j_outer, j_panel, lane = sch.split(j, [None, panels, LANES])
    k_outer, k_inner = sch.split(k, [None, tile_k])
    sch.reorder(i_outer, k_outer, j_outer, i_tile, k_inner, i_reg, j_panel, lane)
    sch.parallel(i_outer)
    sch.vectorize(lane)
    sch.unroll(j_panel)
    sch.unroll(i_reg)
    sch.annotate(block, "pit.tile", [tile_m, reg_m, panels, tile_k])
    sch.decompose_reduction(block, k_outer)


def tile_of(sch: Schedule, task: TileTask) -> Tile:
    """The decided tile, from the annotation."""
    tile_m, reg_m, panels, tile_k = tile_annotation(sch.mod)
    knobs = (("panels", panels), ("reg_m", reg_m))
    return Tile(task.family, task.isa, task.dtype, tile_m * reg_m, panels * LANES, tile_k, knobs)


SPACE = Space(workload, sample, tile_of, lower=lambda mod: mod)


def task(isa: str, m: int = 16, n: int = 32, k: int = 32, dtype: str = "float32") -> TileTask:
    """A product that takes microseconds."""
    return TileTask(FAMILY, isa, dtype, m, n, k)


def space_with(**changes: Any) -> Space:
    """The stand-in space with some functions replaced."""
    return replace(SPACE, **changes)


def scheduled(seed: int) -> Schedule:
    """The sampled schedule of `task` for AVX2."""
    avx2 = task("avx2")
    sch = Schedule(workload_module(SPACE, avx2), seed=seed)
    sample(sch, avx2)
    return sch
