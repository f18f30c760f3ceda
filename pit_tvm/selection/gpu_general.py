"""What contractions by TensorIR tiles cost, and whether a dense product is cheaper. Microseconds.

A CTA computes one tile; the multiprocessors take tiles in turn, the longest decide the end. A
tile's terms are fitted to its own records; without any they are those of the family's largest
tiles on 4096^3 on one H200, which are too fast for smaller ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..structs import Candidate, MicroTile, Plan, Tile, TileTask
from ..target import has_clusters
from ..tile_db.record import TileRecord
from .gpu_cost import GpuRates, cheapest, gpu_rates, tile_candidates
from .gpu_measured import handful
from .gpu_records import times_for

_SMS = 132
# Of the family's largest tile, in 1e12 operations per second: by FMA, on tensor cores in 16 bits,
# and there in TF32, with bands that gather along the depth or without.
_CORES_TFLOPS, _WARPS_TFLOPS = 42.0, 390.0
_TF32_BANDS_TFLOPS, _TF32_TFLOPS = 140.0, 190.0
_MOST_CORES_TFLOPS, _MOST_WARPS_TFLOPS, _MOST_TF32_TFLOPS = 60.7, 625.0, 312.0  # of the chip
_STEP_US, _TILE_US = 0.02, 2.0  # least time of a step of the depth, and a tile's start and end
# Of an element of a tile that is added to others: by FMA; on tensor cores by two; there one by one.
_ADD_US, _PAIR_US, _SINGLE_US = 6.5e-5, 2e-4, 4.9e-4
_PAIRS_START_US = 15.0
_LONE = 0.8  # of the steps of such a tile, where nothing else runs
_ALONE = 0.33  # of its time, where few neighbours live of those that lie in one sector of memory
_ELEMENT_US = 7e-6  # of an element that is gathered alone: 5 to 10 were seen, on one H200
_TERMS_PER_US, _MOST_TERMS_PER_US = 2.5e5, 1e6  # of threads with a result each
# Library products by width of the operands in bytes: tensor cores for two, CUDA cores for four.
_LIBRARY_TFLOPS = {2: 660.0, 4: 51.2}
_KEPT = 4  # tiles of a family to choose from: each that is chosen is a kernel to compile
_LEAST_US = 0.1  # that a product is taken to last
_NEARER = 1e-4  # of the sum of squares, that another term must gain


class Terms(NamedTuple):
    """What a product's time is made of, besides its launch: of every step of the depth and of every
    tile that a multiprocessor computes, of every step of one tile, and of its start and end.

    ``lone_step`` is below 0 where the chip is slower the more of it works.
    """

    step: float
    tile: float = _TILE_US
    lone_step: float = 0.0
    start: float = 0.0

    def us(self, tiles: float, depth: float) -> float:
        """Time of ``tiles`` for each multiprocessor, so deep in the mean."""
        return (self.step * depth + self.tile) * tiles + self.lone_step * depth + self.start


@dataclass(frozen=True)
class GeneralRates:
    """Costs of one family's tiles in one data type; made by `general_rates`. ``base``: the
    device's constants, and the library's products in that type. ``tuned``: tiles were measured."""

    base: GpuRates
    terms: dict[Tile, Terms]
    tuned: bool

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles to choose from."""
        return tuple(self.terms)


@dataclass(frozen=True)
class GeneralWork:
    """Tiles of a product.

    ``lists``: live positions of every list. On the axis of rows a list fills tiles of rows, also
    where there is one for each of the depth's "pieces"; on that of the depth it is the depth of one
    band of rows; else each position is a product of ``rows``. ``n, k``: columns and depth, of a
    piece if there are pieces; ``batch``: products beside each other that share the list.
    Expressions without tiles have ``rows`` results of ``k`` terms each, ``extent`` positions on
    their axis ``""``. ``scattered``: how much of the sparse operand, and of the other, is gathered
    by pieces of one element: what is stored by rows of the depth that lists name is not.
    """

    lists: tuple[int, ...]
    rows: int
    n: int
    k: int
    batch: int
    itemsize: int
    axis: str  # "rows", "depth", "batch", "pieces" or ""
    extent: int = 1
    scattered: tuple[float, float] = (0.0, 0.0)

    @cached_property
    def _counts(self) -> npt.NDArray[np.float64]:
        return np.asarray(self.lists, np.float64)

    def tiles(self, tile: Tile) -> tuple[int, float, float]:
        """Number of tiles, sum of their depths, and the largest depth."""
        columns = -(-self.n // tile.tile_n) * self.batch
        if self.axis == "depth":
            total, deepest = float(sum(self.lists)), float(max(self.lists))
            return columns * len(self.lists), columns * total, deepest
        number, deepest = columns * float(sum(self.lists)), float(self.k)
        if self.axis in ("rows", "pieces"):
            filled = np.ceil(self._counts / tile.tile_m)
            number = columns * float(filled.sum())
            # One CTA takes the tiles of a piece, one after another.
            deepest *= float(filled.max(initial=1.0)) if self.axis == "pieces" else 1.0
        elif self.axis == "batch":
            number *= -(-self.rows // tile.tile_m)
        return int(number), number * self.k, deepest

    def elements(self, tile: Tile) -> float:
        """Pieces of one element that are gathered along the depth."""
        own, other = self.scattered if self.axis == "depth" else (0.0, 0.0)
        again = tile.tile_m * -(-self.n // tile.tile_n)  # of the sparse operand, by every tile
        return float(sum(self.lists)) * self.batch * (own * again + other * self.n)

    @property
    def slower(self) -> float:
        """Times as long that tiles of pieces take: their rows may be gathered by elements, too."""
        if self.axis != "pieces":
            return 1.0
        dead = 1.0 - sum(self.lists) / max(len(self.lists) * self.rows, 1)
        return 1.0 + _ALONE * self.scattered[0] * dead**3

    def load(self, tile: Tile) -> tuple[float, float]:
        """Tiles of each multiprocessor, and their depth in the mean."""
        number, depths, _ = self.tiles(tile)
        ctas = number
        if self.axis == "pieces":
            ctas = -(-self.n // tile.tile_n) * self.batch * len(self.lists)
        each = number / max(ctas, 1)
        return -(-ctas // _SMS) * each, depths / max(number, 1)


@dataclass(frozen=True)
class GeneralDense:
    """All of the product, ``library`` naming who computes it, "" for our own dense kernel; without
    tiles ``m`` results of ``k`` terms. ``zeros``: the share of one operand that is zero.
    ``depth_first``: the depth is the first axis of both operands."""

    m: int
    n: int
    k: int
    batch: int
    itemsize: int
    library: str
    extra_bytes: float = 0.0
    zeros: float = 0.0
    depth_first: bool = False

    def cost_us(self, general: GeneralRates) -> tuple[float, float]:
        """Predicted time with its launch, and what operations and bytes take at least."""
        rates = general.base
        if not self.library and general.terms:
            work = (self.m,), self.m, self.n, self.k, self.batch, self.itemsize, "rows"
            us, least = tile_us(general.tiles[0], GeneralWork(*work), general)
            return us + rates.store_us(self.extra_bytes), least
        if not self.library and self.n == 1:
            terms = float(self.m * self.k)
            least = terms / _MOST_TERMS_PER_US
            return terms / _TERMS_PER_US + rates.constant("launch_us"), least
        if self.library:
            us, least = rates.dense_us(self.m * self.batch, self.n, self.k, self.zeros)
            us *= rates.products.depth_first if self.depth_first else 1.0
            return us + rates.store_us(self.extra_bytes), least
        flops = 2e-6 * self.m * self.n * self.k * self.batch
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        memory = 1e-3 * self.itemsize * self.batch * elements / rates.constant("gather_gbps")
        least = max(flops / _LIBRARY_TFLOPS.get(self.itemsize, _CORES_TFLOPS), memory)
        return least + rates.constant("launch_us") + rates.store_us(self.extra_bytes), least


def general_rates(
    records: Sequence[TileRecord],
    dtype: str,
    isa: str,
    library: str,
    generic: Sequence[Tile],
    axis: str = "rows",
    pairs: bool = True,
) -> GeneralRates:
    """Rates of the family of the ``generic`` tiles: records of a store, or those tiles as they are.

    ``library`` names the BLAS of the dense candidate. ``axis``: what the family's lists count, see
    `GeneralWork`. ``pairs``: rows that tiles add to are whole vectors.
    """
    base = gpu_rates([r for r in records if r.tile is None], dtype, isa, library, ())
    families = {tile.family for tile in generic}
    found: dict[Tile, list[tuple[TileTask, float]]] = {}
    for record, task, secs in times_for(records, dtype, isa):
        if record.tile is not None and record.tile.family in families:
            tile = replace(record.tile, dtype=dtype)
            found.setdefault(tile, []).append((task, 1e6 * secs))
    launch = base.constant("launch_us")
    work = {tile: [_task_work(tile, t, axis) for t, _ in its] for tile, its in found.items()}
    terms = {t: _fitted(t, work[t], [us - launch for _, us in its]) for t, its in found.items()}
    if not terms:
        return GeneralRates(
            base, {tile: _untuned(tile, axis, pairs) for tile in generic}, tuned=False
        )
    tasks = dict.fromkeys(task for entries in found.values() for task, _ in entries)
    times = [[own.us(*_task_work(t, k, axis).load(t)) for k in tasks] for t, own in terms.items()]
    kept = [list(terms)[at] for at in handful(np.array(times), _KEPT)]
    return GeneralRates(base, {tile: terms[tile] for tile in kept}, tuned=True)


def select_general(
    micro_tile: MicroTile,
    work: GeneralWork,
    tiles: Sequence[Tile | None],
    dense: GeneralDense | None,
    rates: GeneralRates,
    beside: tuple[float, float, float],
    covered: float,
) -> Plan:
    """The cheaper of the best tile and the dense product; parts of a cost as in `select_gpu`.
    ``beside``: what detection takes, turning, and what is written of the output beside tiles."""
    index, turn, fill = beside
    timed = ((tile, *tile_us(tile, work, rates)) for tile in tiles)
    before = (("index", index), ("turn", turn))
    candidates = tile_candidates(micro_tile, timed, covered, before, (("output", fill),))
    if dense is not None:
        us, least = dense.cost_us(rates)
        parts = (("index", 0.0), ("product", us), ("output", 0.0), ("bound", least))
        candidates.append(Candidate("dense", None, None, us, parts, 1.0, dense.library))
    return cheapest(candidates, rates.tuned)


def tile_us(tile: Tile | None, work: GeneralWork, rates: GeneralRates) -> tuple[float, float]:
    """Predicted time of a tile with its launch, and what operations take at least; None: a thread
    for each result."""
    launch = rates.base.constant("launch_us")
    if tile is None:
        results = sum(work.lists) * work.rows * work.k / max(work.extent, 1)
        return results / _TERMS_PER_US + launch, results / _MOST_TERMS_PER_US
    _, depths, deepest = work.tiles(tile)
    terms = rates.terms[tile]
    most = _rate(tile, _MOST_CORES_TFLOPS, _MOST_WARPS_TFLOPS, _MOST_TF32_TFLOPS)
    bound = 2e-6 * tile.tile_m * tile.tile_n * depths / most
    alone = _ELEMENT_US * work.elements(tile)
    tiles = max(terms.us(*work.load(tile)), terms.us(1, deepest)) * work.slower
    return float(tiles + alone + launch), bound


def _task_work(tile: Tile, task: TileTask, axis: str) -> GeneralWork:
    """The work of a task of tuning, whose bands have as many live steps each."""
    bands = axis == "depth"
    lists = (task.k,) * -(-task.m // tile.tile_m) if bands else (task.m,)
    return GeneralWork(lists, task.m, task.n, task.k, 1, 0, axis if bands else "rows")


def by_warps(tile: Tile) -> bool:
    """Whether warps compute a tile on tensor cores."""
    return dict(tile.knobs).get("mma", 0) == 1


def _rate(tile: Tile, cores: float, warps: float, tf32: float) -> float:
    """The rate of a tile, of those by FMA, on tensor cores in 16 bits, and there in TF32."""
    if not by_warps(tile):
        return cores
    return tf32 if tile.dtype == "tf32" else warps


def _untuned(tile: Tile, axis: str, pairs: bool) -> Terms:
    """Terms of a tile without records. Those of tiles that add up are from times on one H200, three
    shapes in float32 (20, within 10 %) and in TF32 (15, within 20 %)."""
    tf32 = _TF32_BANDS_TFLOPS if axis == "depth" else _TF32_TFLOPS
    rate = _rate(tile, _CORES_TFLOPS, _WARPS_TFLOPS, tf32)
    size = tile.tile_m * tile.tile_n
    step = max(2e-6 * size * _SMS / rate, _STEP_US / tile.tile_k)
    if axis != "pieces":
        return Terms(step)
    if not by_warps(tile):
        return Terms(step, _ADD_US * size, _LONE * step)
    add = _PAIR_US if pairs and has_clusters(tile.isa) else _SINGLE_US
    return Terms(step, add * size, _LONE * step, _PAIRS_START_US)


def _fitted(tile: Tile, work: Sequence[GeneralWork], times: Sequence[float]) -> Terms:
    """Terms whose times are relatively nearest to those measured."""
    measured = np.maximum(np.array(times), _LEAST_US)
    loads = np.array([given.load(tile) for given in work])
    numbers = np.column_stack([loads.prod(axis=1), loads, np.ones(len(loads))])
    shares = numbers / measured[:, None]
    best, nearest = Terms(0.0, 0.0), np.inf
    places = range(len(best))
    for chosen in (list(c) for size in places for c in combinations(places, size + 1)):
        found = np.zeros(len(best))
        found[chosen] = np.linalg.lstsq(shares[:, chosen], np.ones(len(loads)), rcond=None)[0]
        terms = Terms(*found.tolist())
        error = float(np.square(shares @ found - 1.0).sum())
        if _sound(terms) and error < nearest - _NEARER:
            best, nearest = terms, error
    return best


def _sound(terms: Terms) -> bool:
    """Whether no product of one tile or more takes less the larger it is."""
    others = min(terms.step, terms.tile, terms.start)
    return others >= 0.0 and 2.0 * terms.lone_step >= -terms.step
