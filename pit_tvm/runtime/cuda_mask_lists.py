"""CUDA kernels that list, from a boolean mask, the keys that tiles of queries see.

Both axes of a mask are permutation-invariant for attention: queries are independent, and sums over
keys may be taken in any order (PIT, SOSP'23, section 3). So queries that see about as many keys
share a tile of `QUERIES` rows, those that see most first, and the micro-tile is a column of a tile.
A list names the keys that any row of a tile sees, with a bit for each row beside each of them.

Three kernels: `fold_queries` reads the mask once and leaves bits, `order_queries` sorts rows by how
many they have, `list_keys` makes lists of tiles. Nothing depends on the order in which CTAs run.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from ..schedules.bits import below, is_set
from ..schedules.cuda_listed_rows import KEYS, QUERIES, WORDS
from ..schedules.dependent import after_predecessor
from .cuda_detect_device import (
    BYTES,
    WARP,
    cta_scan,
    full_warp,
    lanes_of_group,
    live_bits,
    load16,
    load_any,
    popcount,
    warp_scan,
    warps_scan,
)

ROWS = 8  # of a CTA that folds: one of each warp
_AT_ONCE = 4  # loads of a lane that are under way together
LOT = _AT_ONCE * WARP  # half words that a warp folds at once, and counts that it orders
ORDER_THREADS = 1024
_CLASSES = 16  # of queries, by the logarithm of their keys to the base of 4
LIST_THREADS = 512
_LIST_WARPS = LIST_THREADS // WARP
_EACH = 8  # words of 32 keys that a warp deals with at once
SPAN = _LIST_WARPS * _EACH * WARP  # keys of a tile that are looked at together


def fold_queries(whole: bool) -> tvm.tirx.PrimFunc:
    """``lines`` (rows, halves), uint16: bits of the keys of every row; count (rows,): how many.

    mask: the address of rows times ``keys`` bytes, 0 where a key is not seen; with ``whole`` every
    row begins at a multiple of 16 bytes. Keys beyond the last are not seen. Several ``spans`` of a
    row are read side by side; then nothing is counted.
    """

    @T.prim_func
    def kernel(
        mask: T.int64,
        keys: T.int32,
        spans: T.int32,
        lines: T.Buffer(("rows", "halves"), "uint16", align=4),
        count: T.Buffer(("rows",), "int32", align=4),
    ):
        rows, halves = T.int32(), T.int32()
        T.device_entry()
        span, place = T.cta_id([spans, T.truncdiv(rows + ROWS - 1, ROWS)])
        thread = T.thread_id([ROWS * WARP])
        loaded = T.alloc_local([_AT_ONCE, 4], "uint32")
        total = T.alloc_local([1], "int32")
        after_predecessor()
        lane: T.let = T.truncmod(thread, WARP)
        row: T.int32 = place * ROWS + T.truncdiv(thread, WARP)
        if row < rows:
            start: T.int64 = mask + T.cast(row, "int64") * T.cast(keys, "int64")
            total[0] = 0
            for turn in T.serial(T.truncdiv(halves + spans * LOT - 1, spans * LOT)):
                first: T.let = (turn * spans + span) * LOT
                for u in T.unroll(_AT_ONCE):
                    half: T.let = first + u * WARP + lane
                    at: T.let = start + T.cast(half, "int64") * BYTES
                    words = T.meta_var(T.address_of(loaded[u, 0]))
                    if whole:
                        load16(words, at, T.cast(half * BYTES < keys, "bool"), 8)
                    else:
                        load_any(words, at, keys - half * BYTES)
                for u in T.unroll(_AT_ONCE):
                    mine: T.let = first + u * WARP + lane
                    live: T.uint32 = live_bits(T.address_of(loaded[u, 0]), full_warp(), 8)
                    if mine < halves:
                        lines[row, mine] = T.cast(live, "uint16")
                        total[0] = total[0] + popcount(live)
            warp_scan(total, lane)
            if (lane == WARP - 1) & (spans == 1):
                count[row] = total[0]

    return kernel


def order_queries() -> tvm.tirx.PrimFunc:
    """``order`` (planes, places): the rows of each plane by the class of their ``count`` (planes,
    rows), largest first, of equal ones the last first; -1 behind them.

    A class is a logarithm to the base of 4, so that rows that are alike stay neighbours.
    """
    warps = ORDER_THREADS // WARP

    @T.prim_func
    def kernel(
        count: T.Buffer(("planes", "rows"), "int32", align=4),
        order: T.Buffer(("planes", "places"), "int32", align=4),
    ):
        planes, rows, places = T.int32(), T.int32(), T.int32()
        T.device_entry()
        plane = T.cta_id([planes])
        thread = T.thread_id([ORDER_THREADS])
        pool = T.SMEMPool()
        tally = pool.alloc((_CLASSES * warps,), "int32", align=16)  # by class, then by warp
        totals = pool.alloc((WARP,), "int32", align=16)
        pool.commit()
        value = T.alloc_local([1], "int32")
        total = T.alloc_local([1], "int32")
        kinds = T.alloc_local([_AT_ONCE], "int32")
        lane: T.let = T.truncmod(thread, WARP)
        warp: T.let = T.truncdiv(thread, WARP)
        if thread < _CLASSES * warps:
            tally[thread] = 0
        after_predecessor()
        each: T.int32 = T.truncdiv(rows + warps * LOT - 1, warps * LOT) * LOT
        for turn in T.unroll(2):
            T.cuda.cta_sync()
            for step in T.serial(T.truncdiv(each, LOT)):
                for u in T.unroll(_AT_ONCE):
                    at: T.let = warp * each + step * LOT + u * WARP + lane
                    kinds[u] = -1
                    if at < rows:
                        kinds[u] = count[plane, rows - 1 - at]
                for u in T.unroll(_AT_ONCE):
                    row: T.let = rows - 1 - (warp * each + step * LOT + u * WARP + lane)
                    kind: T.int32 = _class_of(kinds[u])
                    same: T.uint32 = lanes_of_group(kind, _CLASSES)
                    if kind >= 0:
                        run: T.int32 = tally[kind * warps + warp]
                        if turn == 1:
                            order[plane, run + popcount(T.bitwise_and(same, below(lane)))] = row
                    T.cuda.warp_sync()
                    if kind >= 0:
                        if T.bitwise_and(same, below(lane)) == T.uint32(0):
                            tally[kind * warps + warp] = tally[kind * warps + warp] + popcount(same)
                    T.cuda.warp_sync()
            if turn == 0:
                T.cuda.cta_sync()
                value[0] = 0
                if thread < _CLASSES * warps:
                    value[0] = tally[thread]
                cta_scan(value, total, totals, thread, warps)
                if thread < _CLASSES * warps:
                    tally[thread] = value[0]
        rest: T.int32 = rows + thread
        if rest < places:
            order[plane, rest] = -1

    return kernel


def _class_of(keys: Any) -> Any:
    """int32: 0 for the most keys; up to 3 keys are of the last class, and fewer than 0 of none."""
    code = (
        "__forceinline__ __device__ int pit_class_of(int keys) {\n"
        "  if (keys < 4) return keys < 0 ? -1 : "
        f"{_CLASSES - 1};\n"
        f"  return {_CLASSES - 1} - (31 - __clz(keys)) / 2;\n}}\n"
    )
    return T.cuda.func_call("pit_class_of", keys, source_code=code, return_type="int32")


def _any_of(word: Any) -> Any:
    """uint32: the bits that are set in a word of any lane."""
    code = (
        "__forceinline__ __device__ unsigned pit_any_of(unsigned word) {\n"
        "  return __reduce_or_sync(~0u, word);\n}\n"
    )
    return T.cuda.func_call("pit_any_of", word, source_code=code, return_type="uint32")


@T.inline
def _swap(words, w, lane, step, kept):
    """Of blocks of twice ``step`` lanes and bits, the upper right and lower left parts change
    places; ``kept`` has the bits on the left."""
    own: T.uint32 = words[w]
    other: T.uint32 = T.cuda.__shfl_xor_sync(full_warp(), own, step, 32)
    if T.bitwise_and(lane, step) == 0:
        words[w] = T.bitwise_or(
            T.bitwise_and(own, T.uint32(kept)),
            T.shift_left(T.bitwise_and(other, T.uint32(kept)), T.uint32(step)),
        )
    else:
        words[w] = T.bitwise_or(
            T.bitwise_and(own, T.bitwise_not(T.uint32(kept))),
            T.bitwise_and(T.shift_right(other, T.uint32(step)), T.uint32(kept)),
        )


@T.inline
def turn_words(words, w, lane):
    """Bit b of ``words[w]`` of lane l becomes bit l of that of lane b."""
    _swap(words, w, lane, 16, 0x0000FFFF)
    _swap(words, w, lane, 8, 0x00FF00FF)
    _swap(words, w, lane, 4, 0x0F0F0F0F)
    _swap(words, w, lane, 2, 0x33333333)
    _swap(words, w, lane, 1, 0x55555555)


@T.meta_class
class _Span:
    """Bits of a tile's queries for `SPAN` keys in shared memory, and how many keys of each word
    any of them sees."""

    def __init__(self) -> None:
        pool: Any = T.SMEMPool()
        # An odd number of words: lanes that read a column meet no other's bank.
        self.rows = pool.alloc((QUERIES, SPAN // WARP + 1), "uint32", align=16)
        self.totals = pool.alloc((WARP,), "int32", align=16)
        pool.commit()
        self.some = T.alloc_local([_EACH], "uint32")
        self.column = T.alloc_local([WORDS], "uint32")
        self.place = T.alloc_local([1], "int32")
        self.total = T.alloc_local([1], "int32")

    @T.inline
    def count_before(self, lines, order, plane, tile, fit, first, ordered, thread):
        """``total``: how many keys before word ``first`` are listed."""
        self.place[0] = 0
        at: T.int32 = thread
        while at < first:
            word: T.uint32 = T.uint32(0)
            for r in T.serial(T.min(fit, lines.shape[1] - tile * fit)):
                row: T.int32 = tile * fit + r
                if ordered:
                    row = order[plane, row]
                word = T.bitwise_or(word, T.reinterpret("uint32", lines[plane, row, at]))
            self.place[0] = self.place[0] + popcount(word)
            at = at + LIST_THREADS
        cta_scan(self.place, self.total, self.totals, thread, _LIST_WARPS)
        T.cuda.cta_sync()

    @T.inline
    def read(self, lines, order, shared, fit, plane, tile, first, ordered, warp, lane):
        """Bits of the tile's rows from word ``first`` on: of each query ``shared`` times."""
        for r in T.unroll(QUERIES // _LIST_WARPS):
            own: T.let = r * _LIST_WARPS + warp
            query: T.let = T.truncdiv(own, shared)
            row: T.int32 = tile * fit + query
            if (query >= fit) | (row >= lines.shape[1]):
                row = -1
            elif ordered:
                row = order[plane, row]
            for u in T.unroll(SPAN // WARP // WARP):
                at: T.let = u * WARP + lane
                word: T.uint32 = T.uint32(0)
                if (row >= 0) & (first + at < lines.shape[2]):
                    word = T.reinterpret("uint32", lines[plane, row, first + at])
                self.rows[own, at] = word

    @T.inline
    def look(self, warp, lane):
        """``some`` of the words of a warp, and ``place``: how many keys are listed before them."""
        self.total[0] = 0
        for u in T.unroll(_EACH):
            at: T.let = u * _LIST_WARPS + warp
            self.some[u] = _any_of(T.bitwise_or(self.rows[lane, at], self.rows[WARP + lane, at]))
            self.total[0] = self.total[0] + popcount(self.some[u])
        if lane == 0:
            self.totals[warp] = self.total[0]

    @T.inline
    def columns(self, at, lane):
        """``column``: of the key of each lane in a word, which queries see it."""
        for w in T.unroll(WORDS):
            self.column[w] = self.rows[w * WARP + lane, at]
            turn_words(self.column, w, lane)


@T.inline
def end_list(ids, bits, count, plane, tile, found, thread):
    """Count what a list names; places behind it, up to a multiple of `KEYS`, name nothing."""
    rest: T.let = found + thread
    if rest < T.truncdiv(found + KEYS - 1, KEYS) * KEYS:
        ids[plane, tile, rest] = -1
        for w in T.unroll(WORDS):
            bits[plane, tile, w, rest] = 0
    if thread == 0:
        count[plane, tile] = found


def list_keys(ordered: bool) -> tvm.tirx.PrimFunc:
    """Lists of the keys that tiles see: ids (planes, tiles, capacity) and bits (planes, tiles,
    `WORDS`, capacity), filled with -1 and 0 up to a multiple of `KEYS`; count (planes, tiles)
    counts the keys without these.

    lines (planes, rows, words): bits of every row; order (planes, tiles * ``fit``): the rows of
    all tiles, -1 for none, if they are ``ordered``. A tile has ``fit`` of them, each for ``shared``
    heads, side by side. Capacity is a multiple of `KEYS`, and at least all keys. ``spans`` CTAs
    share a tile: each counts the keys before its own, which costs less than telling each other.
    """

    @T.prim_func
    def kernel(
        lines: T.Buffer(("planes", "rows", "words"), "int32", align=4),
        order: T.Buffer(("planes", "places"), "int32", align=4),
        shared: T.int32,
        fit: T.int32,
        spans: T.int32,
        ids: T.Buffer(("planes", "tiles", "capacity"), "int32", align=16),
        bits: T.Buffer(("planes", "tiles", WORDS, "capacity"), "int32", align=16),
        count: T.Buffer(("planes", "tiles"), "int32", align=4),
    ):
        planes, words, tiles = T.int32(), T.int32(), T.int32()
        T.device_entry()
        tile, own, plane = T.cta_id([tiles, spans, planes])
        thread = T.thread_id([LIST_THREADS])
        span = _Span()
        after_predecessor()
        lane: T.let = T.truncmod(thread, WARP)
        warp: T.let = T.truncdiv(thread, WARP)
        parts: T.let = T.truncdiv(words + SPAN // WARP - 1, SPAN // WARP)
        first: T.let = T.truncdiv(parts * own, spans)
        end: T.let = T.truncdiv(parts * (own + 1), spans)
        found: T.int32 = 0
        if own > 0:
            before: T.let = first * (SPAN // WARP)
            span.count_before(lines, order, plane, tile, fit, before, ordered, thread)
            found = span.total[0]
        for step in T.serial(end - first):
            part: T.let = first + step
            word0: T.let = part * (SPAN // WARP)
            span.read(lines, order, shared, fit, plane, tile, word0, ordered, warp, lane)
            T.cuda.cta_sync()
            span.look(warp, lane)
            warps_scan(span.place, span.total, span.totals, thread, _LIST_WARPS)
            place: T.int32 = found + span.place[0]
            for u in T.unroll(_EACH):
                some: T.uint32 = span.some[u]
                if some != T.uint32(0):
                    at: T.let = u * _LIST_WARPS + warp
                    span.columns(at, lane)
                    if is_set(some, lane) != 0:
                        mine: T.let = place + popcount(T.bitwise_and(some, below(lane)))
                        ids[plane, tile, mine] = (part * (SPAN // WARP) + at) * WARP + lane
                        for w in T.unroll(WORDS):
                            bits[plane, tile, w, mine] = T.reinterpret("int32", span.column[w])
                    place = place + popcount(some)
            found = found + span.total[0]
            T.cuda.cta_sync()
        if own == spans - 1:
            end_list(ids, bits, count, plane, tile, found, thread)

    return kernel
