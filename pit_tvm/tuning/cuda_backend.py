"""Tuning on this machine's GPU: candidates, their data, and what libraries and the device give."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import numpy as np
import tvm
from tvm.target import Target

from ..structs import TileTask
from ..target import TargetInfo
from ..tile_db.record import TileRecord, make_provenance
from .backend import Backend, Builder
from .builder import Lower
from .cuda_builder import CudaBuilder, Toolchain
from .cuda_data import cuda_data
from .cuda_kernels import ROW_FLOATS, ROWS_EACH, THREADS, check_module, profile_module
from .runner import Data, Repeats, cuda_session
from .task_run import Settings
from .tasks import Space, make_example, to_device

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
