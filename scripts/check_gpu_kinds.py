"""Operators that ``check_gpu.py`` calls with zeros along k, in grids, in outputs, and elsewhere.

A family of kernels is a list of kinds: an operator with a pattern. Kernels of Hopper's own families
take every size at run time; those of "general" belong to one expression, whose n and k are fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from bench_gpu_build import ARCH, TARGET, Wanted
from bench_gpu_measure import float32_precision
from bench_gpu_pit import internals

import pit_tvm
from pit_tvm import BitMask, BlockMask, Grid, Groups, Lengths, Mask, Operator, Rows, Values, op
from pit_tvm.runtime.cuda_decode import DecodeDispatcher
from pit_tvm.runtime.cuda_dispatch import all_modules
from pit_tvm.runtime.cuda_few_rows import MOST_ROWS
from pit_tvm.runtime.cuda_general import GeneralDispatcher
from pit_tvm.runtime.cuda_grid import GridDispatcher
from pit_tvm.runtime.cuda_grid_form import GridForm
from pit_tvm.runtime.cuda_modules import cached_modules
from pit_tvm.runtime.cuda_planner import LIBRARY
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.hopper_space import ROWS
from pit_tvm.selection.gpu_cost import gpu_rates
from pit_tvm.structs import MicroTile, SparsitySpec, Tile

KERNEL = (3, 2)  # of a convolution
NAMES = {"lhs": "data", "rhs": "weight"}  # of a convolution's operands
# Sizes whose plans name the tiles that are checked; more rows than the kernel for a few takes.
SIZES = {"m": 64, "n": 640, "k": 640, "b": 3, "f": 8}
WIDTHS = (640, 5760, 20000)  # columns of few rows: each has a kernel of its own


@dataclass(frozen=True)
class Kind:
    """An operator and its pattern, apart from what a call may choose.

    ``operands``: axes of lhs and rhs as they are stored, with b for a batch, g for groups, f, c, x,
    y, i, j of a convolution. ``sparse``: lhs, rhs or out. ``fixed``: extents that are numbers in
    the expression, in the operator's order; None leaves one to the call. ``packed``: the operator
    packs rhs first. ``tf32``: tensor cores compute float32.
    """

    operands: str
    sparse: str
    spec: SparsitySpec
    dtype: str = "float16"
    bias: bool = False
    act: str | None = None
    dead: str = "skip"
    fixed: tuple[int | None, ...] = ()
    out_dtype: str | None = None
    packed: bool = False
    tf32: bool = False

    def __str__(self) -> str:
        dtype = "tf32" if self.tf32 else self.dtype
        parts = [self.operands, dtype, f"{self.sparse}={self.spec}", "bias" * self.bias]
        parts += [self.act or "", "packed" * self.packed, f"dead={self.dead}"]
        return " ".join(filter(None, parts))

    @property
    def stored(self) -> tuple[str, str]:
        """Axes of lhs and of rhs."""
        lhs, rhs = self.operands.split(",")
        return lhs, rhs

    @property
    def family(self) -> str:
        """The family in whose list it stands."""
        return next(family for family, kinds in KINDS.items() if self in kinds)

    @property
    def folds(self) -> bool:
        """Whether it is a convolution."""
        return "f" in self.operands

    @property
    def order(self) -> str:
        """Axes in the order of the operator's extents."""
        known = {"f": "ncfxy", "b": "bmnk", "g": "mnkg"}
        return next((axes for mark, axes in known.items() if mark in self.operands), "mnk")

    @property
    def out(self) -> str:
        """Axes of the output."""
        return "nfxy" if self.folds else "bmn" if "b" in self.operands else "mn"

    def type_of(self, name: str) -> str:
        """Type of lhs, rhs, bias or out."""
        if name == "out" and self.out_dtype:
            return self.out_dtype
        return "int32" if self.dtype == "int8" and name in ("bias", "out") else self.dtype

    @property
    def known(self) -> dict[str, int]:
        """Extents that are numbers in the expression."""
        pairs = zip(self.order, self.fixed, strict=False)
        return {axis: extent for axis, extent in pairs if extent is not None}

    @property
    def axes(self) -> str:
        """Axes of what is sparse."""
        return {"lhs": self.stored[0], "rhs": self.stored[1], "out": self.out}[self.sparse]

    @property
    def named(self) -> str:
        """The axis whose slices a call names; "" for masks."""
        dim = getattr(self.spec, "dim", None)
        return "" if dim is None else self.axes[dim]

    def tensors(self) -> list[Any]:
        """The expression."""
        extents: list[Any] = [self.known.get(axis) for axis in self.order]
        options: dict[str, Any] = {"dtype": self.dtype, "out_dtype": self.out_dtype}
        options["activation"] = self.act
        if self.bias:
            options["bias"] = True
        lhs, rhs = self.stored
        if self.folds:
            options["kernel"] = KERNEL
            return op.conv2d(*extents, **options)
        if "g" in self.operands:
            return op.grouped_matmul(*extents, transpose_rhs=rhs[-1] == "k", **options)
        options |= {"transpose_lhs": lhs[-1] == "m", "transpose_rhs": rhs[-1] == "k"}
        return (op.batch_matmul if "b" in lhs else op.matmul)(*extents, **options)

    @property
    def usual(self) -> dict[str, int]:
        """Extents of a call whose plans name the tiles that are checked."""
        return {axis: SIZES.get(axis, 1) for axis in self.order} | self.known

    def operator(self, target: str, tiles: int = 2) -> Operator:
        """The operator, compiled once; of a grid's tiles, and of one expression's own, only some
        are used."""
        return _operator(self, target, tiles)


@cache
def _operator(kind: Kind, target: str, tiles: int) -> Operator:
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
    return made


def _some(kind: Kind, every: Sequence[Tile], number: int) -> tuple[Tile, ...]:
    """So many tiles, other ones for each kind."""
    first = 2 * KINDS[kind.family].index(kind)
    return tuple(every[(first + i) % len(every)] for i in range(min(number, len(every))))


def _keep_some(kind: Kind, dispatcher: Any, number: int) -> None:
    """Let a grid's plans choose from some tiles alone, as if never measured, and build all of these
    whatever the sizes."""
    planner = dispatcher.planner
    some = _some(kind, planner.rates().families[ROWS].tiles, number)
    planner._rates = gpu_rates((), kind.dtype, dispatcher.target.isa, LIBRARY, some)
    planner.likely_tiles = lambda layout: some


def tiles_for(kind: Kind, made: Operator, sizes: dict[str, int]) -> Sequence[Any]:
    """The tiles that are checked with a call of these sizes; None for one without any."""
    dispatcher = internals(made)
    dispatcher = dispatcher._turned if kind.packed else dispatcher  # which calls go to then
    planner, layout_of = dispatcher.planner, dispatcher.binder.layout_of
    if isinstance(dispatcher, DecodeDispatcher) and planner.few(layout_of(sizes, "torch")):
        return (planner.tile(sizes["m"], sizes["n"]),)
    with float32_precision(kind.tf32):
        return tuple(planner.likely_tiles(layout_of(kind.usual, "torch")))


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
        made.build(kind.usual)
    if kind.family == "decode":
        for n in WIDTHS:
            for m in (1, MOST_ROWS):
                made.build(kind.usual | {"m": m, "n": n})
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


_BF16_FULL: dict[str, Any] = {"dtype": "bfloat16", "bias": True, "act": "relu"}
_BF16_GELU: dict[str, Any] = {"dtype": "bfloat16", "bias": True, "act": "gelu"}
_SINGLE_FULL: dict[str, Any] = {"dtype": "float32", "bias": True, "act": "relu"}
_INT8: dict[str, Any] = {"dtype": "int8", "fixed": (None, 200, 104)}
_ODD: dict[str, Any] = {"dtype": "float32", "fixed": (None, 203, 101)}
_TF32: dict[str, Any] = {"dtype": "float32", "tf32": True}

KINDS: dict[str, list[Kind]] = {
    "blocks": [
        Kind("mk,kn", "lhs", Mask(64, 64)),
        Kind("km,nk", "lhs", BlockMask(64, 32), **_BF16_FULL),
        Kind("mk,kn", "lhs", BlockMask(256, 128)),
        Kind("mk,nk", "lhs", Values(32, 64), bias=True, act="gelu"),
        Kind("km,kn", "lhs", BitMask(128, 64), dtype="bfloat16"),
        Kind("mk,nk", "lhs", Mask(32, 64)),
        Kind("mk,kn", "rhs", Mask(64, 64), act="silu"),
        Kind("mk,nk", "rhs", Values(32, 64), **_BF16_FULL),
        Kind("mk,kn", "rhs", BitMask(32, 64)),
        Kind("mk,nk", "rhs", BlockMask(256, 64)),
        Kind("km,kn", "rhs", BlockMask(64, 128), dtype="bfloat16"),
        Kind("km,nk", "rhs", Mask(64, 32)),
    ],
    "pieces": [
        Kind("mk,kn", "lhs", Mask(1, 64)),
        Kind("mk,nk", "lhs", BlockMask(1, 64), **_BF16_FULL),
        Kind("mk,nk", "lhs", BitMask(2, 128), bias=True, act="gelu"),
        Kind("mk,kn", "lhs", Values(1, 512), dtype="bfloat16"),
        Kind("mk,kn", "lhs", Mask(3, 32), act="relu"),
        Kind("mk,nk", "lhs", BlockMask(1, 32)),
        Kind("km,kn", "lhs", Mask(64, 1)),
        Kind("mk,nk", "rhs", Mask(1, 64), act="silu"),
        Kind("km,kn", "rhs", Values(64, 1), **_BF16_FULL),
        Kind("mk,kn", "rhs", BitMask(32, 2), bias=True),
        Kind("mk,kn", "lhs", Mask(1, 64), dtype="float32", fixed=(None, 200, 264)),
        Kind("mk,nk", "lhs", Values(1, 32), **_SINGLE_FULL, fixed=(None, 131, 328)),
        Kind("km,kn", "lhs", Mask(64, 1), **_SINGLE_FULL, fixed=(None, 200, 264)),
        Kind("mk,nk", "rhs", Mask(1, 64), dtype="float32", fixed=(136, 200, 264)),
        Kind("km,kn", "rhs", BitMask(64, 1), **_SINGLE_FULL, fixed=(72, 131, 328)),
    ],
    "bands": [
        Kind("mk,kn", "rhs", Mask(1, 32)),
        Kind("km,kn", "rhs", Values(1, 64), **_BF16_FULL),
        Kind("mk,nk", "rhs", BitMask(128, 1)),
        Kind("km,nk", "rhs", Mask(32, 1), bias=True, act="gelu"),
        Kind("mk,nk", "lhs", Mask(64, 1), dtype="bfloat16"),
        Kind("km,nk", "lhs", BlockMask(16, 128), act="relu"),
    ],
    "grid": [
        Kind("mk,kn", "lhs", Grid()),
        Kind("mk,nk", "lhs", Grid(), bias=True, act="relu"),
        Kind("mk,kn", "lhs", Grid(), **_BF16_GELU),
        Kind("mk,nk", "lhs", Grid(), dtype="bfloat16"),
        Kind("mk,kn", "lhs", Grid(), bias=True, act="silu"),
        Kind("mk,nk", "lhs", Grid(), **_BF16_FULL),
        Kind("km,kn", "lhs", Grid(), bias=True, act="relu"),
        Kind("km,nk", "lhs", Grid(), dtype="bfloat16"),
        Kind("mk,kn", "rhs", Grid()),
        Kind("mk,nk", "rhs", Grid(), **_BF16_GELU),
        Kind("km,kn", "rhs", Grid(), bias=True, act="relu"),
        Kind("km,nk", "rhs", Grid()),
    ],
    "outputs": [
        Kind("mk,kn", "out", BlockMask(64, 64)),
        Kind("mk,nk", "out", BlockMask(5, 128), dtype="bfloat16"),
        Kind("mk,kn", "out", Mask()),
        Kind("mk,kn", "out", BitMask(3, 64), bias=True, act="relu"),
        Kind("mk,nk", "out", Mask(1, 64), dead="zero"),
        Kind("mk,kn", "out", BlockMask(128, 256), **_BF16_FULL),
        Kind("km,kn", "out", Mask(64, 64), bias=True, act="gelu"),
        Kind("km,nk", "out", BlockMask(64, 64), dtype="bfloat16", dead="zero"),
        Kind("mk,kn", "out", BlockMask(64, 64), dtype="float32", fixed=(None, 200, 104)),
        Kind("mk,nk", "out", BitMask(), **_SINGLE_FULL, dead="zero", fixed=(None, 264, 72)),
    ],
    "ranges": [
        Kind("km,kn", "lhs", Rows()),
        Kind("km,kn", "rhs", Lengths(), **_BF16_FULL),
        Kind("km,kn", "rhs", Rows(), dtype="bfloat16"),
        Kind("km,kn", "lhs", Lengths(cumulative=True), bias=True, act="gelu"),
    ],
    "decode": [
        Kind("mk,kn", "lhs", Values(), act="relu"),
        Kind("mk,nk", "lhs", Values(), dtype="bfloat16", packed=True),
        Kind("mk,nk", "lhs", Values(), bias=True, packed=True),
        Kind("mk,kn", "lhs", Values(), dtype="bfloat16", bias=True, act="gelu"),
    ],
    "general": [
        Kind("mk,kn", "lhs", Rows(), **_ODD),
        Kind("mk,nk", "rhs", Mask(), fixed=(None, 200, 136), bias=True, act="relu"),
        Kind("km,kn", "lhs", Mask(1, 32), dtype="float32", fixed=(256, 264, 136)),
        Kind("mk,kn", "lhs", Values(), **_INT8),
        Kind("bmk,bkn", "lhs", Rows(1), dtype="bfloat16", fixed=(None, 77, 72, 40)),
        Kind("ncxy,fcij", "lhs", Rows(), dtype="float32", bias=True, fixed=(None, 5, 7, 13, 11)),
        Kind("mk,gkn", "lhs", Groups(5), dtype="float32", fixed=(None, 96, 64, 5), dead="zero"),
        Kind("mk,kn", "lhs", Lengths(1), dtype="bfloat16", fixed=(None, 131, 97)),
        Kind("bmk,bnk", "rhs", Lengths(), dtype="float32", fixed=(8, 33, 64, 52), act="relu"),
        Kind("ncxy,fcij", "rhs", Rows(1), dtype="float16", fixed=(2, 37, 7, 13, 11)),
        Kind("mk,kn", "lhs", Mask(64, 1), dtype="float32", bias=True, fixed=(192, 200, 264)),
        Kind("mk,nk", "lhs", BlockMask(64, 8), **_SINGLE_FULL, fixed=(200, 200, 264)),
        Kind("mk,nk", "rhs", Values(128, 1), dtype="float32", fixed=(136, 300, 264)),
        Kind("mk,kn", "rhs", Lengths(1, True), out_dtype="float32", fixed=(96, 72, 64)),
        Kind("mk,kn", "rhs", Rows(1), dtype="int8", fixed=(None, 204, 68), act="relu", dead="zero"),
        Kind("mk,kn", "lhs", Mask(1, 64), dtype="int8", fixed=(None, 200, 264)),
    ],
    "tf32": [
        Kind("mk,nk", "lhs", Rows(), **_TF32, fixed=(None, 203, 101), bias=True, act="relu"),
        Kind("mk,kn", "lhs", Rows(), **_TF32, fixed=(None, 200, 136)),
        Kind("km,kn", "lhs", Mask(1, 32), **_TF32, fixed=(256, 264, 136)),
        Kind("mk,kn", "rhs", Mask(1, 64), **_TF32, fixed=(None, 192, 264)),
        Kind("mk,kn", "lhs", Mask(1, 64), **_TF32, fixed=(None, 200, 264)),
        Kind("mk,kn", "rhs", Mask(64, 1), **_TF32, fixed=(136, 200, 264)),
        Kind("km,nk", "rhs", Mask(32, 1), **_TF32, fixed=(136, 192, 264), bias=True),
        Kind("mk,gkn", "lhs", Groups(5), **_TF32, fixed=(None, 96, 64, 5), dead="zero"),
        Kind("bmk,bkn", "lhs", Rows(1), **_TF32, fixed=(None, 77, 72, 40)),
        Kind("mk,nk", "lhs", Mask(1, 64), **_TF32, fixed=(None, 131, 328), bias=True, act="relu"),
    ],
}
