"""CUDA kernels for live columns of a mask or an operand, read once: straight to lists, or to bits.

Entries lie in rows of ``row_bytes``; an entry has 1, 8, 16, 32 or 64 ``bits`` and is live if any
bit of it that ``keep`` leaves is set. A micro-tile's liveness is one bit: bit ``p % 32`` of word
``p // 32`` of a line stands for position p on the PIT axis. Sizes are run-time values.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from ..schedules.bits import below, is_set
from .cuda_detect_device import (
    AT_ONCE,
    BYTES,
    ROOM,
    WARP,
    atomic_or,
    cta_scan,
    cut,
    live_bits,
    load16,
    load_any,
    popcount,
)

FOLD_THREADS = 1024


def vector_of(bits: int) -> int:
    """Entries in one 16-byte load."""
    return BYTES * 8 // bits


@T.inline
def _or_rows(acc, loaded, src, row_bytes, offset, left, first, last, step, wide, bits):
    """acc = the OR of 16 bytes at byte ``offset`` of the rows first, first + step, ... < last.

    Rows have ``left`` bytes from there on, as far as that is below `ROOM`.
    """
    for w in T.unroll(4):
        acc[w] = T.uint32(0)
    row: T.int32 = first
    if (wide != 0) & (left >= BYTES):
        while row < last:
            for u in T.unroll(AT_ONCE):
                load16(
                    T.address_of(loaded[u, 0]),
                    src + T.int64(row + u * step) * row_bytes + offset,
                    row + u * step < last,
                    bits,
                )
            for u in T.unroll(AT_ONCE):
                for w in T.unroll(4):
                    acc[w] = T.bitwise_or(acc[w], loaded[u, w])
            row = row + step * AT_ONCE
    else:
        while (row < last) & (left > 0):
            load_any(
                T.address_of(loaded[0, 0]),
                src + T.int64(row) * row_bytes + offset,
                left,
            )
            for w in T.unroll(4):
                acc[w] = T.bitwise_or(acc[w], loaded[0, w])
            row = row + step


@T.inline
def put_bits(words, acc, column, keep, bits):
    """OR the live bits of a thread's 16 bytes into ``words``, whose bit 0 is column 0."""
    if bits == 1:
        for w in T.unroll(4):
            if acc[w] != T.uint32(0):
                atomic_or(T.address_of(words[column * 4 + w]), acc[w])
    else:
        live: T.uint32 = live_bits(T.address_of(acc[0]), T.uint32(keep), bits)
        at: T.let = column * (BYTES * 8 // bits)
        if live != T.uint32(0):
            atomic_or(
                T.address_of(words[T.shift_right(at, 5)]),
                T.shift_left(live, T.uint32(T.bitwise_and(at, 31))),
            )


def list_columns(bits: int, threads: int) -> tvm.tirx.PrimFunc:
    """Live columns of every band of ``band`` rows: ascending lists, and ``lines`` (bands, words),
    uint32, of a bit for each column. One CTA to a band.

    ``1 << lanes`` threads, at least 32, share a row; ``wide``: rows begin at multiples of 16
    bytes. ``keep`` are the bits of an int32.
    """
    vector = vector_of(bits)

    @T.prim_func
    def kernel(
        src: T.int64,
        row_bytes: T.int64,
        rows: T.int32,
        cols: T.int32,
        band: T.int32,
        lanes: T.int32,
        wide: T.int32,
        keep: T.int32,
        ids: T.Buffer(("slots", "capacity"), "int32", align=4),
        count: T.Buffer(("slots",), "int32", align=4),
        lines: T.Buffer(("slots", "size"), "uint32", align=4),
    ):
        slots, size = T.int32(), T.int32()
        T.device_entry()
        slot = T.cta_id([slots])
        thread = T.thread_id([threads])
        lane: T.let = T.truncmod(thread, WARP)
        words = T.alloc_shared([threads], "uint32")
        before = T.alloc_shared([threads], "int32")
        totals = T.alloc_shared([WARP], "int32")
        acc = T.alloc_local([4], "uint32")
        loaded = T.alloc_local([AT_ONCE, 4], "uint32")
        value = T.alloc_local([1], "int32")
        total = T.alloc_local([1], "int32")
        across: T.int32 = T.shift_left(1, lanes)
        column: T.int32 = T.bitwise_and(thread, across - 1)
        first: T.int32 = slot * band
        last: T.int32 = first + T.min(band, rows - first)
        line: T.int64 = T.truncdiv(T.int64(cols) * bits + 7, 8)
        col0: T.int32 = 0
        found: T.int32 = 0
        offset: T.int64 = 0
        word: T.uint32 = T.uint32(0)
        at: T.int32 = 0
        if slot < slots:
            while col0 < cols:
                words[thread] = T.uint32(0)
                T.cuda.cta_sync()
                offset = T.truncdiv((T.int64(col0) + T.int64(column * vector)) * bits, 8)
                _or_rows(
                    acc,
                    loaded,
                    src,
                    row_bytes,
                    offset,
                    T.int32(T.max(T.min(line - offset, T.int64(ROOM)), T.int64(0))),
                    first + T.shift_right(thread, lanes),
                    last,
                    T.shift_right(threads, lanes),
                    wide,
                    bits,
                )
                put_bits(words, acc, column, keep, bits)
                T.cuda.cta_sync()
                word = cut(words[thread], thread * 32, 0, cols - col0)
                value[0] = popcount(word)
                words[thread] = word
                if (thread * 32 < across * vector) & (T.truncdiv(col0, 32) + thread < size):
                    lines[T.int64(slot), T.int64(T.truncdiv(col0, 32) + thread)] = word
                cta_scan(value, total, totals, thread, threads // WARP)
                before[thread] = value[0]
                T.cuda.cta_sync()
                at = thread
                while at < T.min(across * vector, cols - col0):
                    word = words[T.shift_right(at, 5)]
                    if is_set(word, lane) != 0:
                        ids[
                            T.int64(slot),
                            T.int64(
                                found
                                + before[T.shift_right(at, 5)]
                                + popcount(T.bitwise_and(word, below(lane)))
                            ),
                        ] = col0 + at
                    at = at + threads
                found = found + total[0]
                col0 = col0 + across * vector
                T.cuda.cta_sync()
            if thread == 0:
                count[slot] = found

    return kernel


def fold_columns(bits: int) -> tvm.tirx.PrimFunc:
    """Bits of the live columns of every part of ``height`` rows of every band of ``band`` rows.

    ``lines`` (bands * parts, words), uint32; ``chunks`` CTAs stand side by side, ``1 << lanes``
    threads of 16 bytes each.
    """
    vector = vector_of(bits)
    threads = FOLD_THREADS

    @T.prim_func
    def kernel(
        src: T.int64,
        row_bytes: T.int64,
        rows: T.int32,
        cols: T.int32,
        band: T.int32,
        parts: T.int32,
        height: T.int32,
        chunks: T.int32,
        lanes: T.int32,
        wide: T.int32,
        keep: T.int32,
        lines: T.Buffer(("count", "size"), "uint32", align=4),
    ):
        count, size = T.int32(), T.int32()
        T.device_entry()
        block = T.cta_id([count * chunks])
        thread = T.thread_id([threads])
        words = T.alloc_shared([threads], "uint32")
        acc = T.alloc_local([4], "uint32")
        loaded = T.alloc_local([AT_ONCE, 4], "uint32")
        line: T.int32 = T.truncdiv(block, chunks)
        across: T.int32 = T.shift_left(1, lanes)
        column: T.int32 = T.bitwise_and(thread, across - 1)
        col0: T.int32 = T.truncmod(block, chunks) * across * vector
        top: T.int32 = T.truncdiv(line, parts) * band
        first: T.int32 = top + T.truncmod(line, parts) * height
        last: T.int32 = T.min(T.min(first + height, top + band), rows)
        offset: T.int64 = T.truncdiv((T.int64(col0) + T.int64(column * vector)) * bits, 8)
        length: T.int64 = T.truncdiv(T.int64(cols) * bits + 7, 8)
        at: T.int32 = T.truncdiv(col0, 32) + thread
        words[thread] = T.uint32(0)
        T.cuda.cta_sync()
        _or_rows(
            acc,
            loaded,
            src,
            row_bytes,
            offset,
            T.int32(T.max(T.min(length - offset, T.int64(ROOM)), T.int64(0))),
            first + T.shift_right(thread, lanes),
            last,
            T.shift_right(threads, lanes),
            wide,
            bits,
        )
        put_bits(words, acc, column, keep, bits)
        T.cuda.cta_sync()
        if (line < count) & (thread * 32 < across * vector) & (at < size):
            lines[T.int64(line), T.int64(at)] = words[thread]

    return kernel
