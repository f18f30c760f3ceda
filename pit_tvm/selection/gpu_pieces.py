"""What products of live pieces of rows cost on a GPU, and whether dense is cheaper.

A CTA walks all steps of k for each of its tiles, whatever lives, and steps wait for each other: one
costs a turn, a part of the time that a stage takes to be filled, and its live rows. Where more of
them live than a stage has room for, it is filled again while the others wait. The constants fit 76
times of kernels on 3 shapes with up to 20 % live, with a median error of 4 %. Live pieces of an
operand whose rows are k are turned first: what surrounds them is read, 16 of them at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..structs import MicroTile, Plan, Tile
from .gpu_cost import ACT_US, GpuDense, GpuRates, cheapest, dense_candidate, tile_candidates

_BYTES = 2  # of an element
_SMS = 132
_CHIP_TFLOPS = 660.0
_WORD = 32  # rows that ranges are multiples of
_START_US = 4.0  # with the launch
_EMPTY_US, _TURN_US, _FILL_US = 0.13, 0.068, 0.9  # of a step, and of filling one stage
_COLUMN_US = 4e-4  # of a step, for each of the tile's columns
_ROW_US, _ELEMENT_US = 1.3e-3, 2.6e-5  # of a live row of a step, and of each of its sums
_AGAIN_US = 0.27  # of a stage that is filled again
_WRITE_US = 5.5e-5  # of an element of out
_SECTOR = 16  # pieces that memory gives at once where they are turned


@dataclass(frozen=True)
class PiecesWork:
    """A product of ``m`` rows, ``counts`` of them live in each step of k, and ``n`` columns.

    ``index_bytes``: what detection reads. ``act``: the activation that tiles end with. ``turns``:
    live pieces are turned first.
    """

    m: int
    n: int
    k: int
    counts: tuple[int, ...]
    index_bytes: float
    act: str = "none"
    turns: bool = False

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """Of every step, the rows that live."""
        return np.asarray(self.counts, np.float64) / max(self.m, 1)


def range_of(m: int, rows: int) -> int:
    """Rows of out that a CTA takes where it can hold ``rows``: even ranges of ``m``, which begin at
    whole words of bits."""
    ranges = max(1, -(-m // rows))
    return -(-m // (ranges * _WORD)) * _WORD


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
    timed = ((tile, *tile_us(tile, work, rates)) for tile in tiles)
    size = _BYTES * work.m * work.k
    turning = rates.turn_us(size, _moved(work)) if work.turns else 0.0
    before = (("index", index), ("turn", turning))
    candidates = tile_candidates(micro_tile, timed, covered, before)
    whole = replace(dense, zeros=1.0 - covered)
    return cheapest([*candidates, dense_candidate(whole, 0.0, 0.0, rates)], tuned=False)


def tile_us(tile: Tile, work: PiecesWork, rates: GpuRates) -> tuple[float, float]:
    """Predicted time of a tile with its launch, and what memory and operations take at least."""
    knobs = dict(tile.knobs)
    high = range_of(work.m, tile.tile_m)
    rows = work.shares * high  # that live of a range, step by step
    fills = _fills(rows, work.shares, knobs["room"])
    step = _TURN_US + _COLUMN_US * tile.tile_n + _FILL_US / knobs["stages"]
    each = np.where(rows > 0, step, _EMPTY_US)
    each = each + rows * (_ROW_US + _ELEMENT_US * tile.tile_n)
    each = each + _AGAIN_US * (fills - 1.0) * np.maximum(fills - 1.0, 1.0)
    tiles = -(-work.m // max(high, 1)) * -(-work.n // tile.tile_n)
    waves = -(-tiles // _SMS)
    alone = _START_US + waves * (float(each.sum()) + _WRITE_US * high * tile.tile_n)
    live = float(sum(work.counts)) * tile.tile_k  # elements of lhs
    memory = _BYTES * (live + work.n * work.k + work.m * work.n)
    from_memory = 1e-3 * memory / rates.constant("gather_gbps")
    least = 2e-6 * live * work.n / _CHIP_TFLOPS
    act = work.m * work.n * ACT_US.get(work.act, 0.0)
    return max(alone, from_memory) + act, max(from_memory, least)


def _moved(work: PiecesWork) -> float:
    """Shares of pieces that are read, and written, where they live independently of each other."""
    moved = 1.0 - (1.0 - work.shares) ** _SECTOR + work.shares
    return float(moved.mean()) if work.counts else 0.0


def _fills(
    rows: npt.NDArray[np.float64], shares: npt.NDArray[np.float64], room: int
) -> npt.NDArray[np.float64]:
    """How often a stage is filled for each step, at least once: counts of live rows spread around
    their means as where rows live independently of each other."""
    spread = np.sqrt(np.maximum(rows * (1.0 - shares), 1e-6))
    most = int(rows.max(initial=0.0) + 4.0 * float(spread.max(initial=0.0))) // room
    full = room * np.arange(1, most + 1)[:, None] + 0.5
    # The normal distribution by a logistic one.
    over = 1.0 / (1.0 + np.exp(np.clip(1.702 * (full - rows) / spread, -30.0, 30.0)))
    fills: npt.NDArray[np.float64] = 1.0 + over.sum(axis=0)
    return fills
