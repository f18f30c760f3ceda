"""Cover statistics: how much of an operand the live micro-tiles of a pattern cover.

The covered density of a micro-tile is the share of micro-tiles that are live; it is at least the
density of the pattern, and it is what a sparse product costs relative to the dense one.
(PIT, SOSP'23, section 3: the cover that Algorithm 1 compares.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter

from ..errors import ShapeError, mismatch

WINDOW = 64  # rows and columns of one sampled window

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


@lru_cache(maxsize=1024)
def reading(extents: tuple[int, int]) -> Callable[[Sequence[float]], float]:
    """How a micro-tile's covered density follows from those of `SAMPLE_EXTENTS`, in their order.

    One that was not sampled is estimated from the nearest sampled micro-tile inside and the
    nearest one around, geometrically in the number of elements between them; with only one of the
    two, pieces are taken to be live independently. Covered density grows with the micro-tile.

    ShapeError if an extent is below 1: a whole dimension has no sampled extent.
    """
    if min(extents) < 1:
        raise ShapeError(mismatch("extents", "extents of at least 1", extents))
    sampled = SAMPLE_EXTENTS
    if extents in sampled:
        return itemgetter(sampled.index(extents))
    areas = [math.prod(e) for e in sampled]
    inside = [i for i, e in enumerate(sampled) if e[0] <= extents[0] and e[1] <= extents[1]]
    around = [i for i, e in enumerate(sampled) if e[0] >= extents[0] and e[1] >= extents[1]]
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


def bucket(density: float) -> int:
    """Number of the bucket of a density: 0 for 1, one more for each factor of 1.12 below it."""
    if density >= 1.0:
        return 0
    if density <= 0.0:
        return EMPTY_BUCKET
    number = round(-math.log(density) / _LOG_STEP)
    return number if number < EMPTY_BUCKET else EMPTY_BUCKET
