"""What products over live columns of bands of rows cost on a GPU, and whether dense is cheaper.

Every band gathers rows of the dense operand by its own list, from the second-level cache: a band of
h rows does h operations per byte of them, so bytes from the cache bound what low bands take. Costs
are in microseconds; four limits are joined by the power 1 / `_JOINED` of the sum of their powers,
which is little less than their sum: a tile seldom waits for all at once. The constants fit 240
times of calls of three shapes with 1 to 50 % live, at three heights, with six tiles: their error is
2.3 % in the median, and 9 % at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..structs import MicroTile, Plan, Tile
from .gpu_cost import GpuDense, GpuRates, against_dense, tile_candidates
from .gpu_turn import whole_us

_BYTES = 2  # of an element
_SMS = 132
_JOINED = 1.25
# Of the instructions' rows, used or not, and of the cache, in multiples of the device's profile:
# rates as they are joined, beyond what the chip reaches, and those that it reaches.
_TFLOPS, _CACHED = 942.0, 2.58
_BOUND_TFLOPS, _BOUND_CACHED = 687.0, 1.45
_DEPTH = 16  # of an instruction
# Time of an instruction's depth in a tile of no columns, and what comes to it for 256.
_STEP_US, _STEP_WIDE_US = 0.0193, 0.0159
# CTAs with more to do than others: standard deviations of a band's steps, by the root of waves.
_LATE = 7.86
# With one list for all bands: steps that an exchange of a tile's sums must be worth, and the most
# equal parts of a tile.
EXCHANGE, MOST_PARTS = 8, 8
# There: a step of a tile without columns, what 256 columns add to it, and adding the sums that one
# part of a tile has in 256 columns. They fit 63 products of 7 shapes, 10 to 100 % live, within 6 %
# on average.
_RANGE_US, _WIDE_US, _ADD_US = 0.155, 0.839, 2.67
_OUTER_COLS = 48  # a tile of one of several groups takes as long as if it had so many more columns
_COLD_US = 0.5  # of operands that are not cached: detection has filled the caches with the mask
_PACK_US, _PACK_GBPS = 4.0, {32: 1060.0, 64: 800.0, 128: 750.0}  # of live columns, by height


@dataclass(frozen=True)
class ColumnsWork:
    """A product ``out[m, n]`` of bands of ``height`` rows, ``counts`` live columns of k each.

    ``index_bytes``: what detection reads. ``packed``: live columns are packed first. ``turns``: rhs
    is turned first. ``common``: the one count is that of all bands, which are as high as a tile.
    """

    m: int
    n: int
    k: int
    height: int
    counts: tuple[int, ...]
    index_bytes: float
    packed: bool
    turns: bool = False
    common: bool = False

    def of_tile(self, tile: Tile) -> ColumnsWork:
        """The same with a count for each band, also where they have one in common."""
        if not self.common:
            return self
        bands = max(-(-self.m // tile.tile_m), 1)
        return replace(self, height=tile.tile_m, counts=self.counts * bands)

    @property
    def live(self) -> float:
        """Live columns of all bands."""
        return float(sum(self.counts))

    @property
    def touched(self) -> float:
        """Rows of rhs that some band reads, if columns live independently of each other."""
        if self.common:
            return float(self.counts[0])
        share = np.asarray(self.counts, np.float64) / max(self.k, 1)
        return self.k * (1.0 - float(np.prod(1.0 - share)))


def select_columns(
    micro_tile: MicroTile,
    work: ColumnsWork,
    tiles: Sequence[Tile],
    dense: GpuDense | None,
    rates: GpuRates,
) -> Plan:
    """The cheaper of the best tile and the dense product, if that gives what is promised; parts of
    a cost as in `select_gpu`, and what packing takes."""
    index = rates.index_us(work.index_bytes)
    packing = _packing_us(work) if work.packed else 0.0
    covered = work.live / max(len(work.counts) * work.k, 1)
    timed = ((tile, *tile_us(tile, work, rates)) for tile in tiles)
    turning = whole_us(_BYTES * work.n * work.k) if work.turns else 0.0
    before = (("index", index), ("pack", packing), ("turn", turning))
    candidates = tile_candidates(micro_tile, timed, covered, before)
    return against_dense(candidates, dense, rates, covered)


def tile_us(tile: Tile, work: ColumnsWork, rates: GpuRates) -> tuple[float, float]:
    """Predicted time of a tile with its launch, and what bytes and operations take at least."""
    work = work.of_tile(tile)
    columns = -(-work.n // tile.tile_n)
    rows = -(-tile.tile_m // 64) * 64  # of an instruction
    counts = np.asarray(work.counts or (0,), np.float64)  # without bands as if nothing lives
    steps = np.ceil(counts / _DEPTH)
    power = 2e-6 * float(steps.sum()) * _DEPTH * rows * columns * tile.tile_n / _TFLOPS
    gathered = _BYTES * work.live * (work.n + work.height * columns)
    cached = 1e-3 * gathered / rates.constant("gather_cached_gbps")
    own = _BYTES * work.live * work.height
    memory = own + _BYTES * work.n * (work.touched + work.m)
    from_memory = 1e-3 * memory / rates.constant("gather_gbps")
    waves = -(-columns * len(counts) // _SMS)
    most = waves * float(steps.mean()) + _LATE * waves**0.5 * float(steps.std())
    alone = most * (_STEP_US + _STEP_WIDE_US * tile.tile_n / 256)
    limits = np.array([power, cached / _CACHED, from_memory, alone])
    operations = 2e-6 * work.live * work.height * work.n / _BOUND_TFLOPS
    bound = max(cached / _BOUND_CACHED, from_memory, operations)
    us = float((limits**_JOINED).sum() ** (1 / _JOINED)) + _COLD_US
    if work.common:
        us = _ranges_us(tile, columns * len(counts), counts[0])
    return us + rates.constant("launch_us"), bound


def _ranges_us(tile: Tile, tiles: int, live: float) -> float:
    """Time of the CTA that has most to do where CTAs share out the depth."""
    steps, added = shared_out(tiles, max(1, -(-int(live) // tile.tile_k)))
    wide = tile.tile_n / 256
    return steps * (_RANGE_US + wide * _WIDE_US) + added * wide * _ADD_US


def shared_out(tiles: int, units: int) -> tuple[int, int]:
    """Steps of the CTA that has most to do, and parts whose sums it adds.

    As `pit_tvm.schedules.hopper_ranges` shares out ``tiles`` of ``units`` steps: whole ones, then
    equal parts, and what is left of a tile behind these if that is worth the exchange.
    """
    whole, cut = divmod(tiles, _SMS)
    if not cut:
        return whole * units, 0
    each = max(-(-cut * units // _SMS), min(units, EXCHANGE), -(-units // MOST_PARTS))
    parts, rest = divmod(units, each)
    more = -(-each // max(rest, 1))
    even = -(-units // parts)
    if each + EXCHANGE * more < even:
        return whole * units + each, parts - 1 + more
    return whole * units + even, -(-units // even) - 1


def _packing_us(work: ColumnsWork) -> float:
    return _PACK_US + 1e-3 * _BYTES * work.live * work.height / _PACK_GBPS[work.height]


def outer_tile(tiles: Sequence[Tile], columns: int) -> Tile:
    """The tile for products of groups, of so many columns each. Other sizes decide nothing: a tile
    of fewer columns reads as many rows of lhs for less."""
    return min(tiles, key=lambda tile: -(-columns // tile.tile_n) * (tile.tile_n + _OUTER_COLS))
