"""Cover statistics: how much of an operand the live micro-tiles of a pattern cover.

The covered density of a micro-tile is the share of micro-tiles that are live; it is at least the
density of the pattern, and it is what a sparse product costs relative to the dense one.
(PIT, SOSP'23, section 3: the cover that Algorithm 1 compares.) Everything here is numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from ..errors import ShapeError, mismatch

WINDOW = 64  # rows and columns of one sampled window
WINDOW_EXTENTS = (1, 8, 16, 32, 64)

# The micro-tiles whose covered densities are sampled at run time, in the order of the samples.
SAMPLE_EXTENTS: tuple[tuple[int, int], ...] = (
    (1, 1),
    (1, 32),
    (1, 64),
    (8, 1),
    (16, 1),
    (32, 1),
    (64, 1),
    (16, 16),
    (32, 32),
    (32, 64),
    (64, 64),
)

BUCKET_STEP = 1.12  # ratio of two neighbouring buckets' densities
_LOG_STEP = math.log(BUCKET_STEP)
EMPTY_BUCKET = 255  # of patterns without a live micro-tile, and of densities below 3e-13


@dataclass(frozen=True)
class Cover:
    """Covered densities of one operand, by the micro-tile's extents in its last two dimensions.

    ``densities``: ``((a, b), density)`` pairs, extents of at least 1, densities from 0 to 1.
    """

    densities: tuple[tuple[tuple[int, int], float], ...]

    @classmethod
    def from_samples(
        cls,
        densities: Iterable[float],
        extents: Sequence[tuple[int, int]] = SAMPLE_EXTENTS,
    ) -> Cover:
        """Cover from densities in the order of ``extents``, as samples have them."""
        return cls(tuple(zip(extents, (float(d) for d in densities), strict=True)))

    @classmethod
    def from_windows(cls, windows: npt.NDArray[np.bool_]) -> Cover:
        """Cover from windows of the mask, bool ``[samples, 64, 64]``: `window_densities`."""
        table = window_densities(windows)
        pairs = [(a, b) for a in WINDOW_EXTENTS for b in WINDOW_EXTENTS]
        return cls.from_samples(table.reshape(-1), pairs)

    @classmethod
    def from_blocks(
        cls,
        blocks: tuple[int, int],
        density: float,
        extents: Sequence[tuple[int, int]] = SAMPLE_EXTENTS,
    ) -> Cover:
        """Cover of independent blocks of which the share ``density`` is live: `block_density`."""
        return cls.from_samples((block_density(e, blocks, density) for e in extents), extents)

    def density(self, extents: tuple[int, int]) -> float:
        """Covered density of a micro-tile of ``extents``, estimated if it was not sampled.

        The estimate takes the nearest sampled micro-tile inside and the nearest one around, and
        is geometric in the number of elements between them; with only one of the two it assumes
        that pieces are live independently. Covered density grows with the micro-tile.

        ShapeError if an extent is below 1: a whole dimension has no sampled extent.
        """
        known = dict(self.densities)
        return reading(extents, tuple(known))(list(known.values()))

    @property
    def buckets(self) -> tuple[int, ...]:
        """Buckets of all densities: a key under which decisions can be kept."""
        return tuple(bucket(density) for _, density in self.densities)


@lru_cache(maxsize=1024)
def reading(
    extents: tuple[int, int], sampled: tuple[tuple[int, int], ...] = SAMPLE_EXTENTS
) -> Callable[[Sequence[float]], float]:
    """How `Cover.density` follows from densities in the order of ``sampled``, looked up once.

    ShapeError if an extent is below 1.
    """
    if min(extents) < 1:
        raise ShapeError(mismatch("extents", "extents of at least 1", extents))
    if extents in sampled:
        return itemgetter(sampled.index(extents))
    areas = [math.prod(e) for e in sampled]
    inside = [i for i, e in enumerate(sampled) if e[0] <= extents[0] and e[1] <= extents[1]]
    around = [i for i, e in enumerate(sampled) if e[0] >= extents[0] and e[1] >= extents[1]]
    if not inside:
        return lambda d: min((d[i] for i in around), default=1.0)
    below = max(areas[i] for i in inside)
    above = min((areas[i] for i in around), default=0)
    lows, highs = (
        [i for i in some if areas[i] == area] for some, area in ((inside, below), (around, above))
    )
    pieces = math.prod(extents) / below
    share = math.log(pieces) / math.log(above / below) if around else 0.0

    def density(d: Sequence[float]) -> float:
        low, least = max(d[i] for i in lows), max(d[i] for i in inside)
        independent = max(least, 1.0 - (1.0 - low) ** pieces)
        if not around:
            return independent
        high, most = min(d[i] for i in highs), min(d[i] for i in around)
        between = low ** (1 - share) * high**share
        return min(most, independent if low == 0.0 else max(least, between))

    return density


def index_density(count: npt.NDArray[np.int32], rows: int) -> float:
    """Exact covered density of an index: ``count`` per slot, of ``rows`` positions on the axis."""
    total = count.size * rows
    return float(count.sum(dtype=np.int64)) / total if total else 0.0


def window_densities(windows: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Covered densities in sampled windows of a mask.

    Parameters
    ----------
    windows
        bool ``[samples, 64, 64]``, cut from the mask at multiples of 64.

    Returns
    -------
    float64 ``[5, 5]``
        Entry ``[i, j]`` belongs to extents ``WINDOW_EXTENTS[i]`` x ``WINDOW_EXTENTS[j]``.

    Raises
    ------
    ShapeError
        The windows have another shape.
    """
    if windows.ndim != 3 or windows.shape[1:] != (WINDOW, WINDOW):
        raise ShapeError(mismatch("windows", f"shape (samples, {WINDOW}, {WINDOW})", windows.shape))
    table = np.zeros((len(WINDOW_EXTENTS), len(WINDOW_EXTENTS)))
    if not len(windows):
        return table
    live = windows != 0
    for i, a in enumerate(WINDOW_EXTENTS):
        lines = live.reshape(len(live), WINDOW // a, a, WINDOW).any(axis=2)
        for j, b in enumerate(WINDOW_EXTENTS):
            table[i, j] = lines.reshape(*lines.shape[:2], WINDOW // b, b).any(axis=3).mean()
    return table


def block_density(
    extents: Sequence[int],
    blocks: Sequence[int],
    density: float,
    shape: Sequence[int] | None = None,
) -> float:
    """Covered density of a micro-tile on a pattern of independent blocks.

    ``1 - (1 - density) ** touched``, where ``touched`` is the number of blocks that a micro-tile
    touches on average. Both lie on their own grids from 0 on; edges are not looked at.

    Parameters
    ----------
    extents, blocks
        Extents of the micro-tile and of the blocks, one per dimension. Extent 0, the whole
        dimension, needs ``shape``, the operand's.
    density
        Share of the blocks that are live.

    Raises
    ------
    ShapeError
        Numbers of dimensions differ, an extent is below its minimum, or ``shape`` is missing.
    """
    sizes = (None,) * len(extents) if shape is None else tuple(shape)
    if not len(extents) == len(blocks) == len(sizes):
        expected = f"{len(extents)} dimensions, as the micro-tile"
        raise ShapeError(mismatch("blocks, shape", expected, (tuple(blocks), sizes)))
    touched = 1.0
    for extent, grain, size in zip(extents, blocks, sizes, strict=True):
        if extent < 0 or grain < 1 or (extent == 0 and size is None):
            expected = "extents of at least 1, or 0 with a shape; blocks of at least 1"
            raise ShapeError(mismatch("extents, blocks", expected, (extents, blocks)))
        if extent == 0:
            touched *= -(-(size or 0) // grain)
        else:
            touched *= (extent + grain - math.gcd(extent, grain)) / grain
    return 1.0 - (1.0 - min(1.0, max(0.0, density))) ** touched


def bucket(density: float) -> int:
    """Number of the bucket of a density: 0 for 1, one more for each factor of 1.12 below it."""
    if density >= 1.0:
        return 0
    if density <= 0.0:
        return EMPTY_BUCKET
    number = round(-math.log(density) / _LOG_STEP)
    return number if number < EMPTY_BUCKET else EMPTY_BUCKET


def bucket_density(number: int) -> float:
    """The density in the middle of a bucket; 0 for that of empty patterns."""
    return 0.0 if number >= EMPTY_BUCKET else BUCKET_STEP**-number
