"""CUDA kernels for live rows of a mask or an operand, and for block masks: entries to bits.

Entries, ``keep`` and bits are those of `cuda_detect_columns`.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from ..schedules.bits import below
from ..schedules.dependent import after_predecessor
from .cuda_detect_columns import vector_of
from .cuda_detect_device import (
    AT_ONCE,
    BYTES,
    ROOM,
    WARP,
    atomic_or,
    cut,
    full_warp,
    live_bits,
    load16,
    load_any,
    same_lanes,
    some_live,
)

THREADS = 512  # of `fold_rows`
ROW_WORDS = 8192  # of its shared memory

# Marks row `row` live in the slot of every live column. Bit 0 of `live` is column `at` of the
# CTA's columns; slots are `width` columns wide and have `high` words of 32 rows each.
# Called, not inlined: many copies of it would be fetched for longer than they run.
_MARK = """static __noinline__ __device__ void pit_mark(unsigned* words, unsigned live, int at,
                                              int width, int high, int row) {
  while (live) {
    int slot = (at + __ffs(live) - 1) / width, end = (slot + 1) * width - at;
    unsigned bit = 1u << (row & 31);
    unsigned* word = words + slot * high + (row >> 5);
    if (!(*reinterpret_cast<volatile unsigned*>(word) & bit)) atomicOr(word, bit);
    live = end < 32 ? live & (~0u << end) : 0u;
  }
}
"""


def _mark(words: Any, live: Any, at: Any, width: Any, high: Any, row: Any) -> Any:
    return T.cuda.func_call("pit_mark", words, live, at, width, high, row, source_code=_MARK)


@T.inline
def load_rows(loaded, at, row_bytes, step, row, height, left, wide, bits):
    """16 bytes of each of `AT_ONCE` rows row, row + step ..., ``at`` being those of row 0; zeros
    from row ``height`` on, and behind the ``left`` bytes of a row."""
    # Lanes that are left nothing go with the others of their warp.
    if (wide != 0) & ((left >= BYTES) | (left <= 0)):
        for u in T.unroll(AT_ONCE):
            load16(
                T.address_of(loaded[u, 0]),
                at + T.int64(row + u * step) * row_bytes,
                (row + u * step < height) & (left > 0),
                bits,
            )
    else:
        for u in T.unroll(AT_ONCE):
            load_any(
                T.address_of(loaded[u, 0]),
                at + T.int64(row + u * step) * row_bytes,
                T.if_then_else(row + u * step < height, left, 0),
            )


@T.inline
def _mark_parts(words, loaded, keep, at, begin, end, width, high, row, step, bits):
    """Mark the rows of 16 bytes whose first entry is column ``at``, whatever slots they touch."""
    for u in T.unroll(AT_ONCE):
        for w in T.unroll(4 if bits == 1 else 1):
            live: T.uint32 = loaded[u, w]
            if bits > 1:
                live = live_bits(T.address_of(loaded[u, 0]), T.uint32(keep), bits)
            live = cut(live, at + w * 32, begin, end)
            if live != T.uint32(0):
                _mark(
                    T.address_of(words[0]), live, at + w * 32 - begin, width, high, row + u * step
                )


@T.inline
def _mark_whole(words, loaded, kept, slot, high, row, step, peers, lane, bits):
    """Mark the rows of 16 bytes that lie in ``slot``: one lane for all ``peers`` of row and slot.

    ``kept`` are the bits that count of each word.
    """
    for u in T.unroll(AT_ONCE):
        some: T.uint32 = some_live(loaded, u, kept, bits)
        hits: T.uint32 = T.bitwise_and(
            T.cuda.ballot_sync(full_warp(), T.int32(some != T.uint32(0))), peers
        )
        if (hits != T.uint32(0)) & (T.bitwise_and(peers, below(lane)) == T.uint32(0)):
            atomic_or(
                T.address_of(words[slot * high + T.shift_right(row + u * step, 5)]),
                T.shift_left(T.uint32(1), T.uint32(T.bitwise_and(row + u * step, 31))),
            )


def fold_rows(bits: int) -> tvm.tirx.PrimFunc:
    """Bits of the live rows of every slot of ``width`` columns, or of each of its ``parts``.

    ``lines`` (slots * parts, words), uint32. A CTA reads ``high * 32`` rows of ``several`` slots,
    or of one part of ``piece`` columns of one slot; ``several * high`` is at most `ROW_WORDS`.
    ``chunks`` CTAs stand side by side, and ``1 << lanes`` threads share a row. ``whole``: no
    16 bytes belong to two slots or parts.
    """
    vector = vector_of(bits)
    threads = THREADS

    @T.prim_func
    def kernel(
        src: T.int64,
        row_bytes: T.int64,
        rows: T.int32,
        cols: T.int32,
        width: T.int32,
        parts: T.int32,
        piece: T.int32,
        several: T.int32,
        high: T.int32,
        chunks: T.int32,
        lanes: T.int32,
        whole: T.int32,
        wide: T.int32,
        keep: T.int32,
        lines: T.Buffer(("count", "size"), "uint32", align=4),
    ):
        count, size = T.int32(), T.int32()
        T.device_entry()
        block = T.cta_id([T.truncdiv(size + high - 1, high) * chunks])
        thread = T.thread_id([threads])
        after_predecessor()
        lane: T.let = T.truncmod(thread, WARP)
        words = T.alloc_shared([ROW_WORDS], "uint32")
        loaded = T.alloc_local([AT_ONCE, 4], "uint32")
        kept = T.alloc_local([4], "uint32")
        chunk: T.int32 = T.truncmod(block, chunks)
        row0: T.int32 = T.truncdiv(block, chunks) * high * 32
        begin: T.int32 = chunk * several * width
        end: T.int32 = T.min(begin + several * width, cols)
        if parts > 1:
            begin = T.truncdiv(chunk, parts) * width
            end = T.min(begin + width, cols)
            begin = begin + T.truncmod(chunk, parts) * piece
            end = T.min(begin + piece, end)
        height: T.int32 = T.min(high * 32, rows - row0)
        length: T.int64 = T.truncdiv(T.int64(cols) * bits + 7, 8)
        across: T.int32 = T.shift_left(1, lanes)
        # Where this thread's 16 bytes begin, and the first of its rows.
        column: T.int32 = (T.truncdiv(begin, vector) + T.bitwise_and(thread, across - 1)) * vector
        row: T.int32 = T.shift_right(thread, lanes)
        step: T.int32 = T.shift_right(threads, lanes)
        offset: T.int64 = 0
        left: T.int32 = 0
        slot: T.int32 = 0
        peers: T.uint32 = T.uint32(0)
        at: T.int32 = thread
        while at < several * high:
            words[at] = T.uint32(0)
            at = at + threads
        T.cuda.cta_sync()
        while column - T.bitwise_and(thread, across - 1) * vector < end:
            offset = T.truncdiv(T.int64(column) * bits, 8)
            left = 0
            if column < end:
                left = T.int32(T.min(length - offset, T.int64(ROOM)))
            offset = src + offset + T.int64(row0) * row_bytes
            slot = T.truncdiv(T.max(column - begin, 0), width)
            peers = same_lanes(slot * (WARP * 2) + T.bitwise_and(row, WARP - 1))
            for w in T.unroll(4):
                kept[w] = T.uint32(keep)
                if bits == 1:
                    kept[w] = cut(T.uint32(0xFFFFFFFF), column + w * 32, begin, end)
            at = 0
            while at < height:
                load_rows(loaded, offset, row_bytes, step, row + at, height, left, wide, bits)
                if whole != 0:
                    _mark_whole(words, loaded, kept, slot, high, row + at, step, peers, lane, bits)
                else:
                    _mark_parts(
                        words, loaded, keep, column, begin, end, width, high, row + at, step, bits
                    )
                at = at + step * AT_ONCE
            column = column + across * vector
        T.cuda.cta_sync()
        at = thread
        while at < several * high:
            line: T.let = chunk * several + T.truncdiv(at, high)
            word: T.let = T.truncdiv(row0, 32) + T.truncmod(at, high)
            if (line < count) & (word < size):
                lines[T.int64(line), T.int64(word)] = words[at]
            at = at + threads

    return kernel


def fold_blocks() -> tvm.tirx.PrimFunc:
    """Bits of the live blocks along the PIT axis, for every slot of a block mask of bytes.

    Slots are ``band`` elements high on the other axis, of ``extent`` elements in blocks of
    ``grain``; neighbours on the axes are ``along`` and ``beside`` bytes apart. One warp to a word.
    ``entries`` is the number of blocks along the PIT axis.
    """
    threads = 256

    @T.prim_func
    def kernel(
        src: T.int64,
        along: T.int64,
        beside: T.int64,
        entries: T.int32,
        extent: T.int32,
        band: T.int32,
        grain: T.int32,
        lines: T.Buffer(("count", "size"), "uint32", align=4),
    ):
        count, size = T.int32(), T.int32()
        T.device_entry()
        block = T.cta_id([T.truncdiv(count * size + (threads // WARP - 1), threads // WARP)])
        thread = T.thread_id([threads])
        lane: T.let = T.truncmod(thread, WARP)
        item: T.int32 = block * (threads // WARP) + T.truncdiv(thread, WARP)
        loaded = T.alloc_local([4], "uint32")
        line: T.int32 = T.truncdiv(item, size)
        word: T.int32 = T.truncmod(item, size)
        if (item < count * size) & (word * WARP < entries):
            top: T.int32 = line * band
            row: T.int32 = T.truncdiv(top, grain)
            last: T.int32 = T.truncdiv(top + T.min(band, extent - top) + grain - 1, grain)
            at: T.int64 = src + T.int64(word * 32 + lane) * along
            live: T.uint32 = T.uint32(0)
            while row < last:
                load_any(
                    T.address_of(loaded[0]),
                    at + T.int64(row) * beside,
                    T.if_then_else(word * 32 + lane < entries, 1, 0),
                )
                live = T.bitwise_or(live, loaded[0])
                row = row + 1
            lines[T.int64(line), T.int64(word)] = T.cuda.ballot_sync(
                T.uint32(0xFFFFFFFF), T.int32(live != T.uint32(0))
            )

    return kernel
