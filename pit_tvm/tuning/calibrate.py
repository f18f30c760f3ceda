"""Costs that tiles are weighed against: the library's dense product, and the device's constants."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any

import numpy as np
import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.target import Target

from ..errors import TuningError, mismatch
from ..structs import TileTask
from ..target import TargetInfo
from ..threads import start_thread_pool
from ..tile_db.record import Provenance, TileRecord, make_provenance
from .tasks import random_array

_WARMUPS = 2
_MIN_RUNS, _MAX_RUNS = 8, 400
_BUDGET_SECS = 1.5
_ROW_BYTES = 4096
_MEMORY_ROWS = 16384  # 64 MiB, above the last-level cache of most CPUs
_CHAINS = 8  # independent sums, so that the latency of an addition does not bound the rate
_CACHE_ROWS = 128  # 512 KiB, in every second-level cache that has AVX2


def numpy_product(lhs: np.ndarray, rhs: np.ndarray, out: np.ndarray) -> None:
    """numpy's BLAS. It knows float32 and float64 only; other types are converted both ways, which
    is what a caller of numpy has to do too. int8 goes through float64, which is exact."""
    if lhs.dtype == np.float32:
        np.matmul(lhs, rhs, out=out)
        return
    wide = np.float64 if lhs.dtype.kind in "iu" else np.float32
    out[...] = np.matmul(lhs.astype(wide), rhs.astype(wide))


@dataclass(frozen=True)
class Library:
    """A dense product to compare with. ``prepare`` turns a numpy array into what
    ``product(lhs, rhs, out)`` takes; ``product`` writes into ``out``, which ``fetch`` turns into
    numpy. ``rhs`` is ``[k, n]``, or ``[n, k]`` if ``transposed``. ``times``: seconds of several
    runs."""

    name: str
    product: Callable[[Any, Any, Any], None]
    prepare: Callable[[np.ndarray], Any] = lambda array: array
    fetch: Callable[[Any], np.ndarray] | None = None
    transposed: bool = False
    times: Callable[[Callable[[], None]], tuple[float, ...]] | None = None


NUMPY = Library("numpy", numpy_product)


def measure_library(
    task: TileTask, provenance: Provenance, library: Library = NUMPY, seed: int = 0
) -> TileRecord:
    """Run times of a library's dense product on a task, without any gather.

    Raises
    ------
    TuningError
        The product is wrong.
    """
    rng = np.random.default_rng(seed)
    lhs = random_array((task.m, task.k), task.dtype, rng)
    sizes = (task.n, task.k) if library.transposed else (task.k, task.n)
    rhs = random_array(sizes, task.dtype, rng)
    out = np.zeros((task.m, task.n), np.int32 if lhs.dtype.kind in "iu" else lhs.dtype)
    operands = [library.prepare(array) for array in (lhs, rhs, out)]
    secs = (library.times or host_times)(lambda: library.product(*operands))
    if library.fetch is not None:
        out = library.fetch(operands[2])
    dense = (rhs.T if library.transposed else rhs).astype(np.float64)
    expected = lhs[:1].astype(np.float64) @ dense
    if not np.allclose(out[:1].astype(np.float64), expected, rtol=0.02, atol=0.02 * task.k**0.5):
        raise TuningError(mismatch(f"product of {library.name}", "the product", "another result"))
    return TileRecord("library", provenance, task=task, run_secs=secs, note=library.name)


def measure_profile(
    target: TargetInfo, more: Mapping[str, Callable[[], float]] = MappingProxyType({})
) -> TileRecord:
    """Constants of this machine, measured with the target's threads.

    ``gather_gbps`` and ``gather_cached_gbps``: bytes read per second (1e9) when rows of 4 KiB are
    gathered from memory and from cache. ``store_gbps``: bytes read and written per second by an
    elementwise pass over memory. ``launch_us``: one parallel loop without work, in microseconds.
    ``more``: constants that higher layers know how to measure, by name.
    """
    threads = start_thread_pool(target.threads)
    profile = {
        "gather_gbps": _gather_gbps(target, _MEMORY_ROWS),
        "gather_cached_gbps": _gather_gbps(target, _CACHE_ROWS),
        "store_gbps": _store_gbps(target),
        "launch_us": _launch_us(target, threads),
        **{name: measure() for name, measure in more.items()},
    }
    provenance = make_provenance(target.device, target.mcpu, threads)
    return TileRecord("profile", provenance, profile=tuple(sorted(profile.items())))


def host_times(run: Callable[[], None]) -> tuple[float, ...]:
    """Seconds of the three fastest of many runs, after warming up.

    Slower runs shared the machine. (`pace` cannot tell: idle threads of a library spin meanwhile.)
    """
    for _ in range(_WARMUPS):
        run()
    secs: list[float] = []
    begin = time.perf_counter()
    while len(secs) < _MIN_RUNS or (
        len(secs) < _MAX_RUNS and time.perf_counter() - begin < _BUDGET_SECS
    ):
        start = time.perf_counter()
        run()
        secs.append(time.perf_counter() - start)
    return tuple(sorted(secs)[:3])


def _gather_gbps(target: TargetInfo, rows: int) -> float:
    """Bandwidth of gathering every row once, in random order, summed so that nothing is stored."""
    columns, lanes = _ROW_BYTES // 4, target.vector_bits // 32
    width = _CHAINS * lanes
    src = te.placeholder((rows, columns), "float32", "src")
    ids = te.placeholder((rows,), "int32", "ids")
    k = te.reduce_axis((0, columns // width), "k")
    sums = te.compute(
        (rows, width), lambda i, j: te.sum(src[ids[i], k * width + j], axis=k), name="sums"
    )
    sch = Schedule(te.create_prim_func([src, ids, sums]))
    block = sch.get_sblock("sums")
    i, j, k_loop = sch.get_loops(block)
    chain, lane = sch.split(j, [None, lanes])
    sch.reorder(i, k_loop, chain, lane)
    sch.parallel(i)
    sch.unroll(chain)
    sch.vectorize(lane)
    sch.decompose_reduction(block, k_loop)
    rng = np.random.default_rng(0)
    arrays = [
        np.ones((rows, columns), np.float32),
        rng.permutation(rows).astype(np.int32),
        np.zeros((rows, width), np.float32),
    ]
    return 1e-9 * rows * _ROW_BYTES / _evaluate(sch, target, arrays)


def _store_gbps(target: TargetInfo) -> float:
    """Traffic of adding to every element of an array that no cache holds."""
    rows, columns, lanes = _MEMORY_ROWS, _ROW_BYTES // 4, target.vector_bits // 32
    src = te.placeholder((rows, columns), "float32", "src")
    out = te.compute((rows, columns), lambda i, j: src[i, j] + te.const(1.0, "float32"), name="out")
    sch = Schedule(te.create_prim_func([src, out]))
    i, j = sch.get_loops(sch.get_sblock("out"))
    sch.parallel(i)
    sch.vectorize(sch.split(j, [None, lanes])[1])
    arrays = [np.ones((rows, columns), np.float32), np.zeros((rows, columns), np.float32)]
    return 2e-9 * rows * _ROW_BYTES / _evaluate(sch, target, arrays)


def _launch_us(target: TargetInfo, threads: int) -> float:
    """Time of a parallel loop that writes one element per thread."""
    out = te.compute((threads * 16,), lambda i: te.const(1.0, "float32"), name="out")
    sch = Schedule(te.create_prim_func([out]))
    (loop,) = sch.get_loops(sch.get_sblock("out"))
    sch.parallel(sch.split(loop, [threads, None])[0])
    return 1e6 * _evaluate(sch, target, [np.zeros(threads * 16, np.float32)])


def _evaluate(sch: Schedule, target: TargetInfo, arrays: list[np.ndarray]) -> float:
    """Median run time in seconds of a scheduled function."""
    built = tvm.compile(sch.mod, target=Target(target.tvm_target))
    timer = built.mod.time_evaluator("main", tvm.cpu(), number=1, repeat=5, min_repeat_ms=10)
    return median(timer(*(tvm.runtime.tensor(array) for array in arrays)).results)
