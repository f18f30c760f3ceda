"""What GPU tiles and dense products cost, and the cheaper of them. Costs are in microseconds.

A tile's product takes a launch and what `gpu_roofline` says. That is corrected by what records of
the same tile gave on shapes like this one: the mean of measured over roofline, weighted by nearness
in the logarithms of the sizes. A dense product takes what `gpu_library` says, corrected by records
of the library in the same way if there are any.

Groups: each group's rows fill whole tiles of their own, and its weights are read if it has rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..remember import remember
from ..structs import Candidate, MicroTile, Plan, Tile, TileTask
from ..tile_db.record import TileRecord
from .gpu_fit import Numbers
from .gpu_library import Library, library_of
from .gpu_measured import Measured, as_measured, completed, handful, sizes_of
from .gpu_records import times_for
from .gpu_roofline import Product, TileSizes, tile_sizes

# Of a whole Hopper chip, where its own were not measured: GB/s and microseconds.
_DEFAULTS = {
    "gather_gbps": 4200.0,
    "gather_cached_gbps": 8500.0,
    "store_gbps": 4000.0,
    "launch_us": 3.0,
    "detect_us": 2.0,
    "detect_gbps": 3500.0,
}
_MOST_TFLOPS = 790.0  # 16-bit operations per second (1e12) of a whole chip under its power limit
_UNTUNED = 1.15  # of a tile without records over its roofline
# Zeros draw less power: a dense product of operands with some of them runs at a higher clock, the
# more so the nearer it is to what the chip can do.
_LESS_PER_ZERO, _BUSY = 0.17, 4
_PASS = 1.25  # of a store's time: what reads and writes as much
# Records of groups were measured with every row in a random one. How much slower than the fastest
# a tile is there counts by this share, because calls route rows otherwise.
_ROUTED = 0.45
# Microseconds of an activation for each element at the end of a tile, which no product hides: the
# mean over five products of 1365 to 30000 rows (tuning_logs/h200-sm_90a/activations.json), and of
# gelu over four of the suite padding since.
ACT_US = {"gelu": 7.1e-7, "silu": 4.8e-7}
# Where a product hides the writing of dead rows: the share of its time alone that is left at least,
# and the share of the time in which the product leaves memory idle that it can use
# (tuning_logs/h100-sm_90a/beside.json: the median error is 3.4 % of a call).
_LEFT, _IDLE = 0.25, 0.3
_SPLIT_US = 3.5  # of the second kernel, where dead rows are listed as well as live ones
_SELDOM = 3  # a tile measured on fewer than one in so many tasks is left out
# Rows of a group: of fewer its weights decide, for whose tasks other tiles are chosen from.
_FEW = 64
_SHOWN = 3  # tiles that a plan lists


@dataclass(frozen=True)
class GpuWork(Product):
    """A product of live rows, and what is done beside it. Without ``counts``, which are those of an
    earlier call, every row goes to a random group.

    ``index_bytes``: what detection reads, None for none; ``splits``: it lists dead rows as well.
    ``extra_bytes``: output traffic beside the kernel's own, such as dead rows to fill; ``hides``:
    the kernel itself writes them, while it computes. ``act``: the activation that its tiles end
    with.
    """

    index_bytes: float | None = None
    splits: bool = False
    extra_bytes: float = 0.0
    hides: bool = False
    act: str = "none"


@dataclass(frozen=True)
class GpuDense:
    """The library's product ``m x n x k`` of all rows.

    ``fills``: dead rows are looked for and overwritten after it. ``extra_bytes``: traffic of passes
    over the output, as of an activation. ``zeros``: the share of one operand that is zero.
    ``steady``: under a load of such products.
    """

    m: int
    n: int
    k: int
    fills: bool = False
    extra_bytes: float = 0.0
    zeros: float = 0.0
    steady: bool = False


@dataclass(frozen=True)
class GpuRates:
    """Costs of one data type on one GPU; made by `gpu_rates`. ``library``: who computes dense
    products, ``products``: what they take."""

    profile: dict[str, float]
    library: str
    products: Library
    families: dict[str, _Family]
    dense: Measured | None
    _known: dict[object, tuple[float, float]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def constant(self, name: str) -> float:
        """A constant of the device, or of a whole Hopper chip."""
        return self.profile.get(name) or _DEFAULTS[name]

    def is_tuned(self, family: str) -> bool:
        """Whether tiles of the family were measured: one without records has generic ones."""
        return self.families[family].measured is not None

    def tile_us(self, family: str, work: GpuWork) -> tuple[npt.NDArray[Any], float]:
        """Predicted time of each tile of a family, in the order of its tiles, and the time that
        none of them can beat."""
        tiles = self.families[family]
        roof, bound = tiles.roofline(work, self)
        if tiles.measured is None:
            return roof * _UNTUNED, bound
        sizes = work.live, work.n, work.k, work.groups, work.share
        return roof * tiles.measured.correction(*sizes), bound

    def store_us(self, size: float) -> float:
        """Microseconds of ``size`` bytes written beside a product."""
        return size / self.constant("store_gbps") * 1e-3

    def beside_us(self, work: GpuWork, product: float) -> float:
        """Microseconds by which a product that takes ``product`` alone takes longer for what is
        written beside it."""
        alone = self.store_us(work.extra_bytes)
        if not work.hides:
            return alone
        busy = 1e-3 * work.bytes_of_memory / self.constant("gather_gbps")
        return max(_LEFT * alone, alone - _IDLE * max(product - busy, 0.0))

    def index_us(self, size: float) -> float:
        """Microseconds of a detection that reads ``size`` bytes."""
        return self.constant("detect_us") + size / self.constant("detect_gbps") * 1e-3

    def dense_us(self, m: int, n: int, k: int, *load: Any) -> tuple[float, float]:
        """Predicted time and lower bound of the library's dense product; see `dense_roofline`."""
        key = (m, n, k, *load)
        known = self._known.get(key)
        if known is None:
            us, bound = self.dense_roofline(*key)
            if self.dense is not None:
                us *= float(self.dense.correction(m, n, k, 1, 1)[0])
            known = remember(self._known, key, (us, bound))
        return known

    def dense_roofline(self, m: int, n: int, k: int, *load: Any) -> tuple[float, float]:
        """Uncorrected time of a dense product, and the time that it takes at least. ``load``: the
        share of an operand that is zero, and whether it is steady; see `Library.product_us`."""
        return self.products.product_us(m, n, k, self.constant("gather_gbps"), *load)


@dataclass(frozen=True)
class _Family:
    """Tiles of one family, and what was measured of all of them."""

    tiles: tuple[Tile, ...]
    sizes: TileSizes
    measured: Measured | None = None

    def roofline(self, work: Product, rates: GpuRates) -> tuple[Numbers, float]:
        """Uncorrected time of each tile, and what bytes and operations take at least."""
        memory = 1e-3 * work.bytes_of_memory / rates.constant("gather_gbps")
        roof = self.sizes.roofline(work, rates.constant("gather_cached_gbps"), memory)
        least = 2e-6 * work.live * work.n * work.k / _MOST_TFLOPS
        return roof + rates.constant("launch_us"), max(memory, least)


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
    for record, task, secs in times_for(records, dtype, isa):
        entry = (task, 1e6 * secs)
        if record.tile is not None:
            tiles = found.setdefault(record.tile.family, {})
            tiles.setdefault(replace(record.tile, dtype=dtype), []).append(entry)
        elif record.note == library:
            dense.append(entry)
    empty = GpuRates(profile, library, library_of(dtype), {}, None)
    families = {name: _measured_family(tiles, empty) for name, tiles in found.items()}
    for tile in generic:
        if tile.family not in families:
            same = [other for other in generic if other.family == tile.family]
            families[tile.family] = _family(same)
    against = None
    if dense:
        ratio = [math.log(us / empty.dense_roofline(*sizes_of(task)[:3])[0]) for task, us in dense]
        against = as_measured([task for task, _ in dense], np.array([ratio]))
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
    index = 0.0 if work.index_bytes is None else rates.index_us(work.index_bytes)
    index += _SPLIT_US * work.splits
    product, bound = rates.tile_us(family, work)
    tiles = rates.families[family].tiles
    candidates = []
    costs = (product + work.live * work.n * ACT_US.get(work.act, 0.0)).tolist()
    for at in sorted(range(len(costs)), key=costs.__getitem__)[:_SHOWN]:
        us = costs[at]
        other = rates.beside_us(work, us)
        parts = (("index", index), ("product", us), ("output", other), ("bound", bound))
        cost = index + us + other
        candidates.append(Candidate("pit", micro_tile, tiles[at], cost, parts, covered))
    if dense is not None:
        other = rates.store_us(work.extra_bytes)
        candidates.append(dense_candidate(dense, rates, index, other))
    return cheapest(candidates, rates.is_tuned(family))


def tile_candidates(
    micro_tile: MicroTile,
    timed: Iterable[tuple[Tile | None, float, float]],
    covered: float,
    before: tuple[tuple[str, float], ...],
    after: tuple[tuple[str, float], ...] = (),
) -> list[Candidate]:
    """Tiles, the cheapest first. ``timed`` gives each with the time of its product and the time
    that this takes at least; the parts of the cost ``before`` and ``after`` it are all tiles'."""
    candidates = []
    for tile, product, bound in timed:
        parts = (*before, ("product", product), *after)
        cost = sum(us for _, us in parts)
        shown = (*parts, ("bound", bound))
        candidates.append(Candidate("pit", micro_tile, tile, cost, shown, covered))
    return sorted(candidates, key=lambda candidate: candidate.cost_us)


def dense_candidate(
    dense: GpuDense, rates: GpuRates, index: float = 0.0, other: float = 0.0
) -> Candidate:
    """The library's product; ``index`` and ``other`` are what looking for dead rows and writing
    them take, where that is done."""
    us, least = rates.dense_us(dense.m, dense.n, dense.k, 0.0, dense.steady)
    busy = 2e-6 * dense.m * dense.n * dense.k / (rates.products.most_tflops * us)
    pace = 1.0 - _LESS_PER_ZERO * dense.zeros * busy**_BUSY
    us, least = pace * us, pace * least
    parts = (
        ("index", index if dense.fills else 0.0),
        ("product", us),
        ("output", (other if dense.fills else 0.0) + _PASS * rates.store_us(dense.extra_bytes)),
        ("bound", least),
    )
    cost = sum(part for name, part in parts if name != "bound")
    return Candidate("dense", None, None, cost, parts, 1.0, rates.library)


def against_dense(
    candidates: Sequence[Candidate], dense: GpuDense | None, rates: GpuRates, covered: float = 1.0
) -> Plan:
    """The cheapest of tiles that were not tuned and the dense product, None where that gives
    another result; ``covered``: the share of an operand that is not zero."""
    if dense is None:
        return cheapest(candidates, tuned=False)
    whole = replace(dense, zeros=1.0 - covered)
    return cheapest([*candidates, dense_candidate(whole, rates)], tuned=False)


def cheapest(candidates: Sequence[Candidate], tuned: bool) -> Plan:
    """The plan that takes the cheapest of them."""
    choice = min(candidates, key=lambda candidate: candidate.cost_us)
    return Plan(choice, tuple(candidates), _reason(choice, candidates), tuned)


def _reason(choice: Candidate, candidates: Sequence[Candidate]) -> str:
    bound = dict(choice.parts)["bound"]
    text = f"cheapest of {len(candidates)}, {choice.cost_us / max(bound, 1e-9):.2f}x its bound"
    others = [c.cost_us for c in candidates if c.kind != choice.kind]
    if others:
        other = "dense" if choice.kind == "pit" else "pit"
        text += f", {min(others) / max(choice.cost_us, 1e-9):.2f}x {other}"
    return text


def _measured_family(tiles: dict[Tile, list[tuple[TileTask, float]]], rates: GpuRates) -> _Family:
    most = max(len(entries) for entries in tiles.values())
    tiles = {tile: found for tile, found in tiles.items() if _SELDOM * len(found) >= most}
    plain = _family(list(tiles))
    tasks = list(dict.fromkeys(task for found in tiles.values() for task, _ in found))
    roofs = {
        task: plain.roofline(Product(task.m, task.n, task.k, task.groups, (), task.share), rates)[0]
        for task in tasks
    }
    ratio = np.full((len(tiles), len(tasks)), math.nan)
    for row, found in enumerate(tiles.values()):
        for task, us in found:
            ratio[row, tasks.index(task)] = math.log(us / roofs[task][row])
    ratio = completed(ratio, tasks)
    for column, task in enumerate(tasks):
        if task.groups > 1:
            fastest = ratio[(np.log(roofs[task]) + ratio[:, column]).argmin(), column]
            ratio[:, column] = fastest + _ROUTED * (ratio[:, column] - fastest)
    times = np.column_stack([roofs[task] for task in tasks]) * np.exp(ratio)
    few = np.array([task.m < _FEW * task.groups for task in tasks])
    parts = [handful(times[:, part]) for part in (few, ~few) if part.any()]
    kept = sorted(set().union(*parts))
    family = _family([list(tiles)[at] for at in kept])
    return replace(family, measured=as_measured(tasks, ratio[kept]))


def _family(tiles: Sequence[Tile]) -> _Family:
    return _Family(tuple(tiles), tile_sizes(tiles))
