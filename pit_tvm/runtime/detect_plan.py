"""How a mask becomes an index: the steps for one operand shape, micro-tile and mask layout.

The operand is viewed as ``[before.., PIT, after..]``. Dimensions that can share one loop are
merged, each one whose micro-tile extent is more than one entry is folded, and what comes after
the PIT dimension is moved before it. One flag per micro-tile is left, PIT innermost: compact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import tvm

from ..errors import ShapeError, mismatch
from ..structs import MicroTile
from . import detect_compact, detect_kernels
from .detect_view import FLAGS, Dim, Elements, dimension, folded, merge, odd_pitch, product

Build = partial[tvm.IRModule]
Kernel = Callable[..., Any]

INT32_MAX = 2**31 - 1
PARALLEL_BYTES = 1 << 16  # waking a second worker costs about as much as reading this many bytes
PARALLEL_POSITIONS = 1 << 15  # the same for compact, which takes eight positions at a time
SHORT_RUNS = (1, 8, 16, 32)  # extents that fold_columns takes as constants
LONG_RUN = 256  # extents from which fold_rows works in two steps,
ONE_PASS_SLOTS = 64  # lists from which each is one task of a single pass
PART_RUN = 64  # the first of which folds this many rows


@dataclass(frozen=True)
class Step:
    """One kernel of a plan: ``build`` makes its module, ``args`` are its sizes.

    ``size`` is the number of bytes of the array of flags that it fills.
    """

    build: Build
    args: tuple[int, ...]
    size: int = 0

    @property
    def needs_table(self) -> bool:
        """Whether the kernel takes `detect_compact.bit_positions` after its source."""
        return self.build.func in (detect_compact.compact, detect_compact.fold_compact)


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


def kernel_name(build: Build) -> str:
    """Name of the kernel that a template makes with its parameters, unique among all kernels of
    detection."""
    template = build.func
    words = [a if isinstance(a, str) else f"{int(a):x}" for a in build.args]
    return "_".join(["detect", template.__name__, *words])


def is_parallel(build: Build) -> bool:
    """Whether the kernel has parallel loops: what a template's parameter ``parallel`` says."""
    given = signature(build.func).bind(*build.args, **build.keywords).arguments
    return bool(given.get("parallel"))


def capacity_of(size: int) -> int:
    """Room of a list of positions on an axis of ``size``: a multiple of 64, at least 64."""
    return max(64, -(-size // 64) * 64)


def check_micro_tile(shape: tuple[int, ...], micro_tile: MicroTile) -> None:
    """Raise ShapeError unless the micro-tile fits the shape, and positions fit int32."""
    extents = micro_tile.extents
    if len(extents) != len(shape):
        expected = f"one extent for each of {len(shape)} dimensions"
        raise ShapeError(mismatch("micro_tile.extents", expected, extents))
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
    sizes = (shape[dim], math.prod(grid), capacity)
    last = builder.lists(*sizes) or builder.compact(*sizes)
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
            dimension(n, min(e or n, n), self.elements, d, last)
            for d, (n, e) in enumerate(zip(shape, tile.extents, strict=True))
        ]
        self.rows = dims[tile.dim].size
        self.grain = dims[tile.dim].grain
        self.before = merge(dims[: tile.dim])
        self.after = merge(dims[tile.dim + 1 :])

    def fold(self) -> None:
        """Fold every dimension to its slots, and move the ones after PIT before it."""
        if len(self.after) > 1:
            for place in reversed(range(len(self.after))):
                if not self.after[place].done:
                    self._fold_after(place)
            self.after = merge(self.after)
        if self.after and not self.after[0].done:
            self._turn()
        for place in range(len(self.before)):
            if not self.before[place].done:
                self._fold_before(place)
        if self.after:
            self._turn()
        if not self.steps and not self.bits and self.grain == 1:
            one = Dim(1, 1, 1, 1)  # nothing to fold: only test the elements
            self._add(*self._rows_kernel(one, 1, self._size()))

    def lists(self, rows: int, slots: int, capacity: int) -> Step | None:
        """The only step, in place of a fold of rows and `compact`, where there are slots enough for
        all workers; ``rows``: elements along PIT."""
        only = self.steps[0] if len(self.steps) == 1 else None
        if only is None or only.build.func is not detect_kernels.fold_rows or self.bits:
            return None
        outer, _, inner, runs, *_ = only.args
        bits, sign, _, parallel = only.build.args
        vector = detect_kernels.VECTOR_BYTES * 8 // bits
        if self.grain > 1 or slots < ONE_PASS_SLOTS or inner < vector:
            return None
        if (outer * runs, inner) != (slots, self.rows):  # folded nothing, only tested elements
            return None
        self.steps = []
        build = partial(detect_compact.fold_compact, bits, sign, parallel)
        return Step(build, (*only.args, rows, capacity))

    def compact(self, rows: int, slots: int, capacity: int) -> Step:
        """The last step, on the flags that `fold` leaves; ``rows``: elements along PIT."""
        parallel = slots > 1 and slots * rows >= PARALLEL_POSITIONS
        args = (slots, rows, self.rows, capacity)
        if self.grain > 1:
            return Step(partial(detect_compact.compact_blocks, parallel), (*args, self.grain))
        return Step(partial(detect_compact.compact, self.bits, parallel), args)

    def _size(self) -> int:
        """Entries of the view."""
        return product(self.before) * self.rows * product(self.after)

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
        dim, outer = self.before[place], product(self.before[:place])
        inner = product(self.before[place + 1 :]) * self.rows * product(self.after)
        long = dim.grain == 1 and dim.extent >= LONG_RUN
        if long and (dim.extent == dim.size or dim.extent % PART_RUN == 0):
            # two steps: narrow columns of many rows are slow to read, and few tasks
            self._add(*self._shorten(place, dim, outer, inner))
            dim = self.before[place]
        kernel = self._rows_kernel(dim, outer, inner)
        self.before[place] = folded(dim)
        self._add(*kernel)

    def _shorten(
        self, place: int, dim: Dim, outer: int, inner: int
    ) -> tuple[Build, tuple[int, ...]]:
        """Fold a dimension to pieces of its micro-tiles."""
        part = Dim(dim.size, PART_RUN, 1, dim.limit)
        kernel = self._rows_kernel(part, outer, inner)
        self.before[place] = Dim(part.slots, -(-dim.extent // PART_RUN), 1, part.slots)
        return kernel

    def _fold_after(self, place: int) -> None:
        dim, inner = self.after[place], product(self.after[place + 1 :])
        outer = product(self.before) * self.rows * product(self.after[:place])
        if place == len(self.after) - 1:
            kernel = self._columns_kernel(dim, outer, 1, 1)
        else:
            kernel = self._rows_kernel(dim, outer, inner)
        self.after[place] = folded(dim)
        self._add(*kernel)

    def _turn(self) -> None:
        """Fold the only dimension after PIT and move it before it."""
        (dim,) = self.after
        pitch = odd_pitch(self.rows) if dim.slots > 1 else self.rows
        kernel = self._columns_kernel(dim, product(self.before), self.rows, pitch)
        self.before.append(folded(dim))
        self.after, self.rows = [], pitch
        self._add(*kernel)

    def _rows_kernel(self, dim: Dim, outer: int, inner: int) -> tuple[Build, tuple[int, ...]]:
        e = self.elements
        parallel = outer * dim.size * inner * e.bits // 8 >= PARALLEL_BYTES
        build = partial(detect_kernels.fold_rows, e.bits, e.sign, self.bits, parallel)
        return build, (outer, dim.size, inner, dim.slots, dim.extent, dim.grain, dim.limit)

    def _columns_kernel(
        self, dim: Dim, outer: int, rows: int, pitch: int
    ) -> tuple[Build, tuple[int, ...]]:
        e, blocks = self.elements, dim.grain > 1
        parallel = outer * rows * dim.size * e.bits // 8 >= PARALLEL_BYTES
        run = dim.extent if dim.extent in SHORT_RUNS and not blocks else 0
        build = partial(detect_kernels.fold_columns, e.bits, e.sign, run, blocks, parallel)
        sizes = (dim.size, dim.slots, dim.extent, dim.grain, dim.limit)
        return build, (outer, rows, *sizes, pitch)
