"""Kernels compiled before anything is measured, many at once; needs nvcc, and no GPU.

The files land in the kernel cache, from where operators load them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

from bench_gpu_cases import (
    Layer,
    Linear,
    Moe,
    TrainingStep,
    list_layers,
    list_linear,
    list_moe,
    list_training,
)
from bench_gpu_experts import IDS, Product, choices_of, products_of
from bench_gpu_grains import Grain, list_grains, list_tensor_cores
from bench_gpu_granularity import grain_operator
from bench_gpu_grid import Cross, grid_operator, list_grid
from bench_gpu_measure import GpuSettings, float32_precision
from bench_gpu_outputs import Output, list_outputs, outputs_operator
from bench_gpu_pit import internals, later, operator, operator_of
from bench_gpu_sread import Segment, list_segments, segment_operator
from bench_gpu_weights import Weights, list_weights, weights_operator

import pit_tvm
from pit_tvm.runtime.cuda_between import CudaBetween
from pit_tvm.runtime.cuda_columns import ColumnsKernels
from pit_tvm.runtime.cuda_dispatch import all_modules
from pit_tvm.runtime.cuda_general import GeneralDispatcher
from pit_tvm.runtime.cuda_modules import cached_modules
from pit_tvm.runtime.cuda_rows import FamilyKernels, RowsKernels
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.hopper_bands import starting_ranges
from pit_tvm.selection.gpu_columns import outer_tile
from pit_tvm.structs import Candidate, SparsitySpec, Tile
from pit_tvm.torch.operators import ONES

ARCH = "sm_90a"
TARGET = f"cuda -arch={ARCH} -model=h200"


@dataclass(frozen=True)
class Kernel:
    """One library of an operator, compiled when this is called: a tile, or what moves operands if
    ``tile`` is None. The others are as in `bench_gpu_pit`, ``spec`` None for live rows or groups;
    ``deep``: the product ends with the live columns."""

    kind: str
    dtype: str
    bias: bool
    act: str | None
    tile: Tile | None
    dead: str = "skip"
    spec: SparsitySpec | None = None
    side: str = "lhs"
    deep: bool = False

    def __call__(self) -> None:
        groups = 2 if self.kind == "grouped" else 0
        spec = self.spec or (pit_tvm.Groups(groups) if groups else pit_tvm.Rows())
        options = (groups, self.bias, self.act, self.dead, self.side)
        made = internals(operator(self.kind, spec, self.dtype, TARGET, (None, None), *options))
        if self.tile is None:
            made.build_moving()
        else:
            also = {"deep": True} if self.deep else {}
            made.kernels.product(self.tile, groups, **made.options, **also)


@dataclass(frozen=True)
class Asked:
    """What the method ``name`` of some ``kernels`` gives, compiled when this is called."""

    kernels: type[FamilyKernels]
    name: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self) -> None:
        getattr(self.kernels(KernelCache(), ARCH), self.name)(*self.arguments, **dict(self.options))


CASES: dict[str, Any] = {
    "granularity": list_grains,
    "tensorcore": list_tensor_cores,
    "weights": list_weights,
    "outputs": list_outputs,
    "grid": list_grid,
    "sread": list_segments,
    "training": list_training,
}
Sparse = Grain | Weights | Output | Segment


@dataclass(frozen=True)
class Part:
    """A library that the operator of ``case`` takes: a tile, without SRead if the options are
    "dense", or the kernels that move operands if ``tile`` is None. Equal ones are one library,
    whatever the cases. ``turned``: lhs is stored [k, m]."""

    family: str
    dtype: str
    tile: Tile | None
    options: tuple[tuple[str, Any], ...]
    case: Sparse = field(compare=False)
    turned: bool = field(compare=False, default=False)

    def __call__(self) -> None:
        made = _sparse(self.case, self.turned)
        if self.tile is None:
            made.build_moving()
        elif dict(self.options).get("dense"):
            made.kernels.dense(self.tile)
        else:
            made.kernels.product(self.tile, made.form.groups, **made.options)


Wanted = Callable[[], None]  # which compiles one library
Measured = Linear | Moe | Layer | TrainingStep | Cross | Sparse


def build_all(kernels: Iterable[Wanted], jobs: int) -> int:
    """Compile, with ``jobs`` processes, the kernels and detection that the cache lacks; returns
    how many were asked for."""
    unique = sorted(set(kernels), key=str)
    work: list[str | Wanted] = [*all_modules(), *unique]  # the longest first
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return sum(pool.map(build_one, work))


def build_one(what: str | Wanted) -> int:
    """Compile one kernel, or one module of detection by its name; 1."""
    if isinstance(what, str):
        cached_modules(KernelCache(), ARCH)(what, all_modules()[what])
    else:
        what()
    return 1


def wanted(cases: Sequence[Measured], settings: GpuSettings) -> list[Wanted]:
    """What measuring these cases runs: the candidates that are timed, and what an operator takes
    before it knows how much is live."""
    return [kernel for case in cases for kernel in _wanted(case, settings)]


def _wanted(case: Measured, settings: GpuSettings) -> Iterator[Wanted]:
    if isinstance(case, Segment):
        name = type(_sparse(case).kernels).__name__
        for dense in (True, False):
            yield Part(name, "float32", case.tile(ARCH), (("dense", dense),), case)
        return
    if isinstance(case, (Grain, Weights, Output)):
        for turned in (True, False) if isinstance(case, Grain) else (False,):
            yield from _parts(case, turned)
        return
    if isinstance(case, Cross):
        yield from _crossing(case, settings)
        return
    if isinstance(case, TrainingStep):
        counts = case.counts(settings.rng(case.label))
        if isinstance(case.layer, Linear):
            yield from _linear_step(case.layer, counts, settings)
        else:
            yield from _experts_step(case.layer, counts, settings)
        return
    if isinstance(case, Layer) or isinstance(case, Moe) and case.top_k > 1:
        if isinstance(case, Layer) and (tiles := choices_of(case)):
            for few in tiles:
                yield Asked(RowsKernels, "choices", (few,))
            return
        counts = case.counts(settings.rng(case.label))
        number = settings.tiles if isinstance(case, Moe) else 1
        for product in products_of(case):
            for tile in product.tiles(counts, settings.planned_target, number):
                yield _rows(tile, product.options)
        if isinstance(case, Layer):
            yield _combining(case.dtype)
        return
    kind = "grouped" if isinstance(case, Moe) else "linear"
    bias = isinstance(case, Linear) and case.gelu
    act = "gelu" if bias else None
    rows = case.rows if isinstance(case, Moe) else case.stored
    for dead in ("skip",) if isinstance(case, Moe) else ("skip", "zero"):
        made = operator_of(case, settings.planned_target, dead)
        for candidate in _timed(case, (rows, case.n, case.k), made, settings):
            if candidate.tile is not None:
                yield Kernel(kind, case.dtype, bias, act, candidate.tile, dead)


def _sparse(case: Sparse, turned: bool = False) -> Any:
    """The dispatcher of a case's operator."""
    if isinstance(case, Grain):
        return internals(grain_operator(case, TARGET, turned))
    if isinstance(case, Weights):
        return internals(weights_operator(case, TARGET))
    make: Any = segment_operator if isinstance(case, Segment) else outputs_operator
    return internals(make(case, TARGET))


def _parts(case: Grain | Weights | Output, turned: bool) -> Iterator[Part]:
    made = _sparse(case, turned)
    name, dtype = type(made.kernels).__name__, case.dtype
    layout = made.binder.layout_of(dict(zip("mnk", case.sizes, strict=True)), "torch")
    options = tuple(made.options.items())
    if isinstance(made, GeneralDispatcher):  # a kernel belongs to its program
        micro_tile = made.form.route.micro_tile
        options += (("turned", turned), ("sizes", case.sizes), ("micro_tile", str(micro_tile)))
    with float32_precision(isinstance(case, Grain) and case.tf32):
        tiles = made.planner.likely_tiles(layout)
    for tile in tiles:
        yield Part(name, dtype, tile, options, case, turned)
    moves = {what: getattr(made.form, what, False) for what in ("packed", "turns", "flips")}
    if any(moves.values()):
        yield Part(name, dtype, None, (*options, *moves.items()), case, turned)


def _crossing(case: Cross, settings: GpuSettings) -> Iterator[Wanted]:
    of = (case.kind, case.dtype, case.bias, None)
    which = partial(Kernel, *of, spec=pit_tvm.Grid(), side=case.side)
    yield which(tile=None)
    made = grid_operator(case, settings.planned_target)
    for candidate in _timed(case, case.sizes, made, settings):
        if candidate.micro_tile is not None:
            yield which(tile=candidate.tile, deep=candidate.micro_tile.also is not None)


def _linear_step(case: Linear, counts: tuple[int, ...], settings: GpuSettings) -> Iterator[Wanted]:
    """What a step of `pit_tvm.torch.linear_rows` runs: the product, and its gradients to x, to the
    weight, and to the bias, as the weight of eight columns of ones; the activation and its own."""
    stored, n, k = case.stored, case.n, case.k
    for kind, bias, dead, sizes in (
        ("linear", True, "zero", (stored, n, k)),
        ("matmul", False, "zero", (stored, k, n)),
        ("turned", False, "skip", (n, k, stored)),
        ("turned", False, "skip", (n, ONES, stored)),
    ):
        which = (kind, pit_tvm.Lengths(), case.dtype, settings.planned_target, (None, None))
        made = internals(operator(*which, bias=bias, dead=dead))
        layout = made.binder.layout_of(dict(zip("mnk", sizes, strict=True)), "torch")
        for known in (counts, None):
            tile = made.planner.plan(layout, known).choice.tile
            if tile is not None:
                yield Kernel(kind, case.dtype, bias, None, tile, dead)
    for backward in (False, True) if case.gelu else ():
        yield _between("activate", case.dtype, "gelu", backward=backward)


def _experts_step(case: Layer, counts: tuple[int, ...], settings: GpuSettings) -> Iterator[Wanted]:
    """The same of `pit_tvm.torch.moe_feed_forward`: both products, rows gated and a token's summed,
    products by turned weights, and sums of outer products."""
    dtype, shares = case.dtype, (case.top_k, 1)
    yield _combining(dtype)
    yield _between("spread", dtype, IDS)
    if case.top_k > 1:
        yield _between("total", dtype)
    for backward in (False, True) if case.gated else ():
        yield _between("gate", dtype, case.act, backward=backward)
    for (n, k), share in zip(case.products, shares, strict=True):
        plain = {"act": "none", "share": share}
        for sizes, options in (
            ((n, k), plain),
            ((k, n), {**plain, "share": 1, "rhs_layout": "kn"}),
        ):
            given = tuple(options.items())
            product = Product(case.experts, case.rows, *sizes, dtype, given)
            for tile in product.tiles(counts, settings.planned_target, 1):
                yield _rows(tile, given)
        tile = outer_tile(starting_ranges(dtype), k)
        yield Asked(ColumnsKernels, "product", (tile,), (("share", share),))


def _rows(tile: Tile, options: tuple[tuple[str, Any], ...]) -> Asked:
    """A product of groups of rows."""
    return Asked(RowsKernels, "product", (tile, 2), options)


def _combining(dtype: str) -> Asked:
    """The sum of a token's rows, for tokens with several experts."""
    return Asked(RowsKernels, "combine_kernel", (dtype, IDS))


def _between(name: str, *arguments: str, **options: bool) -> Asked:
    return Asked(CudaBetween, f"{name}_kernel", arguments, tuple(options.items()))


def _timed(
    case: Linear | Moe | Cross,
    sizes: tuple[int, int, int],
    made: pit_tvm.Operator,
    settings: GpuSettings,
) -> list[Candidate]:
    """Candidates of a product of ``sizes`` m, n, k that are timed, and what runs before counts are
    known."""
    dispatcher = internals(made)
    layout = dispatcher.binder.layout_of(dict(zip("mnk", sizes, strict=True)), "torch")
    counts = case.counts(settings.rng(case.label))
    plan, blind = (dispatcher.planner.plan(layout, of, False) for of in (counts, None))
    return [plan.choice, *later(plan, settings).values(), blind.choice]


def product_cases(suites: Sequence[str], quick: bool) -> list[Measured]:
    """Cases that some suites run kernels for; ``search`` runs those of both suites of products."""
    cases: list[Measured] = []
    if {"padding", "search"} & set(suites):
        cases += list_linear(quick)
    if {"moe", "search"} & set(suites):
        cases += list_moe(quick)
    if "layer" in suites:
        cases += list_layers(quick)
    for name, make in CASES.items():
        cases += make(quick) if name in suites else []
    return cases


def all_processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))
