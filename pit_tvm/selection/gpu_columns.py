"""What products over live columns of bands of rows cost on a GPU, and whether dense is cheaper.

Every band gathers rows of the dense operand by its own list, from the second-level cache: a band of
h rows does h operations per byte of them, so bytes from the cache bound what low bands take. Costs
are in microseconds; four limits are joined by the root of the sum of their squares. The constants
fit the times of calls on 4096^3 with 1 to 50 % live, at three heights, with six tiles, within 8 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..structs import MicroTile, Plan, Tile
from .gpu_cost import GpuDense, GpuRates, cheapest, dense_candidate, tile_candidates

_BYTES = 2  # of an element
_SMS = 132
_CHIP_TFLOPS = 687.0  # of the instructions' rows, used or not
_CACHED = 1.45  # longer rows come faster than those of the device's profile, if alone
_DEPTH = 16  # of an instruction
# Least time of an instruction's depth in 256 columns of a tile, and of a tile's write.
_STEP_US, _TILE_US = 0.031, 0.434
_COLD_US = 1.8  # after detection, whose mask is in the caches
_PACK_US, _PACK_GBPS = 4.0, {32: 1060.0, 64: 800.0, 128: 750.0}  # of live columns, by height
# Zeros draw less power: a dense product of operands with some of them runs at a higher clock.
_LESS_PER_ZERO, _LEAST = 0.3, 0.8


@dataclass(frozen=True)
class ColumnsWork:
    """A product ``out[m, n]`` of bands of ``height`` rows, ``counts`` live columns of k each.

    ``index_bytes``: what detection reads. ``packed``: live columns are packed first.
    """

    m: int
    n: int
    k: int
    height: int
    counts: tuple[int, ...]
    index_bytes: float
    packed: bool

    @property
    def live(self) -> float:
        """Live columns of all bands."""
        return float(sum(self.counts))

    @property
    def touched(self) -> float:
        """Rows of rhs that some band reads, if columns live independently of each other."""
        share = np.asarray(self.counts, np.float64) / max(self.k, 1)
        return self.k * (1.0 - float(np.prod(1.0 - share)))


def select_columns(
    micro_tile: MicroTile,
    work: ColumnsWork,
    tiles: Sequence[Tile],
    dense: GpuDense,
    rates: GpuRates,
) -> Plan:
    """The cheaper of the best tile and the dense product; parts of a cost as in `select_gpu`, and
    what packing takes."""
    index = rates.index_us(work.index_bytes)
    packing = _packing_us(work) if work.packed else 0.0
    covered = work.live / max(len(work.counts) * work.k, 1)
    timed = ((tile, *tile_us(tile, work, rates)) for tile in tiles)
    before = (("index", index), ("pack", packing))
    candidates = tile_candidates(micro_tile, timed, covered, before)
    paced = replace(dense, pace=max(_LEAST, 1.0 - _LESS_PER_ZERO * (1.0 - covered)))
    return cheapest([*candidates, dense_candidate(paced, 0.0, 0.0, rates)], tuned=False)


def tile_us(tile: Tile, work: ColumnsWork, rates: GpuRates) -> tuple[float, float]:
    """Predicted time of a tile with its launch, and what bytes and operations take at least."""
    columns = -(-work.n // tile.tile_n)
    rows = -(-tile.tile_m // 64) * 64  # of an instruction
    counts = np.asarray(work.counts, np.float64)
    steps = np.ceil(counts / _DEPTH)
    power = 2e-6 * float(steps.sum()) * _DEPTH * rows * columns * tile.tile_n / _CHIP_TFLOPS
    gathered = _BYTES * work.live * (work.n + work.height * columns)
    cached = 1e-3 * gathered / (_CACHED * rates.constant("gather_cached_gbps"))
    own = _BYTES * work.live * work.height
    memory = own + _BYTES * work.n * (work.touched + work.m)
    from_memory = 1e-3 * memory / rates.constant("gather_gbps")
    waves = -(-columns * len(counts) // _SMS)
    alone = waves * (float(steps.mean()) * _STEP_US * tile.tile_n / 256 + _TILE_US)
    limits = np.array([power, cached, from_memory, alone])
    bound = max(cached, from_memory, 2e-6 * work.live * work.height * work.n / _CHIP_TFLOPS)
    together = float(np.sqrt((limits**2).sum()))
    return together + _COLD_US + rates.constant("launch_us"), bound


def _packing_us(work: ColumnsWork) -> float:
    return _PACK_US + 1e-3 * _BYTES * work.live * work.height / _PACK_GBPS[work.height]
