"""Kernels compiled before anything is measured, many at once; needs nvcc, and no GPU.

The files land in the kernel cache, from where operators load them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from bench_gpu_cases import Linear, Moe, list_linear, list_moe
from bench_gpu_measure import GpuSettings
from bench_gpu_pit import internals, operator, operator_of

import pit_tvm
from pit_tvm.runtime.cuda_dispatch import all_modules
from pit_tvm.runtime.cuda_modules import cached_modules
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import SparsitySpec, Tile

ARCH = "sm_90a"
TARGET = f"cuda -arch={ARCH} -model=h200"


@dataclass(frozen=True)
class Kernel:
    """One library: a tile with the options of an operator; ``kind`` as in `bench_gpu_pit`."""

    kind: str
    dtype: str
    bias: bool
    act: str | None
    tile: Tile


def build_all(kernels: Iterable[Kernel], jobs: int) -> int:
    """Compile, with ``jobs`` processes, the kernels and detection that the cache lacks; returns
    how many were asked for."""
    unique = sorted(set(kernels), key=str)
    work: list[str | Kernel] = [*all_modules(), *unique]  # the longest first
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return sum(pool.map(build_one, work))


def build_one(what: str | Kernel) -> int:
    """Compile one kernel, or one module of detection by its name; 1."""
    if isinstance(what, str):
        cached_modules(KernelCache(), ARCH)(what, all_modules()[what])
        return 1
    groups = 2 if what.kind == "grouped" else 0
    spec: SparsitySpec = pit_tvm.Groups(groups) if groups else pit_tvm.Rows()
    sizes = (None, None)
    made = operator(what.kind, spec, what.dtype, TARGET, sizes, groups, what.bias, what.act)
    dispatcher = internals(made)
    dispatcher.kernels.product(what.tile, groups, **dispatcher.options)
    return 1


def wanted(cases: Sequence[Linear | Moe], settings: GpuSettings) -> list[Kernel]:
    """What measuring these cases runs: the candidates that are timed, and what an operator takes
    before it knows how much is live."""
    kernels = []
    for case in cases:
        made = operator_of(case, settings.planned_target)
        kind = "grouped" if isinstance(case, Moe) else "linear"
        bias = isinstance(case, Linear) and case.gelu
        act = "gelu" if bias else None
        for tile in _tiles(case, made, settings):
            kernels.append(Kernel(kind, case.dtype, bias, act, tile))
    return kernels


def _tiles(case: Linear | Moe, made: pit_tvm.Operator, settings: GpuSettings) -> list[Tile]:
    dispatcher = internals(made)
    planner = dispatcher.planner
    rows = case.rows if isinstance(case, Moe) else case.stored
    layout = dispatcher.binder.layout_of({"m": rows, "n": case.n, "k": case.k}, "torch")
    plan = planner.decide(layout, case.counts(settings.rng(case.label)))
    tiles = [c.tile for c in plan.candidates if c.tile is not None][: settings.tiles]
    blind = planner.plan(layout, None).choice.tile
    return tiles if blind is None else [*tiles, blind]


def product_cases(suites: Sequence[str], quick: bool) -> list[Linear | Moe]:
    """Cases that some suites run kernels for; ``search`` runs those of both others."""
    cases: list[Linear | Moe] = []
    if {"padding", "search"} & set(suites):
        cases += list_linear(quick)
    if {"moe", "search"} & set(suites):
        cases += list_moe(quick)
    return cases


def all_processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))
