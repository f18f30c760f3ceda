"""What products of live pieces of rows cost on a GPU, and whether dense is cheaper.

A CTA walks all steps of k for each of its tiles, whatever lives, and steps wait for each other: one
costs a turn, a part of the time that a stage takes to be filled, and its live rows. Where more of
them live than a stage has room for, it is filled again while the others wait. Tiles that give slots
to rows walk once for as many of them as have room; turned, a row with one piece takes half a slot.
The constants fit 294 times of kernels on 7 shapes with 0.1 to 10 % live, with a median error of
3 %. Live pieces of an operand whose rows are k are turned first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from ..structs import MicroTile, Plan, Tile
from .gpu_cost import ACT_US, GpuDense, GpuRates, against_dense, tile_candidates
from .gpu_turn import live_us

_BYTES = 2  # of an element
_SMS = 132
_CHIP_TFLOPS = 660.0
_WORD = 32  # rows that ranges are multiples of
MOST_ROWS = 4096  # of a range where slots are given to rows
_MORE = 15  # ranges that are tried beyond the least number
TILE_K = 64  # of a step
_COLUMN_US = 4e-4  # of a step, for each of the tile's columns


@dataclass(frozen=True)
class _Costs:
    """Microseconds: ``start`` of a launch, ``tile`` before its first step; ``empty`` and ``turn``
    of a step, without live rows and with any; ``fill`` of one stage, ``again`` of one that is
    filled again; ``row`` and ``element`` of a live row of a step and of each of its sums; ``write``
    of an element of out."""

    start: float
    tile: float
    empty: float
    turn: float
    fill: float
    row: float
    element: float
    again: float
    write: float

    def step(self, tile: Tile) -> float:
        """A step with live rows, before any of them."""
        return self.turn + _COLUMN_US * tile.tile_n + self.fill / tile.knob("stages")


# Where every row has a sum, and where slots are given to rows.
_COSTS = (
    _Costs(2.49, 0.0, 0.149, 0.122, 0.287, 0.0, 5e-5, 0.197, 9.5e-5),
    _Costs(1.90, 1.58, 0.162, 0.099, 1.705, 1.31e-3, 5e-6, 0.417, 4.7e-5),
)


@dataclass(frozen=True)
class PiecesWork:
    """A product of ``m`` rows, ``counts`` of them live in each step of k, and ``n`` columns.

    ``index_bytes``: what detection reads. ``act``: the activation that tiles end with. ``turns``:
    live pieces are turned first. ``flip``: the product is computed turned.
    """

    m: int
    n: int
    k: int
    counts: tuple[int, ...]
    index_bytes: float
    act: str = "none"
    turns: bool = False
    flip: bool = False

    @cached_property
    def shares(self) -> npt.NDArray[np.float64]:
        """Of every step, the rows that live."""
        return np.asarray(self.counts, np.float64) / max(self.m, 1)

    @cached_property
    def rows(self) -> tuple[float, float, float]:
        """Shares of rows without a live piece, and with one; the mean share of a step."""
        if not self.counts:
            return 1.0, 0.0, 0.0
        shares = np.minimum(self.shares, 1.0 - 1e-9)
        dead = float(np.prod(1.0 - shares))
        return dead, dead * float((shares / (1.0 - shares)).sum()), float(shares.mean())


@lru_cache(maxsize=1024)
def range_of(m: int, n: int, k: int, tile: Tile) -> int:
    """Rows of out that a CTA takes of ``m``: even ranges that begin at whole words of bits.

    Where every row has a sum there are as few ranges as may be. Where slots are given to some, so
    many that CTAs end early: each range costs a walk down the depth of its own.
    """
    slots = tile.knob("slots")
    least = max(1, -(-m // (MOST_ROWS if slots else tile.tile_m)))
    across, costs = -(-n // tile.tile_n), _COSTS[slots]
    walk = costs.tile + -(-k // TILE_K) * costs.step(tile)

    def cost(ranges: int) -> float:
        written = costs.write * tile.tile_n * m / ranges
        return -(-across * ranges // _SMS) * (walk + written)

    ranges = min(range(least, least + _MORE * slots + 1), key=cost)
    return max(-(-m // (ranges * _WORD)), 1) * _WORD


def fair_rows(room: int) -> int:
    """Live rows of a step in the mean, so that few steps have more than the ``room`` of a stage."""
    return 9 * room // 10


def select_pieces(
    micro_tile: MicroTile,
    work: PiecesWork,
    tiles: Sequence[Tile],
    dense: GpuDense,
    rates: GpuRates,
) -> Plan:
    """The cheaper of the best tile and the dense product; parts of a cost as in `select_gpu`."""
    index = rates.index_us(work.index_bytes)
    covered = float(work.shares.mean()) if work.counts else 0.0
    timed = tiles_us(tuple(tiles), work, rates) if tiles else []
    turns = work.turns and work.counts
    turning = live_us(_BYTES * work.m * work.k, work.shares, _BYTES) if turns else 0.0
    before = (("index", index), ("turn", turning))
    candidates = tile_candidates(micro_tile, timed, covered, before)
    return against_dense(candidates, dense, rates, covered)


def tiles_us(
    tiles: tuple[Tile, ...], work: PiecesWork, rates: GpuRates
) -> list[tuple[Tile, float, float]]:
    """Tiles, their predicted times with the launch, and what memory and operations take at
    least."""
    of, shares = _columns(tiles), work.shares
    high = np.array([range_of(work.m, work.n, work.k, tile) for tile in tiles], np.float64)
    walks = np.array([_walks(*each, work) for each in zip(tiles, high, strict=True)])
    # That live of those walked together, step by step.
    rows = shares * (high / walks)[:, None]
    fills = _fills(rows, shares, of["room"])
    some = -np.expm1(-rows)  # of steps: those with a live row
    each = of["empty"] + some * (of["step"] - of["empty"]) + rows * of["row"]
    each = each + of["again"] * (fills - 1.0) * np.maximum(fills - 1.0, 1.0)
    walked = of["tile"] + walks * each.sum(axis=1) + of["write"] * high
    waves = np.ceil(np.ceil(work.m / high) * np.ceil(work.n / of["wide"]) / _SMS)
    live = float(sum(work.counts)) * TILE_K  # elements of lhs
    memory = _BYTES * (live + work.n * work.k + work.m * work.n)
    from_memory = 1e-3 * memory / rates.constant("gather_gbps")
    least = max(from_memory, 2e-6 * live * work.n / _CHIP_TFLOPS)
    act = work.m * work.n * ACT_US.get(work.act, 0.0)
    times = np.maximum(of["start"] + waves * walked, from_memory) + act
    return [(tile, us, least) for tile, us in zip(tiles, times.tolist(), strict=True)]


@lru_cache(maxsize=64)
def _columns(tiles: tuple[Tile, ...]) -> dict[str, npt.NDArray[np.float64]]:
    """What a prediction needs of tiles; what belongs to steps as columns."""
    costs = [_COSTS[tile.knob("slots")] for tile in tiles]
    flat = {
        "start": [c.start for c in costs],
        "tile": [c.tile for c in costs],
        "wide": [t.tile_n for t in tiles],
        "write": [c.write * t.tile_n for c, t in zip(costs, tiles, strict=True)],
    }
    steps = {
        "room": [tile.knob("room") for tile in tiles],
        "empty": [c.empty for c in costs],
        "step": [c.step(t) for c, t in zip(costs, tiles, strict=True)],
        "row": [c.row + c.element * t.tile_n for c, t in zip(costs, tiles, strict=True)],
        "again": [c.again for c in costs],
    }
    found = {name: np.array(values, np.float64) for name, values in flat.items()}
    return found | {name: np.array(v, np.float64)[:, None] for name, v in steps.items()}


def _walks(tile: Tile, high: float, work: PiecesWork) -> int:
    """How often a tile of ``high`` rows goes down the depth, where pieces live independently of
    each other: for as many rows at a time as there are slots for, or as stages have room for."""
    if not tile.knob("slots"):
        return 1
    dead, one, mean = work.rows
    slots = high * (max(1.0 - dead - one, 0.0) + (0.5 * one if work.flip else 0.0))
    slots += math.sqrt(slots * max(1.0 - slots / max(high, 1.0), 0.0))
    return max(math.ceil(slots / tile.tile_m), int(mean * high // fair_rows(tile.knob("room"))) + 1)


def _fills(
    rows: npt.NDArray[np.float64], shares: npt.NDArray[np.float64], room: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """How often a stage is filled for each step, at least once: counts of live rows spread around
    their means as where rows live independently of each other."""
    spread = np.sqrt(np.maximum(rows * (1.0 - shares), 1e-6))
    most = int(((rows + 4.0 * spread) / room).max(initial=0.0))
    full = room * np.arange(1, most + 1)[:, None, None] + 0.5
    # The normal distribution by a logistic one.
    over = 1.0 / (1.0 + np.exp(np.clip(1.702 * (full - rows) / spread, -30.0, 30.0)))
    fills: npt.NDArray[np.float64] = 1.0 + over.sum(axis=0)
    return fills
