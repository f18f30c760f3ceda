"""What limits GPU tiles: multiprocessors, power, the second-level cache and memory.

Tiles are worked on in waves over the multiprocessors, and a wave takes as long as its tiles: steps
of depth 64, then the write of the result. The last one is shorter where its tiles' parts have room
beside each other. Each of the four limits alone gives a time; where several are near each other
they share what there is, so the time is the fourth root of the sum of their fourth powers. Memory
takes longer where the last wave has few tiles, which ask for less than it could give. The constants
were fitted to times of 18 tiles on 110 products of one H200, and of 55 tiles on 9 of few rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..remember import remember
from ..structs import Tile
from .gpu_fit import (
    HEIGHT_STEP,
    Fitting,
    Numbers,
    even_heights,
    filled_groups,
    fitting,
    group_sizes,
)

# 16-bit operations per second (1e12): of one multiprocessor by one and by two warpgroups, and what
# the chip's power allows all of them.
_SM_TFLOPS, _CHIP_TFLOPS = (7.54, 6.36), 1050.0
_BYTES, _STEP = 2, 64  # of an element; depth of a step
# Microseconds of a step at least: of tiles that fit their height, which fetch many weights for few
# rows, for each tile and for each column; of other tiles.
_FEW_US, _FEW_COLUMN_US, _STEP_US = 0.235, 0.00063, 0.16
_GATHER_US = (0.0026, 0.0027)  # of a row in a step; where tiles fit their height
# Of an element of the output, which no product hides: stored by threads, and late.
_WRITE_US, _LATE_US = 4.4e-5, 1.0e-5
# Of memory's rate: tiles that store late have fewer stages on the way, pairs of CTAs wait for each
# other.
_LATE_MEMORY, _PAIR_MEMORY = 0.85, 0.96
_LAST = 0.32  # of the time that memory takes for a wave: what a last one takes at least
_TILE_US = 0.78  # of a tile's start and end
_PART = 0.65  # of a tile's time that half of its rows take, whose weights are as many
# The profile's rates are those of kernels that gather: copies in bulk get more from the cache, and
# products less from memory.
_CACHED, _MEMORY = 1.46, 0.9
# Of one number of rows, in steps of their height, what tiles do is worked out once, in tables that
# grow: at least and at most so many steps, and so many tables. Those of weights that were asked for
# so often are worth one of their own: it takes as long as it saves by then.
_LEAST_TABLED, _TABLED, _TABLES = 256, 4096, 16
_OFTEN, _WEIGHTS = 32, 64


@dataclass(frozen=True)
class Product:
    """Sizes of ``out[live, n] = lhs[live, k] @ rhs`` over ``groups`` weights; ``counts``: live rows
    of each, empty if not known; ``share``: how many of them are of one row that is stored."""

    live: float
    n: int
    k: int
    groups: int = 1
    counts: tuple[int, ...] = ()
    share: int = 1

    @property
    def used(self) -> float:
        """Groups that have rows; without counts, as many as random rows fill."""
        if self.counts:
            return float(len(self.counts) - self.counts.count(0))
        return filled_groups(self.live, self.groups)

    @property
    def bytes_of_memory(self) -> float:
        """Bytes that are read from memory and written to it at least."""
        rows = self.live * (self.k / self.share + self.n)
        return _BYTES * (rows + self.used * self.n * self.k)


@dataclass
class _Weights:
    """What is known of weights of ``n`` columns and depth ``k``. ``prices`` [5, tiles]: blocks of
    columns; steps of depth; and microseconds to store a row of a block, of power for a row, and to
    fetch a row or a column from the cache. ``table``: `TileSizes._priced` of every number of rows
    below its length, once they were ``asked`` for often."""

    prices: Numbers
    table: Numbers
    asked: int = 0


@dataclass(frozen=True)
class TileSizes:
    """Sizes of tiles of one family, each an array [tiles].

    ``height``: live rows, at most where tiles fit it to the count (``fits``); an only group's by
    ``fitting``, for the tiles at the places ``fit``. ``blocks``: those of its rows that rest where
    none is live; ``sharing``: bands of a group that fetch their weights once; ``split``: CTAs that
    share a tile's depth; ``places``: tiles that are worked on at once. ``pace``, ``least``:
    microseconds of a step for a row, and at least; ``write``: of an element that is stored.
    ``slower``: the fourth power of how much slower memory is beside products. ``room``: tiles of a
    last wave whose parts, of so many as rest, have room beside each other.
    """

    width: Numbers
    height: Numbers
    blocks: Numbers
    sharing: Numbers
    split: Numbers
    places: Numbers
    pace: Numbers
    least: Numbers
    write: Numbers
    slower: Numbers
    fits: npt.NDArray[np.bool_]
    fit: npt.NDArray[np.intp]
    fitting: Fitting | None
    room: Numbers
    _tables: dict[int | None, Numbers] = field(default_factory=dict, repr=False, compare=False)
    _weights: dict[tuple[object, ...], _Weights] = field(
        default_factory=dict, repr=False, compare=False
    )

    def roofline(self, work: Product, cached_gbps: float, memory_us: float) -> Numbers:
        """Microseconds of each tile, without a launch: by the rate of gathered rows in the
        second-level cache, of a device's profile, and by what its memory takes for the bytes."""
        others, longer = self._others(work, cached_gbps)
        together: Numbers = np.sqrt(np.sqrt(others + memory_us**4 * self.slower * longer))
        return together

    def _others(self, work: Product, cached_gbps: float) -> Numbers:
        """[2, tiles]: the fourth powers of what limits each tile beside memory, summed, and of how
        much longer memory takes for its last wave."""
        alone = work.groups == 1 and not work.counts
        steps, times = group_sizes(work.live, work.groups, work.counts)
        key = work.n, work.k, alone, cached_gbps
        weights = self._weights.get(key)
        if weights is None:
            made = _Weights(self._prices(work.n, work.k, cached_gbps), np.empty((0, 0)))
            weights = remember(self._weights, key, made, _WEIGHTS)
        weights.asked += 1
        table = weights.table  # another thread may put a shorter one in its place
        most = int(steps[-1]) if steps.size else 0  # they are in order
        if most >= len(table) and most < _TABLED and weights.asked > _OFTEN:
            every = np.arange(_length(most))
            weights.table = table = self._priced(weights.prices, every, work.n, alone)
        if most < len(table):
            found = table.take(steps, axis=0)
        else:
            found = self._priced(weights.prices, steps, work.n, alone)
        if alone:
            return found.reshape(2, -1)
        return self._joined((times @ found).reshape(5, -1)).reshape(2, -1)

    def _prices(self, n: int, k: int, cached_gbps: float) -> Numbers:
        columns = np.ceil(n / self.width)
        return np.stack(
            [
                columns,
                np.ceil(math.ceil(k / _STEP) / self.split),
                self.width * self.write,
                self.width * columns * (2e-6 * k / _CHIP_TFLOPS),
                columns * (1e-3 * _BYTES * k / (_CACHED * cached_gbps)),
            ]
        )

    def _priced(
        self, prices: Numbers, steps: npt.NDArray[np.int64], n: int, alone: bool
    ) -> Numbers:
        """For each number of rows, given in ``steps``: of an only group the answer, [steps, 2 *
        tiles]; of one among several what `_joined` takes, which may be summed, [steps, 5 *
        tiles]."""
        columns, deep, write, power, fetch = prices
        found = self._bands(steps, n if alone else None)
        bands, fetched, rows, step = found.reshape(-1, 4, len(self.width)).swapaxes(0, 1)
        compute = step * deep + rows * write + bands * _TILE_US
        cache = (rows + fetched * self.width) * fetch
        parts = bands, bands * columns, compute, rows * power, cache
        return self._joined(np.stack(parts)) if alone else np.hstack(parts)

    def _bands(self, steps: npt.NDArray[np.int64], n: int | None) -> Numbers:
        """`_worked`, from a table."""
        most = int(steps[-1]) if steps.size else 0
        if most >= _TABLED:
            return self._worked(steps, n)
        table = self._tables.get(n)
        if table is None or most >= len(table):
            every = self._worked(np.arange(_length(most)), n)
            table = remember(self._tables, n, every, _TABLES)
        return table.take(steps, axis=0)

    def _joined(self, parts: Numbers) -> Numbers:
        """`_others`, [..., 2 * tiles], of bands of rows and of tiles; microseconds of all bands,
        one after another, for one block of columns; microseconds by the chip's power and by the
        cache: [5, ..., tiles], which are overwritten."""
        whole, left = np.divmod(parts[1], self.places)
        some = left > 0.0
        waves = whole + np.where(left <= self.room, _PART, 1.0) * some
        filled = np.maximum(parts[1], 1.0) / self.places
        longer = (whole + (_LAST + (1.0 - _LAST) * left / self.places) * some) / filled
        parts[2] *= waves / np.maximum(parts[0], 1.0)
        limits = parts[2:]
        limits *= limits
        limits *= limits
        longer *= longer
        longer *= longer
        return np.concatenate([np.add.reduce(limits), longer], axis=-1)

    def _worked(self, steps: npt.NDArray[np.int64], n: int | None) -> Numbers:
        """Of each number of rows, given in ``steps``, [steps, 4 * tiles]: bands of rows, how many
        fetch weights, their rows, and microseconds of one step in each. The rows are of one among
        several groups, or, with ``n`` columns, of an only one."""
        sizes = (HEIGHT_STEP * steps).astype(np.float64)[:, None]
        if n is None:
            even = even_heights(sizes, np.ceil(sizes / self.height))
            high = np.where(self.fits, even, self.height)
        else:
            high = np.repeat(self.height[None], len(sizes), 0)
            if self.fitting is not None:
                high[:, self.fit] = self.fitting.heights(sizes[:, 0], n)
        whole = np.floor(sizes / high)
        rest = sizes - whole * high
        block = high / self.blocks
        rows = np.ceil(rest / block) * block
        some = rest > 0.0
        step = np.maximum(rows * self.pace, self.least) * some
        full = np.maximum(high * self.pace, self.least)
        bands = whole + some
        fetched = np.ceil(bands / self.sharing)
        return np.hstack([bands, fetched, whole * high + rows, whole * full + step])


def _length(most: int) -> int:
    """Of a table that has ``most``."""
    return max(_LEAST_TABLED, 1 << most.bit_length())


def tile_sizes(tiles: Sequence[Tile]) -> TileSizes:
    """The sizes of tiles of one family, in their order."""
    tall = np.array([tile.tile_m for tile in tiles], np.float64)
    width = np.array([tile.tile_n for tile in tiles], np.float64)
    cluster = np.array([tile.knob("cluster") for tile in tiles], np.float64)
    consumers = np.array([tile.knob("consumers") for tile in tiles], np.float64)
    sms = float(tiles[0].knob("sms"))
    fits = np.array([bool(dict(tile.knobs).get("flip", 0)) for tile in tiles])
    late = np.array([bool(dict(tile.knobs).get("late", 0)) for tile in tiles])
    split = np.where(fits, cluster, 1.0)
    element = 2e-6 * _STEP / np.where(consumers == 1, *_SM_TFLOPS)
    fit = np.flatnonzero(fits)
    blocks, places = np.where(fits, 1.0, consumers), sms / split
    memory = _MEMORY * np.where(late, _LATE_MEMORY, 1.0)
    memory *= np.where(cluster > split, _PAIR_MEMORY, 1.0)
    return TileSizes(
        width=width,
        height=tall,
        blocks=blocks,
        sharing=cluster / split,
        split=split,
        places=places,
        pace=np.maximum(width * element, np.where(fits, _GATHER_US[1], _GATHER_US[0])),
        least=np.where(fits, _FEW_US + _FEW_COLUMN_US * width, _STEP_US),
        write=np.where(late, _LATE_US, _WRITE_US),
        slower=memory**-4,
        fits=fits,
        fit=fit,
        fitting=fitting(tall[fit], width[fit], sms / cluster[fit]) if fit.size else None,
        room=np.where(blocks > 1.0, places / blocks, -1.0),
    )
