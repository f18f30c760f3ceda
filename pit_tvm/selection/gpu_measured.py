"""What measured times say of products nearby, and which tiles they speak for.

Times are compared as logarithms of measured over what a roofline gives; products are near each
other by the logarithms of their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..remember import remember
from ..structs import TileTask
from .gpu_fit import Numbers

_SOFT = 0.02  # keeps a record of the very shape from an infinite weight
_ROUNDS = 20  # of alternating means, to convergence
HANDFUL = 12  # tiles of a family to choose from: each that is chosen is a kernel to compile


@dataclass(frozen=True)
class Measured:
    """What was measured: ``places [tasks, 6]``, of each task the squared length of the vector of
    its sizes' logarithms, then -2 times that vector; ``ratio [tiles + 1, tasks]``, the logarithms
    of measured over roofline, then ones."""

    places: Numbers
    ratio: Numbers
    _away: dict[tuple[float, ...], Numbers] = field(default_factory=dict, repr=False, compare=False)

    def correction(self, m: float, *sizes: float) -> Numbers:
        """Measured over roofline of each tile near these sizes (m, and n, k, groups, share): the
        mean over the tasks, weighted by the inverse square of their distance."""
        away = self._away.get(sizes)
        if away is None:
            here = [0.0, *(math.log(max(size, 1)) for size in sizes)]
            away = self.places @ np.array([1.0, *here]) + (_SOFT + sum(x * x for x in here))
            remember(self._away, sizes, away)
        high = math.log(max(m, 1.0))
        sums = self.ratio @ (1.0 / (away + (self.places[:, 1] * high + high * high)))
        corrected: Numbers = np.exp(sums[:-1] / sums[-1])
        return corrected


def as_measured(tasks: Sequence[TileTask], ratio: Numbers) -> Measured:
    """Of the tiles that ``ratio [tiles, tasks]`` has, every one on every task."""
    logs = _logs(tasks)
    places = np.column_stack([(logs * logs).sum(axis=1), -2.0 * logs])
    return Measured(places, np.vstack([ratio, np.ones(len(tasks))]))


def completed(ratio: Numbers, tasks: Sequence[TileTask]) -> Numbers:
    """``ratio [tiles, tasks]`` with estimates for what was not measured, NaN.

    They are sums of what the task has in common with all that was measured, since a task is
    measured in one state of the device's clocks, which changes all of its tiles, and of what the
    tile has beyond that on tasks that are near.
    """
    known = ~np.isnan(ratio)
    sums = np.where(known, ratio, 0.0)
    of_tile = np.zeros((len(ratio), 1))
    for _ in range(_ROUNDS):
        of_task = (sums - of_tile * known).sum(axis=0) / known.sum(axis=0)
        beyond = sums - of_task * known
        of_tile = beyond.sum(axis=1, keepdims=True) / known.sum(axis=1, keepdims=True)
    logs = _logs(tasks)
    near = 1.0 / (_SOFT + ((logs[:, None] - logs) ** 2).sum(axis=2))
    of_tile = (beyond @ near) / (known @ near)
    filled: Numbers = np.where(known, ratio, of_tile + of_task)
    return filled


def handful(times: Numbers, most: int = HANDFUL) -> list[int]:
    """The tiles to choose from, given their ``times [tiles, tasks]``, so that a few kernels serve
    every shape: each next one is the one that brings the tasks nearest to their best tiles. When
    none does any more, the others are looked at as if they were alone: a shape between those of the
    tasks may fill its last round by one of them."""
    share = times / times.min(axis=0)
    best = np.full(share.shape[1], math.inf)
    kept: list[int] = []
    while len(kept) < min(most, len(share)):
        gain = np.minimum(share, best).mean(axis=1)
        gain[kept] = math.inf
        if gain.min() >= best.mean():
            best.fill(math.inf)
            continue
        kept.append(int(gain.argmin()))
        best = np.minimum(best, share[kept[-1]])
    return sorted(kept)


def sizes_of(task: TileTask) -> tuple[int, int, int, int, int]:
    """m, n, k, groups and share of a product, in whatever data type."""
    return task.m, task.n, task.k, task.groups, task.share


def _logs(tasks: Sequence[TileTask]) -> Numbers:
    """Of the sizes of tasks, one to a row."""
    return np.log([sizes_of(task) for task in tasks])
