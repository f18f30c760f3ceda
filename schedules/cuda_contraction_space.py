"""Tiles of the family of `pit_tvm.schedules.cuda_contraction`, and their space for MetaSchedule.

A tile cuts the function before it is scheduled, so a candidate is an annotation of a stand-in:
`sample` decides the knobs, and `lower` makes the kernel, which has the stand-in's parameters.
Families differ in what is gathered, and each is measured with its gather and scatter:

* `ROWS`: live rows, of all the depth (``lhs`` [m, k], ``rhs`` [n, k]);
* `COLUMNS` by height: for bands of so many rows, live steps of the depth, one in `SPARSITY` of
  those stored (``lhs`` [k, m], ``rhs`` [k, n]).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tvm
from tvm import DataType, s_tir, te, tirx

from pit_tvm.analysis.contraction import Contraction, contraction_of
from pit_tvm.errors import TileNotFound, TuningError, mismatch
from pit_tvm.op.matmul import matmul
from pit_tvm.structs import MicroTile, Tile, TileTask
from pit_tvm.transform.pipeline import lower as lower_scheduled

from .contraction_space import random_operand
from .cuda_contraction import VECTOR_BYTES, scheduled
from .decisions import note, noted, pick

ROWS = "rows-cuda"
PIECES = "pieces-cuda"  # rows that live in one piece of the depth; not tuned
BANDS = (32, 64, 128)  # rows of a tile whose columns have a list of their own
COLUMNS: Mapping[int, str] = MappingProxyType({band: f"columns-cuda-{band}" for band in BANDS})
FAMILIES = (ROWS, *COLUMNS.values())
DTYPES = ("float32", "float16", "bfloat16", "int8")
TF32 = "tf32"  # of tiles that compute float32 on tensor cores
SPARSITY = 8
DEPTH_STEP = 32  # of pieces of the depth: a multiple of every tile's
_WARP_DTYPES = ("float16", "bfloat16", TF32)

# (tile_m, tile_n, reg_m, reg_n): rows and columns of a tile, and of one thread.
_FORMS = (
    *((128, 128, 8, 8), (128, 256, 8, 16), (256, 128, 16, 8), (128, 64, 8, 8)),
    *((64, 256, 8, 16), (64, 256, 8, 8), (64, 128, 8, 8), (64, 64, 4, 4)),
    *((32, 512, 8, 16), (32, 256, 8, 8), (32, 256, 4, 16), (32, 128, 4, 8), (32, 64, 4, 4)),
)
# The same on tensor cores, where 32 threads share 8 times as many rows and 4 times the columns.
_WARP_FORMS = (
    *((128, 256, 8, 16), (256, 128, 8, 16), (192, 256, 12, 16), (128, 128, 8, 16)),
    *((128, 64, 8, 8), (64, 256, 8, 16), (64, 128, 8, 8), (64, 64, 4, 8)),
    *((32, 256, 4, 16), (32, 128, 4, 8)),
)
_DEPTHS, _WARP_DEPTHS = (8, 16, 32), (32, 64)
_STAGES = (2, 3, 4)

# Tiles to start from: sizes, then depth and stages.
_STARTS = (
    ((128, 256, 8, 16), 16, 3),
    ((128, 128, 8, 8), 32, 2),
    ((64, 128, 8, 8), 16, 3),
    ((64, 64, 4, 4), 16, 3),
    ((32, 256, 8, 8), 16, 3),
    ((32, 128, 4, 8), 16, 3),
)
_WARP_STARTS = (
    ((128, 256, 8, 16), 64, 3),
    ((128, 128, 8, 16), 64, 2),
    ((64, 256, 8, 16), 64, 3),
    ((64, 128, 8, 8), 64, 3),
    ((64, 64, 4, 8), 32, 4),
    ((32, 128, 4, 8), 64, 3),
)
# In TF32: for rows, and for bands that gather along the depth.
_TF32_STARTS = (
    ((128, 256, 8, 16), 32, 4),
    ((64, 256, 8, 16), 32, 4),
    ((64, 128, 8, 8), 32, 4),
    ((32, 128, 4, 8), 32, 4),
)
_TF32_BAND_STARTS = (
    ((128, 256, 8, 16), 32, 3),
    ((128, 128, 8, 16), 16, 3),
    ((128, 64, 8, 8), 16, 4),
    ((64, 256, 8, 16), 16, 4),
    ((64, 128, 8, 8), 16, 4),
    ((32, 256, 4, 16), 16, 3),
    ((32, 128, 4, 8), 16, 4),
)
# For rows of one piece of the depth: low, since those are few, in two steps or more.
_PIECE_STARTS = (((32, 128, 4, 8), 32, 2),)
_TF32_PIECE_STARTS = (((64, 64, 4, 8), 32, 2),)

# Bytes of shared memory that a CTA may have, by architecture; others have as many as the least.
_SHARED = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}
_LEAST_SHARED = 99
_PIT_M = MicroTile("lhs", "m", 0, (1, 0))
_STAND_IN = "out"  # the block that holds the decisions


def starting_tiles(isa: str, dtype: str, height: int = 0, family: str = ROWS) -> tuple[Tile, ...]:
    """Tiles of a family that are sound on every GPU of an architecture, untuned; with a
    ``height``, those of the family for bands of so many rows."""
    family = COLUMNS[height] if height else family
    starts = _starts(dtype, height, family)
    made = (_tile(family, isa, dtype, form, depth, stages) for form, depth, stages in starts)
    return tuple(tile for tile in made if tile.tile_m == height or not height)


def workload(task: TileTask) -> tirx.PrimFunc:
    """A stand-in with the kernel's parameters ``lhs``, ``rhs``, ``ids``, ``count``, ``out``.

    It is annotated and replaced, never compiled.
    """
    _check(task)
    lists, high, capacity = _lists(task)
    wide = "int32" if task.dtype == "int8" else "float32"
    bands = task.family != ROWS
    depth = stored_depth(task)
    k = te.reduce_axis((0, depth), "k")
    lhs = te.placeholder((depth, task.m) if bands else (task.m, depth), task.dtype, "lhs")
    rhs = te.placeholder((depth, task.n) if bands else (task.n, depth), task.dtype, "rhs")
    ids = te.placeholder((lists, capacity), "int32", "ids")
    count = te.placeholder((lists,), "int32", "count")

    def product(i: Any, j: Any) -> Any:
        near = ids[i // high, k % capacity if bands else i] + count[i // high]
        left, right = (lhs[near, i], rhs[k, j]) if bands else (lhs[near, k], rhs[j, k])
        return te.sum((left * right).astype(wide), axis=k)

    sums = te.compute((task.m, task.n), product, name=_STAND_IN)
    return te.create_prim_func([lhs, rhs, ids, count, sums])


def sample(sch: s_tir.Schedule, task: TileTask) -> None:
    """Sample the knobs and annotate the stand-in's block with them."""
    depths = _WARP_DEPTHS if task.dtype in _WARP_DTYPES else _DEPTHS
    choices = (range(len(_forms(task))), depths, _STAGES)
    note(sch, _STAND_IN, [pick(sch, values) for values in choices], task)


def tile_of(sch: s_tir.Schedule, task: TileTask) -> Tile:
    """The tile that a sampled schedule is annotated with."""
    return _decided(noted(sch.mod, _STAND_IN)[0], task)


def lower(mod: tvm.IRModule) -> tvm.IRModule:
    """The kernel of a sampled module, scheduled TensorIR named ``main``."""
    values, task = noted(mod, _STAND_IN)
    return kernel_module(_decided(values, task), task.n, task.k, task.m)


def kernel_module(tile: Tile, n: int, k: int, m: int) -> tvm.IRModule:
    """The kernel of a tile for products of ``n`` columns; live rows of depth ``k``, however many,
    or bands of ``m`` rows with any live steps of the depth."""
    bands = tile.family != ROWS
    sizes = (m, n, None) if bands else (None, n, k)
    tensors = matmul(
        *sizes,
        dtype=_stored(tile.dtype),
        out_dtype="int32" if tile.dtype == "int8" else None,
        transpose_lhs=bands,
        transpose_rhs=not bands,
    )
    func = te.create_prim_func(tensors)
    con = contraction_of(func, "lhs")
    if not isinstance(con, Contraction):
        raise TuningError(mismatch("workload", "a contraction", "another expression"))
    micro_tile = MicroTile("lhs", "k", 0, (1, tile.tile_m)) if bands else _PIT_M
    return lower_scheduled(scheduled(func, con, tile, micro_tile).mod)


def example(task: TileTask, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """Random arguments of the workload but the output, and the exact result in float64."""
    lists, high, capacity = _lists(task)
    depth = stored_depth(task)
    ids = np.full((lists, capacity), -1, np.int32)
    if task.family == ROWS:
        ids[0, : task.m] = rng.permutation(task.m)
        lhs, rhs = (random_operand((e, depth), task.dtype, rng) for e in (task.m, task.n))
        exact = lhs.astype(np.float64) @ rhs.astype(np.float64).T
        return [lhs, rhs, ids, np.full(1, task.m, np.int32)], exact
    lhs, rhs = (random_operand((depth, e), task.dtype, rng) for e in (task.m, task.n))
    exact = np.empty((task.m, task.n))
    for at in range(lists):
        live = ids[at, : task.k] = rng.permutation(depth)[: task.k]
        band = slice(at * high, at * high + high)
        exact[band] = lhs[live, band].astype(np.float64).T @ rhs[live].astype(np.float64)
    return [lhs, rhs, ids, np.full(lists, task.k, np.int32)], exact


def features(tile: Tile, task: TileTask) -> tuple[float, ...]:
    """What decides a tile's speed on a task beside its knobs: CTAs, threads of each, loads from
    shared memory for each sum, and shared memory in KiB."""
    ctas = -(-task.m // tile.tile_m) * -(-task.n // tile.tile_n)
    rows, columns = tile.knob("reg_m"), tile.knob("reg_n")
    loads = 1.0 / rows + 1.0 / columns
    return float(ctas), float(threads(tile)), loads, shared_bytes(tile) / 1024


def starts(task: TileTask) -> list[tuple[int, ...]]:
    """Decisions of the candidates to measure first: tiles to start from."""
    forms, warps = _forms(task), task.dtype in _WARP_DTYPES
    depths = _WARP_DEPTHS if warps else _DEPTHS
    return [
        (forms.index(form), depths.index(depth), _STAGES.index(stages))
        for form, depth, stages in _starts(task.dtype)
        if form in forms
    ]


def threads(tile: Tile) -> int:
    """Threads of a CTA."""
    return tile.tile_m * tile.tile_n // (tile.knob("reg_m") * tile.knob("reg_n"))


def shared_bytes(tile: Tile) -> int:
    """Shared memory of a CTA at most, with a vector of padding for each row."""
    row = tile.tile_k * int(DataType(_stored(tile.dtype)).itemsize) + VECTOR_BYTES
    return tile.knob("stages") * (tile.tile_m + tile.tile_n) * row


def _stored(dtype: str) -> str:
    """The operands' type."""
    return "float32" if dtype == TF32 else dtype


def stored_depth(task: TileTask) -> int:
    """Steps of the depth in memory, of which a band uses ``task.k``."""
    return task.k if task.family == ROWS else task.k * SPARSITY


def _lists(task: TileTask) -> tuple[int, int, int]:
    """Number of lists, rows of the output of each, and entries of each."""
    if task.family == ROWS:
        return 1, task.m, task.m
    high = next(band for band, family in COLUMNS.items() if family == task.family)
    return -(-task.m // high), high, stored_depth(task)


def _forms(task: TileTask) -> list[tuple[int, int, int, int]]:
    """Sizes of the family's tiles."""
    forms = _WARP_FORMS if task.dtype in _WARP_DTYPES else _FORMS
    high = [band for band, family in COLUMNS.items() if family == task.family]
    return [form for form in forms if not high or form[0] in high]


def _starts(
    dtype: str, height: int = 0, family: str = ROWS
) -> Sequence[tuple[tuple[int, int, int, int], int, int]]:
    if family == PIECES:
        return _TF32_PIECE_STARTS if dtype == TF32 else _PIECE_STARTS
    if dtype == TF32:
        return _TF32_BAND_STARTS if height else _TF32_STARTS
    return _WARP_STARTS if dtype in _WARP_DTYPES else _STARTS


def _decided(values: Sequence[int], task: TileTask) -> Tile:
    """The tile that sampled values stand for: form, depth and stages."""
    form, depth, stages = values
    return _tile(task.family, task.isa, task.dtype, _forms(task)[form], depth, stages)


def _tile(
    family: str, isa: str, dtype: str, form: tuple[int, int, int, int], depth: int, stages: int
) -> Tile:
    """A tile of at most so many stages and steps: as many as shared memory has room for."""
    limit = _SHARED.get(isa.rstrip("af"), _LEAST_SHARED) * 1024
    tile_m, tile_n, reg_m, reg_n = form
    mma = (("mma", 1),) if dtype in _WARP_DTYPES else ()
    knobs = (*mma, ("reg_m", reg_m), ("reg_n", reg_n))
    tiles = (
        Tile(family, isa, dtype, tile_m, tile_n, steps, (*knobs, ("stages", held)))
        for steps in (depth, depth // 2, depth // 4)
        for held in range(stages, _STAGES[0] - 1, -1)
    )
    return next(tile for tile in tiles if shared_bytes(tile) <= limit)


def _check(task: TileTask) -> None:
    if task.family not in FAMILIES:
        raise TileNotFound(mismatch("task.family", f"one of {FAMILIES}", repr(task.family)))
    if not task.isa.startswith("sm_") or task.dtype not in DTYPES:
        expected = f"a GPU's and one of {DTYPES}"
        raise TileNotFound(mismatch("task.isa, task.dtype", expected, (task.isa, task.dtype)))
    if task.groups != 1:
        raise TileNotFound(mismatch("task.groups", 1, task.groups))
