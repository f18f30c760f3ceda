"""What products of live blocks along k cost on a GPU, and whether dense is cheaper.

Every band reads live rows or columns of the operand that is not sparse from the second-level cache:
a band of h does h operations for each byte of them. Arithmetic, bytes from the cache, bytes from
memory and the time that tiles take one after the other hide most of each other: costs, in
microseconds, are joined by the power 1 / `_JOINED` of the sum of their powers. The constants fit
139 times of calls, index and all, on 3 shapes with 1 to 50 % live on either side, with a median
error of 4 % (tuning_logs/h200-sm_90a).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..structs import MicroTile, Plan, Tile
from .gpu_cost import ACT_US, GpuDense, GpuRates, against_dense, tile_candidates

_BYTES = 2  # of an element
_SMS = 132
_CHIP_TFLOPS = 660.0
_TFLOPS, _CACHED_GBPS = 671.0, 17700.0
_STEP_US, _WIDE_STEP_US = 0.031, 0.4  # of a tile's step, and for every 256 that it covers
_TILE_US = 0.32  # of a tile's write
_JOINED = 2.5
_FOLD_US, _FOLD_GBPS = 0.75, 2800.0  # of reading a mask that is none of blocks


@dataclass(frozen=True)
class BlocksWork:
    """A product ``out[m, n]`` with bands of ``height``, ``counts`` live steps of k each.

    A step is ``step`` of k. ``of_lhs``: bands are rows of lhs, else columns of rhs.
    ``index_bytes``: what detection reads, 0 if the kernel reads the block mask itself. ``act``: the
    activation that tiles end with.
    """

    m: int
    n: int
    k: int
    height: int
    step: int
    counts: tuple[int, ...]
    of_lhs: bool
    index_bytes: float
    act: str = "none"

    @property
    def across(self) -> int:
        """Extent of the operand that is not sparse, beside k."""
        return self.n if self.of_lhs else self.m

    @property
    def shares(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Of every band, what lives."""
        return np.asarray(self.counts, np.float64) * self.step / max(self.k, 1)


def select_blocks(
    micro_tile: MicroTile,
    work: BlocksWork,
    tiles: Sequence[Tile],
    dense: GpuDense,
    rates: GpuRates,
) -> Plan:
    """The cheaper of the best tile and the dense product; parts of a cost as in `select_gpu`."""
    index = _FOLD_US + 1e-3 * work.index_bytes / _FOLD_GBPS if work.index_bytes else 0.0
    covered = min(1.0, float(work.shares.sum()) / max(len(work.counts), 1))
    timed = ((tile, *tile_us(tile, work, rates)) for tile in tiles)
    candidates = tile_candidates(micro_tile, timed, covered, (("index", index),))
    return against_dense(candidates, dense, rates, covered)


def tile_us(tile: Tile, work: BlocksWork, rates: GpuRates) -> tuple[float, float]:
    """Predicted time of a tile with its launch, and what memory and operations take at least."""
    high = -(-tile.tile_m // 64) * 64 if work.of_lhs else tile.tile_m  # of an instruction
    columns = -(-work.across // tile.tile_n)
    steps = float(sum(work.counts))
    live = steps * work.step  # of k, of all bands
    power = 2e-6 * live * high * columns * tile.tile_n / _TFLOPS
    gathered = 1e-3 * _BYTES * live * (work.across + work.height * columns)
    touched = work.k * (1.0 - float(np.prod(1.0 - np.minimum(work.shares, 1.0))))
    memory = _BYTES * (live * work.height + work.across * touched + work.m * work.n)
    from_memory = 1e-3 * memory / rates.constant("gather_gbps")
    waves = -(-columns * len(work.counts) // _SMS)
    step = _STEP_US + _WIDE_STEP_US * tile.tile_n / 256
    alone = waves * (steps / max(len(work.counts), 1) * step + _TILE_US)
    limits = np.array([power, gathered / _CACHED_GBPS, from_memory, alone])
    together = float((limits**_JOINED).sum() ** (1.0 / _JOINED))
    act = work.m * work.n * ACT_US.get(work.act, 0.0)
    least = 2e-6 * live * work.height * work.across / _CHIP_TFLOPS
    return together + act + rates.constant("launch_us"), max(from_memory, least)
