"""How high in live rows a GPU tile is that fits itself to the count, as its kernel decides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

HEIGHT_STEP = 8  # live rows: heights are its multiples
# What a step of a tile takes, in no unit: the tensor cores' part for each element, the
# second-level cache's for each row and column, and that of the copies that gather for each row.
PER_ELEMENT, PER_ROW, PER_GATHERED = 4.0, 320.0, 700.0
# Middles of eight equally probable parts of the normal distribution.
_POINTS = np.array([-1.534, -0.887, -0.489, -0.157, 0.157, 0.489, 0.887, 1.534])


@dataclass(frozen=True)
class Fitting:
    """Kinds of tiles: ``width`` columns each, and ``places``, how many the chip works on at once.

    ``tall [heights, 1]``: heights from the tallest on; ``step [heights, kinds]``: what a step of
    such a tile takes, infinite beyond the most rows of a kind.
    """

    width: Numbers
    places: Numbers
    tall: Numbers
    step: Numbers

    def heights(self, live: Any, n: int) -> Numbers:
        """For ``live`` rows of one group, one number or many, and ``n`` columns, the height
        of each kind of tile whose waves take the least time: [..., kinds]."""
        columns = np.ceil(max(n, 1) / self.width) / self.places
        rows = np.maximum(live, 1.0)[..., None, None]
        cost = np.ceil(np.ceil(rows / self.tall) * columns) * self.step
        best: Numbers = self.tall[cost.argmin(axis=-2), 0]
        return best


def fitting(tallest: npt.ArrayLike, width: npt.ArrayLike, places: npt.ArrayLike) -> Fitting:
    """Kinds of tiles of at most ``tallest`` rows; the lists are of one length."""
    most, wide = np.array(tallest, np.float64), np.array(width, np.float64)
    tall = np.arange(HEIGHT_STEP, most.max() + 1.0, HEIGHT_STEP)[::-1, None]
    step = np.maximum(tall * np.maximum(wide * PER_ELEMENT, PER_GATHERED), (tall + wide) * PER_ROW)
    return Fitting(wide, np.array(places, np.float64), tall, np.where(tall > most, math.inf, step))


def even_heights(live: Any, bands: Any) -> Numbers:
    """Heights of tiles where ``live`` rows are split evenly into ``bands``; arrays of any shape."""
    even = np.ceil(live / np.maximum(bands, 1.0) / HEIGHT_STEP) * HEIGHT_STEP
    return np.maximum(even, float(HEIGHT_STEP))


def group_sizes(
    live: float, groups: int, counts: tuple[int, ...]
) -> tuple[npt.NDArray[np.int64], Numbers]:
    """Different numbers of rows that groups have, in steps of `HEIGHT_STEP` that are begun, and how
    many groups have each.

    Without ``counts``, and with several groups, every row goes to a random one.
    """
    if counts:
        rows = np.fromiter(counts, np.int64, len(counts))
        often = np.bincount((rows + (HEIGHT_STEP - 1)) // HEIGHT_STEP)
        often[0] = 0
        steps = often.nonzero()[0]
        return steps, often.take(steps).astype(np.float64)
    if groups == 1:
        return np.array([math.ceil(live / HEIGHT_STEP)]), np.ones(1)
    used = filled_groups(live, groups)
    mean = live / used if used else 0.0
    of_all = live / groups
    spread = math.sqrt(max(mean * (1.0 - 1.0 / groups + of_all) - mean * mean, 0.0))
    drawn = np.ceil(np.maximum(mean + _POINTS * spread, min(mean, 1.0)) / HEIGHT_STEP)
    return drawn.astype(np.int64), np.full(len(drawn), used / len(drawn))


def filled_groups(live: float, groups: int) -> float:
    """How many groups have rows, of which each of ``live`` goes to a random one."""
    if groups == 1:
        return float(live > 0)
    return -groups * math.expm1(live * math.log1p(-1.0 / groups))
