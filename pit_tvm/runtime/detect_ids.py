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
from .detect_workspace import Array, flat_view

Kernel = Callable[..., Any]

INT32 = np.dtype(np.int32)
ID_BITS = {np.dtype(np.int32): 32, np.dtype(np.int64): 64}
PART_ROWS = 1 << 15  # rows of one task when group ids are split
MAX_PARTS = 16


@dataclass
class SliceCall:
    """One detection on slices: what was passed, and where kernels and memory come from.

    ``take(name, shape, dtype)`` gives memory; ``kernel(build)`` the compiled kernel of a template.
    """

    spec: SparsitySpec
    value: Any
    shape: tuple[int, ...]
    micro_tile: MicroTile
    take: Callable[..., Array]
    kernel: Callable[[Build], Kernel]
    deterministic: bool = False
    checked: bool = False

    def index(self) -> Index:
        """The index of the slices that the value names; see `Detector.detect`."""
        check_micro_tile(self.shape, self.micro_tile)
        whole = tuple(int(d == self.micro_tile.dim) for d in range(len(self.shape)))
        if self.micro_tile.extents != whole:
            expected = f"{whole}, since {self.spec} names whole slices"
            raise ShapeError(mismatch("micro_tile.extents", expected, self.micro_tile.extents))
        spec = self.spec
        if not isinstance(spec, (Rows, Lengths, Groups)):
            raise AxisError(mismatch("spec", "a sparsity specification", type(spec).__name__))
        if spec.dim != self.micro_tile.dim:
            expected = f"dimension {spec.dim} of {spec}"
            raise AxisError(mismatch("micro_tile.dim", expected, self.micro_tile.dim))
        if isinstance(spec, Rows):
            return self._rows()
        return self._lengths(spec) if isinstance(spec, Lengths) else self._groups(spec)

    @property
    def rows(self) -> int:
        """Extent of the PIT dimension."""
        return self.shape[self.micro_tile.dim]

    def _rows(self) -> Index:
        argument, ids = self._vector("row ids")
        if ids.size > self.rows:
            advice = "an id must not occur twice"
            raise ShapeError(mismatch(argument, f"at most {self.rows} ids", ids.size, advice))
        if self.checked:
            _check_repeats(argument, ids)
        lists, count, bad = self._output(1)
        kernel = self.kernel(partial(detect_slices.copy_rows, ID_BITS[ids.dtype]))
        flat = flat_view(argument, ids, ids.dtype)
        kernel(flat, lists.reshape(-1), count, bad, ids.size, self.rows)
        if bad[0]:
            _refuse(argument, ids, (ids < 0) | (ids >= self.rows), f"ids from 0 to {self.rows - 1}")
        if self.deterministic:
            lists[0, : ids.size].sort()
        return Index(lists, count)

    def _lengths(self, spec: Lengths) -> Index:
        argument, given = self._vector("cu_seqlens" if spec.cumulative else "lengths")
        batch = given.size - 1 if spec.cumulative else given.size
        if batch < 0 or (self.rows % batch if batch else self.rows):
            expected = f"a number of sequences that divides {self.rows} rows"
            raise ShapeError(mismatch(argument, expected, f"{max(batch, 0)} sequences"))
        padded = self.rows // batch if batch else 0
        lists, count, bad = self._output(1)
        kernel = self.kernel(
            partial(detect_slices.expand_lengths, ID_BITS[given.dtype], spec.cumulative)
        )
        flat = flat_view(argument, given, given.dtype)
        kernel(flat, lists.reshape(-1), count, bad, batch, padded)
        if bad[0]:
            if spec.cumulative and given[0] != 0:
                raise ShapeError(mismatch(argument, "running sums that start at 0", given[0]))
            lengths = np.diff(given.astype(np.int64)) if spec.cumulative else given
            _refuse(argument, lengths, (lengths < 0) | (lengths > padded), f"0 to {padded} rows")
        return Index(lists, count)

    def _groups(self, spec: Groups) -> Index:
        argument, given = self._vector("group ids")
        if given.size != self.rows:
            raise ShapeError(mismatch(argument, f"{self.rows} ids", given.size))
        groups = spec.num_groups
        lists, count, bad = self._output(groups)
        parts = min(MAX_PARTS, -(-self.rows // PART_ROWS)) or 1
        starts = self.take("starts", (parts * groups,), INT32)
        build = partial(detect_slices.split_groups, ID_BITS[given.dtype], parts > 1)
        flat = flat_view(argument, given, given.dtype)
        vectors = (lists.reshape(-1), count, starts, bad)
        self.kernel(build)(flat, *vectors, self.rows, groups, lists.shape[1], parts)
        if bad[0]:
            outside = (given < -1) | (given >= groups)
            _refuse(argument, given, outside, f"ids from -1 (dead) to {groups - 1}")
        return Index(lists, count)

    def _vector(self, what: str) -> tuple[str, Array]:
        """Name of the argument, and the ids as a contiguous vector."""
        argument = f"sparsity of {self.micro_tile.operand} ({what})"
        ids = np.ascontiguousarray(self.value)
        if ids.dtype not in ID_BITS:
            raise DTypeError(mismatch(argument, "int32 or int64", ids.dtype))
        if np.ndim(self.value) != 1:
            raise ShapeError(mismatch(argument, "one dimension", f"shape {np.shape(self.value)}"))
        return argument, ids

    def _output(self, slots: int) -> tuple[Array, Array, Array]:
        """Lists, counts, and the flag that kernels set on bad input."""
        operand = self.micro_tile.operand
        lists = self.take(f"{operand} ids", (slots, capacity_of(self.rows)), INT32)
        return lists, self.take(f"{operand} count", (slots,), INT32), self.take("bad", (1,), INT32)


def _refuse(argument: str, given: Array, outside: Array, expected: str) -> None:
    """Raise ShapeError about the first offender."""
    place = int(np.flatnonzero(outside)[0])
    raise ShapeError(mismatch(argument, expected, f"{given[place]} at position {place}"))


def _check_repeats(argument: str, ids: Array) -> None:
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(np.diff(ids[order]) == 0)
    if again.size:
        place = int(order[again[0] + 1])
        got = f"{ids[place]} again at position {place}"
        raise ShapeError(mismatch(argument, "ids that occur once", got))
