"""CUDA kernel that reads a mask once for both of its axes: bits of live rows and of live columns.

Bits and lines are those of `cuda_detect_columns`; entries are bytes.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from ..schedules.dependent import after_predecessor
from .cuda_detect_columns import put_bits
from .cuda_detect_device import AT_ONCE, BYTES, WARP, atomic_or, full_warp
from .cuda_detect_plan import MOST_PARTS, SMS
from .cuda_detect_rows import load_rows

THREADS = 512
LINE_BYTES = WARP * BYTES  # of a row, that one warp reads
STEP = THREADS // WARP * AT_ONCE  # rows that a CTA reads at a time
MOST_HEIGHT = 1 << 15  # rows of a CTA


def axes_grid(rows: int, cols: int) -> tuple[int, int, int]:
    """Rows of a CTA, CTAs that share a column, and CTAs that share a row."""
    chunks = -(-cols // LINE_BYTES)
    fair = max(-(-rows * chunks // (2 * SMS)), -(-rows // MOST_PARTS))
    height = min(-(-max(fair, 1) // STEP) * STEP, MOST_HEIGHT)
    return height, -(-rows // height), chunks


def fold_axes() -> tvm.tirx.PrimFunc:
    """Bits of the live rows of every `LINE_BYTES` columns, and of the live columns of every
    ``height`` rows.

    ``across`` (chunks, row words) and ``down`` (parts, column words), uint32; ``height`` is a
    multiple of `STEP`, at most `MOST_HEIGHT`. ``wide``: rows begin at multiples of 16 bytes.
    """

    @T.prim_func
    def kernel(
        src: T.int64,
        row_bytes: T.int64,
        rows: T.int32,
        cols: T.int32,
        height: T.int32,
        wide: T.int32,
        across: T.Buffer(("chunks", "row_words"), "uint32", align=4),
        down: T.Buffer(("parts", "column_words"), "uint32", align=4),
    ):
        chunks, parts, column_words = T.int32(), T.int32(), T.int32()
        T.device_entry()
        block = T.cta_id([parts * chunks])
        thread = T.thread_id([THREADS])
        lane: T.let = T.truncmod(thread, WARP)
        rows_live = T.alloc_shared([MOST_HEIGHT // 32], "uint32")
        columns_live = T.alloc_shared([LINE_BYTES // 32], "uint32")
        loaded = T.alloc_local([AT_ONCE, 4], "uint32")
        acc = T.alloc_local([4], "uint32")
        chunk: T.int32 = T.truncmod(block, chunks)
        part: T.int32 = T.truncdiv(block, chunks)
        row0: T.int32 = part * height
        column: T.int32 = chunk * LINE_BYTES + lane * BYTES
        last: T.int32 = T.min(height, rows - row0)
        keep: T.int32 = -1
        at: T.int32 = thread
        while at < T.truncdiv(height, 32):
            rows_live[at] = T.uint32(0)
            at = at + THREADS
        if thread < LINE_BYTES // 32:
            columns_live[thread] = T.uint32(0)
        for w in T.unroll(4):
            acc[w] = T.uint32(0)
        T.cuda.cta_sync()
        after_predecessor()
        first: T.int64 = src + T.int64(row0) * row_bytes + T.int64(column)
        at = T.truncdiv(thread, WARP) * AT_ONCE
        while at < last:
            load_rows(loaded, first, row_bytes, 1, at, last, cols - column, wide, 8)
            found: T.uint32 = T.uint32(0)
            for u in T.unroll(AT_ONCE):
                some: T.uint32 = T.uint32(0)
                for w in T.unroll(4):
                    some = T.bitwise_or(some, loaded[u, w])
                    acc[w] = T.bitwise_or(acc[w], loaded[u, w])
                hits: T.uint32 = T.cuda.ballot_sync(full_warp(), T.int32(some != T.uint32(0)))
                found = T.bitwise_or(
                    found, T.shift_left(T.uint32(hits != T.uint32(0)), T.uint32(u))
                )
            if lane == 0:
                atomic_or(
                    T.address_of(rows_live[T.shift_right(at, 5)]),
                    T.shift_left(found, T.uint32(T.bitwise_and(at, 31))),
                )
            at = at + STEP
        put_bits(columns_live, acc, lane, keep, 8)
        T.cuda.cta_sync()
        at = T.truncdiv(row0, 32) + thread
        while at < T.truncdiv(row0 + last + 31, 32):
            across[T.int64(chunk), T.int64(at)] = rows_live[at - T.truncdiv(row0, 32)]
            at = at + THREADS
        at = chunk * (LINE_BYTES // 32) + thread
        if (thread < LINE_BYTES // 32) & (at < column_words):
            down[T.int64(part), T.int64(at)] = columns_live[thread]

    return kernel
