"""Indices, on a CUDA device, of slices that the user names: row ids, lengths and group ids."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..errors import AxisError, ShapeError, mismatch
from ..structs import Groups, Index, Lengths, MicroTile, Rows, SparsitySpec
from . import cuda_detect_groups as sharing
from . import cuda_detect_slices as slices
from .cuda_arrays import (
    check_tensor,
    dtype_name,
    empty_int32,
    empty_words,
    first_outside,
    first_repeat,
    zero,
)
from .cuda_detect_plan import SMS, capacity_of, check_extents
from .cuda_modules import CudaKernels

ID_BITS = {"int32": 32, "int64": 64}
SEARCH_LIMIT = 1 << 16  # ids that one multiprocessor compares before all groups share the work
LEAST_SHARE = 1024  # ids of one CTA where groups share


def new_index(like: Any, slots: int, extent: int) -> Index:
    """Memory for lists of positions on an axis of ``extent``, on the device of ``like``."""
    ids = empty_int32(like, (slots, capacity_of(extent)))
    return Index(ids, empty_int32(like, (slots,)))


@dataclass(frozen=True)
class SliceCall:
    """One detection on slices: what was passed, and what is asked for.

    ``split``: the dead positions too. ``ascending``: row ids in order.
    """

    kernels: CudaKernels
    spec: SparsitySpec
    value: Any
    shape: tuple[int, ...]
    micro_tile: MicroTile
    ascending: bool
    split: bool

    def indices(self) -> tuple[Index, Index | None]:
        """Live positions, and the others if ``split``; see `CudaDetector.detect`."""
        _check(self.spec, self.shape, self.micro_tile)
        if isinstance(self.spec, Rows):
            return self._rows()
        if isinstance(self.spec, Lengths):
            return self._lengths(self.spec)
        if isinstance(self.spec, Groups) and not self.split:
            return self._groups(self.spec), None
        advice = "lists of groups name no slice that is dead"
        raise AxisError(mismatch("spec", "one slot", self.spec, advice))

    @property
    def rows(self) -> int:
        """Extent of the PIT dimension."""
        return self.shape[self.micro_tile.dim]

    def _argument(self, what: str) -> str:
        return f"sparsity of {self.micro_tile.operand} ({what})"

    def _rows(self) -> tuple[Index, Index | None]:
        argument, rows = self._argument("row ids"), self.rows
        ids, bits = _vector(argument, self.value)
        if ids.numel() > rows:
            advice = "an id must not occur twice"
            raise ShapeError(mismatch(argument, f"at most {rows} ids", ids.numel(), advice))
        if _checking():
            _refuse(argument, first_outside(ids, 0, rows - 1), f"ids from 0 to {rows - 1}")
            _refuse(argument, first_repeat(ids), "ids that occur once")
        live = new_index(ids, 1, rows)
        dead = new_index(ids, 1, rows) if self.split else None
        if not self.ascending:
            share = -(-ids.numel() // (SMS * slices.THREADS)) * slices.THREADS or slices.THREADS
            self.kernels.slices(f"copy_rows_{bits}")(ids, rows, share, live.ids, live.count)
        if not self.ascending and dead is None:
            return live, None
        lines = empty_words(ids, (1, max(1, -(-rows // 32))))
        if rows:
            self.kernels.slices(f"mark_rows_{bits}")(ids, lines)
        axis = (rows, 1, rows)
        if self.ascending:
            self.kernels.emit(lines, 1, axis, live, dead)
        elif dead is not None:
            self.kernels.emit(lines, 1, axis, dead, wanted=0)
        return live, dead

    def _lengths(self, spec: Lengths) -> tuple[Index, Index | None]:
        argument = self._argument("cu_seqlens" if spec.cumulative else "lengths")
        given, bits = _vector(argument, self.value)
        rows, batch = self.rows, given.numel() - spec.cumulative
        if batch < 0 or (rows % batch if batch else rows):
            expected = f"a number of sequences that divides {rows} rows"
            raise ShapeError(mismatch(argument, expected, f"{max(batch, 0)} sequences"))
        padded = rows // batch if batch else 0
        if _checking():
            if spec.cumulative:
                starts = first_outside(given[:1], 0, 0)
                _refuse(argument, starts, "running sums that start at 0")
            lengths = given.diff() if spec.cumulative else given
            _refuse(argument, first_outside(lengths, 0, padded), f"0 to {padded} rows")
        live = new_index(given, 1, rows)
        dead = new_index(given, 1, rows) if self.split else None
        lists = [index for index in (live, dead) if index is not None]
        if batch == 0:
            for index in lists:
                zero(index.count)
            return live, dead
        kind = f"{'sums' if spec.cumulative else 'lengths'}{'_both' * self.split}"
        pieces = max(1, -(-padded // slices.SPREAD))
        memory = [array for index in lists for array in (index.ids, index.count)]
        self.kernels.slices(f"spread_{kind}_{bits}")(given, batch, padded, pieces, *memory)
        return live, dead

    def _groups(self, spec: Groups) -> Index:
        argument, groups = self._argument("group ids"), spec.num_groups
        given, bits = _vector(argument, self.value, top_k=True)
        size = given.numel()
        if self.value.shape[0] != self.rows:
            expected = f"ids of {self.rows} slices"
            raise ShapeError(mismatch(argument, expected, f"shape {tuple(self.value.shape)}"))
        check_extents((size,))
        if _checking():
            outside = first_outside(given, -1, groups - 1)
            _refuse(argument, outside, f"ids from -1 (dead) to {groups - 1}")
        index = new_index(given, groups, size)
        if groups == 0:
            return index
        if -(-groups // SMS) * size <= SEARCH_LIMIT or groups > sharing.MOST_GROUPS:
            self.kernels.slices(f"search_groups_{bits}")(given, index.ids, index.count)
            return index
        step = sharing.SHARE_THREADS
        share = max(LEAST_SHARE, -(-size // (SMS * step)) * step)
        sizes = empty_int32(given, (-(-size // share), groups))
        self.kernels.slices(f"count_groups_{bits}")(given, share, sizes)
        place = self.kernels.slices(f"place_groups_{bits}")
        lanes = min((groups - 1).bit_length(), step.bit_length() - 1)
        place(given, share, lanes, sizes, index.ids, index.count)
        return index


def _check(spec: SparsitySpec, shape: tuple[int, ...], micro_tile: MicroTile) -> None:
    """Refuse a micro-tile that does not fit the operand or the specification."""
    check_extents(shape)
    if not isinstance(spec, (Rows, Lengths, Groups)):
        raise AxisError(mismatch("spec", "a sparsity specification", type(spec).__name__))
    whole = tuple(int(d == micro_tile.dim) for d in range(len(shape)))
    if micro_tile.extents != whole:
        expected = f"{whole}, since {spec} names whole slices"
        raise ShapeError(mismatch("micro_tile.extents", expected, micro_tile.extents))
    if spec.dim != micro_tile.dim:
        expected = f"dimension {spec.dim} of {spec}"
        raise AxisError(mismatch("micro_tile.dim", expected, micro_tile.dim))


def _vector(argument: str, value: Any, top_k: bool = False) -> tuple[Any, int]:
    """The ids as a contiguous vector, and the bits of one."""
    check_tensor(argument, value, tuple(ID_BITS))
    if value.dim() != 1 and not (top_k and value.dim() == 2):
        expected = "one dimension, or [tokens, top_k]" if top_k else "one dimension"
        raise ShapeError(mismatch(argument, expected, f"shape {tuple(value.shape)}"))
    if not value.numel():
        value = value.new_empty(0)  # strides of empty arrays may be anything
    if value.dim() > 1 or not value.is_contiguous():
        value = value.contiguous().view(-1)
    return value, ID_BITS[dtype_name(value)]


def _checking() -> bool:
    return os.environ.get("PIT_TVM_CHECK") == "1"


def _refuse(argument: str, offender: tuple[int, int] | None, expected: str) -> None:
    """Raise ShapeError if there is an offender: a value and its position."""
    if offender is not None:
        got = f"{offender[0]} at position {offender[1]}"
        raise ShapeError(mismatch(argument, expected, got))
