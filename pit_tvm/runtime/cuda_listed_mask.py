"""Lists of what the mask of a call lets queries and keys see, on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tvm

from ..errors import ShapeError, mismatch
from ..schedules.cuda_listed_rows import KEYS, PART_FACTS, QUERIES, THREADS, WORDS, holders_of
from . import cuda_arrays
from .cuda_detect_device import WARP
from .cuda_mask_lists import LOT, SPAN, fold_queries, list_keys, order_queries
from .cuda_mask_parts import SMS, deal_lists
from .cuda_mask_row import list_row
from .cuda_mask_turned import turn_lines
from .cuda_modules import Kernel, ModuleKernels, cached_modules, named_module
from .cuda_view import view_of
from .kernel_cache import KernelCache

_BYTES = 16  # of one load
_HALF = 16  # bits of half a word
_CTAS = SMS * 4  # that an H200 holds at once
_LEAST_SLOTS = 8  # of parts of lists that are cut, of each head and sequence
_MOST_PARTS = 704  # of all heads and sequences: 48 MB where heads are wide
_MOST = 65535  # CTAs along the later axes of a grid


class Lists(NamedTuple):
    """What tiles of rows see of others, by a mask of ``planes``, [batch or 1, heads or 1], and so
    many rows: CUDA tensors, int32, whose first dimension is all planes.

    ``ids`` [.., tiles, capacity] and ``bits`` [.., tiles, words, capacity] name what any row of a
    tile sees, and which of them do; ``order`` [.., tiles * 64] the rows of all tiles, anything if
    there is one; ``work`` [.., items, facts] is what CTAs do. See `cuda_mask_lists` and
    `cuda_mask_parts`.
    """

    ids: Any
    bits: Any
    order: Any
    work: Any
    planes: tuple[int, int, int]

    def tiled(self, shape: Sequence[int], kv_heads: int) -> tuple[int, int, int]:
        """`tiled_shape` of a call, if they are of that, else what it is given; ShapeError if they
        are neither."""
        tiled = tiled_shape(shape, kv_heads, self.planes)
        own, (batch, heads, rows) = self.planes[2], shape
        if own in (1, tiled[2]):
            return tiled
        if own != rows:
            expected, got = f"one listed for {kv_heads} heads of keys", f"one of {own} rows"
            raise ShapeError(mismatch("mask", expected, got, "list_mask(.., kv_heads=..)"))
        return batch, heads, rows

    @property
    def apart(self) -> tuple[int, int]:
        """How far planes lie apart, of sequences and of heads."""
        batch, heads, _ = self.planes
        return heads * int(batch > 1), int(heads > 1)

    @property
    def ordered(self) -> int:
        """1 if ``order`` names rows."""
        return int(self.order.shape[1] > QUERIES)

    def steps(self) -> int:
        """Steps of 64 that CTAs take for a head of all planes, those of cut lists included; waits
        for the device."""
        first, end = self.work[..., 1], self.work[..., 2]
        return int((end - first)[self.work[..., 0] >= 0].sum())

    def slots(self, rows: int) -> int:
        """Parts of cut lists of each head and sequence, at most."""
        return int(self.work.shape[1]) - -(-rows // QUERIES)


class CudaMaskLists:
    """Makes lists of masks. Threads may share it."""

    def __init__(self, cache: KernelCache, arch: str) -> None:
        self._kernels = ModuleKernels(cached_modules(cache, arch))

    def of_queries(self, mask: Any, shape: Sequence[int]) -> tuple[Lists, Any]:
        """The keys that tiles of queries see, by a contiguous mask [batch or 1, heads or 1, queries
        or 1, keys] for sequences, heads and queries, ``shape``, those of several heads in turn if
        it is a `tiled_shape`; and bits of its rows, for `of_keys`.

        ShapeError if there are more than 65,535 planes, or lists have places beyond 32 bits.
        """
        batch, heads, rows, keys = mask.shape
        planes = batch, heads
        _check_planes(planes, rows, keys)
        lines, count = self._lines(mask, planes, rows, keys)
        if mask.numel():
            whole = keys % _BYTES == 0 and mask.data_ptr() % _BYTES == 0
            halves = view_of(lines, "uint16", (count.numel(), lines.shape[2] * 2))
            # What rows of one tile see is counted by nobody.
            spans = -(-halves.shape[1] // LOT) if rows <= QUERIES else 1
            self.kernel("fold", whole)(mask.data_ptr(), keys, spans, halves, count.view(-1))
        return self._listed(lines, count, planes, shape), lines

    def of_keys(
        self, lines: Any, planes: tuple[int, int], shape: Sequence[int], keys: int
    ) -> Lists:
        """The queries that see tiles of keys, by bits of the rows of a mask of ``planes``; errors
        as `of_queries`."""
        batch, heads, queries = shape
        _check_planes(planes, keys, queries)
        turned, count = self._lines(lines, planes, keys, queries)
        if lines.numel() and turned.numel():
            self.kernel("turn")(lines, queries, turned, count)
        return self._listed(turned, count, planes, (batch, heads, keys))

    def _listed(
        self, lines: Any, count: Any, planes: tuple[int, int], shape: Sequence[int]
    ) -> Lists:
        """Order rows by how many they see, list what their tiles see, and deal that out."""
        number, told, words = lines.shape
        rows = shape[2] if told > 1 else 1
        made = shapes_of(number, rows, words * WARP, shape)
        ids, bits, order, work = (self._new(lines, each) for each in made)
        lists = Lists(ids, bits, order, work, (*planes, rows))
        if not lines.numel():
            return lists
        listed, tiles = ids.shape[1], -(-shape[2] // QUERIES)
        seen = self._new(lines, (number, listed))
        if rows == 1:
            self.kernel("row")(lines, ids, bits, seen)
        else:
            if listed > 1:
                self.kernel("order")(count, order)
            # Few tiles leave multiprocessors to read their keys side by side.
            spans = -(-words * WARP // SPAN) if number * listed < SMS else 1
            self.kernel("list", listed > 1)(lines, order, rows, max(1, spans), ids, bits, seen)
        teams = THREADS // holders_of(max(1, shape[2]))
        given = tiles, _wanted(shape), shape[0] * shape[1], teams, lists.slots(shape[2])
        self.kernel("deal")(seen, *given, work)
        return lists

    def _lines(self, like: Any, planes: Sequence[int], rows: int, others: int) -> tuple[Any, Any]:
        """Memory for bits of rows, and for how many are set."""
        number, words = planes[0] * planes[1], -(-others // KEYS) * (KEYS // WARP)
        return self._new(like, (number, rows, words)), self._new(like, (number, rows))

    def _new(self, like: Any, shape: tuple[int, ...]) -> Any:
        return cuda_arrays.empty_of("int32", like, shape)

    def kernel(self, name: str, option: bool = False) -> Kernel:
        """One of `lists_module`."""
        return self._kernels.find("cuda-mask-lists", lists_module, f"{name}_{option:d}")


def tiled_shape(shape: Sequence[int], kv_heads: int, planes: Sequence[int]) -> tuple[int, int, int]:
    """Sequences, heads and queries, ``shape``, as tiles of a call take them by a mask of
    ``planes``: few queries of heads that share keys, and see the same, are rows of one tile."""
    batch, heads, rows = shape
    shared = heads // max(1, kv_heads)
    alike = planes[1] == 1 and 1 < shared and 0 < shared * rows <= QUERIES
    return (batch, kv_heads, shared * rows) if alike else (batch, heads, rows)


def shapes_of(
    planes: int, rows: int, others: int, shape: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """The shapes of `Lists` of ``rows`` that see others, or of one row for all, for sequences,
    heads and rows, ``shape``."""
    listed, capacity = -(-rows // QUERIES), -(-others // KEYS) * KEYS
    tiles, alike = -(-shape[2] // QUERIES), max(1, shape[0] * shape[1])
    most = _MOST_PARTS * THREADS // holders_of(max(1, shape[2])) // alike
    wanted = _wanted(shape)
    slots = min(max(_LEAST_SLOTS, tiles // 4, wanted if wanted > tiles else 0), most)
    own = (listed, capacity), (listed, WORDS, capacity), (listed * QUERIES,)
    for each in (*own, (tiles + slots, PART_FACTS)):
        yield planes, *each


def _wanted(shape: Sequence[int]) -> int:
    """Lists of each head and sequence that keep all multiprocessors busy."""
    return -(-_CTAS // max(1, shape[0] * shape[1]))


def lists_module() -> tvm.IRModule:
    """The kernels that make lists, by their names and options."""
    made = {"order_0": order_queries(), "row_0": list_row()}
    made |= {"deal_0": deal_lists(), "turn_0": turn_lines()}
    for option in (False, True):
        made[f"fold_{option:d}"] = fold_queries(option)
        made[f"list_{option:d}"] = list_keys(option)
    return named_module(made)


def _check_planes(planes: Sequence[int], rows: int, others: int) -> None:
    number, capacity = planes[0] * planes[1], -(-others // KEYS) * KEYS
    if number > _MOST:
        raise ShapeError(mismatch("mask", f"at most {_MOST} planes", number))
    # Bits are told by words of lists, and read by halves of words of rows.
    if number * capacity * max(WORDS * -(-rows // QUERIES), -(-rows // _HALF)) >= 2**31:
        got = f"{number} of {rows} x {others}"
        raise ShapeError(mismatch("mask", "lists of fewer than 2**31 words", got, "split the call"))
