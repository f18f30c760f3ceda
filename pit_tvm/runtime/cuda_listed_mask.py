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
_MOST_LISTED = 2**27  # bytes of lists of many queries of heads that share tiles
_FULL = 58  # rows of a tile that heads of many queries leave no more of empty


class Tiled(NamedTuple):
    """How the queries of a call are tiles: ``shared`` heads of a query, which share keys and see
    the same, are rows of one tile, and ``heads`` are groups of so many."""

    batch: int
    heads: int
    queries: int
    shared: int = 1

    @property
    def fit(self) -> int:
        """Queries of a tile."""
        return QUERIES // self.shared

    @property
    def tiles(self) -> int:
        """Of each group of heads."""
        return -(-self.queries // self.fit)

    @property
    def holders(self) -> int:
        """Threads that hold rows of a tile."""
        return holders_of(max(1, self.queries * self.shared))


class Lists(NamedTuple):
    """What tiles of rows see of others, by a mask of ``planes``, [batch or 1, heads or 1], so many
    rows, and `Tiled.shared`: CUDA tensors, int32, whose first dimension is all planes.

    ``ids`` [.., tiles, capacity] and ``bits`` [.., tiles, words, capacity] name what any row of a
    tile sees, and which of them do; ``order`` [.., tiles * `Tiled.fit`] the queries of all tiles,
    anything if there is one; ``work`` [.., items, facts] is what CTAs do. See `cuda_mask_lists` and
    `cuda_mask_parts`.
    """

    ids: Any
    bits: Any
    order: Any
    work: Any
    planes: tuple[int, int, int, int]

    def tiled(self, shape: Sequence[int], kv_heads: int) -> Tiled:
        """How the queries of a call are tiles of these lists; ShapeError if they cannot be."""
        batch, heads, rows = shape
        told, shared = self.planes[2:]
        if told == 1 and Tiled(1, 1, rows, shared).tiles == 1:
            few = tiled_shape((*shape, 0), kv_heads, self.planes)
            if few.tiles == 1:
                return few  # whoever made them
        if told not in (1, rows) or heads // max(1, kv_heads) % shared:
            expected = f"one listed for {kv_heads} heads of keys"
            got = f"one of {told} rows for {shared} heads at once"
            raise ShapeError(mismatch("mask", expected, got, "list_mask(.., kv_heads=..)"))
        return Tiled(batch, heads // shared, rows, shared)

    @property
    def apart(self) -> tuple[int, int]:
        """How far planes lie apart, of sequences and of heads."""
        batch, heads, *_ = self.planes
        return heads * int(batch > 1), int(heads > 1)

    @property
    def ordered(self) -> int:
        """1 if ``order`` names rows."""
        return int(self.ids.shape[1] > 1)

    def steps(self) -> int:
        """Steps of 64 that CTAs take for a head of all planes, those of cut lists included; waits
        for the device."""
        first, end = self.work[..., 1], self.work[..., 2]
        return int((end - first)[self.work[..., 0] >= 0].sum())

    def slots(self, tiles: int) -> int:
        """Parts of cut lists of each group of heads of that many tiles, at most."""
        return int(self.work.shape[1]) - tiles


class CudaMaskLists:
    """Makes lists of masks. Threads may share it."""

    def __init__(self, cache: KernelCache, arch: str) -> None:
        self._kernels = ModuleKernels(cached_modules(cache, arch))

    def of_queries(self, mask: Any, shape: Sequence[int]) -> tuple[Lists, Any]:
        """The keys that tiles of queries see, by a contiguous mask [batch or 1, heads or 1, queries
        or 1, keys] for sequences, heads and queries, or what `tiled_shape` makes of them; and bits
        of its rows, for `of_keys`.

        ShapeError if there are more than 65,535 planes, or lists have places beyond 32 bits.
        """
        batch, heads, rows, keys = mask.shape
        planes, tiled = (batch, heads), Tiled(*shape)
        _check_planes(planes, -(-rows // tiled.fit), rows, keys)
        lines, count = self._lines(mask, planes, rows, keys)
        if mask.numel():
            whole = keys % _BYTES == 0 and mask.data_ptr() % _BYTES == 0
            halves = view_of(lines, "uint16", (count.numel(), lines.shape[2] * 2))
            # What rows of one tile see is counted by nobody.
            spans = -(-halves.shape[1] // LOT) if rows <= tiled.fit else 1
            self.kernel("fold", whole)(mask.data_ptr(), keys, spans, halves, count.view(-1))
        return self._listed(lines, count, planes, tiled), lines

    def of_keys(
        self, lines: Any, planes: tuple[int, int], shape: Sequence[int], keys: int
    ) -> Lists:
        """The queries that see tiles of keys, by bits of the rows of a mask of ``planes``; errors
        as `of_queries`."""
        batch, heads, queries = shape
        _check_planes(planes, -(-keys // QUERIES), keys, queries)
        turned, count = self._lines(lines, planes, keys, queries)
        if lines.numel() and turned.numel():
            self.kernel("turn")(lines, queries, turned, count)
        return self._listed(turned, count, planes, Tiled(batch, heads, keys))

    def _listed(self, lines: Any, count: Any, planes: tuple[int, int], tiled: Tiled) -> Lists:
        """Order rows by how many they see, list what their tiles see, and deal that out."""
        number, told, words = lines.shape
        made = shapes_of(number, told, words * WARP, tiled)
        ids, bits, order, work = (self._new(lines, each) for each in made)
        lists = Lists(ids, bits, order, work, (*planes, told, tiled.shared))
        if not lines.numel():
            return lists
        listed = ids.shape[1]
        seen = self._new(lines, (number, listed))
        if told == 1:
            self.kernel("row")(lines, ids, bits, seen)
        else:
            if listed > 1:
                self.kernel("order")(count, order)
            # Few tiles leave multiprocessors to read their keys side by side.
            spans = -(-words * WARP // SPAN) if number * listed < SMS else 1
            given = tiled.shared, tiled.fit, max(1, spans)
            self.kernel("list", listed > 1)(lines, order, *given, ids, bits, seen)
        alike, teams = tiled.batch * tiled.heads, THREADS // tiled.holders
        dealt = tiled.tiles, _wanted(alike), alike, teams, lists.slots(tiled.tiles)
        self.kernel("deal")(seen, *dealt, work)
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


def tiled_shape(shape: Sequence[int], kv_heads: int, planes: Sequence[int]) -> Tiled:
    """How sequences, heads, queries and keys, ``shape``, of a call without gradients are tiles by a
    mask of ``planes`` and so many rows.

    Heads that share keys, and see the same, are rows of one tile. A tile of 64 rows has the fewer
    queries then, and its list the fewer keys that only some of them see: none beside a query's own
    where it has 64 heads.
    """
    batch, heads, queries, keys = shape
    each = heads // max(1, kv_heads)
    if planes[1] == 1 and queries:
        for shared in range(min(each, QUERIES), 1, -1):
            if each % shared == 0:
                tiled = Tiled(batch, heads // shared, queries, shared)
                if tiled.tiles == 1 or _gains(tiled, keys, planes):
                    return tiled
    return Tiled(batch, heads, queries)


def _gains(tiled: Tiled, keys: int, planes: Sequence[int]) -> bool:
    """Whether heads of many queries may share tiles: queries see different keys, tiles are full,
    and lists, of which there are the more, do not become too large."""
    listed = planes[0] * tiled.tiles * _capacity(keys) * (1 + WORDS) * 4
    return planes[2] > 1 and tiled.shared * tiled.fit >= _FULL and listed <= _MOST_LISTED


def shapes_of(planes: int, told: int, others: int, tiled: Tiled) -> Iterator[tuple[int, ...]]:
    """The shapes of `Lists` of queries that see others, by ``told`` rows, one of which may be that
    of all."""
    listed, capacity = tiled.tiles if told > 1 else min(told, 1), _capacity(others)
    alike = max(1, tiled.batch * tiled.heads)
    most = _MOST_PARTS * THREADS // tiled.holders // alike
    wanted = _wanted(alike)
    slots = min(max(_LEAST_SLOTS, tiled.tiles // 4, wanted if wanted > tiled.tiles else 0), most)
    own = (listed, capacity), (listed, WORDS, capacity), (listed * tiled.fit,)
    for each in (*own, (tiled.tiles + slots, PART_FACTS)):
        yield planes, *each


def _capacity(others: int) -> int:
    """Places of a list."""
    return -(-others // KEYS) * KEYS


def _wanted(alike: int) -> int:
    """Lists of each of so many groups of heads that keep all multiprocessors busy."""
    return -(-_CTAS // max(1, alike))


def lists_module() -> tvm.IRModule:
    """The kernels that make lists, by their names and options."""
    made = {"order_0": order_queries(), "row_0": list_row()}
    made |= {"deal_0": deal_lists(), "turn_0": turn_lines()}
    for option in (False, True):
        made[f"fold_{option:d}"] = fold_queries(option)
        made[f"list_{option:d}"] = list_keys(option)
    return named_module(made)


def _check_planes(planes: tuple[int, int], tiles: int, rows: int, others: int) -> None:
    number = planes[0] * planes[1]
    if number > _MOST:
        raise ShapeError(mismatch("mask", f"at most {_MOST} planes", number))
    # Bits are told by words of lists, and read by halves of words of rows.
    if number * _capacity(others) * max(WORDS * tiles, -(-rows // _HALF)) >= 2**31:
        got = f"{number} of {rows} x {others}"
        raise ShapeError(mismatch("mask", "lists of fewer than 2**31 words", got, "split the call"))
