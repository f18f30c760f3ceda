"""What GPU tiles and dense products cost, and the cheaper of them. Costs are in microseconds.

A tile's product takes a launch and whole waves of tiles over the multiprocessors, each wave as
long as one tile's depth; never less than its bytes take from memory and from the second-level
cache. That roofline is corrected by what records of the same tile gave on shapes like this one:
the mean of measured over roofline, weighted by nearness in the logarithms of the sizes. A dense
product is its own roofline, corrected by records of the library in the same way.

Groups: each group's rows fill whole tiles of their own, and its weights are read if it has rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..structs import Candidate, MicroTile, Plan, Tile, TileTask
from ..tile_db.record import TileRecord
from .gpu_fit import Fitting, even_heights, expected_bands, fitting
from .gpu_records import records_for

_Numbers = npt.NDArray[np.float64]
# Of a whole Hopper chip, where its own were not measured: GB/s and microseconds.
_DEFAULTS = {
    "gather_gbps": 4200.0,
    "gather_cached_gbps": 8500.0,
    "store_gbps": 4000.0,
    "launch_us": 3.0,
    "detect_us": 6.0,
    "detect_gbps": 1400.0,
}
# 16-bit operations per second (1e12): of one multiprocessor among few that work, and of a whole
# chip under its power limit, in a long product and at most.
_SM_TFLOPS, _CHIP_TFLOPS, _MOST_TFLOPS = 7.2, 720.0, 790.0
_STEP_US = 0.18  # at least: what a step waits for its copies
_WRITE_US = 0.5 / (128 * 256)  # of an element of the output, which no product hides
_STEP = 64  # depth of one step
_GATHER_US = 0.0043  # of one row in one step: 128 bytes by the copies that gather
_FILL_US = 1.2  # of a tile's start and end, where nothing hides them
_UNTUNED = 1.15  # of a tile without records over its roofline
_BYTES = 2  # of an element
_SOFT = 0.02  # keeps a record of the very shape from an infinite weight
_SELDOM = 3  # a tile measured on fewer than one in so many tasks is left out
_SHOWN = 3  # tiles that a plan lists


@dataclass(frozen=True)
class GpuWork:
    """A product of live rows: ``out[live, n] = lhs[live, k] @ rhs``, over ``groups`` weights.

    ``counts``: live rows of each group where they are known, as from an earlier call; without
    them every row goes to a random group. ``index_bytes``: what detection reads, None for none.
    ``extra_bytes``: output traffic beside the kernel's own, such as dead rows to fill.
    """

    live: float
    n: int
    k: int
    groups: int = 1
    counts: tuple[int, ...] = ()
    index_bytes: float | None = None
    extra_bytes: float = 0.0


@dataclass(frozen=True)
class GpuDense:
    """The library's product ``m x n x k`` of all rows.

    ``fills``: dead rows are looked for and overwritten after it. ``extra_bytes``: traffic of passes
    over the output, as of an activation.
    """

    m: int
    n: int
    k: int
    fills: bool = False
    extra_bytes: float = 0.0


@dataclass(frozen=True)
class _Measured:
    """What was measured: ``logs [tasks, 4]`` of the sizes, ``squares [tasks]`` of their lengths,
    and ``ratio [tiles, tasks]``, the logarithm of measured over roofline."""

    logs: _Numbers
    squares: _Numbers
    ratio: _Numbers

    def correction(self, sizes: tuple[float, ...]) -> _Numbers:
        """Measured over roofline of each tile near these sizes (m, n, k, groups): the mean over
        the tasks, weighted by the inverse square of their distance."""
        here = np.array([math.log(size) for size in sizes])
        away = self.squares - 2.0 * (self.logs @ here) + (float(here @ here) + _SOFT)
        nearness = 1.0 / away
        corrected: _Numbers = np.exp(self.ratio @ nearness / nearness.sum())
        return corrected


@dataclass(frozen=True)
class GpuRates:
    """Costs of one data type on one GPU; made by `gpu_rates`. ``tuned``: tiles were measured."""

    profile: dict[str, float]
    library: str
    families: dict[str, _Family]
    dense: _Measured | None
    tuned: bool

    def constant(self, name: str) -> float:
        """A constant of the device, or of a whole Hopper chip."""
        return self.profile.get(name) or _DEFAULTS[name]

    def tile_us(self, family: str, work: GpuWork) -> tuple[npt.NDArray[Any], float]:
        """Predicted time of each tile of a family, in the order of its tiles, and the time that
        none of them can beat."""
        tiles = self.families[family]
        roof, bound = tiles.roofline(work, self)
        if tiles.measured is None:
            return roof * _UNTUNED, bound
        sizes = (max(work.live, 1.0), work.n, work.k, work.groups)
        return roof * tiles.measured.correction(sizes), bound

    def store_us(self, size: float) -> float:
        """Microseconds of ``size`` bytes written beside a product."""
        return size / self.constant("store_gbps") * 1e-3

    def dense_us(self, m: int, n: int, k: int) -> tuple[float, float]:
        """Predicted time and lower bound of the library's dense product."""
        roof, bound = self.dense_roofline(m, n, k)
        if self.dense is None:
            return _UNTUNED * roof, bound
        return roof * float(self.dense.correction((m, n, k, 1))[0]), bound

    def dense_roofline(self, m: int, n: int, k: int) -> tuple[float, float]:
        """Uncorrected time of a dense product, and the time that it takes at least."""
        flops = 2e-6 * m * n * k
        memory = 1e-3 * _BYTES * (m * k + n * k + m * n) / self.constant("gather_gbps")
        roof = max(flops / _CHIP_TFLOPS, memory) + self.constant("launch_us")
        return roof, max(flops / _MOST_TFLOPS, memory)


@dataclass(frozen=True)
class _Family:
    """Tiles of one family as arrays, and what was measured of all of them.

    ``height``: rows of a cluster's tiles; ``block``: rows of one warpgroup, which rests where
    none is live; ``elements``: of a tile of the output; ``cached``: elements that a cluster reads
    for a step of depth 1; ``share``: part of the multiprocessors in a cluster. ``flip``: places of
    the tiles that fit their height to the count; ``split``: CTAs that share a tile's depth.
    """

    tiles: tuple[Tile, ...]
    height: _Numbers
    width: _Numbers
    block: _Numbers
    elements: _Numbers
    cached: _Numbers
    share: _Numbers
    flip: npt.NDArray[np.intp]
    split: _Numbers
    fitting: Fitting | None
    sms: float
    tallest: float
    measured: _Measured | None = None

    def roofline(self, work: GpuWork, rates: GpuRates) -> tuple[_Numbers, float]:
        """Uncorrected time of each tile, and what bytes and operations take at least."""
        used = _used(work)
        bands = self._bands(work)
        elements = self._computed(work.live / (used or 1.0))
        if self.fitting is not None:
            bands, elements, gathered = self._fitted(work, bands, elements, self.fitting)
        count = bands * np.ceil(work.n / self.width)
        busy = count * self.share  # tiles over multiprocessors
        slowness = np.maximum(1.0 / _SM_TFLOPS, np.minimum(busy, 1.0) * (self.sms / _CHIP_TFLOPS))
        each = np.maximum(elements * slowness * (2e-6 * _STEP), _STEP_US)
        if self.fitting is not None:
            each[self.flip] = np.maximum(each[self.flip], gathered)
        steps = np.ceil(math.ceil(work.k / _STEP) / self.split)
        compute = np.ceil(busy) * (each * steps + elements * _WRITE_US) + _FILL_US
        cached = count * self.cached
        cached *= 1e-3 * _BYTES * work.k / rates.constant("gather_cached_gbps")
        moved = _BYTES * (work.live * (work.k + work.n) + used * work.n * work.k)
        from_memory = 1e-3 * moved / rates.constant("gather_gbps")
        least = 2e-6 * work.live * work.n * work.k / _MOST_TFLOPS
        roof = np.maximum(np.maximum(compute, cached), from_memory) + rates.constant("launch_us")
        return roof, max(from_memory, least)

    def _fitted(
        self, work: GpuWork, bands: _Numbers, elements: _Numbers, kinds: Fitting
    ) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Bands and elements of all tiles, where those that fit themselves to the count do, and
        what a step of these takes to gather its rows."""
        if work.groups > 1 or work.counts:
            high = even_heights(work.live, bands[self.flip])
        else:
            high = kinds.heights(work.live, work.n)
            bands[self.flip] = np.ceil(work.live / high)
        elements = elements.copy()
        elements[self.flip] = high * kinds.width
        return bands, elements, high * _GATHER_US

    def _computed(self, rows: float) -> _Numbers:
        """Elements of a tile in warpgroups that work, where a group has so many rows."""
        if rows >= self.tallest:
            return self.elements
        # A cluster takes as long as its CTA with the most rows.
        busy = np.ceil(rows / self.block) * self.block * self.width / self.elements
        return self.elements * np.minimum(busy, 1.0)

    def _bands(self, work: GpuWork) -> _Numbers:
        """Tiles' rows that the live rows fill, summed over the groups."""
        height = self.height
        if work.counts:
            counts = np.asarray(work.counts, np.float64)
            return np.ceil(counts[:, None] / height).sum(axis=0)
        if work.groups == 1:
            return np.asarray(np.ceil(work.live / height))
        return expected_bands(work.live, work.groups, height)


def gpu_rates(
    records: Sequence[TileRecord], dtype: str, isa: str, library: str, generic: Sequence[Tile]
) -> GpuRates:
    """Rates of one data type: records of a store, or ``generic`` tiles in families without any.

    ``library`` names the BLAS of the dense candidate.
    """
    profile: dict[str, float] = {}
    found: dict[str, dict[Tile, list[tuple[TileTask, float]]]] = {}
    dense: list[tuple[TileTask, float]] = []
    for record in records:
        profile.update(record.profile)
    for record, task in records_for(records, dtype, isa):
        entry = (task, 1e6 * record.secs)
        if record.tile is not None:
            tiles = found.setdefault(record.tile.family, {})
            tiles.setdefault(replace(record.tile, dtype=dtype), []).append(entry)
        elif record.note == library:
            dense.append(entry)
    empty = GpuRates(profile, library, {}, None, bool(found))
    families = {name: _measured_family(tiles, empty) for name, tiles in found.items()}
    for tile in generic:
        if tile.family not in families:
            same = [other for other in generic if other.family == tile.family]
            families[tile.family] = _family(same)
    against = None
    if dense:
        ratio = [math.log(us / empty.dense_roofline(*_sizes(task))[0]) for task, us in dense]
        against = _as_measured([task for task, _ in dense], np.array([ratio]))
    return replace(empty, families=families, dense=against)


def select_gpu(
    family: str,
    micro_tile: MicroTile,
    work: GpuWork,
    dense: GpuDense | None,
    rates: GpuRates,
    stored_rows: int,
) -> Plan:
    """The cheaper of the family's best tile and the dense product, None where that gives another
    result. ``stored_rows``: rows of the operand, live and dead.

    Parts of a cost: the index, the product with its launch, what is written beside it, and
    ``bound``, which is no part but what the product takes at least.
    """
    covered = work.live / stored_rows if stored_rows else 0.0
    other = rates.store_us(work.extra_bytes)
    index = 0.0
    if work.index_bytes is not None:
        index = (
            rates.constant("detect_us") + work.index_bytes / rates.constant("detect_gbps") * 1e-3
        )
    product, bound = rates.tile_us(family, work)
    tiles = rates.families[family].tiles
    candidates = []
    for at in product.argsort()[:_SHOWN].tolist():
        us = float(product[at])
        parts = (("index", index), ("product", us), ("output", other), ("bound", bound))
        cost = index + us + other
        candidates.append(Candidate("pit", micro_tile, tiles[at], cost, parts, covered))
    if dense is not None:
        us, least = rates.dense_us(dense.m, dense.n, dense.k)
        parts = (
            ("index", index if dense.fills else 0.0),
            ("product", us),
            ("output", (other if dense.fills else 0.0) + rates.store_us(dense.extra_bytes)),
            ("bound", least),
        )
        cost = sum(part for name, part in parts if name != "bound")
        candidates.append(Candidate("dense", None, None, cost, parts, 1.0, rates.library))
    choice = min(candidates, key=lambda candidate: candidate.cost_us)
    return Plan(choice, tuple(candidates), _reason(choice, candidates), rates.tuned)


def _reason(choice: Candidate, candidates: Sequence[Candidate]) -> str:
    bound = dict(choice.parts)["bound"]
    text = f"cheapest of {len(candidates)}, {choice.cost_us / max(bound, 1e-9):.2f}x its bound"
    others = [c.cost_us for c in candidates if c.kind != choice.kind]
    if others:
        other = "dense" if choice.kind == "pit" else "pit"
        text += f", {min(others) / max(choice.cost_us, 1e-9):.2f}x {other}"
    return text


def _used(work: GpuWork) -> float:
    """Groups that have rows; where the counts are not known, as many as random rows fill."""
    if work.counts:
        return float(sum(count > 0 for count in work.counts))
    if work.groups == 1:
        return float(work.live > 0)
    return -work.groups * math.expm1(work.live * math.log1p(-1.0 / work.groups))


def _completed(
    tiles: dict[Tile, list[tuple[TileTask, float]]],
) -> dict[TileTask, list[float]]:
    """Time of every tile on every task, estimated where only others were measured.

    A tile is as far behind the fastest one there as on its own nearest task, and no faster than
    those that were kept there: records are of the fastest ones.
    """
    fastest: dict[TileTask, float] = {}
    slowest: dict[TileTask, float] = {}
    for entries in tiles.values():
        for task, us in entries:
            fastest[task] = min(us, fastest.get(task, math.inf))
            slowest[task] = max(us, slowest.get(task, 0.0))
    times: dict[TileTask, list[float]] = {task: [] for task in fastest}
    for entries in tiles.values():
        behind = {task: us / fastest[task] for task, us in entries}
        for task, row in times.items():
            near = min(behind, key=lambda known, to=task: _apart(known, to))  # type: ignore[misc]
            estimate = max(fastest[task] * behind[near], slowest[task])
            row.append(fastest[task] * behind[task] if task in behind else estimate)
    return times


def _apart(one: TileTask, other: TileTask) -> float:
    return sum(abs(a - b) for a, b in zip(one.logs, other.logs, strict=True))


def _measured_family(tiles: dict[Tile, list[tuple[TileTask, float]]], rates: GpuRates) -> _Family:
    most = max(len(entries) for entries in tiles.values())
    tiles = {tile: list(found) for tile, found in tiles.items() if _SELDOM * len(found) >= most}
    times = _completed(tiles)
    plain = _family(list(tiles))
    roofs = [plain.roofline(GpuWork(t.m, t.n, t.k, t.groups), rates)[0] for t in times]
    ratio = np.log(np.array(list(times.values())) / np.array(roofs)).T
    return replace(plain, measured=_as_measured(list(times), ratio))


def _family(tiles: Sequence[Tile]) -> _Family:
    tile_m, tile_n = (np.array(sizes, float) for sizes in zip(*map(_extents, tiles), strict=True))
    cluster = np.array([tile.knob("cluster") for tile in tiles], np.float64)
    consumers = np.array([tile.knob("consumers") for tile in tiles], np.float64)
    sms = float(tiles[0].knob("sms"))
    flip = np.array([i for i, tile in enumerate(tiles) if dict(tile.knobs).get("flip", 0)], np.intp)
    split = np.ones_like(cluster)
    split[flip] = cluster[flip]
    stacked = cluster / split  # CTAs of a cluster with rows of their own
    return _Family(
        tiles=tuple(tiles),
        height=tile_m * stacked,
        width=tile_n,
        block=tile_m / consumers,
        elements=tile_m * tile_n,
        cached=stacked * tile_m + tile_n,
        share=cluster / sms,
        flip=flip,
        split=split,
        fitting=fitting(tile_m[flip], tile_n[flip], sms / cluster[flip]) if flip.size else None,
        sms=sms,
        tallest=float((tile_m * stacked).max()),
    )


def _extents(tile: Tile) -> tuple[int, int]:
    return tile.tile_m, tile.tile_n


def _as_measured(tasks: Sequence[TileTask], ratio: _Numbers) -> _Measured:
    logs = np.array([np.log((*_sizes(task), task.groups)) for task in tasks])
    return _Measured(logs, np.einsum("ij,ij->i", logs, logs), ratio)


def _sizes(task: TileTask) -> tuple[int, int, int]:
    return task.m, task.n, task.k
