"""What contractions by TensorIR tiles cost, and whether a dense product is cheaper. Microseconds.

A CTA computes one tile; the multiprocessors take tiles in turn, the longest decide the end. Rates
are those of the largest tiles on 4096^3 on one H200, rows and bands of columns, 1 to 100 % live;
smaller tiles have not been fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..structs import Candidate, MicroTile, Plan, Tile
from .gpu_cost import GpuRates, cheapest, tile_candidates

_SMS = 132
# Of the family's largest tile, in 1e12 operations per second: by FMA, and on tensor cores.
_CORES_TFLOPS, _WARPS_TFLOPS = 45.0, 290.0
_STEP_US, _TILE_US = 0.02, 2.0  # least time of a step of the depth, and a tile's start and end
_TERMS_PER_US, _MOST_TERMS_PER_US = 2.5e5, 1e6  # of threads with a result each
# Library products by width of the operands in bytes: tensor cores for two, CUDA cores for four.
_LIBRARY_TFLOPS = {2: 660.0, 4: 51.2}


@dataclass(frozen=True)
class GeneralWork:
    """Tiles of a product.

    ``lists``: live positions of every list. On the axis of rows a list fills tiles of rows; with
    ``reduces`` it is the depth of one band of rows; else each position is a product of ``rows``.
    ``n, k``: columns and depth; ``batch``: products beside each other that share the list.
    Expressions without tiles have ``rows`` results of ``k`` terms each, ``extent`` positions on
    their axis ``""``.
    """

    lists: tuple[int, ...]
    rows: int
    n: int
    k: int
    batch: int
    itemsize: int
    axis: str  # "rows", "depth", "batch" or ""
    extent: int = 1

    def tiles(self, tile: Tile) -> tuple[int, float, float]:
        """Number of tiles, sum of their depths, and the largest depth."""
        columns = -(-self.n // tile.tile_n) * self.batch
        counts = np.asarray(self.lists, np.float64)
        if self.axis == "depth":
            return columns * len(counts), columns * float(counts.sum()), float(counts.max())
        rows = np.ceil(counts / tile.tile_m) if self.axis == "rows" else counts
        number = float(rows.sum()) * columns
        if self.axis == "batch":
            number *= -(-self.rows // tile.tile_m)
        return int(number), number * self.k, float(self.k)


@dataclass(frozen=True)
class GeneralDense:
    """All of the product, ``library`` naming who computes it, "" for our own dense kernel; without
    tiles ``m`` results of ``k`` terms."""

    m: int
    n: int
    k: int
    batch: int
    itemsize: int
    library: str
    extra_bytes: float = 0.0

    def cost_us(self, rates: GpuRates) -> tuple[float, float]:
        """Predicted time with its launch, and what operations and bytes take at least."""
        if not self.library and self.n == 1:
            terms = float(self.m * self.k)
            least = terms / _MOST_TERMS_PER_US
            return terms / _TERMS_PER_US + rates.constant("launch_us"), least
        flops = 2e-6 * self.m * self.n * self.k * self.batch
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        memory = 1e-3 * self.itemsize * self.batch * elements / rates.constant("gather_gbps")
        least = max(flops / _LIBRARY_TFLOPS.get(self.itemsize, _CORES_TFLOPS), memory)
        extra = 1e-3 * self.extra_bytes / rates.constant("store_gbps")
        return least + rates.constant("launch_us") + extra, least


def select_general(
    micro_tile: MicroTile,
    work: GeneralWork,
    tiles: Sequence[Tile | None],
    dense: GeneralDense | None,
    rates: GpuRates,
    index_bytes: float,
    fill_bytes: float,
    covered: float,
) -> Plan:
    """The cheaper of the best tile and the dense product; parts of a cost as in `select_gpu`."""
    index, fill = rates.index_us(index_bytes), rates.store_us(fill_bytes)
    timed = ((tile, *tile_us(tile, work, rates)) for tile in tiles)
    beside = (("index", index),), (("output", fill),)
    candidates = tile_candidates(micro_tile, timed, covered, *beside)
    if dense is not None:
        us, least = dense.cost_us(rates)
        parts = (("index", 0.0), ("product", us), ("output", 0.0), ("bound", least))
        candidates.append(Candidate("dense", None, None, us, parts, 1.0, dense.library))
    return cheapest(candidates, tuned=False)


def tile_us(tile: Tile | None, work: GeneralWork, rates: GpuRates) -> tuple[float, float]:
    """Predicted time of a tile with its launch, and what operations take at least; None: a thread
    for each result."""
    if tile is None:
        terms = sum(work.lists) * work.rows * work.k / max(work.extent, 1)
        return terms / _TERMS_PER_US + rates.constant("launch_us"), terms / _MOST_TERMS_PER_US
    number, depths, deepest = work.tiles(tile)
    flops = 2e-6 * tile.tile_m * tile.tile_n
    rate = _WARPS_TFLOPS if dict(tile.knobs).get("mma") else _CORES_TFLOPS
    step = max(flops * _SMS / rate, _STEP_US / tile.tile_k)
    shared = -(-number // _SMS) * (depths / max(number, 1) * step + _TILE_US)
    longest = deepest * step + _TILE_US
    bound = flops * depths / rate
    return max(shared, longest) + rates.constant("launch_us"), bound
