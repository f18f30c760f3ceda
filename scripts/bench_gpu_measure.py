"""How the GPU benchmark measures: replays of CUDA graphs in turn, medians, errors.

Each contender's calls are captured in a CUDA graph, so that no time of the host is in what is
measured; events around a replay give the time of its calls. A round replays every contender once,
starting with another one each time; a kernel that only waits keeps the GPU busy while the host
asks for the whole round. What cannot be captured runs between events as it is, after that.

A GPU draws less power in such rounds than under steady load, and products that are bound by its
tensor cores gain most by that. So a contender may be timed ``sustained`` instead: alone, after it
has kept the GPU busy for some milliseconds.

On the CPU everything runs as well, to try the benchmark without a GPU: times mean nothing then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_rows import Array, Row, Settings, Stat, Target, in_turn, limits

# Deviation from float64 in roundings of the result's type, relative to the exact value plus the
# root mean square of all of them. Libraries round partial sums, and before an activation too: in
# float32 a few thousand of them count for many roundings of the result.
ERROR_LIMIT = 8.0
# TF32 leaves 10 bits of every factor.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-18, "tf32": 2.0**-10}

GRAPH_US = 2000.0  # calls of a graph fill about this long, within limits:
LEAST_CALLS, MOST_CALLS = 2, 10
# An operator asks for counts every 16 calls, and then needs one more.
WARM_UPS = 20
SLOW_US, LEAST_ROUNDS = 1e5, 3  # what is never captured runs for so long, or so often at least
SPIN_CYCLES = 1_500_000  # just under a millisecond
# So few that the queue of launches never fills: the host would wait in it.
HOST_CALLS, HOST_ROUNDS = 20, 25
HOST_LIMIT_US = 12.0
# Other machines' work beside it slows a virtual one down by a factor of two, for seconds or for
# minutes. A loop of so many steps shows it; within so much of the fastest the host is quiet.
PACE_STEPS, QUIET = 400, 1.15
SHORT_US = 500.0

Run = Callable[[], Any]


@dataclass(frozen=True)
class GpuSettings(Settings):
    """What the command line decides. ``device`` "cpu" is a dry run; ``peers`` False leaves
    contenders out that are not pit-tvm's; ``tiles`` of each plan are timed, or with ``every`` its
    candidates, dense or not, but those that are far from the best. ``sustained``: milliseconds for
    which a contender runs before it is timed; 0 times them in turns."""

    device: str = "cuda"
    peers: bool = True
    tiles: int = 4
    every: bool = False
    sustained: int = 0

    @property
    def target(self) -> str:
        """What operators are compiled for."""
        return "cuda" if self.device == "cuda" else "llvm"

    @property
    def planned_target(self) -> str:
        """What plans are made for: a GPU, also where there is none."""
        return "cuda" if self.device == "cuda" else "cuda -arch=sm_90a -model=h200"


@dataclass(frozen=True)
class Contender:
    """One way to compute. ``run`` does it once and returns what ``error`` judges, or anything if
    that is None. Without ``capture`` it is never put into a graph."""

    run: Run
    error: Callable[[Any], float] | None = None
    capture: bool = True


@dataclass(frozen=True)
class Measured:
    """Times and errors of contenders, and which of them ran without a graph."""

    stats: dict[str, Stat]
    errors: dict[str, float]
    plain: list[str]


# --------------------------------------------------------------------------------------------
# Data


def generator(rng: np.random.Generator, device: str) -> torch.Generator:
    """torch's random numbers, seeded by numpy's."""
    return torch.Generator(device).manual_seed(int(rng.integers(2**62)))


def normal(made: torch.Generator, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Standard normal on the generator's device."""
    kind = getattr(torch, dtype)
    return torch.randn(tuple(shape), generator=made, device=made.device, dtype=kind)


def on(device: str, array: Array) -> torch.Tensor:
    """A copy of a numpy array on the device."""
    return torch.from_numpy(array.copy()).to(device)


def poisoned(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """An output that shows what was not written."""
    return like.new_full(tuple(shape), float("nan"))


def rounding_error(got: torch.Tensor, want: torch.Tensor, kind: str = "") -> float:
    """Largest deviation of ``got`` from float64 ``want``, in the unit of `ERROR_LIMIT` for the type
    ``kind``, else its own; infinite for anything that is not finite, and 0 for empty ones."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    unit = ROUNDING[kind or str(got.dtype).removeprefix("torch.")]
    scale = want.abs() + want.square().mean().sqrt().clamp(min=1e-30)
    worst = float(((got.double() - want).abs() / scale).max()) / unit
    return worst if np.isfinite(worst) else float("inf")


# --------------------------------------------------------------------------------------------
# Time


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(contenders: Mapping[str, Contender], settings: GpuSettings) -> Measured:
    """Warm up, time and check contenders.

    What is judged is the result of the very graph that was timed: it is filled with NaN before
    one more replay.
    """
    if settings.device != "cuda":
        return _dry(contenders, settings)
    torch.cuda.synchronize()  # the data are there before other streams read them
    ready = {name: _Ready(contender) for name, contender in contenders.items()}
    stats = _times(ready, settings)
    errors = {
        name: _judge(contender.error, ready[name])
        for name, contender in contenders.items()
        if contender.error is not None
    }
    plain = [name for name, one in ready.items() if one.graph is None]
    return Measured(stats, errors, plain)


def host_stats(
    run: Run,
    stat: Stat,
    device: str,
    dense: Contender | None = None,
    vary: Callable[[], object] | None = None,
) -> dict[str, Stat]:
    """Microseconds of the host in one call, as "host": `HOST_CALLS` in a row, with nothing waited
    for; in one of ``dense`` in turn, as "host_dense"; in a loop of Python, in turn, as "host_pace",
    for the host's own speed varies; and, as "host_varied", where ``vary`` changes how much lives
    before each row of calls. Empty for calls that take the device, by ``stat``, so long that rounds
    would take long."""
    if stat.median > SHORT_US:
        return {}
    runs = {"host": run, **({} if dense is None else {"host_dense": dense.run})}
    seconds: dict[str, list[float]] = {name: [] for name in (*runs, "host_pace")}
    for _ in range(WARM_UPS):
        run()
    for _ in range(HOST_ROUNDS):
        for name, each in runs.items():
            seconds[name].append(_host_seconds(each, device))
        seconds["host_pace"].append(_pace_seconds())
    if vary is not None:
        varied = []
        for _ in range(2 * HOST_ROUNDS):  # the first half has kernels to load, calls to record
            vary()
            varied.append(_host_seconds(run, device))
        seconds["host_varied"] = varied[HOST_ROUNDS:]
    synchronize(device)
    return {name: Stat.of(found) for name, found in seconds.items()}


def _host_seconds(run: Run, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        run()
    return (time.perf_counter() - start) / HOST_CALLS


def _pace_seconds() -> float:
    start, total = time.perf_counter(), 0
    for step in range(PACE_STEPS):
        total += step * step & 7
    return time.perf_counter() - start


def host_targets(suite: str, rows: Sequence[Row]) -> list[Target]:
    """The limit on the host's part of a call: for all rows, and beside that for those in which the
    host was as fast as it gets."""
    timed = [row for row in rows if "host" in row.stats]
    fastest = min((row.us("host_pace") for row in timed), default=0.0)
    quiet = [row for row in timed if row.us("host_pace") <= QUIET * fastest]
    name = f"{suite}: host us of one call, plan cached"
    at = f"host quiet in {len(quiet)} of {len(timed)} rows"
    return [
        target
        for some, label in ((timed, name), (quiet, f"{name}, {at}"))
        for target in limits(some, label, HOST_LIMIT_US, lambda row: row.us("host"), at_least=False)
    ]


def _dry(contenders: Mapping[str, Contender], settings: GpuSettings) -> Measured:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    errors = {}
    for name, contender in contenders.items():
        result = contender.run()
        for _ in range(settings.repeats):
            start = time.perf_counter()
            result = contender.run()
            seconds[name].append(time.perf_counter() - start)
        if contender.error is not None:
            errors[name] = contender.error(result)
    stats = {name: Stat.of(kept) for name, kept in seconds.items()}
    return Measured(stats, errors, list(contenders))


class _Ready:
    """A contender that is warm and, where that is possible, captured."""

    def __init__(self, contender: Contender) -> None:
        self.run = contender.run
        self.stream = torch.cuda.Stream()
        self.result: Any = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 1
        self.us = self._warm(WARM_UPS if contender.capture else LEAST_ROUNDS)
        if contender.capture:
            self.calls = int(min(max(round(GRAPH_US / self.us), LEAST_CALLS), MOST_CALLS))
            self.graph = self._capture()

    def launch(self) -> None:
        """All calls once, without waiting for them."""
        if self.graph is not None:
            self.graph.replay()
        else:
            for _ in range(self.calls):
                self.result = self.run()

    def _warm(self, turns: int) -> float:
        """Microseconds of the last of several calls, each waited for."""
        us = 1.0
        with torch.cuda.stream(self.stream):
            for _ in range(turns):
                begin, end = _events()
                begin.record()
                self.result = self.run()
                end.record()
                self.stream.synchronize()
                us = max(1.0, 1e3 * begin.elapsed_time(end))
        return us

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """The calls as a graph; None if one of them does what cannot be captured."""
        # Not torch.cuda.graph: that collects all garbage first, which takes longer than the rest.
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin()
                try:
                    for _ in range(self.calls):
                        self.result = self.run()
                finally:
                    graph.capture_end()
        except RuntimeError:
            torch.cuda.synchronize()  # raises if the device is at fault
            self.calls = 1
            self.result = self.run()
            return None
        return graph


def _judge(error: Callable[[Any], float], one: _Ready) -> float:
    for result in one.result if isinstance(one.result, tuple) else (one.result,):
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            result.fill_(float("nan"))
    one.launch()
    torch.cuda.synchronize()
    return error(one.result)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _times(ready: Mapping[str, _Ready], settings: GpuSettings) -> dict[str, Stat]:
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    captured = [name for name, one in ready.items() if one.graph]
    if settings.sustained:
        for name in captured:
            _sustain(name, ready, settings, seconds)
    else:
        for turn in range(settings.repeats if captured else 0):
            torch.cuda._sleep(SPIN_CYCLES)
            _time_once(in_turn(captured, turn), ready, seconds)
    plain = [name for name, one in ready.items() if not one.graph]
    most = int(SLOW_US / max((ready[name].us for name in plain), default=1.0))
    for turn in range(min(settings.repeats, max(most, LEAST_ROUNDS)) if plain else 0):
        _time_once(in_turn(plain, turn), ready, seconds)
    return {name: Stat.of(kept) for name, kept in seconds.items()}


def _sustain(
    name: str,
    ready: Mapping[str, _Ready],
    settings: GpuSettings,
    seconds: Mapping[str, list[float]],
) -> None:
    """Replays of one contender, without a break, of which the last ones are timed."""
    one = ready[name]
    for _ in range(int(1e3 * settings.sustained / (one.us * one.calls))):
        one.launch()
    _time_once([name] * settings.repeats, ready, seconds)


def _time_once(
    names: Sequence[str], ready: Mapping[str, _Ready], seconds: Mapping[str, list[float]]
) -> None:
    pairs = []
    for name in names:
        begin, end = _events()
        begin.record()
        ready[name].launch()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    for name, (begin, end) in zip(names, pairs, strict=True):
        seconds[name].append(1e-3 * begin.elapsed_time(end) / ready[name].calls)


@contextlib.contextmanager
def float32_precision(tf32: bool) -> Iterator[None]:
    """Whether tensor cores may multiply float32, in torch's products and in ours."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def memory_of(run: Run) -> int:
    """Bytes of the device that one call takes at its peak, its result included."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextlib.contextmanager
def fresh_memory(device: str) -> Iterator[None]:
    """Memory of a case goes back to the device when it is done."""
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
