"""CUDA kernels that read a mask or an operand once and say which of its blocks live."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from ..schedules.dependent import after_predecessor
from .cuda_detect_columns import vector_of
from .cuda_detect_device import AT_ONCE, ROOM, WARP, full_warp, popcount
from .cuda_detect_rows import load_rows

THREADS = 256
LANES = 32  # threads that share a row
_ROWS = THREADS // LANES
MOST_BLOCKS = 128  # beside each other in what one CTA reads: of one bit each, 32 wide


@T.inline
def _mark(flags, acc, column, wide, keep, bits):
    """Set the flags of the blocks, ``wide`` columns each, that live in 16 bytes from ``column``."""
    for w in T.unroll(4):
        first: T.let = column + w * (32 // bits)
        if T.bitwise_and(acc[w], T.uint32(keep)) != T.uint32(0):
            flags[T.truncdiv(first, wide)] = T.uint8(1)


def map_blocks(bits: int) -> tvm.tirx.PrimFunc:
    """1 for every block of ``high`` rows and ``wide`` columns with a live entry, else 0.

    Entries are those of `cuda_detect_columns`, of 1, 8 or 16 ``bits``. ``wide`` is a power of two
    from 32 to 256, ``aligned`` says that rows begin at multiples of 16 bytes. ``map`` is uint8
    (blocks down, blocks across).
    """
    across = LANES * vector_of(bits)  # columns of one CTA

    @T.prim_func
    def kernel(
        src: T.int64,
        row_bytes: T.int64,
        rows: T.int32,
        cols: T.int32,
        high: T.int32,
        wide: T.int32,
        aligned: T.int32,
        keep: T.int32,
        found: T.Buffer(("down", "beside"), "uint8", align=1),
    ):
        down, beside = T.int32(), T.int32()
        T.device_entry()
        chunks: T.let = T.truncdiv(cols + (across - 1), across)
        block = T.cta_id([down * T.truncdiv(cols + (across - 1), across)])
        thread = T.thread_id([THREADS])
        after_predecessor()
        flags = T.alloc_shared([MOST_BLOCKS], "uint8")
        acc = T.alloc_local([4], "uint32")
        loaded = T.alloc_local([AT_ONCE, 4], "uint32")
        if thread < MOST_BLOCKS:
            flags[thread] = T.uint8(0)
        T.cuda.cta_sync()
        strip: T.int32 = T.truncdiv(block, chunks)
        column: T.int32 = T.truncmod(thread, LANES) * vector_of(bits)  # of the CTA's
        col0: T.int32 = T.truncmod(block, chunks) * across
        offset: T.int64 = T.truncdiv(T.int64(col0 + column) * bits, 8)
        length: T.int64 = T.truncdiv(T.int64(cols) * bits + 7, 8)
        left: T.int32 = T.int32(T.max(T.min(length - offset, T.int64(ROOM)), T.int64(0)))
        row: T.int32 = strip * high + T.truncdiv(thread, LANES)
        last: T.int32 = T.min(strip * high + high, rows)
        for w in T.unroll(4):
            acc[w] = T.uint32(0)
        while row < last:
            load_rows(loaded, src + offset, row_bytes, _ROWS, row, last, left, aligned, bits)
            for u in T.unroll(AT_ONCE):
                for w in T.unroll(4):
                    acc[w] = T.bitwise_or(acc[w], loaded[u, w])
            row = row + AT_ONCE * _ROWS
        _mark(flags, acc, column, wide, keep, bits)
        T.cuda.cta_sync()
        first: T.let = T.truncdiv(col0, wide)
        if (thread < T.truncdiv(across, wide)) & (first + thread < beside):
            found[strip, first + thread] = flags[thread]

    return kernel


def count_steps() -> tvm.tirx.PrimFunc:
    """Live steps of every band of a map, as `pit_tvm.schedules.hopper_blocks.blocks_kernel` reads
    it: ``count`` (bands,), int32. One warp to a band."""

    @T.prim_func
    def kernel(
        live: T.Buffer(("size",), "uint8", align=1),
        high: T.int32,
        deep: T.int32,
        beside: T.int32,
        along: T.int32,
        steps: T.int32,
        count: T.Buffer(("bands",), "int32", align=4),
    ):
        bands = T.int32()
        T.device_entry()
        band = T.cta_id([bands])
        lane = T.thread_id([WARP])
        first: T.let = T.truncdiv(band, high) * beside
        found: T.int32 = 0
        step: T.int32 = lane
        while step - lane < steps:
            some: T.int32 = 0
            if step < steps:
                if live[first + T.truncdiv(step, deep) * along] != T.uint8(0):
                    some = 1
            found = found + popcount(T.cuda.ballot_sync(full_warp(), some))
            step = step + WARP
        if lane == 0:
            count[band] = found

    return kernel


def count_lines() -> tvm.tirx.PrimFunc:
    """Set bits of each of ``lines`` (slots, words), uint32: ``count`` (slots,), int32. One warp to
    a line."""

    @T.prim_func
    def kernel(
        lines: T.Buffer(("slots", "size"), "uint32", align=4),
        count: T.Buffer(("slots",), "int32", align=4),
    ):
        slots, size = T.int32(), T.int32()
        T.device_entry()
        slot = T.cta_id([slots])
        lane = T.thread_id([WARP])
        found: T.int32 = 0
        word: T.int32 = lane
        while word < size:
            found = found + popcount(lines[slot, word])
            word = word + WARP
        for d in T.unroll(5):
            found = found + T.cuda.__shfl_xor_sync(full_warp(), found, 16 >> d, WARP)
        if lane == 0:
            count[slot] = found

    return kernel
