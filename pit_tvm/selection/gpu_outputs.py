"""What products cost on a GPU of which only live rows of every slot of columns are computed.

Live rows and a slot's weights come from the second-level cache, to which each was brought once from
memory. Tiles are dealt out in rounds of one for every multiprocessor, slots of high tiles first. A
round takes what its bytes take, and at each step of the depth a wait: the last one is short of
bytes, but waits like all others. Two multiprocessors may share a tile's depth, and each waits for
half of it; between two of their tiles nothing is under way, so they do so in an only round. The
constants fit 102 times of 4096^3 and 8192x8192x128 with 1 to 50 % of the blocks live (64x64 and
128x128, one H200), with a median error of 4 %. Costs are in microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..structs import MicroTile, Plan, Tile
from .gpu_cost import ACT_US, GpuDense, GpuRates, against_dense, tile_candidates
from .gpu_fit import Numbers, even_heights
from .gpu_turn import whole_us

_BYTES = 2  # of an element
_STEP = 64  # of the depth
_CACHED = 1.76  # of the rate of gathered rows, which tells waiting as well
_WAIT_US = 1.36  # for a step's operands; as many stages as there are wait at once
_JOIN = 1.25  # power that joins the two: they add up, nearly
_TILE_US = 0.91  # of a tile's begin and end
_SHARE_US = 1.0  # of sums that two CTAs exchange
_START_US = 3.9  # of a kernel's
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

    @cached_property
    def live(self) -> float:
        """Live rows of all slots."""
        return float(self.live_rows.sum())

    @cached_property
    def live_rows(self) -> Numbers:
        """Live rows of every slot."""
        return np.array(self.counts, np.float64)

    @cached_property
    def bytes_of_memory(self) -> float:
        """Bytes read and written at least, if rows live independently of each other."""
        share = self.live_rows / max(self.m, 1)
        rows = self.m * (1.0 - float(np.prod(1.0 - share)))
        columns = self.slot * float(np.count_nonzero(share))
        return _BYTES * (self.k * (rows + columns) + self.live * self.slot)

    @cached_property
    def _cuts(self) -> dict[tuple[int, int], _Cut]:
        return {}

    def cut(self, tile: Tile) -> _Cut:
        """The output in tiles, however they are computed."""
        size = tile.tile_m, tile.tile_n
        found = self._cuts.get(size)
        if found is None:
            bands = np.ceil(self.live_rows / tile.tile_m)
            tiles = bands * (self.slot / tile.tile_n)
            heights = even_heights(self.live_rows, bands)
            found = self._cuts[size] = _Cut(tiles, heights, float(tiles.sum()))
        return found


@dataclass(frozen=True)
class _Cut:
    """An output in tiles: of every slot how many, and how high they are; and ``number`` in all."""

    tiles: Numbers
    heights: Numbers
    number: float

    @cached_property
    def dealt(self) -> tuple[Numbers, Numbers]:
        """Tiles, and their heights, in all slots before one, high tiles first; and in all."""
        order = np.argsort(-self.heights, kind="stable")
        dealt, high = np.zeros((2, len(order) + 1))
        self.tiles[order].cumsum(out=dealt[1:])
        (self.tiles * self.heights)[order].cumsum(out=high[1:])
        return dealt, high

    def rounds(self, places: int) -> tuple[Numbers, Numbers]:
        """How many tiles each round of so many has, and how high they are in all."""
        if 0 < self.number <= places:
            return np.array([self.number]), np.array([self.tiles @ self.heights])
        dealt, high = self.dealt
        ends = np.minimum(np.arange(0.0, dealt[-1] + places, places), dealt[-1])
        summed = np.interp(ends, dealt, high)
        return ends[1:] - ends[:-1], summed[1:] - summed[:-1]


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
    times = ((tile, *tile_us(tile, work, rates)) for tile in tiles if _usable(tile, work))
    timed = ((tile, product + act, bound) for tile, product, bound in times)
    turning = whole_us(_BYTES * work.m * work.k) if work.turns else 0.0
    beside = (("index", index), ("turn", turning)), (("output", clear),)
    candidates = tile_candidates(micro_tile, timed, covered, *beside)
    return against_dense(candidates, dense, rates)


def _usable(tile: Tile, work: OutputsWork) -> bool:
    """Whether multiprocessors that share tiles have one round of them; those that do not always."""
    return tile.knob("cluster") == 1 or work.cut(tile).number <= _places(tile)


def _places(tile: Tile) -> int:
    """Tiles of a round."""
    return tile.knob("sms") // tile.knob("cluster")


def tile_us(tile: Tile, work: OutputsWork, rates: GpuRates) -> tuple[float, float]:
    """Predicted time of a tile with its launch, and what bytes and operations take at least."""
    split = tile.knob("cluster")
    rounds, high = work.cut(tile).rounds(_places(tile))
    cached_gbps = _CACHED * rates.constant("gather_cached_gbps")
    cached = 1e-3 * _BYTES * work.k * (high + rounds * tile.tile_n) / cached_gbps
    waiting = -(-work.k // (_STEP * split)) * _WAIT_US / tile.knob("stages")
    ends = _TILE_US + _SHARE_US * (split - 1)
    alone = float(((cached**_JOIN + waiting**_JOIN) ** (1.0 / _JOIN) + ends).sum())
    from_memory = 1e-3 * work.bytes_of_memory / rates.constant("gather_gbps")
    operations = 2e-6 * work.live * work.slot * work.k / _CHIP_TFLOPS
    limits = (alone, from_memory, operations)
    together = sum(limit**_POWER for limit in limits) ** (1.0 / _POWER)
    bound = max(float(cached.sum()), from_memory, operations, rates.constant("launch_us"))
    return together + _START_US + rates.constant("launch_us"), bound
