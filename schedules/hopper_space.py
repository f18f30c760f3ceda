"""Search space of the Hopper m-axis family, for MetaSchedule: the knobs of ``RowsTile``.

A tile shapes the whole kernel, so a candidate is an annotation of a stand-in block: ``sample``
decides the knobs, and ``lower`` turns them into the kernel, which has the stand-in's parameters.
Only combinations that ``RowsTile.check`` accepts are sampled. Two families share the kernel:

* ``rows-hopper``: one group of live rows;
* ``groups-hopper``: live rows spread over ``task.groups`` groups, each with its own weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import tvm
from tvm import s_tir, te, tirx

from pit_tvm.errors import TileNotFound, mismatch
from pit_tvm.selection.gpu_fit import even_heights, fitting
from pit_tvm.structs import Tile, TileTask

from .decisions import note, noted, pick
from .hopper_knobs import ISA, as_tile, knobs_of
from .hopper_rows import SHARED_LIMIT, TILE_K, RowsTile, rows_kernel

ROWS, GROUPS = "rows-hopper", "groups-hopper"
FAMILIES = (ROWS, GROUPS)
DTYPES = ("float16", "bfloat16")

# (tile_m, consumers, tile_n). Registers hold 64 rows x 256 columns of a consumer, or 128 x 128.
ROW_FORMS = (
    *((64, 1, n) for n in (64, 96, 128, 192, 256)),
    *((128, 2, n) for n in (64, 96, 128, 160, 168, 176, 192, 208, 224, 240, 256)),
    *((256, 2, n) for n in (96, 128)),
)
# The same with ``flip``. Copies that gather rows are slow: wide tiles where arithmetic counts.
FLIPPED_FORMS = (
    *((m, 1, 64) for m in (64, 128)),
    *((m, 2, 128) for m in (64, 128, 192)),
    *((m, 2, 256) for m in (96, 128, 144)),
)
FORMS = (*ROW_FORMS, *FLIPPED_FORMS)
CLUSTER = (1, 2)
SPARE = (0, 1)  # stages less than shared memory has room for
RASTER = (4, 8, 16)
LAG = (0, 1)
STORE_COLS = (64, 128)
LATE = (0, 2, 4)
_USUAL = (0, 1, 0, 0, 0)  # positions of the usual choices in the five lists above
_LAGGING = (0, 1, 1, 0, 0)  # the same with a lag
_LATE = (0, 1, 0, 0, 2)  # with rows stored late
# Forms and clusters of the candidates that are measured first, rows' and flipped ones in turn.
_OFFSETS = (0, len(ROW_FORMS)) * 2
_FIRST = (
    (
        *(((128, 2, 256), cluster) for cluster in (1, 2)),
        *(((128, 2, 240), cluster) for cluster in (1, 2)),
        ((128, 2, 192), 2),
    ),
    (*(((m, 2, 256), 1) for m in (144, 128)), ((192, 2, 128), 1), ((128, 2, 128), 2)),
    (((128, 2, 128), 2), ((128, 2, 168), 2), ((128, 2, 128), 1), ((64, 1, 128), 1)),
    (((128, 1, 64), 2), ((64, 2, 128), 2), ((96, 2, 256), 1)),
)
MOST_STAGES = 8
_ALL_STAGES = 16  # and more than fit: low tiles wait for latency alone
# Groups that the kernel takes, by how many there are: each step is a kernel of its own.
GROUP_STEPS = (1, 256, 1024)
DEAD_SHARE = 8  # of the workload's stored rows one in so many is dead


@dataclass(frozen=True)
class Stored:
    """Sizes of a task's arrays: stored rows of ``out`` and of ``lhs``, and ids for each group."""

    rows: int
    sources: int
    capacity: int


def stored(task: TileTask) -> Stored:
    """Live rows and some dead ones among them; a group's list could name every row."""
    rows = task.m + max(1, task.m // DEAD_SHARE)
    return Stored(rows, -(-rows // task.share), rows)


def workload(task: TileTask) -> tirx.PrimFunc:
    """A stand-in with the kernel's parameters: lhs, ids, count, rhs ``[groups, n, k]``, out.

    It is annotated and replaced, never compiled.
    """
    _check(task)
    size = stored(task)
    k = te.reduce_axis((0, task.k), "k")
    lhs = te.placeholder((size.sources, task.k), task.dtype, "lhs")
    ids = te.placeholder((task.groups, size.capacity), "int32", "ids")
    count = te.placeholder((task.groups,), "int32", "count")
    rhs = te.placeholder((task.groups, task.n, task.k), task.dtype, "rhs")
    out = te.compute(
        (size.rows, task.n),
        lambda i, j: te.sum(lhs[ids[0, i // task.share] + count[0], k] * rhs[0, j, k], axis=k),
        name="out",
    )
    return te.create_prim_func([lhs, ids, count, rhs, out])


def sample(sch: s_tir.Schedule, task: TileTask) -> None:
    """Sample the knobs and annotate the stand-in's block with them."""
    choices = (range(len(FORMS)), CLUSTER, SPARE, RASTER, LAG, STORE_COLS, LATE)
    note(sch, "out", [pick(sch, values) for values in choices], task)


def tile_of(sch: s_tir.Schedule, task: TileTask) -> Tile:
    """The tile that a sampled schedule is annotated with."""
    return as_tile(decided(noted(sch.mod, "out")[0], task.groups), task.family, task.dtype)


def lower(mod: tvm.IRModule) -> tvm.IRModule:
    """The kernel of a sampled module, a TIRx function ``main``."""
    values, task = noted(mod, "out")
    return kernel_module(decided(values, task.groups), task.dtype, task.share)


def kernel_module(knobs: RowsTile, dtype: str, share: int = 1) -> tvm.IRModule:
    """The family's plain kernel as a module with one function, ``main``."""
    return tvm.IRModule({"main": rows_kernel(dtype, knobs, share=share)})


def decided(values: Sequence[int], groups: int) -> RowsTile:
    """The knobs that sampled values stand for: form, cluster, spare, raster, lag, store_cols, late;
    all the stages that fit but the spare."""
    form, cluster, spare, raster, lag, store_cols, late = (*values, 0)[:7]  # older ones end before
    tile_m, consumers, tile_n = FORMS[form]
    knobs = RowsTile(
        tile_m=tile_m,
        tile_n=tile_n,
        stages=MOST_STAGES,
        consumers=consumers,
        cluster=cluster,
        raster=raster,
        lag=lag,
        store_cols=STORE_COLS[0] if late else store_cols,
        late=late,
    )
    if form >= len(ROW_FORMS):  # choices that have no meaning there are one choice
        shared_depth = cluster if tile_n == 64 * consumers else 1
        plain = {"lag": 0, "store_cols": STORE_COLS[0], "late": 0}
        knobs = replace(knobs, flip=1, cluster=shared_depth, **plain)
    fitting = for_groups(knobs, groups)
    return fitting.with_stages(max(2, fitting.stages - spare))


def kind_of(tile: Tile) -> tuple[int, ...]:
    """Flipped tiles, those whose CTAs work together, and those that store late are others of the
    same extents."""
    knobs = rows_tile(tile)
    return knobs.flip, knobs.cluster, int(knobs.late > 0)


def starts(task: TileTask) -> list[tuple[int, ...]]:
    """Decisions of the candidates to measure first: every form of proven use."""
    usual = [
        (forms.index(form) + at, CLUSTER.index(cluster), *_USUAL)
        for first, forms, at in zip(_FIRST, (ROW_FORMS, FLIPPED_FORMS) * 2, _OFFSETS, strict=True)
        for form, cluster in first
    ]
    late = [
        (ROW_FORMS.index((128, 2, tile_n)), CLUSTER.index(cluster), *_LATE)
        for tile_n, cluster in ((256, 1), (256, 2), (192, 2), (128, 2))
    ]
    return [*usual, *late, (ROW_FORMS.index((128, 2, 240)), 0, *_LAGGING)]


def features(tile: Tile, task: TileTask) -> tuple[float, ...]:
    """What decides a tile's speed on a task beside its knobs: waves of tiles over the chip, the
    share of the last wave that works, and useful over computed elements."""
    knobs = rows_tile(tile)
    groups, each = _even(task)
    high = _fitted(knobs, task) if knobs.flip else knobs.tile_m
    bands = groups * -(-each // high)
    columns = -(-task.n // knobs.tile_n)
    places = knobs.sms // (knobs.cluster if knobs.flip else 1)
    waves = -(-bands * columns // places)
    computed = bands * high * columns * knobs.tile_n
    filled = bands * columns / (waves * places)
    return float(waves), filled, task.m * task.n / computed, float(knobs.stages)


def _even(task: TileTask) -> tuple[int, int]:
    """Groups that have rows, and rows of each, where a task's are spread evenly."""
    groups = min(task.groups, task.m)
    return groups, -(-task.m // groups)


def _fitted(knobs: RowsTile, task: TileTask) -> int:
    """Height of flipped tiles where each group of a task has as many rows."""
    if task.groups > 1:
        _, each = _even(task)
        return int(even_heights(each, -(-each // knobs.tile_m)))
    kind = fitting([knobs.tile_m], [knobs.tile_n], [knobs.sms // knobs.cluster])
    return int(kind.heights(task.m, task.n)[0])


def random_index(task: TileTask, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """``ids`` int32 ``[groups, capacity]`` and ``count`` int32 ``[groups]``: ``task.m`` of the
    stored rows in random order, each in a random group, as a router without bias fills them.
    Unused ids are -1."""
    size = stored(task)
    live = rng.permutation(size.rows)[: task.m].astype(np.int32)
    group = rng.integers(task.groups, size=task.m)
    count = np.bincount(group, minlength=task.groups).astype(np.int32)
    ids = np.full((task.groups, size.capacity), -1, np.int32)
    for g in range(task.groups):
        ids[g, : count[g]] = live[group == g]
    return ids, count


def rows_tile(tile: Tile) -> RowsTile:
    """The kernel's knobs of a tile of these families.

    Raises
    ------
    TileNotFound
        The tile is of another family, has an unknown knob, or the template cannot build it.
    """
    if tile.tile_k != TILE_K:
        raise TileNotFound(mismatch("tile.tile_k", TILE_K, tile.tile_k))
    return knobs_of(tile, RowsTile, FAMILIES, tile_m=tile.tile_m, tile_n=tile.tile_n)


def for_groups(knobs: RowsTile, groups: int) -> RowsTile:
    """The same knobs for a kernel that takes at least ``groups`` groups, with as many stages as
    then fit.

    Raises
    ------
    TileNotFound
        The kernel does not take so many groups.
    """
    most = next((step for step in GROUP_STEPS if step >= groups), None)
    if most is None:
        raise TileNotFound(mismatch("groups", f"at most {GROUP_STEPS[-1]}", groups))
    wider = replace(knobs, most_groups=most)
    while wider.shared_bytes > SHARED_LIMIT and wider.stages > 2:
        wider = wider.with_stages(wider.stages - 1)
    return wider


def starting_tiles(isa: str, dtype: str) -> tuple[Tile, ...]:
    """Tiles of both families that are sound on every Hopper chip, untuned.

    Raises
    ------
    TileNotFound
        Another instruction set, or a data type that the families do not compute.
    """
    if isa != ISA or dtype not in DTYPES:
        raise TileNotFound(mismatch("isa, dtype", f"{ISA} and one of {DTYPES}", (isa, dtype)))
    shapes = (
        RowsTile(cluster=2),
        RowsTile(),
        RowsTile(tile_n=128, stages=6),
        RowsTile(tile_m=64, tile_n=128, consumers=1, stages=6),
        RowsTile(tile_m=64, tile_n=64, consumers=1, stages=8),
        RowsTile(tile_m=144, tile_n=256, flip=1),
        RowsTile(tile_m=128, tile_n=128, stages=6, cluster=2, flip=1),
    )
    plain = [as_tile(knobs, ROWS, dtype) for knobs in shapes]
    grouped = [as_tile(for_groups(knobs, 2), GROUPS, dtype) for knobs in shapes]
    return (*plain, *grouped)


@cache  # asked for at every decision
def output_tiles(dtype: str, slot: int, slots: int) -> tuple[Tile, ...]:
    """Tiles of products in ``slots`` slots of ``slot`` columns, 64 or 128, from the tallest on: the
    lower ones have more stages. Each is there twice: for one CTA, and for two that share its depth.

    Raises
    ------
    TileNotFound
        No kernel takes so many slots.
    """
    tallest = 256 if slot == TILE_K else 192
    plain = RowsTile(tile_n=slot, stages=_ALL_STAGES, consumers=slot // TILE_K, flip=1)
    made = (
        replace(plain, tile_m=tile_m, cluster=cluster)
        for tile_m in (tallest, 128, 64)
        for cluster in CLUSTER
    )
    return tuple(as_tile(for_groups(knobs, max(slots, 2)), GROUPS, dtype) for knobs in made)


def _check(task: TileTask) -> None:
    if task.family not in FAMILIES:
        raise TileNotFound(mismatch("task.family", f"one of {FAMILIES}", repr(task.family)))
    if task.isa != ISA or task.dtype not in DTYPES:
        expected = f"{ISA} and one of {DTYPES}"
        raise TileNotFound(mismatch("task.isa, task.dtype", expected, (task.isa, task.dtype)))
    if task.n % 8 or task.k % 8:
        raise TileNotFound(mismatch("task.n, task.k", "multiples of 8", (task.n, task.k)))
    if (task.family == ROWS) != (task.groups == 1):
        expected = f"1 for {ROWS}, more for {GROUPS}"
        raise TileNotFound(mismatch("task.groups", expected, (task.family, task.groups)))
