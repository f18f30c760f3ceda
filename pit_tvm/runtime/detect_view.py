"""The operand as detection sees it: what an entry is, and dimensions that can share a loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DTypeError, ShapeError, mismatch
from ..structs import BitMask, BlockMask, Mask, SparsitySpec, Values
from .detect_workspace import Array, flat_view

UINT8 = np.dtype(np.uint8)
# What makes an element of each type live: everything, or for floating point all but the sign.
INTEGERS = {"bool": 8, **{f"{u}int{bits}": bits for u in ("", "u") for bits in (8, 16, 32, 64)}}
FLOATS = {"float16": 16, "bfloat16": 16, "uint16": 16, "float32": 32, "float64": 64}


@dataclass(frozen=True)
class Elements:
    """What one entry of the user's array is: ``bits`` wide; live if a bit of ``sign`` is set.

    ``packed``: every entry is eight elements of the last dimension. ``grains``: elements per
    entry in each dimension, for block masks, or none.
    """

    bits: int
    sign: int
    packed: bool = False
    grains: tuple[int, ...] = ()

    def entries(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the user's array for an operand of ``shape``."""
        if self.packed:
            return (*shape[:-1], -(-shape[-1] // 8))
        if self.grains:
            return tuple(-(-n // g) for n, g in zip(shape, self.grains, strict=True))
        return shape


FLAGS = Elements(8, 0xFF)


@dataclass(frozen=True)
class Dim:
    """A dimension of ``size`` entries of ``grain`` positions each, ``limit`` positions in all.

    Micro-tiles take ``extent`` positions of it.
    """

    size: int
    extent: int
    grain: int
    limit: int

    @property
    def slots(self) -> int:
        """Number of micro-tiles along the dimension."""
        return -(-self.limit // self.extent)

    @property
    def done(self) -> bool:
        """Whether there is one entry per micro-tile."""
        return self.extent == 1 and self.grain == 1


def dimension(n: int, extent: int, elements: Elements, d: int, last: int) -> Dim:
    """Dimension ``d`` of ``n`` elements in entries, its extent too where it is whole entries."""
    grain = 8 if elements.packed and d == last else 1
    if elements.grains:
        grain = elements.grains[d]
    size = -(-n // grain)
    if elements.packed and d == last and extent == 1:
        return Dim(size, 1, 1, size)  # PIT itself: compact reads the bits
    if extent == n:
        return Dim(size, size, 1, size)
    if extent % grain == 0:
        return Dim(size, extent // grain, 1, size)
    return Dim(size, extent, grain, n)


def folded(dim: Dim) -> Dim:
    """The dimension with one entry per micro-tile."""
    return Dim(dim.slots, 1, 1, dim.slots)


def product(dims: list[Dim]) -> int:
    """Number of entries of several dimensions."""
    return math.prod(d.size for d in dims)


def merge(dims: list[Dim]) -> list[Dim]:
    """Neighbours as one dimension wherever the runs of the two together are runs of one."""
    merged: list[Dim] = []
    for dim in dims:
        left = merged[-1] if merged else None
        if left is None or left.grain > 1 or dim.grain > 1:
            merged.append(dim)
        elif dim.extent == dim.size or (left.extent == 1 and dim.size % dim.extent == 0):
            size = left.size * dim.size
            merged[-1] = Dim(size, left.extent * dim.extent, 1, size)
        else:
            merged.append(dim)
    return [d for d in merged if d.limit > 1 or d.grain > 1]


def odd_pitch(rows: int) -> int:
    """At least ``rows`` bytes, an odd number of cache lines: slots spread over cache sets."""
    lines = -(-rows // 64)
    return 64 * (lines + 1 - lines % 2)


def _argument(spec: SparsitySpec, operand: str) -> str:
    return f"sparsity of {operand} ({type(spec).__name__})"


def entries_of(
    spec: SparsitySpec, array: Array, shape: tuple[int, ...], element: np.dtype[Any], operand: str
) -> Any:
    """The user's array, checked, as a flat vector of ``element``."""
    if array.shape != shape:
        raise ShapeError(mismatch(_argument(spec, operand), f"shape {shape}", array.shape))
    return flat_view(_argument(spec, operand), array, element)


def elements_of(
    spec: SparsitySpec, dtype: np.dtype[Any], shape: tuple[int, ...], operand: str
) -> tuple[Elements, np.dtype[Any]]:
    """What an entry of the array is, and the unsigned type under which kernels read it."""
    name = dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"
    if isinstance(spec, Values):
        if name in FLOATS:
            bits = FLOATS[name]
            return Elements(bits, (1 << bits - 1) - 1), np.dtype(f"uint{bits}")
        if name in INTEGERS:
            bits = INTEGERS[name]
            return Elements(bits, (1 << bits) - 1), np.dtype(f"uint{bits}")
        raise DTypeError(mismatch(_argument(spec, operand), "floating point or integers", name))
    allowed = ("uint8",) if isinstance(spec, BitMask) else ("bool", "uint8")
    if name not in allowed:
        advice = "use Values to detect non-zeros" if isinstance(spec, Mask) else ""
        expected = " or ".join(allowed)
        raise DTypeError(mismatch(_argument(spec, operand), expected, name, advice))
    if isinstance(spec, BlockMask):
        if len(spec.extents) != len(shape):
            expected = f"one extent for each of {len(shape)} dimensions"
            raise ShapeError(mismatch("BlockMask", expected, spec.extents))
        grains = spec.extents if max(spec.extents) > 1 else ()
        return Elements(8, 0xFF, grains=grains), UINT8
    return Elements(8, 0xFF, packed=isinstance(spec, BitMask)), UINT8
