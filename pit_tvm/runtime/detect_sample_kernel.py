"""The kernel that samples a pattern: windows of 64x64, each line of one as the 64 bits of a word,
and whole lines. It checks its array itself, so that a call like the one before asks nothing else.
"""

from __future__ import annotations

import math

import tvm
from tvm.script import tirx as T
from tvm.tirx import const

from ..selection.cover import BUCKET_STEP, EMPTY_BUCKET, SAMPLE_EXTENTS, WINDOW
from .detect_compact import GATHER_BITS
from .gate import ENTRIES, ROW, compare, field

EXTENTS = len(SAMPLE_EXTENTS)
COUNTS = EXTENTS + 2  # densities that a sample has
FOUND = COUNTS + 2  # words that the kernel writes: live ones of each, and a byte of each
HEAD = 11 + COUNTS  # words of a table before its places


def sample_windows(bits: int, sign: int, layout: str) -> tvm.IRModule:
    """Count the live micro-tiles of windows of 64x64, and live lines; 0 if the array is as ``want``
    says (see `gate.row_of`), else nothing is done.

    ``tensor``: entries of ``bits`` bits, live if a bit of ``sign`` is set; ``layout``: an entry is
    one element ("entries"), eight of a row ("bits"), or a block of grain_rows x grain_columns
    ("blocks"). ``table``: see `SamplePlan`. ``found``: int64 ``[FOUND]``, live ones in the order of
    ``SAMPLE_EXTENTS``, crossed lines, lines; then for each the bucket of its density, in a byte.
    """
    dtype, lanes = f"uint{bits}", 8 if layout == "bits" else WINDOW

    def any_bit(word: tvm.ir.Expr) -> tvm.ir.Expr:
        return T.Cast("int64", word != T.uint64(0))

    def ones(word: tvm.ir.Expr) -> tvm.ir.Expr:
        return T.Cast("int64", T.popcount(word))

    def parts(word: tvm.ir.Expr, width: int) -> tvm.ir.Expr:
        """How many of the ``width``-bit parts of a word are not 0."""
        mask = T.uint64((1 << width) - 1)
        shifts = range(0, WINDOW, width)
        return sum(any_bit((word >> T.uint64(s)) & mask) for s in shifts)

    def full_line(src: tvm.ir.Expr, at: tvm.ir.Expr) -> tvm.ir.Expr:
        """64 elements of a row as a word."""
        if layout == "bits":
            return T.reinterpret("uint64", src[T.Ramp(at, T.int64(1), 8)])
        entries = src[T.Ramp(at, T.int64(1), WINDOW)]
        if sign != (1 << bits) - 1:
            entries = entries & T.Broadcast(const(sign, dtype), WINDOW)
        flags = T.Cast(f"uint8x{WINDOW}", entries != T.Broadcast(const(0, dtype), WINDOW))
        words = T.reinterpret("uint64x8", flags) * T.Broadcast(T.uint64(GATHER_BITS), 8)
        return T.reinterpret("uint64", T.Cast("uint8x8", words >> T.Broadcast(T.uint64(56), 8)))

    @T.inline
    def live_lines(src, table, first, line, at, found):
        """Lines with any live entry, 1 if the table has no lines, into found[EXTENTS + ...]."""
        for kind in range(2):
            length: T.let = table[6 + 3 * kind]
            stride: T.let = table[7 + 3 * kind]
            found[EXTENTS + kind] = T.Cast("int64", table[5 + 3 * kind] == T.int64(0))
            for i in range(table[5 + 3 * kind]):
                begin: T.let = table[first + table[5] * kind + i]
                line[0] = T.uint64(0)
                at[0] = T.int64(0)
                if stride == T.int64(1):
                    while T.And(line[0] == T.uint64(0), at[0] + lanes <= length):
                        line[0] = full_line(src, begin + at[0])
                        at[0] = at[0] + T.int64(lanes)
                while T.And(line[0] == T.uint64(0), at[0] < length):
                    entry: T.let = src[begin + at[0] * stride] & const(sign, dtype)
                    line[0] = T.Cast("uint64", entry)
                    at[0] = at[0] + T.int64(1)
                found[EXTENTS + kind] = found[EXTENTS + kind] + any_bit(line[0])

    def bucket(live: tvm.ir.Expr, total: tvm.ir.Expr) -> tvm.ir.Expr:
        """As `cover.bucket`."""
        share = T.Cast("float64", live) / T.Cast("float64", total)
        steps = T.round(T.log(share) * T.float64(-1 / math.log(BUCKET_STEP)))
        few = T.Cast("int64", T.min(steps, T.float64(EMPTY_BUCKET)))
        some = T.if_then_else(live == T.int64(0), T.int64(EMPTY_BUCKET), few)
        return T.if_then_else(live >= total, T.int64(0), some)

    @T.inline
    def part_line(src, at, width, line):
        """As ``full_line`` for ``width`` elements, into line[0]."""
        line[0] = T.uint64(0)
        if layout == "bits":
            for i in range(T.ceildiv(width, 8)):
                line[0] = line[0] | (T.Cast("uint64", src[at + i]) << T.Cast("uint64", i * 8))
            line[0] = line[0] & ((T.uint64(1) << T.Cast("uint64", width)) - T.uint64(1))
        else:
            for i in range(width):
                entry: T.let = src[at + i] & const(sign, dtype)
                found: T.let = T.Cast("uint64", entry != const(0, dtype))
                line[0] = line[0] | (found << T.Cast("uint64", i))

    @T.inline
    def block_line(src, at, column, width, grain, line):
        """As ``full_line`` with an entry for every ``grain`` elements, into line[0]."""
        line[0] = T.uint64(0)
        for i in range(T.ceildiv(column + width, grain) - column // grain):
            begin: T.let = T.max((column // grain + i) * grain - column, T.int64(0))
            end: T.let = T.min((column // grain + i + 1) * grain - column, width)
            if src[at + column // grain + i] != T.uint8(0):
                half: T.let = T.uint64(1) << T.Cast("uint64", end - begin - 1)
                line[0] = line[0] | ((half | (half - T.uint64(1))) << T.Cast("uint64", begin))

    @T.inline
    def merge(lines, count, factor):
        """OR of every ``factor`` lines, in place."""
        for r in range(count):
            for i in T.unroll(1, factor):
                lines[r * factor] = lines[r * factor] | lines[r * factor + i]
            lines[r] = lines[r * factor]

    @T.inline
    def tally(lines, sums):
        """Add a window's live micro-tiles, in the order of SAMPLE_EXTENTS."""
        for r in range(WINDOW):
            sums[0] = sums[0] + ones(lines[r])
            sums[1] = sums[1] + parts(lines[r], 32)
            sums[2] = sums[2] + any_bit(lines[r])
        merge(lines, 8, 8)
        for r in range(8):
            sums[3] = sums[3] + ones(lines[r])
        merge(lines, 4, 2)
        for r in range(4):
            sums[4] = sums[4] + ones(lines[r])
            sums[7] = sums[7] + parts(lines[r], 16)
        merge(lines, 2, 2)
        for r in range(2):
            sums[5] = sums[5] + ones(lines[r])
            sums[8] = sums[8] + parts(lines[r], 32)
            sums[9] = sums[9] + any_bit(lines[r])
        merge(lines, 1, 2)
        sums[6] = sums[6] + ones(lines[0])
        sums[10] = sums[10] + any_bit(lines[0])

    @T.inline
    def count(src, table, seen, found):
        lines = T.alloc_buffer((WINDOW,), "uint64")
        line = T.alloc_buffer((1,), "uint64")
        pitch: T.let = table[2]
        grain_rows: T.let = table[3]
        grain_columns: T.let = table[4]
        for window in range(table[0]):
            base: T.let = table[HEAD + window * 5]
            row: T.let = table[HEAD + window * 5 + 1]
            column: T.let = table[HEAD + window * 5 + 2]
            height: T.let = table[HEAD + window * 5 + 3]
            width: T.let = table[HEAD + window * 5 + 4]
            for r in range(height):
                if layout == "blocks":
                    blocks: T.let = base + (row + r) // grain_rows * pitch
                    if T.Or(r == 0, (row + r) % grain_rows == 0):
                        block_line(src, blocks, column, width, grain_columns, line)
                    lines[r] = line[0]
                else:
                    at: T.let = base + (row + r) * pitch + column // (8 if layout == "bits" else 1)
                    if width == WINDOW:
                        lines[r] = full_line(src, at)
                    else:
                        part_line(src, at, width, line)
                        lines[r] = line[0]
            for r in range(WINDOW - height):
                lines[height + r] = T.uint64(0)
            tally(lines, found)
        live_lines(src, table, HEAD + table[0] * 5, line, seen, found)

    @T.prim_func(s_tir=True)
    def main(p_want: T.handle, tensor: T.handle, p_table: T.handle, p_found: T.handle) -> T.int64:
        n_table = T.int64()
        want = T.match_buffer(p_want, (1, ROW), "int64", align=8)
        table = T.match_buffer(p_table, (n_table,), "int64", align=8)
        found = T.match_buffer(p_found, (FOUND,), "int64", align=8)
        seen = T.alloc_buffer((3,), "int64")
        compare(tensor, want, 0, seen)
        wrong: T.let = seen[0]
        if wrong == T.int64(0):
            data: T.let[T.handle(dtype)] = field(tensor, ENTRIES, dtype)
            src = T.decl_buffer((table[1],), dtype, data=data, align=bits // 8)
            for i in range(FOUND):
                found[i] = T.int64(0)
            count(src, table, seen, found)
            for i in range(COUNTS):
                byte: T.let = bucket(found[i], table[HEAD - COUNTS + i])
                found[COUNTS + i // 8] = found[COUNTS + i // 8] | (byte << (i % 8 * 8))
        return wrong

    return tvm.IRModule({"main": main})
