"""Indices of slices that the user names: row ids, lengths and group ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import tvm_ffi

from ..errors import AxisError, DTypeError, ShapeError, mismatch
from ..structs import Groups, Index, Lengths, MicroTile, Rows, SparsitySpec
from . import detect_slices
from .argument import pattern_array, told_groups, uneven
from .arrays import kind
from .detect_plan import Build, Kernel, capacity_of, check_micro_tile
from .detect_workspace import Array, Take, Workspace, flat_view, fresh
from .gate import negated

INT32 = np.dtype(np.int32)
ID_BITS = {np.dtype(np.int32): 32, np.dtype(np.int64): 64}
PART_ROWS = 1 << 15  # rows of one task when group ids are split
MAX_PARTS = 16


@dataclass(frozen=True)
class _Memory:
    """What one detection writes: the index, a flag for bad input, and all of it as the kernel takes
    it, with scratch memory."""

    index: Index
    bad: Array
    tensors: tuple[Any, ...]


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
        self._operand, self._groups, self._parts = micro_tile.operand, 1, 0
        self._cumulative = isinstance(spec, Lengths) and spec.cumulative
        # By type of array: the element type and the kernel of what a kernel took as it was.
        self._plain: dict[type, tuple[Any, Kernel]] = {}
        self._template: Callable[..., Any] = detect_slices.copy_rows
        self._options: tuple[bool, ...] = ()
        what = "row ids"
        if isinstance(spec, Lengths):
            what = "cu_seqlens" if spec.cumulative else "lengths"
            self._template, self._options = detect_slices.expand_lengths, (self._cumulative,)
        elif isinstance(spec, Groups):
            self._groups = spec.num_groups
            self._parts = min(MAX_PARTS, -(-self.rows // PART_ROWS)) or 1
            what, self._template = "group ids", detect_slices.split_groups
            self._options = (self._parts > 1,)
        self._argument = f"sparsity of {self._operand} ({what})"

    def index(
        self, value: Any, workspace: Workspace | None = None, *, deterministic: bool = False
    ) -> Index:
        """The index of the slices that ``value`` names; ``deterministic`` sorts row ids."""
        make = self._memory
        memory = make(fresh) if workspace is None else workspace.keep(self, make)
        if not self._quick(value, memory):
            self._long(value, memory)
        if deterministic and isinstance(self._spec, Rows):
            memory.index.ids[0, : memory.index.count[0]].sort()
        return memory.index

    def read(self, value: Any) -> Array:
        """The ids or lengths that `index` takes, checked as it does, without a kernel."""
        ids, _ = self._checked_size(value)
        self._refuse_ids(ids)
        return ids

    def _memory(self, take: Take) -> _Memory:
        lists = take(f"{self._operand} ids", (self._groups, capacity_of(self.rows)), INT32)
        count = take(f"{self._operand} count", (self._groups,), INT32)
        bad = take("bad", (1,), INT32)
        written = [lists.reshape(-1), count, bad]
        if isinstance(self._spec, Groups):
            written.insert(2, take("starts", (self._parts * self._groups,), INT32))
        index = Index(lists, count, (_tensor(lists), _tensor(count)))
        return _Memory(index, bad, tuple(map(_tensor, written)))

    def _quick(self, value: Any, memory: _Memory) -> bool:
        """Whether the kernel takes ``value``, if another like it was plain, and finds no fault."""
        dtype, kernel = self._plain.get(type(value), (None, None))
        if kernel is None or value.dtype is not dtype or negated(value):
            return False
        try:
            shape = value.shape
            args = self._sizes(shape[0]) if len(shape) == 1 else None
            if args is None:
                return False
            kernel(value, *memory.tensors, *args)
        except (BufferError, RuntimeError, TypeError, ValueError):  # of another layout or device
            return False
        return not memory.bad[0]

    def _long(self, value: Any, memory: _Memory) -> None:
        """The same for anything, with errors that say what is wrong."""
        ids, args = self._checked_size(value)
        kernel = self._kernel(partial(self._template, ID_BITS[ids.dtype], *self._options))
        kernel(flat_view(self._argument, ids, ids.dtype), *memory.tensors, *args)
        if memory.bad[0]:
            self._refuse_ids(ids)
        if not (self._checked or isinstance(value, (list, tuple, int)) or kind(value) == "dlpack"):
            self._plain[type(value)] = value.dtype, kernel

    def _checked_size(self, value: Any) -> tuple[Array, tuple[int, ...]]:
        """A vector of ids, or of lengths, and the kernel's last arguments for it."""
        given = pattern_array(np.asarray(value) if isinstance(value, int) else value)
        ids = np.ascontiguousarray(given)
        if ids.dtype not in ID_BITS:
            raise DTypeError(mismatch(self._argument, "int32 or int64", ids.dtype))
        if given.ndim != 1:
            raise ShapeError(mismatch(self._argument, "one dimension", f"shape {given.shape}"))
        args = self._sizes(ids.size)
        if args is None:
            self._refuse_size(ids.size)
        elif self._checked and isinstance(self._spec, Rows):
            _check_repeats(self._argument, ids)
        return ids, args

    def _sizes(self, size: int) -> tuple[int, ...] | None:
        """The kernel's last arguments for ``size`` entries; None if there cannot be so many."""
        spec, rows = self._spec, self.rows
        if isinstance(spec, Rows):
            return (size, rows) if size <= rows else None
        if isinstance(spec, Groups):
            sizes = (rows, self._groups, capacity_of(rows), self._parts)
            return sizes if size == rows else None
        batch = size - self._cumulative
        if batch > 0:
            return (batch, rows // batch) if rows % batch == 0 else None
        return None if batch or rows else (0, 0)

    def _refuse_size(self, size: int) -> NoReturn:
        rows, advice = self.rows, ""
        if isinstance(self._spec, Rows):
            expected, got, advice = f"at most {rows} ids", str(size), "an id must not occur twice"
        elif isinstance(self._spec, Groups):
            expected, got = f"{rows} ids", str(size)
        else:
            raise uneven(self._argument, rows, size - self._cumulative, self._cumulative)
        raise ShapeError(mismatch(self._argument, expected, got, advice))

    def _refuse_ids(self, ids: Array) -> None:
        """Raise ShapeError about the first wrong one, if there is one."""
        rows, groups = self.rows, self._groups
        if isinstance(self._spec, Rows):
            self._refuse(ids, (ids < 0) | (ids >= rows), f"ids from 0 to {rows - 1}")
            return
        if isinstance(self._spec, Groups):
            outside = (ids < -1) | (ids >= groups)
            self._refuse(ids, outside, told_groups(groups))
            return
        if self._cumulative and ids[0] != 0:
            expected = "running sums that start at 0"
            raise ShapeError(mismatch(self._argument, expected, ids[0]))
        lengths = np.diff(ids.astype(np.int64)) if self._cumulative else ids
        padded = rows // max(len(lengths), 1)
        self._refuse(lengths, (lengths < 0) | (lengths > padded), f"0 to {padded} rows")

    def _refuse(self, given: Array, outside: Array, expected: str) -> None:
        """Raise ShapeError about the first offender, if there is one."""
        for place in np.flatnonzero(outside)[:1]:
            got = f"{given[place]} at position {place}"
            raise ShapeError(mismatch(self._argument, expected, got))


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


def _tensor(array: Array) -> Any:
    """Memory that is used again in the form that compiled functions take soonest."""
    return tvm_ffi.from_dlpack(array) if array.size else array


def _check_repeats(argument: str, ids: Array) -> None:
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(np.diff(ids[order]) == 0)
    if again.size:
        place = int(order[again[0] + 1])
        got = f"{ids[place]} again at position {place}"
        raise ShapeError(mismatch(argument, "ids that occur once", got))
