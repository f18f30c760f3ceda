"""Tuning on this machine's GPU: candidates, their data, and what libraries and the device give."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import numpy as np
import tvm
from tvm.target import Target

from ..memory import numpy_dtype
from ..schedules.hopper_space import random_index, stored
from ..structs import TileTask
from ..target import TargetInfo
from ..tile_db.record import TileRecord, make_provenance
from .backend import Backend, Builder
from .builder import Lower
from .cuda_builder import CudaBuilder, Toolchain
from .cuda_kernels import (
    LANES,
    LARGEST,
    ROW_FLOATS,
    ROWS_EACH,
    THREADS,
    check_module,
    profile_module,
)
from .runner import Data, Repeats, cuda_session
from .task_run import Settings
from .tasks import Space, check_error, make_example, random_array, to_device, tolerance_of

# A launch from the host takes microseconds, so each measurement fills some milliseconds. Under
# load the chip's power limit lowers its clock within tenths of a second (on an H200 by a sixth).
_SEARCH = Repeats(repeat=5, min_repeat_ms=4, hopeless=6.0, warm_ms=40)
FINAL = Repeats(repeat=9, min_repeat_ms=6, hopeless=float("inf"), warm_ms=150)
_KEEP = 6

_MEMORY_ROWS = 262_144  # 1 GiB in rows of 4 KiB
_CACHE_ROWS = 6_144  # 24 MiB, half of the second-level cache
_CACHE_READS = 131_072
_FIRST_RUNS = 3


def cuda_settings(trials: int, seed: int) -> Settings:
    """How a GPU task is searched: short measurements, and batches as wide as compilers are."""
    return Settings(trials=trials, seed=seed, keep=_KEEP, repeats=_SEARCH, final=FINAL)


def cuda_backend(toolchain: Toolchain, pool: ProcessPoolExecutor | None) -> Backend:
    """Candidates compiled by ``toolchain`` in the processes of ``pool``, run on this machine's
    first GPU."""

    @cache
    def kernels(dtype: str) -> Any:
        return tvm.runtime.load_module(str(toolchain.built(check_module(dtype))))

    def make_builder(lower: Lower, target: Target, folder: Path) -> Builder:
        return CudaBuilder(lower, folder, toolchain, pool)

    def make_data(space: Space, task: TileTask, rng: np.random.Generator) -> Data:
        if space.example is not None:
            return make_example(space, task, rng)
        return cuda_data(task, rng, kernels(task.dtype), tvm.cuda(0))

    def profile(target: TargetInfo, more: Mapping[str, Callable[[], float]]) -> TileRecord:
        return measure_profile(target, toolchain, more)

    return Backend(cuda_session, make_builder, make_data, measure_profile=profile)


def measure_profile(
    target: TargetInfo,
    toolchain: Toolchain,
    more: Mapping[str, Callable[[], float]] = MappingProxyType({}),
) -> TileRecord:
    """Constants of this machine's first GPU.

    ``gather_gbps`` and ``gather_cached_gbps``: bytes read per second (1e9) when rows of 4 KiB are
    gathered from memory and from the second-level cache. ``store_gbps``: bytes read and written
    per second by a copy in memory. ``launch_us``: a kernel that does nothing, in microseconds,
    many in a row. ``more``: constants that higher layers know how to measure, by name.
    """
    module = tvm.runtime.load_module(str(toolchain.built(profile_module())))
    gpu = tvm.cuda(0)
    profile = {
        "gather_gbps": _gather_gbps(module, gpu, _MEMORY_ROWS, _MEMORY_ROWS),
        "gather_cached_gbps": _gather_gbps(module, gpu, _CACHE_ROWS, _CACHE_READS),
        "store_gbps": _copy_gbps(gpu),
        "launch_us": 1e6 * _evaluate(module, gpu, "empty", tvm.runtime.empty((1,), "float32", gpu)),
        **{name: measure() for name, measure in more.items()},
    }
    provenance = make_provenance(target.device, target.mcpu, target.threads)
    return TileRecord("profile", provenance, profile=tuple(sorted(profile.items())))


def cuda_times(run: Callable[[], None]) -> tuple[float, ...]:
    """Seconds of one run on the GPU, measured as the tiles that it is compared with: each time
    enough runs in a row that the host's part hides behind the GPU's."""
    gpu = tvm.cuda(0)

    def seconds(runs: int) -> float:
        gpu.sync()
        start = time.perf_counter()
        for _ in range(runs):
            run()
        gpu.sync()
        return (time.perf_counter() - start) / runs

    seconds(_FIRST_RUNS)
    once = seconds(_FIRST_RUNS)
    seconds(max(_FIRST_RUNS, round(1e-3 * FINAL.warm_ms / once)))
    runs = max(_FIRST_RUNS, round(1e-3 * FINAL.min_repeat_ms / once))
    return tuple(seconds(runs) for _ in range(FINAL.repeat))


def _gather_gbps(module: Any, gpu: Any, rows: int, reads: int) -> float:
    """Bandwidth of reading ``reads`` random ones of ``rows`` rows."""
    order = np.resize(np.random.default_rng(0).permutation(rows), reads).astype(np.int32)
    src = tvm.runtime.empty((rows, ROW_FLOATS), "float32", gpu)
    sums = tvm.runtime.empty((reads // ROWS_EACH, THREADS), "float32", gpu)
    secs = _evaluate(module, gpu, "gather", src, to_device(order, gpu), sums)
    return 1e-9 * reads * ROW_FLOATS * 4 / secs


def _copy_gbps(gpu: Any) -> float:
    src, dst = (tvm.runtime.empty((_MEMORY_ROWS, ROW_FLOATS), "float32", gpu) for _ in range(2))
    return 2e-9 * _MEMORY_ROWS * ROW_FLOATS * 4 / median(cuda_times(lambda: dst.copyfrom(src)))


def _evaluate(module: Any, gpu: Any, name: str, *arrays: Any) -> float:
    """Median run time in seconds of a function."""
    timer = module.time_evaluator(name, gpu, number=10, repeat=7, min_repeat_ms=5)
    return median(timer(*arrays).results)


@dataclass
class CudaData:
    """Arguments lhs, ids, count, rhs, out of one task on a GPU, and the check of ``out``.

    The product is made once, on the GPU, by a kernel that shares nothing with the candidates; every
    element of every candidate's output is compared with it, and every dead row must stay untouched.
    """

    task: TileTask
    kernels: Any
    inputs: list[Any]
    out: Any
    untouched: Any
    exact: Any
    slot: Any
    worst: Any

    def arguments(self, device: Any) -> list[Any]:
        """The arguments; ``out`` is poisoned with NaN, in place."""
        self.out.copyfrom(self.untouched)
        return [*self.inputs, self.out]

    def check(self, arguments: Sequence[Any]) -> None:
        """Compare the output; TuningError if a live element is wrong or a dead row was written."""
        self.kernels["compare"](arguments[-1], self.exact, self.slot, self.worst)
        deviation, peak = self.worst.numpy().max(axis=(0, 2))
        scale = float(peak) or 1.0
        error = float("inf") if deviation >= LARGEST else float(deviation) / scale
        check_error(error, tolerance_of(self.task.dtype))


def cuda_data(task: TileTask, rng: np.random.Generator, kernels: Any, device: Any) -> CudaData:
    """Random arguments of a task on a GPU; ``kernels`` is the loaded ``check_module``."""
    size = stored(task)
    ids, count = random_index(task, rng)
    rows = max(1, int(count.max()))
    slot = np.full(size.rows, -1, np.int32)
    for g in range(task.groups):
        slot[ids[g, : count[g]]] = g * rows + np.arange(count[g], dtype=np.int32)
    host = [
        random_array((size.sources, task.k), task.dtype, rng),
        ids,
        count,
        random_array((task.groups, task.n, task.k), task.dtype, rng),
    ]
    inputs = [to_device(array, device) for array in host]
    lhs, _, lives, rhs = inputs
    poisoned = np.full((size.rows, task.n), np.nan, numpy_dtype(task.dtype))
    untouched = to_device(poisoned, device)
    exact = tvm.runtime.empty((task.groups, rows, task.n), "float32", device)
    kernels["reference"](lhs, to_device(ids // task.share, device), lives, rhs, exact)
    return CudaData(
        task=task,
        kernels=kernels,
        inputs=inputs,
        out=tvm.runtime.empty((size.rows, task.n), task.dtype, device),
        untouched=untouched,
        exact=exact,
        slot=to_device(slot, device),
        worst=tvm.runtime.empty((size.rows, 2, LANES), "float32", device),
    )
