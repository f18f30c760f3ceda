"""How the quickstart measures: one contender after the other over all layers, and the errors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from quickstart_contenders import Batch, Case, Pit, Run, exact

CONTENDERS = ("numpy", "torch", "torch_gather", "pit")


@dataclass
class Samples:
    """What was measured of one layer, in seconds or microseconds, one entry per batch."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {c: [] for c in CONTENDERS})
    index_us: list[float] = field(default_factory=list)
    select_us: list[float] = field(default_factory=list)
    kernels: set[str] = field(default_factory=set)
    errors: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CONTENDERS, 0.0))

    def ms(self, contender: str) -> float:
        """Median milliseconds of one call."""
        return 1e3 * statistics.median(self.seconds[contender])


def collect(run: Run, cases: Sequence[Case], batch: Batch) -> list[np.ndarray]:
    """The live rows of every layer's output."""
    return [run(case, batch)[batch.live] for case in cases]


def collect_pit(
    pit: Pit, cases: Sequence[Case], batch: Batch, samples: Sequence[Samples]
) -> list[np.ndarray]:
    """As ``collect``, on poisoned outputs whose dead rows must stay as they were."""
    rows = []
    for case, kept in zip(cases, samples, strict=True):
        out = pit.outputs.of(case)
        out.fill(np.nan)
        rows.append(pit.run(case, batch)[batch.live])
        if not np.isnan(np.delete(out, batch.live, axis=0)).all():
            raise RuntimeError(f"{case.name}: rows beyond the lengths were written")
        parts = pit.profile(case, batch)
        kept.index_us.append(parts.index_us)
        kept.select_us.append(parts.select_us)
        kept.kernels.add(parts.kernel)
    return rows


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest deviation over largest exact value; infinite if ``got`` is not finite."""
    deviation = float(np.abs(got - want).max())
    return deviation / float(np.abs(want).max()) if np.isfinite(deviation) else float("inf")


def check(
    runs: dict[str, Run], pit: Pit, cases: Sequence[Case], batch: Batch, samples: Sequence[Samples]
) -> None:
    """Compare the given contenders and pit-tvm with float64 on one batch."""
    rows = {name: collect(run, cases, batch) for name, run in runs.items()}
    rows["pit"] = collect_pit(pit, cases, batch, samples)
    for number, (case, kept) in enumerate(zip(cases, samples, strict=True)):
        want = exact(case, batch)
        for name, got in rows.items():
            kept.errors[name] = max(kept.errors[name], relative_error(got[number], want))


def settle(patience: float = 1.0) -> None:
    """Wait until idle threads of the library that ran last stop spinning, which takes up to 0.1 s.

    They would slow down whatever runs next. ``patience`` is in seconds.
    """
    end = time.perf_counter() + patience
    busy = True
    while busy and time.perf_counter() < end:
        before = time.process_time()
        time.sleep(0.005)
        busy = time.process_time() - before > 0.001


def time_layers(run: Run, cases: Sequence[Case], batch: Batch) -> list[float]:
    """Seconds of each layer in one pass over all layers."""
    settle()
    run(cases[0], batch)
    seconds = []
    for case in cases:
        start = time.perf_counter()
        run(case, batch)
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(
    runs: dict[str, Run], pit: Pit, cases: Sequence[Case], batches: Iterable[Batch], repeats: int
) -> list[Samples]:
    """All contenders on all batches, ``repeats`` times, after one unmeasured and checked pass.

    Dense numpy, by far the slowest, runs on every second batch only.
    """
    samples = [Samples() for _ in cases]
    peers = {name: run for name, run in runs.items() if name != "pit"}
    for number, batch in enumerate(batches):
        check(peers if number == 0 else {}, pit, cases, batch, samples)
        for turn in range(repeats):
            first = (number + turn) % len(CONTENDERS)
            for name in CONTENDERS[first:] + CONTENDERS[:first]:
                if name == "numpy" and number % 2:
                    continue
                seconds = time_layers(runs[name], cases, batch)
                for kept, value in zip(samples, seconds, strict=True):
                    kept.seconds[name].append(value)
    return samples
