"""Search space of the CPU's contraction tiles, for MetaSchedule.

A tile's sizes shape the function before it is scheduled, so a candidate is an annotation: the
space samples the knobs, ``lower`` turns them into the kernel. The three families differ in what is
gathered, and each is measured with its gather and scatter:

* ``rows``: live rows (m axis), the whole depth;
* ``depth``: per tile of 32 rows, an eighth of the depth or less (k axis);
* ``blocks``: per 64 steps of depth, live rows, results accumulated (m axis, split).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import s_tir, te, tirx
from tvm.target import Target

from pit_tvm.analysis.contraction import Contraction, contraction_of
from pit_tvm.errors import TileNotFound, TuningError, mismatch
from pit_tvm.memory import numpy_dtype
from pit_tvm.op.matmul import matmul
from pit_tvm.structs import MicroTile, Tile, TileTask
from pit_tvm.transform.pipeline import lower as lower_scheduled

from .contraction import apply
from .contraction_forms import DEPTH_STEP, PANEL_VECTORS, Roles, contraction_form
from .decisions import note, noted, pick

ROWS, DEPTH, BLOCKS = "contraction-rows", "contraction-depth", "contraction-blocks"
FAMILIES = (ROWS, DEPTH, BLOCKS)
LANES = {"avx512": 16, "avx2": 8, "generic": 4}
REG_M = {"avx512": (4, 6, 8, 12, 14), "avx2": (2, 4, 6), "generic": (2, 4, 6)}
ROW_BLOCKS = (1, 2, 4, 8, 16, 32, 64)
TILE_N = (128, 256, 512, 1024, 4096)
TILE_K = (64, 128, 192, 256, 384, 512, 1024, 1536)
MICRO_ROWS, MICRO_DEPTH = 32, 64  # micro-tiles 32x1 and 1x64
SPARSITY = 8  # stored over live steps of depth, or rows, in the workloads of DEPTH and BLOCKS
# The least depth stored for DEPTH: the dense operand must not fit a cache that it would not fit.
STORED_DEPTH = 2048
_NOTED = "lhs_sread"  # the block that holds the decisions


@dataclass(frozen=True)
class _Stored:
    """Stored sizes and micro-tile of a family's workload."""

    m: int
    k: int
    micro_tile: MicroTile


def lanes_of(isa: str) -> int:
    """Accumulators in one vector; TileNotFound for an unknown instruction set."""
    if isa not in LANES:
        raise TileNotFound(mismatch("task.isa", f"one of {sorted(LANES)}", repr(isa)))
    return LANES[isa]


def workload(task: TileTask) -> tirx.PrimFunc:
    """The sparse form of the task at a fixed tile: parameters ``lhs``, packed ``rhs``, ``ids``,
    ``count``, ``out``. Every tile's kernel has the same parameters and the same result."""
    tile = Tile(task.family, task.isa, task.dtype, 8, PANEL_VECTORS * 16, 64, (("reg_m", 1),))
    return _form(task, tile)[0]


def sample(sch: s_tir.Schedule, task: TileTask) -> None:
    """Sample the knobs and annotate the first block with them."""
    choices = (
        _reg_m(task),
        ROW_BLOCKS if task.family != DEPTH else (1,),
        TILE_N,
        TILE_K if task.family != BLOCKS else (MICRO_DEPTH,),
    )
    note(sch, _NOTED, [pick(sch, values) for values in choices], task)


def starts(task: TileTask) -> tuple[tuple[int, ...], ...]:
    """Decisions of tiles to measure first: blocks of six rows, which can stand beside a second
    panel of columns, and panels of the whole depth where it is one of the depths at hand."""
    if task.family == DEPTH:
        return ()
    values, deep = _reg_m(task), range(len(TILE_K) if task.family == ROWS else 1)
    depth = min(deep, key=lambda i: abs(math.log(task.k / TILE_K[i])))
    reg_m = values.index(6) if 6 in values else len(values) - 1
    return tuple(
        (reg_m, ROW_BLOCKS.index(blocks), TILE_N.index(tile_n), depth)
        for blocks in (16, 32)
        for tile_n in (512, 4096)
    )


def tile_of(sch: s_tir.Schedule, task: TileTask) -> Tile:
    """The tile that a sampled schedule is annotated with."""
    return _tile(noted(sch.mod, _NOTED)[0], task)


def lower(mod: tvm.IRModule) -> tvm.IRModule:
    """The kernel of a sampled module, ready for ``tvm.compile``; for the threads of the target
    that is in scope, if one is."""
    values, task = noted(mod, _NOTED)
    tile = _tile(values, task)
    form, roles = _form(task, tile)
    sch = s_tir.Schedule(form.with_attr("global_symbol", "main"))
    apply(sch, roles, reg_m=tile.knob("reg_m"), lanes=lanes_of(task.isa), threads=_threads())
    return lower_scheduled(sch.mod)


def example(task: TileTask, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """Random arguments of the workload but the output, and the exact result in float64."""
    stored = _stored(task)
    lhs = random_operand((stored.m, stored.k), task.dtype, rng)
    rhs = random_operand((stored.k, task.n), task.dtype, rng)
    ids, count, mask = _random_index(task, stored, rng)
    exact = np.where(mask, lhs, 0).astype(np.float64) @ rhs.astype(np.float64)
    return [lhs, _pack(rhs, lanes_of(task.isa)), ids, count], exact


def random_operand(shape: tuple[int, int], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Random elements of an operand: standard normal, or integers from -8 to 7."""
    if dtype == "int8":
        return rng.integers(-8, 8, shape).astype(np.int8)
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def _threads() -> int:
    target = Target.current(allow_none=True)
    return int(target.attrs.get("num-cores", 1)) if target is not None else 1


def _stored(task: TileTask) -> _Stored:
    if task.family == ROWS:
        return _Stored(task.m, task.k, MicroTile("lhs", "m", 0, (1, 0)))
    if task.family == DEPTH:
        depth = max(task.k * SPARSITY, STORED_DEPTH)
        return _Stored(task.m, depth, MicroTile("lhs", "k", 1, (MICRO_ROWS, 1)))
    if task.family == BLOCKS:
        return _Stored(task.m * SPARSITY, task.k, MicroTile("lhs", "m", 0, (1, MICRO_DEPTH)))
    raise TileNotFound(mismatch("task.family", f"one of {FAMILIES}", repr(task.family)))


def _reg_m(task: TileTask) -> tuple[int, ...]:
    values = REG_M.get(task.isa, ())
    if task.family == DEPTH:
        return tuple(r for r in values if MICRO_ROWS % r == 0)
    return values


def _form(task: TileTask, tile: Tile) -> tuple[tirx.PrimFunc, Roles]:
    stored = _stored(task)
    tensors = matmul(stored.m, task.n, stored.k, dtype=task.dtype, out_dtype=_wide(task.dtype))
    func = te.create_prim_func(tensors)
    con = contraction_of(func, "lhs")
    if not isinstance(con, Contraction):
        raise TuningError(mismatch("workload", "a contraction", "another expression"))
    return contraction_form(func, con, tile, lanes_of(task.isa), stored.micro_tile)


def _tile(values: list[int], task: TileTask) -> Tile:
    reg_m, blocks, tile_n, tile_k = values
    tile_m = MICRO_ROWS if task.family == DEPTH else reg_m * blocks
    knobs = (("reg_m", reg_m),)
    return Tile(task.family, task.isa, task.dtype, tile_m, tile_n, tile_k, knobs)


def _wide(dtype: str) -> str:
    return "int32" if dtype == "int8" else "float32"


def _random_index(
    task: TileTask, stored: _Stored, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A random index of the family's sparsity, and the mask that it covers."""
    mask = np.zeros((stored.m, stored.k), bool)
    if task.family == ROWS:
        slots, live, total = 1, task.m, stored.m
    elif task.family == DEPTH:
        slots, live, total = -(-stored.m // MICRO_ROWS), task.k, stored.k
    else:
        slots, live, total = -(-stored.k // MICRO_DEPTH), task.m, stored.m
    ids = np.zeros((slots, -(-total // 64) * 64), np.int32)
    for slot in range(slots):
        chosen = rng.permutation(total)[:live].astype(np.int32)
        ids[slot, :live] = chosen
        if task.family == DEPTH:
            mask[slot * MICRO_ROWS : (slot + 1) * MICRO_ROWS, chosen] = True
        else:
            width = stored.k if task.family == ROWS else MICRO_DEPTH
            mask[chosen, slot * width : (slot + 1) * width] = True
    return ids, np.full(slots, live, np.int32), mask


def _pack(rhs: np.ndarray, lanes: int) -> np.ndarray:
    """numpy's twin of ``contraction_forms.pack_func`` for ``rhs [k, n]``."""
    width = PANEL_VECTORS * lanes
    depth, columns = rhs.shape
    shape = (-(-depth // DEPTH_STEP) * DEPTH_STEP, -(-columns // width) * width)
    full = np.zeros(shape, np.int32 if rhs.dtype == np.int8 else np.float32)
    full[:depth, :columns] = rhs
    panels = full.reshape(shape[0], -1, width).transpose(1, 0, 2)
    return np.ascontiguousarray(panels)


def starting_tiles(isa: str, dtype: str) -> tuple[Tile, ...]:
    """One tile for each family that is sound on every CPU of an instruction set, untuned."""
    reg_m = {"avx512": 12, "avx2": 6, "generic": 4}[isa]
    low = {"avx512": 8, "avx2": 4, "generic": 4}[isa]
    return (
        Tile(ROWS, isa, dtype, 8 * reg_m, 4096, 256, (("reg_m", reg_m),)),
        Tile(DEPTH, isa, dtype, MICRO_ROWS, 4096, 128, (("reg_m", low),)),
        Tile(BLOCKS, isa, dtype, 8 * reg_m, 256, MICRO_DEPTH, (("reg_m", reg_m),)),
    )
