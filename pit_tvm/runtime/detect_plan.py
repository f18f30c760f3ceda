"""How a mask becomes an index: the steps for one operand shape, micro-tile and mask layout.

The operand is viewed as ``[before.., PIT, after..]``. Dimensions that can share one loop are
merged, each one whose micro-tile extent is more than one entry is folded, and what comes after
the PIT dimension is moved before it. One flag per micro-tile is left, PIT innermost: compact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import tvm

from ..errors import ShapeError, mismatch
from ..structs import MicroTile
from . import detect_compact, detect_kernels

Build = partial[tvm.IRModule]

INT32_MAX = 2**31 - 1
PARALLEL_BYTES = 1 << 16  # waking a second worker costs about as much as reading this many bytes
PARALLEL_POSITIONS = 1 << 15  # the same for compact, which takes eight positions at a time
SHORT_RUNS = (1, 8, 16, 32)  # extents that fold_columns takes as constants
LONG_RUN = 256  # extents from which fold_rows works in two steps,
PART_RUN = 64  # the first of which folds this many rows


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
class Step:
    """One kernel of a plan: ``build`` makes its module, ``args`` are its sizes.

    ``size`` is the number of bytes of the array of flags that it fills.
    """

    build: Build
    args: tuple[int, ...]
    size: int = 0

    @property
    def name(self) -> str:
        """Name of the kernel, unique among all kernels of detection."""
        return kernel_name(self.build)

    @property
    def needs_table(self) -> bool:
        """Whether the kernel takes `detect_compact.bit_positions` after its source."""
        return self.build.func is detect_compact.compact


@dataclass(frozen=True)
class MaskPlan:
    """Steps from the user's array (of shape ``entries``) to ``ids`` and ``count``.

    ``last`` writes the lists; without it the operand is empty.
    """

    entries: tuple[int, ...]
    folds: tuple[Step, ...]
    last: Step | None
    slots: tuple[int, ...]
    capacity: int


@dataclass(frozen=True)
class _Dim:
    """``size`` entries of ``grain`` positions each, of ``limit`` positions in all."""

    size: int
    extent: int
    grain: int
    limit: int

    @property
    def slots(self) -> int:
        return -(-self.limit // self.extent)

    @property
    def done(self) -> bool:
        return self.extent == 1 and self.grain == 1


def kernel_name(build: Build) -> str:
    """Name of the kernel that a template makes with its parameters."""
    return "_".join(["detect", build.func.__name__, *map(_word, build.args)])


def _word(argument: int | str) -> str:
    return argument if isinstance(argument, str) else f"{int(argument):x}"


def capacity_of(rows: int) -> int:
    """Length of one list: ``rows`` rounded up to a multiple of 64, at least 64."""
    return max(64, -(-rows // 64) * 64)


def check_micro_tile(shape: tuple[int, ...], micro_tile: MicroTile) -> None:
    """Raise ShapeError unless the micro-tile fits the shape, and positions fit int32."""
    extents = micro_tile.extents
    if len(extents) != len(shape):
        expected = f"one extent for each of {len(shape)} dimensions"
        raise ShapeError(mismatch("micro_tile.extents", expected, extents))
    if any(e < 0 for e in extents):
        raise ShapeError(mismatch("micro_tile.extents", "extents of at least 0", extents))
    if any(n < 0 for n in shape) or shape[micro_tile.dim] > INT32_MAX:
        expected = f"sizes from 0, at most {INT32_MAX} on dimension {micro_tile.dim}"
        raise ShapeError(mismatch("shape", expected, shape))


def slot_grid(shape: tuple[int, ...], micro_tile: MicroTile) -> tuple[int, ...]:
    """Numbers of slots: one per dimension that is neither the PIT dimension nor whole."""
    grid = tuple(
        -(-n // e)
        for d, (n, e) in enumerate(zip(shape, micro_tile.extents, strict=True))
        if d != micro_tile.dim and e > 0
    )
    return grid or (1,)


def plan_mask(shape: tuple[int, ...], micro_tile: MicroTile, elements: Elements) -> MaskPlan:
    """Plan the detection of the live micro-tiles of an operand; errors: `check_micro_tile`."""
    check_micro_tile(shape, micro_tile)
    grid, dim = slot_grid(shape, micro_tile), micro_tile.dim
    capacity = capacity_of(shape[dim])
    if 0 in shape:
        return MaskPlan(elements.entries(shape), (), None, grid, capacity)
    builder = _Builder(shape, micro_tile, elements)
    builder.fold()
    last = builder.compact(shape[dim], math.prod(grid), capacity)
    return MaskPlan(elements.entries(shape), tuple(builder.steps), last, grid, capacity)


# --------------------------------------------------------------------------------------------


class _Builder:
    """The view as it is so far: dimensions before, PIT entries, dimensions after, and the steps.

    After the first step the entries are flags of one byte, or still bits if PIT is the packed
    dimension.
    """

    def __init__(self, shape: tuple[int, ...], tile: MicroTile, elements: Elements) -> None:
        last = len(shape) - 1
        self.steps: list[Step] = []
        self.elements = elements
        self.bits = elements.packed and tile.dim == last
        bytewise = tile.extents[last] % 8 == 0 or tile.extents[last] >= shape[last]
        if elements.packed and not self.bits and not bytewise:
            self._unpack(shape)
        dims = [
            _dim(n, min(e or n, n), self.elements, d, last)
            for d, (n, e) in enumerate(zip(shape, tile.extents, strict=True))
        ]
        self.rows = dims[tile.dim].size
        self.grain = dims[tile.dim].grain
        self.before = _merge(dims[: tile.dim])
        self.after = _merge(dims[tile.dim + 1 :])

    def fold(self) -> None:
        """Fold every dimension to its slots, and move the ones after PIT before it."""
        if len(self.after) > 1:
            for place in reversed(range(len(self.after))):
                if not self.after[place].done:
                    self._fold_after(place)
            self.after = _merge(self.after)
        if self.after and not self.after[0].done:
            self._turn()
        for place in range(len(self.before)):
            if not self.before[place].done:
                self._fold_before(place)
        if self.after:
            self._turn()
        if not self.steps and not self.bits and self.grain == 1:
            one = _Dim(1, 1, 1, 1)  # nothing to fold: only test the elements
            self._add(*self._rows_kernel(one, 1, self._size()))

    def compact(self, rows: int, slots: int, capacity: int) -> Step:
        """The last step, on the flags that `fold` leaves; ``rows``: elements along PIT."""
        parallel = slots > 1 and slots * rows >= PARALLEL_POSITIONS
        args = (slots, rows, self.rows, capacity)
        if self.grain > 1:
            return Step(partial(detect_compact.compact_blocks, parallel), (*args, self.grain))
        return Step(partial(detect_compact.compact, self.bits, parallel), args)

    def _size(self) -> int:
        """Entries of the view."""
        return _product(self.before) * self.rows * _product(self.after)

    def _add(self, build: Build, args: tuple[int, ...]) -> None:
        """One more step, which leaves the view as it is now."""
        self.steps.append(Step(build, args, self._size() + detect_compact.WORD_SLACK))
        self.elements = FLAGS

    def _unpack(self, shape: tuple[int, ...]) -> None:
        size = math.prod(shape)
        build = partial(detect_kernels.unpack, size >= PARALLEL_BYTES)
        args = (size // shape[-1], shape[-1])
        self.steps.append(Step(build, args, size + detect_compact.WORD_SLACK))
        self.elements = FLAGS

    def _fold_before(self, place: int) -> None:
        dim, outer = self.before[place], _product(self.before[:place])
        inner = _product(self.before[place + 1 :]) * self.rows * _product(self.after)
        long = dim.grain == 1 and dim.extent >= LONG_RUN
        if long and (dim.extent == dim.size or dim.extent % PART_RUN == 0):
            # two steps: narrow columns of many rows are slow to read, and few tasks
            self._add(*self._shorten(place, dim, outer, inner))
            dim = self.before[place]
        kernel = self._rows_kernel(dim, outer, inner)
        self.before[place] = _folded(dim)
        self._add(*kernel)

    def _shorten(
        self, place: int, dim: _Dim, outer: int, inner: int
    ) -> tuple[Build, tuple[int, ...]]:
        """Fold a dimension to pieces of its micro-tiles."""
        part = _Dim(dim.size, PART_RUN, 1, dim.limit)
        kernel = self._rows_kernel(part, outer, inner)
        self.before[place] = _Dim(part.slots, -(-dim.extent // PART_RUN), 1, part.slots)
        return kernel

    def _fold_after(self, place: int) -> None:
        dim, inner = self.after[place], _product(self.after[place + 1 :])
        outer = _product(self.before) * self.rows * _product(self.after[:place])
        if place == len(self.after) - 1:
            kernel = self._columns_kernel(dim, outer, 1, 1)
        else:
            kernel = self._rows_kernel(dim, outer, inner)
        self.after[place] = _folded(dim)
        self._add(*kernel)

    def _turn(self) -> None:
        """Fold the only dimension after PIT and move it before it."""
        (dim,) = self.after
        pitch = _pitch(self.rows) if dim.slots > 1 else self.rows
        kernel = self._columns_kernel(dim, _product(self.before), self.rows, pitch)
        self.before.append(_folded(dim))
        self.after, self.rows = [], pitch
        self._add(*kernel)

    def _rows_kernel(self, dim: _Dim, outer: int, inner: int) -> tuple[Build, tuple[int, ...]]:
        e = self.elements
        parallel = outer * dim.size * inner * e.bits // 8 >= PARALLEL_BYTES
        build = partial(detect_kernels.fold_rows, e.bits, e.sign, self.bits, parallel)
        return build, (outer, dim.size, inner, dim.slots, dim.extent, dim.grain, dim.limit)

    def _columns_kernel(
        self, dim: _Dim, outer: int, rows: int, pitch: int
    ) -> tuple[Build, tuple[int, ...]]:
        e, blocks = self.elements, dim.grain > 1
        parallel = outer * rows * dim.size * e.bits // 8 >= PARALLEL_BYTES
        run = dim.extent if dim.extent in SHORT_RUNS and not blocks else 0
        build = partial(detect_kernels.fold_columns, e.bits, e.sign, run, blocks, parallel)
        sizes = (dim.size, dim.slots, dim.extent, dim.grain, dim.limit)
        return build, (outer, rows, *sizes, pitch)


def _dim(n: int, extent: int, elements: Elements, d: int, last: int) -> _Dim:
    """Dimension ``d`` of ``n`` elements in entries, its extent too where it is whole entries."""
    grain = 8 if elements.packed and d == last else 1
    if elements.grains:
        grain = elements.grains[d]
    size = -(-n // grain)
    if elements.packed and d == last and extent == 1:
        return _Dim(size, 1, 1, size)  # PIT itself: compact reads the bits
    if extent == n:
        return _Dim(size, size, 1, size)
    if extent % grain == 0:
        return _Dim(size, extent // grain, 1, size)
    return _Dim(size, extent, grain, n)


def _folded(dim: _Dim) -> _Dim:
    return _Dim(dim.slots, 1, 1, dim.slots)


def _product(dims: list[_Dim]) -> int:
    return math.prod(d.size for d in dims)


def _merge(dims: list[_Dim]) -> list[_Dim]:
    """Neighbours as one dimension wherever the runs of the two together are runs of one."""
    merged: list[_Dim] = []
    for dim in dims:
        left = merged[-1] if merged else None
        if left is None or left.grain > 1 or dim.grain > 1:
            merged.append(dim)
        elif dim.extent == dim.size or (left.extent == 1 and dim.size % dim.extent == 0):
            size = left.size * dim.size
            merged[-1] = _Dim(size, left.extent * dim.extent, 1, size)
        else:
            merged.append(dim)
    return [d for d in merged if d.limit > 1 or d.grain > 1]


def _pitch(rows: int) -> int:
    """At least ``rows`` bytes, an odd number of cache lines: slots spread over cache sets."""
    lines = -(-rows // 64)
    return 64 * (lines + 1 - lines % 2)
