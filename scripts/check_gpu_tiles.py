"""The operators of ``check_gpu.py``: which tiles of each are checked, and what that compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from bench_gpu_build import ARCH, TARGET, Wanted
from bench_gpu_measure import float32_precision
from bench_gpu_pit import internals
from check_gpu_kinds import KINDS, ROWS, Kind

import pit_tvm
from pit_tvm import Groups, Operator
from pit_tvm.runtime.cuda_decode import DecodeDispatcher
from pit_tvm.runtime.cuda_dispatch import CudaDispatcher, all_modules
from pit_tvm.runtime.cuda_few_rows import MOST_ROWS
from pit_tvm.runtime.cuda_general import GeneralDispatcher
from pit_tvm.runtime.cuda_grid import GridDispatcher
from pit_tvm.runtime.cuda_grid_form import GridForm
from pit_tvm.runtime.cuda_modules import cached_modules
from pit_tvm.runtime.cuda_planner import LIBRARY, BandPlanner
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules import hopper_space
from pit_tvm.selection.gpu_cost import gpu_rates
from pit_tvm.structs import MicroTile, Tile

NAMES = {"lhs": "data", "rhs": "weight"}  # of a convolution's operands
# Sizes whose plans name the tiles that are checked; more rows than the kernel for a few takes.
SIZES = {"m": 64, "n": 640, "k": 640, "b": 3, "f": 8}
WIDTHS = (640, 5760, 20000)  # columns of few rows: each has a kernel of its own
LOOKED_AT = ((20_000, 3072, 768), (300, 300, 300), (4096, 4096, 4096))  # m, n, k of plans of rows


def usual(kind: Kind) -> dict[str, int]:
    """Extents of a call whose plans name the tiles that are checked."""
    return {axis: SIZES.get(axis, 1) for axis in kind.order} | kind.known


@cache
def operator(kind: Kind, target: str, tiles: int = 2) -> Operator:
    """The operator, compiled once; of a grid's tiles, of products of rows with an epilogue, and of
    one expression's own, only some are used."""
    return compiled(kind, target, tiles, KernelCache())


def compiled(kind: Kind, target: str, tiles: int, kernels: KernelCache) -> Operator:
    """An operator that keeps its kernels in a cache."""
    operand = NAMES.get(kind.sparse, kind.sparse) if kind.folds else kind.sparse
    options: Any = {"target": target, "dead": kind.dead, "cache": kernels}
    made = pit_tvm.compile(kind.tensors(), sparse={operand: kind.spec}, **options)
    dispatcher = internals(made)
    if isinstance(dispatcher, GeneralDispatcher) and dispatcher.planner.tiles:
        with float32_precision(kind.tf32):
            dispatcher.planner.tiles = _some(kind, dispatcher.planner.tiles, tiles)
    elif isinstance(dispatcher, GridDispatcher):
        _keep_some(kind, dispatcher, tiles)
    elif kind.family in ROWS and isinstance(dispatcher, CudaDispatcher):
        _build_rows(kind, dispatcher, tiles)
    return made


def _some(kind: Kind, every: Sequence[Tile], number: int) -> tuple[Tile, ...]:
    """So many tiles, other ones for each kind."""
    first = 2 * kind.place
    return tuple(every[(first + i) % len(every)] for i in range(min(number, len(every))))


def _keep_some(kind: Kind, dispatcher: Any, number: int) -> None:
    """Let a grid's plans choose from some tiles alone, as if never measured, and build all of these
    whatever the sizes."""
    planner = dispatcher.planner
    some = _some(kind, planner.rates().families[hopper_space.ROWS].tiles, number)
    planner._rates = gpu_rates((), kind.dtype, dispatcher.target.isa, LIBRARY, some)
    planner.likely_tiles = lambda layout: some


def _build_rows(kind: Kind, dispatcher: Any, number: int) -> None:
    """Let a product of live rows build all tiles, or with an epilogue some, whatever the sizes; of
    bands it does so anyway."""
    if isinstance(dispatcher.planner, BandPlanner):
        return
    every = _row_tiles(kind, dispatcher)
    tiles = every if kind.plain else _some(kind, every, number)
    dispatcher.planner.likely_tiles = lambda layout: tiles


def _row_tiles(kind: Kind, dispatcher: Any) -> tuple[Tile, ...]:
    """Tiles that plans over live rows can hold, and the untuned ones that they could."""
    planner, layout_of = dispatcher.planner, dispatcher.binder.layout_of
    layouts = (
        layout_of(dict(zip("mnk", sizes, strict=True)) | kind.known, "torch") for sizes in LOOKED_AT
    )
    candidates = [c for layout in layouts for c in planner.plan(layout, None).candidates]
    names = dict.fromkeys(c.tile.family for c in candidates if c.tile is not None)
    families = planner.rates().families
    tuned = [tile for name in names for tile in families[name].tiles]
    generic = hopper_space.starting_tiles(dispatcher.target.isa, kind.dtype)
    every = dict.fromkeys([*tuned, *(tile for tile in generic if tile.family in names)])
    return tuple(tile for tile in every if _takes(kind, tile))


def _takes(kind: Kind, tile: Tile) -> bool:
    """Whether a kernel of a tile takes so many groups; a weight that is stored [k, n] comes in
    boxes of 64 columns."""
    if isinstance(kind.spec, Groups):
        return int(dict(tile.knobs).get("most_groups", 1)) >= kind.spec.num_groups
    return kind.stored[1] != "kn" or tile.tile_n % 64 == 0


def tiles_for(kind: Kind, made: Operator, sizes: dict[str, int]) -> Sequence[Any]:
    """The tiles that are checked with a call of these sizes; None for one without any."""
    dispatcher = internals(made)
    dispatcher = dispatcher._turned if kind.packed else dispatcher  # which calls go to then
    planner, layout_of = dispatcher.planner, dispatcher.binder.layout_of
    if isinstance(dispatcher, DecodeDispatcher) and planner.few(layout_of(sizes, "torch")):
        return (planner.tile(sizes["m"], sizes["n"]),)
    with float32_precision(kind.tf32):
        return tuple(planner.likely_tiles(layout_of(usual(kind), "torch")))


def micro_tiles_for(made: Operator) -> tuple[MicroTile | None, ...]:
    """Micro-tiles whose candidates are checked: of a grid rows alone, and both axes; None stands
    for that of the first candidate."""
    form = internals(made).form
    return (form.route.micro_tile, form.both) if isinstance(form, GridForm) else (None,)


class Listed(KernelCache):
    """Notes the keys of the kernels that are asked for, and makes the one called ``only``."""

    def __init__(self, only: str = "") -> None:
        super().__init__()
        self.only, self.asked = only, set[str]()

    def module(self, key: str, build: Callable[[], Any]) -> Any:
        """The module of ``only``; of others something that is never called."""
        self.asked.add(key)
        return super().module(key, build) if key == self.only else {"main": None, "product": None}


@dataclass(frozen=True)
class Ahead:
    """A kernel that an operator may need, compiled when this is called; equal keys are one."""

    key: str
    kind: Kind = field(compare=False)
    tiles: int = field(compare=False)

    def __call__(self) -> None:
        _ask(self.kind, self.tiles, Listed(self.key))


def _ask(kind: Kind, tiles: int, kernels: Listed) -> set[str]:
    """Keys of what checking a kind needs, detection apart."""
    made = internals(compiled(kind, TARGET, tiles, kernels))
    with float32_precision(kind.tf32):
        made.build(usual(kind))
    if isinstance(made, DecodeDispatcher) or kind.packed:
        for n in WIDTHS[: 1 if kind.family in ROWS else None]:
            for m in (1, MOST_ROWS):
                made.build(usual(kind) | {"m": m, "n": n})
    return kernels.asked - _detection()


@cache
def _detection() -> frozenset[str]:
    kernels = Listed()
    for name, make in all_modules().items():
        cached_modules(kernels, ARCH)(name, make)
    return frozenset(kernels.asked)


def kernels_of_kind(kind: Kind, tiles: int) -> Iterator[Wanted]:
    """What checking a kind compiles."""
    return (Ahead(key, kind, tiles) for key in sorted(_ask(kind, tiles, Listed())))


def kernels_of(families: Sequence[str], tiles: int) -> list[Wanted]:
    """What checking some families compiles."""
    kinds = dict.fromkeys(kind for family in families for kind in KINDS[family])
    return [kernel for kind in kinds for kernel in kernels_of_kind(kind, tiles)]
