"""Indices, on a CUDA device, of slices that the user names: row ids, lengths and group ids.

Everything that shapes and types decide is worked out once, into a function that only takes memory
and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import AxisError, ShapeError, mismatch
from ..structs import Groups, Lengths, MicroTile, Rows, SparsitySpec
from . import cuda_detect_cluster as cluster
from . import cuda_detect_groups as sharing
from . import cuda_detect_slices as slices
from .argument import MOST_ELEMENTS, told_groups, uneven
from .cuda_arrays import (
    check_tensor,
    dtype_name,
    empty_of,
    first_outside,
    first_repeat,
    zero,
)
from .cuda_detect_device import WARP
from .cuda_detect_plan import SMS, check_extents
from .cuda_modules import CudaKernels, Kernel
from .cuda_workspace import CudaIndex, Take, listed
from .detect_plan import capacity_of

ID_BITS = {"int32": 32, "int64": 64}
SEARCH_LIMIT = 1 << 15  # ids that one multiprocessor compares before all groups share the work
LEAST_SHARE = 768  # ids of one CTA where groups share

# Live positions, and the dead ones if they were asked for.
Lists = tuple[CudaIndex, CudaIndex | None]
Find = Callable[[Any, Take], Lists]  # find(value, take)


@dataclass(frozen=True)
class OneLaunch:
    """Detection by one launch, ``kernel(ids, *numbers, *listed(index, dead))``.

    ``flat`` makes a vector of the ids; the index has so many ``slots`` of positions below
    ``extent``; ``split``: the dead ones are listed too.
    """

    kernel: Kernel
    numbers: tuple[int, ...]
    slots: int
    extent: int
    flat: Callable[[Any], Any]
    split: bool = False

    def __call__(self, value: Any, take: Take) -> Lists:
        """The lists of ``value``, in memory of ``take``."""
        given, size = self.flat(value), (self.slots, self.extent)
        index = take(given, "live", *size)
        dead = take(given, "dead", *size) if self.split else None
        self.kernel(given, *self.numbers, *listed(index, dead))
        return index, dead


@dataclass(frozen=True)
class SlicePlan:
    """One kind of detection on slices: what is passed, and what is asked for.

    ``value``: a tensor like all those that `run` will get. ``split``: the dead positions too.
    ``ascending``: row ids in order. ``checked``: look for ids and lengths out of range. ``top_k``:
    group ids may be [tokens, top_k], for a result with a row of its own for each choice.
    """

    kernels: CudaKernels
    spec: SparsitySpec
    value: Any
    shape: tuple[int, ...]
    micro_tile: MicroTile
    ascending: bool
    split: bool
    checked: bool
    top_k: bool = False

    def run(self) -> Find:
        """The function that detects; see `CudaDetector.detect`. It keeps no ``value``: what it was
        made for may be memory of a CUDA graph."""
        _check(self.spec, self.shape, self.micro_tile)
        if isinstance(self.spec, Rows):
            return self._rows()
        if isinstance(self.spec, Lengths):
            return self._lengths(self.spec)
        if isinstance(self.spec, Groups) and not self.split:
            return self._groups(self.spec)
        advice = "lists of groups name no slice that is dead"
        raise AxisError(mismatch("spec", "one slot", self.spec, advice))

    @property
    def rows(self) -> int:
        """Extent of the PIT dimension."""
        return self.shape[self.micro_tile.dim]

    def _argument(self, what: str) -> str:
        return f"sparsity of {self.micro_tile.operand} ({what})"

    def _rows(self) -> Find:
        argument, rows, kernels = self._argument("row ids"), self.rows, self.kernels
        split, ascending, checked = self.split, self.ascending, self.checked
        flat, bits = _vector(argument, self.value)
        number = self.value.numel()
        if number > rows:
            advice = "an id must not occur twice"
            raise ShapeError(mismatch(argument, f"at most {rows} ids", number, advice))
        share = -(-number // (SMS * slices.THREADS)) * slices.THREADS or slices.THREADS
        axis, words = (rows, 1, rows), max(1, -(-rows // 32))
        copy = OneLaunch(kernels.slices(f"copy_rows_{bits}"), (rows, share), 1, rows, flat)
        both = ascending or split  # from bits, in order
        if not (both or checked):
            return copy
        mark = kernels.slices(f"mark_rows_{bits}")

        def run(value: Any, take: Take) -> Lists:
            ids = flat(value)
            if checked:
                _refuse(argument, first_outside(ids, 0, rows - 1), f"ids from 0 to {rows - 1}")
                _refuse(argument, first_repeat(ids), "ids that occur once")
            if not both:
                return copy(ids, take)
            live = take(ids, "live", 1, rows)
            dead = take(ids, "dead", 1, rows) if split else None
            lines = empty_of("uint32", ids, (1, words))
            if rows:
                mark(ids, lines)
            kernels.emit(lines, 1, axis, live, dead)
            return live, dead

        return run

    def _lengths(self, spec: Lengths) -> Find:
        argument = self._argument("cu_seqlens" if spec.cumulative else "lengths")
        flat, bits = _vector(argument, self.value)
        rows, split, checked = self.rows, self.split, self.checked
        batch = self.value.numel() - spec.cumulative
        if batch < 0 or (rows % batch if batch else rows):
            raise uneven(argument, rows, batch, spec.cumulative)
        padded = rows // batch if batch else 0
        pieces = max(1, -(-padded // slices.SPREAD))
        kind = f"{'sums' if spec.cumulative else 'lengths'}{'_both' * split}"
        spread = self.kernels.slices(f"spread_{kind}_{bits}")
        launch = OneLaunch(spread, (batch, padded, pieces), 1, rows, flat, split)
        if batch and not checked:
            return launch

        def run(value: Any, take: Take) -> Lists:
            given = flat(value)
            if checked:
                _check_lengths(argument, given, spec.cumulative, padded)
            if batch:
                return launch(given, take)
            live = take(given, "live", 1, rows)
            dead = take(given, "dead", 1, rows) if split else None
            for index in (live, dead):
                if index is not None:
                    zero(index.count)
            return live, dead

        return run

    def _groups(self, spec: Groups) -> Find:
        argument, groups = self._argument("group ids"), spec.num_groups
        flat, bits = _vector(argument, self.value, self.top_k)
        size = self.value.numel()
        if self.value.shape[0] != self.rows:
            expected = f"ids of {self.rows} slices"
            raise ShapeError(mismatch(argument, expected, f"shape {tuple(self.value.shape)}"))
        check_extents((size,))
        if groups * capacity_of(size) >= MOST_ELEMENTS:
            expected = f"lists of {groups} groups of fewer than {MOST_ELEMENTS} places together"
            advice = "split the rows into several calls"
            raise ShapeError(mismatch(argument, expected, f"{size} ids", advice))
        alone, checked = self._group_kernel(size, groups, bits), self.checked
        if alone is not None and groups and not checked:
            return OneLaunch(*alone, groups, size, flat)
        launch = self._group_kernels(size, groups, bits)

        def run(value: Any, take: Take) -> Lists:
            given = flat(value)
            if checked:
                outside = first_outside(given, -1, groups - 1)
                _refuse(argument, outside, told_groups(groups))
            index = take(given, "live", groups, size)
            if groups:
                launch(given, index)
            return index, None

        return run

    def _group_kernel(
        self, size: int, groups: int, bits: int
    ) -> tuple[Kernel, tuple[int, ...]] | None:
        """The kernel that lists the positions of every group of ``size`` ids alone, and the numbers
        that it takes; None where several share the work."""
        alone = -(-groups // SMS) * size <= SEARCH_LIMIT
        few = size <= cluster.MOST_IDS and groups <= cluster.MOST_GROUPS
        if self.kernels.clusters and few:
            each = max(1, -(-size // cluster.STEP)) * WARP
            return self.kernels.slices(f"cluster_groups_{bits}"), (each,)
        if alone or groups > sharing.MOST_GROUPS:
            return self.kernels.slices(f"search_groups_{bits}"), ()
        return None

    def _group_kernels(self, size: int, groups: int, bits: int) -> Callable[[Any, CudaIndex], None]:
        """What lists the positions of every group of ``size`` ids."""
        alone = self._group_kernel(size, groups, bits)
        if alone is not None:
            return lambda given, index: alone[0](given, *alone[1], *index.views)
        count = self.kernels.slices(f"count_groups_{bits}")
        place = self.kernels.slices(f"place_groups_{bits}")
        step = sharing.SHARE_THREADS
        share = max(LEAST_SHARE, -(-size // (SMS * step)) * step)
        lanes = min((groups - 1).bit_length(), step.bit_length() - 1)

        def launch(given: Any, index: CudaIndex) -> None:
            sizes = empty_of("int32", given, (-(-size // share), groups))
            count(given, share, sizes)
            place(given, share, lanes, sizes, *index.views)

        return launch


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


def _vector(argument: str, like: Any, top_k: bool = False) -> tuple[Callable[[Any], Any], int]:
    """What makes a contiguous vector of ids such as ``like``, and the bits of one id."""
    check_tensor(argument, like, tuple(ID_BITS))
    if like.dim() != 1 and not (top_k and like.dim() == 2):
        expected = "one dimension, or [tokens, top_k]" if top_k else "one dimension"
        raise ShapeError(mismatch(argument, expected, f"shape {tuple(like.shape)}"))
    bits = ID_BITS[dtype_name(like)]
    if not like.numel():
        return lambda value: value.new_empty(0), bits  # its strides may be anything
    if like.dim() > 1 or not like.is_contiguous():
        return lambda value: value.contiguous().view(-1), bits
    return lambda value: value, bits


def _check_lengths(argument: str, given: Any, cumulative: bool, padded: int) -> None:
    if cumulative:
        _refuse(argument, first_outside(given[:1], 0, 0), "running sums that start at 0")
    lengths = given.diff() if cumulative else given
    _refuse(argument, first_outside(lengths, 0, padded), f"0 to {padded} rows")


def _refuse(argument: str, offender: tuple[int, int] | None, expected: str) -> None:
    """Raise ShapeError if there is an offender: a value and its position."""
    if offender is not None:
        got = f"{offender[0]} at position {offender[1]}"
        raise ShapeError(mismatch(argument, expected, got))
