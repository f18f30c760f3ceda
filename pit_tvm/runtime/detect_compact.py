"""Kernels that turn flags of micro-tiles into the lists of live ones, without a branch per flag.

Lists come out ascending: a slot is one task. Nothing is written past ``ids``, whatever the flags.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import tvm
from tvm.script import tirx as T
from tvm.tirx import const

from .detect_kernels import VECTOR_BYTES, flag, n_count, n_ids, n_src

PAD = 64  # entries after a list's end that hold 0, as far as there is room
WORD_SLACK = 8  # bytes that compact may read past the last flag

CHUNK_BYTES = 4096  # of a row that are folded before their flags become list entries
ROWS = 8  # that are read side by side

BIT_0_OF_BYTES = 0x0101010101010101
GATHER_BITS = 0x0102040810204080  # as a factor: moves bit 0 of byte i to bit 56 + i


def bit_positions() -> npt.NDArray[np.uint8]:
    """uint8 ``[2048]``: entry ``8 * b + i`` is the position of the i-th set bit of byte ``b``."""
    table = np.zeros((256, 8), np.uint8)
    for byte in range(256):
        found = [bit for bit in range(8) if byte >> bit & 1]
        table[byte, : len(found)] = found
    return table.reshape(-1)


def live_byte(flags: tvm.ir.Expr, at: tvm.ir.Expr) -> tvm.ir.Expr:
    """Eight flags of 0 or 1, from position ``at``, as the bits of one byte."""
    eight = T.reinterpret("uint64", flags[T.Ramp(at, T.int64(1), 8)])
    packed = (eight & T.uint64(BIT_0_OF_BYTES)) * T.uint64(GATHER_BITS)
    return T.Cast("int64", packed >> T.uint64(56))


@T.inline
def append(ids, end, table, live, first, rows):
    """Append the set bits of ``live``, for positions from ``first``, at ``end[0]`` of a list.

    Branch-free: the byte's row of ``table`` is stored at the end of the list, all eight lanes; the
    list then grows by the number of set bits. The list never holds more than the positions seen so
    far, so the store stays inside its capacity.
    """
    seen: T.let = T.min(T.int64(8), rows - first)
    byte: T.let = live & (T.shift_left(T.int64(1), seen) - T.int64(1))
    for lane in T.vectorized(8):
        ids[end[0] + lane] = T.Cast("int32", table[byte * 8 + lane]) + T.Cast("int32", first)
    end[0] = end[0] + T.Cast("int64", T.popcount(byte))


@T.inline
def close(ids, count, end, slot, capacity):
    """Write the length of a list that ends at ``end[0]``, and its zeros after the end."""
    found: T.let = end[0] - slot * capacity
    count[slot] = T.Cast("int32", found)
    for lane in range(T.min(T.int64(PAD), capacity - found)):
        ids[slot * capacity + found + lane] = 0


def compact(bits: bool, parallel: bool) -> tvm.IRModule:
    """Positions of the live flags of each slot, ascending: the lists of live micro-tiles.

    ``src``: uint8 ``[slots, pitch]``, per position a flag of 0 or 1 (readable for 8 bytes past
    the end), or with ``bits`` one bit, least significant first. ``table``:
    :func:`bit_positions`. ``ids``: int32 ``[slots, capacity]``, with ``capacity`` at least
    ``rows`` rounded up to a multiple of 64; ``count``: int32 ``[slots]``.
    """
    loop = T.parallel if parallel else T.serial

    def live(src: tvm.ir.Expr, at: tvm.ir.Expr, word: tvm.ir.Expr) -> tvm.ir.Expr:
        return T.Cast("int64", src[at + word]) if bits else live_byte(src, at + word * 8)

    @T.prim_func(s_tir=True)
    def main(
        src: T.Buffer((n_src,), "uint8", align=1),
        table: T.Buffer((2048,), "uint8", align=1),
        ids: T.Buffer((n_ids,), "int32", align=4),
        count: T.Buffer((n_count,), "int32", align=4),
        slots: T.int64,
        rows: T.int64,
        pitch: T.int64,
        capacity: T.int64,
    ):
        for slot in loop(slots):
            end = T.alloc_buffer((1,), "int64")
            end[0] = slot * capacity
            for word in range(T.ceildiv(rows, 8)):
                append(ids, end, table, live(src, slot * pitch, word), word * 8, rows)
            close(ids, count, end, slot, capacity)

    return tvm.IRModule({"main": main})


def compact_blocks(parallel: bool) -> tvm.IRModule:
    """As :func:`compact`, with one flag (uint8, any non-zero) for each ``grain`` positions."""
    loop = T.parallel if parallel else T.serial

    @T.prim_func(s_tir=True)
    def main(
        src: T.Buffer((n_src,), "uint8", align=1),
        ids: T.Buffer((n_ids,), "int32", align=4),
        count: T.Buffer((n_count,), "int32", align=4),
        slots: T.int64,
        rows: T.int64,
        pitch: T.int64,
        capacity: T.int64,
        grain: T.int64,
    ):
        for slot in loop(slots):
            end = T.alloc_buffer((1,), "int64")
            end[0] = slot * capacity
            for block in range(T.ceildiv(rows, grain)):
                if src[slot * pitch + block] != T.uint8(0):
                    size: T.let = T.min(grain, rows - block * grain)
                    for i in range(size):
                        ids[end[0] + i] = T.Cast("int32", block * grain + i)
                    end[0] = end[0] + size
            close(ids, count, end, slot, capacity)

    return tvm.IRModule({"main": main})


def fold_compact(bits: int, sign: int, parallel: bool) -> tvm.IRModule:
    """Lists of the live micro-tiles of ``src[outer, size, inner]``, PIT innermost, in one pass.

    What ``fold_rows`` and `compact` do one after the other; a slot's flags never leave the nearest
    cache, and workers are woken once. Rows are read along, several at a time: down a column every
    row is another page and, where rows are 4096 bytes apart, the same cache set.

    Entries and the sizes of runs are as in ``fold_rows``; ``table``, ``ids``, ``count``, ``rows``
    and ``capacity`` as in ``compact``, with ``outer * slots`` lists. Needs at least
    64 bytes of entries in ``inner``.
    """
    dtype = f"uint{bits}"
    lanes, most = (size * 8 // bits for size in (VECTOR_BYTES, CHUNK_BYTES))
    loop = T.parallel if parallel else T.serial

    @T.inline
    def fold(src, folded, top, high, start, width, inner):
        """OR ``high`` rows from place ``top`` on to what is folded of a chunk."""
        acc = T.alloc_buffer((lanes,), dtype)
        for vec in range(T.ceildiv(width, lanes)):
            at: T.let = T.min(start + vec * lanes, inner - lanes)
            for w in T.vectorized(lanes):
                acc[w] = folded[at - start + lanes + w]
            for row in T.unroll(high):
                for w in T.vectorized(lanes):
                    acc[w] = acc[w] | src[top + row * inner + at + w]
            for w in T.vectorized(lanes):
                folded[at - start + lanes + w] = acc[w]

    @T.prim_func(s_tir=True)
    def main(
        src: T.Buffer((n_src,), dtype, align=bits // 8),
        table: T.Buffer((2048,), "uint8", align=1),
        ids: T.Buffer((n_ids,), "int32", align=4),
        count: T.Buffer((n_count,), "int32", align=4),
        outer: T.int64,
        size: T.int64,
        inner: T.int64,
        slots: T.int64,
        extent: T.int64,
        grain: T.int64,
        limit: T.int64,
        rows: T.int64,
        capacity: T.int64,
    ):
        for task in loop(outer * slots):
            # through memory, because TVM takes 10 s to simplify bound variables with divisions
            place = T.alloc_buffer((5,), "int64")
            place[0] = task // slots
            place[1] = task - place[0] * slots
            place[2] = place[1] * extent // grain
            place[3] = T.min(T.ceildiv(T.min((place[1] + 1) * extent, limit), grain), size)
            place[4] = (place[3] - place[2]) // ROWS
            top: T.let = (place[0] * size + place[2]) * inner
            # one vector more in front: the last one begins earlier, so that it is whole
            folded = T.alloc_buffer((lanes + most,), dtype)
            flags = T.alloc_buffer((most,), "uint8")
            end = T.alloc_buffer((1,), "int64")
            end[0] = task * capacity
            for chunk in range(T.ceildiv(inner, most)):
                start: T.let = chunk * most
                width: T.let = T.min(T.int64(most), inner - start)
                for vec in range(T.ceildiv(width, lanes) + 1):
                    for w in T.vectorized(lanes):
                        folded[vec * lanes + w] = const(0, dtype)
                for group in range(place[4]):
                    fold(src, folded, top + group * ROWS * inner, ROWS, start, width, inner)
                for row in range(place[3] - place[2] - place[4] * ROWS):
                    at: T.let = top + (place[4] * ROWS + row) * inner
                    fold(src, folded, at, 1, start, width, inner)
                for vec in range(T.ceildiv(width, lanes)):
                    for w in T.vectorized(lanes):
                        flags[vec * lanes + w] = flag(folded[(vec + 1) * lanes + w], sign, dtype)
                for word in range(T.ceildiv(T.min(width, rows - start), 8)):
                    live: T.let = live_byte(flags, word * 8)
                    append(ids, end, table, live, start + word * 8, rows)
            close(ids, count, end, task, capacity)

    return tvm.IRModule({"main": main})
