"""What products cost on a GPU of which only live rows of every slot of columns are computed.

Live rows and a slot's weights come from the second-level cache, to which each was brought once from
memory: bytes through the cache bound most patterns, and the tallest tiles those of few tiles. The
constants fit times of 4096^3 with 1 to 50 % of the blocks live (64x64, one H200). Costs are in
microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..structs import MicroTile, Plan, Tile
from .gpu_cost import ACT_US, GpuDense, GpuRates, cheapest, dense_candidate, tile_candidates
from .gpu_fit import even_heights

_BYTES = 2  # of an element
_STEP = 64  # of the depth
_CACHED = 1.25  # of the rate of gathered rows: what is brought to the cache counts as well
_SM_GBPS = 123.0  # that reach one multiprocessor
_WAIT_US = 1.42  # for a step's operands; as many stages as there are wait at once
_TILE_US = 1.18  # of a tile's begin and end
_START_US, _LAST_WAVE = 3.2, 1.14  # of a kernel's; of a wave, where there are several
_CHIP_TFLOPS = 820.0
_POWER = 4  # that joins limits: the largest counts for most


@dataclass(frozen=True)
class OutputsWork:
    """A product ``m x n x k`` in slots of ``slot`` columns, ``counts`` live rows in each.

    ``index_bytes``: what detection reads. ``clears``: the output is made zero before. ``act``: the
    activation that tiles end with. ``turns``: lhs is turned first.
    """

    m: int
    n: int
    k: int
    slot: int
    counts: tuple[int, ...]
    index_bytes: float
    clears: bool = False
    act: str = "none"
    turns: bool = False

    @property
    def live(self) -> float:
        """Live rows of all slots."""
        return float(sum(self.counts))

    def bytes_of_memory(self) -> float:
        """Bytes read and written at least, if rows live independently of each other."""
        share = np.asarray(self.counts, np.float64) / max(self.m, 1)
        rows = self.m * (1.0 - float(np.prod(1.0 - share)))
        columns = self.slot * float(np.count_nonzero(share))
        return _BYTES * (self.k * (rows + columns) + self.live * self.slot)


def select_outputs(
    micro_tile: MicroTile,
    work: OutputsWork,
    tiles: Sequence[Tile],
    dense: GpuDense | None,
    rates: GpuRates,
) -> Plan:
    """The cheaper of the best tile and the dense product, None where that would write too much;
    parts of a cost as in `select_gpu`."""
    index = rates.index_us(work.index_bytes)
    clear = rates.store_us(_BYTES * work.m * work.n) if work.clears else 0.0
    covered = work.live / max(len(work.counts) * work.m, 1)
    act = work.live * work.slot * ACT_US.get(work.act, 0.0)
    times = ((tile, *tile_us(tile, work, rates)) for tile in tiles)
    timed = ((tile, product + act, bound) for tile, product, bound in times)
    turning = rates.turn_us(_BYTES * work.m * work.k) if work.turns else 0.0
    beside = (("index", index), ("turn", turning)), (("output", clear),)
    candidates = tile_candidates(micro_tile, timed, covered, *beside)
    if dense is not None:
        candidates.append(dense_candidate(dense, 0.0, 0.0, rates))
    return cheapest(candidates, tuned=False)


def tile_us(tile: Tile, work: OutputsWork, rates: GpuRates) -> tuple[float, float]:
    """Predicted time of a tile with its launch, and what bytes and operations take at least."""
    counts = np.asarray(work.counts, np.float64)
    across, places = work.slot / tile.tile_n, tile.knob("sms")
    bands = np.ceil(counts / tile.tile_m)
    tiles, heights = float(bands.sum()) * across, even_heights(counts, bands)
    edges = work.live * across + tiles * tile.tile_n
    memory = work.bytes_of_memory()
    cached = 1e-3 * (_BYTES * work.k * edges + memory)
    cached /= _CACHED * rates.constant("gather_cached_gbps")
    from_memory = 1e-3 * memory / rates.constant("gather_gbps")
    if tiles > places:  # they are dealt out high and low
        waves, high = tiles / places + _LAST_WAVE, float((heights * bands).sum()) * across / tiles
    else:
        waves, high = min(tiles, 1.0), float(heights.max(initial=0.0))
    step = 1e-3 * _BYTES * _STEP * (high + tile.tile_n) / _SM_GBPS
    steps = -(-work.k // _STEP)
    alone = waves * (steps * max(step, _WAIT_US / tile.knob("stages")) + _TILE_US)
    operations = 2e-6 * work.live * work.slot * work.k / _CHIP_TFLOPS
    limits = np.array([cached, from_memory, alone, operations])
    together = float((limits**_POWER).sum() ** (1.0 / _POWER))
    bound = max(cached, from_memory, operations, rates.constant("launch_us"))
    return together + _START_US + rates.constant("launch_us"), bound
