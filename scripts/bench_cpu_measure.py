"""How the CPU benchmark measures: interleaved runs, medians, random data and errors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from bench_rows import Array, Run, Stat, in_turn
from quickstart_measure import settle

CHECKED_ROWS = 64


def interleave(runs: Mapping[str, Run], repeats: int, inner: int = 1) -> dict[str, Stat]:
    """Statistics of `take_turns`."""
    return {name: Stat.of(kept) for name, kept in take_turns(runs, repeats, inner).items()}


def take_turns(runs: Mapping[str, Run], repeats: int, inner: int = 1) -> dict[str, list[float]]:
    """Seconds of every contender, in the order of `each_turn`."""
    turns = list(each_turn(runs, repeats, inner))
    return {name: [one for turn in turns for one in turn[name]] for name in runs}


def each_turn(
    runs: Mapping[str, Run], repeats: int, inner: int
) -> Iterator[dict[str, list[float]]]:
    """Seconds of every contender, ``repeats`` times in turn, ``inner`` runs each time.

    Every turn starts with another contender. Before a contender's turn idle threads of the last
    one come to rest, then one unmeasured run warms its caches and wakes its own threads.
    """
    for turn in range(repeats):
        yield {name: _timed(runs[name], inner) for name in in_turn(runs, turn)}


def _timed(run: Run, inner: int) -> list[float]:
    settle()
    run()
    seconds = []
    for _ in range(inner):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def times_faster(seconds: Mapping[str, Sequence[float]], name: str, *peers: str) -> float:
    """How many times faster than the fastest of ``peers`` a contender is: the median over the
    turns, between which a machine's clock may change."""
    turns = zip(seconds[name], *(seconds[peer] for peer in peers), strict=True)
    return statistics.median(min(others) / own for own, *others in turns)


def profiled(profile: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Median ``index_us`` and ``select_us`` of an operator's profiles, the plan's prediction,
    the covered share, and every kernel that ran."""
    settle()
    profile()
    parts = [profile() for _ in range(repeats)]
    plans = [part.plan for part in parts]
    return {
        "index_us": statistics.median(part.index_us for part in parts),
        "select_us": statistics.median(part.select_us for part in parts),
        "predicted_us": statistics.median(plan.choice.cost_us for plan in plans),
        "covered": statistics.median(plan.choice.covered for plan in plans),
        "kernel": " | ".join(sorted({part.kernel for part in parts})),
        "tuned": all(plan.tuned for plan in plans),
    }


def normal(rng: np.random.Generator, *shape: int) -> Array:
    """float32 standard normal."""
    return rng.standard_normal(shape, np.float32)


def poisoned(*shape: int) -> Array:
    """A float32 output that shows what was not written."""
    return np.full(shape, np.nan, np.float32)


def product_error(rng: np.random.Generator, lhs: Array, rhs: Array, out: Array) -> float:
    """Largest deviation of some random rows of ``out`` from float64, over the largest exact value.

    Infinite if any element of the whole ``out`` is not finite.
    """
    if not np.isfinite(out).all():
        return float("inf")
    rows = rng.choice(len(lhs), min(len(lhs), CHECKED_ROWS), replace=False)
    want = lhs[rows].astype(np.float64) @ rhs.astype(np.float64)
    deviation, scale = float(np.abs(out[rows] - want).max()), float(np.abs(want).max())
    return deviation / scale if scale else deviation
