"""Indices of slices that the user names: row ids, lengths and group ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..errors import AxisError, DTypeError, ShapeError, mismatch
from ..structs import Groups, Index, Lengths, MicroTile, Rows, SparsitySpec
from . import detect_slices
from .detect_plan import Build, capacity_of, check_micro_tile
from .detect_workspace import Array, Take, Workspace, flat_view, fresh

Kernel = Callable[..., Any]

INT32 = np.dtype(np.int32)
ID_BITS = {np.dtype(np.int32): 32, np.dtype(np.int64): 64}
PART_ROWS = 1 << 15  # rows of one task when group ids are split
MAX_PARTS = 16


@dataclass(frozen=True)
class _Memory:
    """What one detection writes: the index, its lists as a vector, a flag for bad input, and where
    the parts of groups start."""

    index: Index
    lists: Array
    count: Array
    bad: Array
    starts: Array


class SliceCall:
    """Detection of slices of one operand shape: what no call changes is looked up once.

    ``kernel(build)`` gives the compiled kernel of a template; ``checked``: look for row ids that
    are repeated. Errors are those of `Detector.detect`.
    """

    def __init__(
        self,
        spec: SparsitySpec,
        shape: tuple[int, ...],
        micro_tile: MicroTile,
        kernel: Callable[[Build], Kernel],
        checked: bool,
    ) -> None:
        self.rows = _rows_of(spec, shape, micro_tile)
        self._spec, self._kernel, self._checked = spec, kernel, checked
        self._kernels: dict[object, Kernel] = {}
        self._operand, self._groups, self._parts = micro_tile.operand, 1, 0
        what = "row ids"
        self._run: Callable[[Array, Any, _Memory], None] = self._of_rows
        if isinstance(spec, Lengths):
            what, self._run = "cu_seqlens" if spec.cumulative else "lengths", self._of_lengths
            self._cumulative = spec.cumulative
        elif isinstance(spec, Groups):
            what, self._run = "group ids", self._of_groups
            self._groups = spec.num_groups
            self._parts = min(MAX_PARTS, -(-self.rows // PART_ROWS)) or 1
        self._argument = f"sparsity of {self._operand} ({what})"

    def index(
        self, value: Any, workspace: Workspace | None = None, *, deterministic: bool = False
    ) -> Index:
        """The index of the slices that ``value`` names; ``deterministic`` sorts row ids."""
        ids, flat = self._vector(value)
        make = self._memory
        memory = make(fresh) if workspace is None else workspace.keep(self, make)
        self._run(ids, flat, memory)
        if deterministic and isinstance(self._spec, Rows):
            memory.lists[: ids.size].sort()
        return memory.index

    def _memory(self, take: Take) -> _Memory:
        lists = take(f"{self._operand} ids", (self._groups, capacity_of(self.rows)), INT32)
        count = take(f"{self._operand} count", (self._groups,), INT32)
        bad = take("bad", (1,), INT32)
        starts = take("starts", (self._parts * self._groups,), INT32)
        return _Memory(Index(lists, count), lists.reshape(-1), count, bad, starts)

    def _of_rows(self, ids: Array, flat: Any, memory: _Memory) -> None:
        if ids.size > self.rows:
            advice = "an id must not occur twice"
            raise ShapeError(mismatch(self._argument, f"at most {self.rows} ids", ids.size, advice))
        if self._checked:
            _check_repeats(self._argument, ids)
        kernel = self._kernel_for(ids, detect_slices.copy_rows)
        kernel(flat, memory.lists, memory.count, memory.bad, ids.size, self.rows)
        if memory.bad[0]:
            self._refuse(ids, (ids < 0) | (ids >= self.rows), f"ids from 0 to {self.rows - 1}")

    def _of_lengths(self, given: Array, flat: Any, memory: _Memory) -> None:
        cumulative, rows = self._cumulative, self.rows
        batch = given.size - 1 if cumulative else given.size
        if batch < 0 or (rows % batch if batch else rows):
            expected = f"a number of sequences that divides {rows} rows"
            raise ShapeError(mismatch(self._argument, expected, f"{max(batch, 0)} sequences"))
        padded = rows // batch if batch else 0
        kernel = self._kernel_for(given, detect_slices.expand_lengths, cumulative)
        kernel(flat, memory.lists, memory.count, memory.bad, batch, padded)
        if memory.bad[0]:
            if cumulative and given[0] != 0:
                expected = "running sums that start at 0"
                raise ShapeError(mismatch(self._argument, expected, given[0]))
            lengths = np.diff(given.astype(np.int64)) if cumulative else given
            self._refuse(lengths, (lengths < 0) | (lengths > padded), f"0 to {padded} rows")

    def _of_groups(self, given: Array, flat: Any, memory: _Memory) -> None:
        groups, rows = self._groups, self.rows
        if given.size != rows:
            raise ShapeError(mismatch(self._argument, f"{rows} ids", given.size))
        kernel = self._kernel_for(given, detect_slices.split_groups, self._parts > 1)
        capacity = capacity_of(rows)
        vectors = (memory.lists, memory.count, memory.starts, memory.bad)
        kernel(flat, *vectors, rows, groups, capacity, self._parts)
        if memory.bad[0]:
            outside = (given < -1) | (given >= groups)
            self._refuse(given, outside, f"ids from -1 (dead) to {groups - 1}")

    def _kernel_for(self, ids: Array, template: Callable[..., Any], *options: bool) -> Kernel:
        """The kernel of a template for this width of ids."""
        key = (ids.dtype, options)
        kernel = self._kernels.get(key)
        if kernel is None:
            build = partial(template, ID_BITS[ids.dtype], *options)
            kernel = self._kernels[key] = self._kernel(build)
        return kernel

    def _vector(self, value: Any) -> tuple[Array, Any]:
        """The ids as a contiguous vector, and the same as a kernel takes it."""
        if type(value) is np.ndarray and value.ndim == 1 and value.dtype in ID_BITS:
            if value.size and value.flags.carray:
                return value, value
        ids = np.ascontiguousarray(value)
        if ids.dtype not in ID_BITS:
            raise DTypeError(mismatch(self._argument, "int32 or int64", ids.dtype))
        if np.ndim(value) != 1:
            raise ShapeError(mismatch(self._argument, "one dimension", f"shape {np.shape(value)}"))
        return ids, flat_view(self._argument, ids, ids.dtype)

    def _refuse(self, given: Array, outside: Array, expected: str) -> None:
        """Raise ShapeError about the first offender."""
        place = int(np.flatnonzero(outside)[0])
        raise ShapeError(mismatch(self._argument, expected, f"{given[place]} at position {place}"))


def _rows_of(spec: SparsitySpec, shape: tuple[int, ...], micro_tile: MicroTile) -> int:
    """Extent of the PIT dimension, if the specification names slices of it."""
    check_micro_tile(shape, micro_tile)
    whole = tuple(int(d == micro_tile.dim) for d in range(len(shape)))
    if micro_tile.extents != whole:
        expected = f"{whole}, since {spec} names whole slices"
        raise ShapeError(mismatch("micro_tile.extents", expected, micro_tile.extents))
    if not isinstance(spec, (Rows, Lengths, Groups)):
        raise AxisError(mismatch("spec", "a sparsity specification", type(spec).__name__))
    if spec.dim != micro_tile.dim:
        expected = f"dimension {spec.dim} of {spec}"
        raise AxisError(mismatch("micro_tile.dim", expected, micro_tile.dim))
    return shape[micro_tile.dim]


def _check_repeats(argument: str, ids: Array) -> None:
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(np.diff(ids[order]) == 0)
    if again.size:
        place = int(order[again[0] + 1])
        got = f"{ids[place]} again at position {place}"
        raise ShapeError(mismatch(argument, "ids that occur once", got))
