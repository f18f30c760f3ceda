"""Operators that ``check_gpu.py`` calls, each with a pattern: a list for every family of kernels.

Kernels of Hopper's own families take every size at run time; those of "general" belong to one
expression, whose n and k are fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pit_tvm import BitMask, BlockMask, Grid, Groups, Lengths, Mask, Rows, Values, op
from pit_tvm.structs import SparsitySpec

KERNEL = (3, 2)  # of a convolution
DTYPES = ("float16", "bfloat16")
EPILOGUES = (
    (False, None),
    (True, None),
    (True, "relu"),
    (True, "gelu"),
    (False, "gelu_tanh"),
    (True, "silu"),
)
BLOCKS = ((1, 16), (4, 8), (32, 64))
BANDS = ((1, 32), (16, 64), (64, 128))  # of an lhs that is stored [k, m]
GROUPS = (1, 2, 3, 8, 64, 130, 256)
#: Operands of products over live rows.
ROWS = {"linear": "mk,nk", "matmul": "mk,kn", "turned": "km,kn", "grouped": "mk,gnk"}


@dataclass(frozen=True)
class Kind:
    """An operator and its pattern, apart from what a call may choose.

    ``operands``: axes of lhs and rhs as they are stored, with b for a batch, g for groups, f, c, x,
    y, i, j of a convolution. ``sparse``: lhs, rhs or out. ``fixed``: extents that are numbers in
    the expression, in the operator's order; None leaves one to the call. ``packed``: the operator
    packs rhs first. ``tf32``: tensor cores compute float32. ``family``: whose kernels are checked;
    ``place``: the number of the operator among those of its family.
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
    family: str = ""
    place: int = 0

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
    def plain(self) -> bool:
        """Without an epilogue."""
        return not self.bias and self.act is None

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
        groups = {"g": self.spec.num_groups} if isinstance(self.spec, Groups) else {}
        return {axis: extent for axis, extent in pairs if extent is not None} | groups

    @property
    def axes(self) -> str:
        """Axes of what is sparse."""
        return {"lhs": self.stored[0], "rhs": self.stored[1], "out": self.out}[self.sparse]

    @property
    def named(self) -> str:
        """The axis whose slices a call names; "" for masks."""
        dim = getattr(self.spec, "dim", None)
        return "" if dim is None else self.axes[dim]

    @property
    def axes_of_bias(self) -> str:
        """Axes of the bias."""
        return "f" if self.folds else "gn" if "g" in self.operands else "n"

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


def _over_rows(family: str) -> list[Kind]:
    """Products over live rows: all types and epilogues, at each turn with other patterns."""
    every = [(dtype, bias, act) for bias, act in EPILOGUES for dtype in DTYPES]
    kinds = []
    for turn in range(len(_patterns(family, 0))):
        for place, (dtype, bias, act) in enumerate(every):
            patterns = _patterns(family, place)
            spec, dead = patterns[(turn + place) % len(patterns)]
            kinds.append(Kind(ROWS[family], "lhs", spec, dtype, bias, act, dead, place=place))
    return kinds


def _patterns(family: str, place: int) -> list[tuple[SparsitySpec, str]]:
    """Patterns of live rows, and what becomes of dead ones; where lhs is turned, in bands of every
    height for products without an epilogue, else of one."""
    named: list[SparsitySpec] = [Lengths(), Lengths(cumulative=True), Rows()]
    masks: list[SparsitySpec] = [Mask(), BitMask(), *(BlockMask(*b) for b in BLOCKS), Values()]
    if family == "turned":
        bands = BANDS if place < len(DTYPES) else BANDS[place // len(DTYPES) % len(BANDS) :][:1]
        makers = (Mask, BitMask, BlockMask, Values)
        named, masks = [], [make(*band) for make in makers for band in bands]
    if family == "grouped":
        named, masks = [Groups(number) for number in GROUPS], []
    return [*product(named, ("skip", "zero")), *product(masks, ("skip",))]


_BF16_FULL: dict[str, Any] = {"dtype": "bfloat16", "bias": True, "act": "relu"}
_BF16_GELU: dict[str, Any] = {"dtype": "bfloat16", "bias": True, "act": "gelu"}
_SINGLE_FULL: dict[str, Any] = {"dtype": "float32", "bias": True, "act": "relu"}
_INT8: dict[str, Any] = {"dtype": "int8", "fixed": (None, 200, 104)}
_ODD: dict[str, Any] = {"dtype": "float32", "fixed": (None, 203, 101)}
_TF32: dict[str, Any] = {"dtype": "float32", "tf32": True}

_LISTED: dict[str, list[Kind]] = {
    **{family: _over_rows(family) for family in ROWS},
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
        Kind("mk,gkn", "lhs", Groups(5), dtype="float32", fixed=(None, 96, 64), dead="zero"),
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
        Kind("mk,gkn", "lhs", Groups(5), **_TF32, fixed=(None, 96, 64), dead="zero"),
        Kind("bmk,bkn", "lhs", Rows(1), **_TF32, fixed=(None, 77, 72, 40)),
        Kind("mk,nk", "lhs", Mask(1, 64), **_TF32, fixed=(None, 131, 328), bias=True, act="relu"),
    ],
}

KINDS = {
    family: [
        replace(kind, family=family, place=kind.place if family in ROWS else number)
        for number, kind in enumerate(kinds)
    ]
    for family, kinds in _LISTED.items()
}
