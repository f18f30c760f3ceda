"""Kernels that fold a mask, or the values themselves, to one flag per micro-tile.

Every array is a flat view; the host works out the sizes. Each function is one template: its
parameters are the element test, the layout and whether the outer loop is parallel; all sizes are
arguments of the kernel, so a handful of kernels serves every shape. Buffers are declared with the
alignment of one element, because a view may start anywhere. Buffers allocated inside stay in the
``global`` scope: only those become stack slots in TVM's CPU code, ``local`` ones become calls.
"""

from __future__ import annotations

from typing import TypeVar

import tvm
from tvm.script import tirx as T
from tvm.tirx import const

VECTOR_BYTES = 64  # one cache line, one AVX-512 register
FOLD_CHUNK = 8  # vectors per task of fold_rows
BLOCK = 64  # rows and slots that fold_columns turns at a time: whole cache lines

# Sizes of views, which signatures of templates name: TVMScript makes 64-bit integers of them.
n_src = TypeVar("n_src")
n_dst = TypeVar("n_dst")
n_ids = TypeVar("n_ids")
n_count = TypeVar("n_count")


def flag(entry: tvm.ir.Expr, sign: int, dtype: str) -> tvm.ir.Expr:
    """1 (uint8) if any bit of ``sign`` is set in ``entry``, else 0."""
    return T.Cast("uint8", (entry & const(sign, dtype)) != const(0, dtype))


def fold_rows(bits: int, sign: int, raw: bool, parallel: bool) -> tvm.IRModule:
    """OR over runs of the middle dimension.

    ``src[outer, size, inner] -> dst[outer, slots, inner]``
    Slot ``q`` covers positions ``q * extent .. min((q + 1) * extent, limit)`` of the dimension;
    one entry of ``src`` stands for ``grain`` positions. ``src``: unsigned integers of ``bits``
    bits; an entry is live if any bit of ``sign`` is set in it. ``dst``: uint8, 0 or 1, or with
    ``raw`` the OR of the entries itself (bit masks; needs ``bits`` 8).
    """
    dtype = f"uint{bits}"
    lanes = VECTOR_BYTES * 8 // bits
    chunk = lanes * FOLD_CHUNK
    loop = T.parallel if parallel else T.serial

    def result(entry: tvm.ir.Expr) -> tvm.ir.Expr:
        return entry if raw else flag(entry, sign, dtype)

    @T.prim_func(s_tir=True)
    def main(
        src: T.Buffer((n_src,), dtype, align=bits // 8),
        dst: T.Buffer((n_dst,), "uint8", align=1),
        outer: T.int64,
        size: T.int64,
        inner: T.int64,
        slots: T.int64,
        extent: T.int64,
        grain: T.int64,
        limit: T.int64,
    ):
        for task in loop(outer * slots * T.ceildiv(inner, chunk)):
            # through memory, because TVM takes 10 s to simplify bound variables with divisions
            place = T.alloc_buffer((4,), "int64")
            place[0] = task // T.ceildiv(inner, chunk)
            place[1] = task - place[0] * T.ceildiv(inner, chunk)
            place[2] = place[0] // slots
            place[3] = place[0] - place[2] * slots
            start: T.let = place[1] * chunk
            slot: T.let = place[3]
            first: T.let = slot * extent // grain
            last: T.let = T.min(T.ceildiv(T.min((slot + 1) * extent, limit), grain), size)
            source: T.let = (place[2] * size + first) * inner + start
            target: T.let = place[0] * inner + start
            width: T.let = T.min(T.int64(chunk), inner - start)
            acc = T.alloc_buffer((lanes,), dtype)
            if width >= lanes:
                # the last vector overlaps its neighbour: an OR may be written twice
                for vec in range(T.ceildiv(width, lanes)):
                    at: T.let = T.min(vec * lanes, width - lanes)
                    for w in T.vectorized(lanes):
                        acc[w] = src[source + at + w]
                    for row in range(last - first - 1):
                        for w in T.vectorized(lanes):
                            acc[w] = acc[w] | src[source + (row + 1) * inner + at + w]
                    for w in T.vectorized(lanes):
                        dst[target + at + w] = result(acc[w])
            else:
                for w in range(width):
                    acc[w] = src[source + w]
                for row in range(last - first - 1):
                    for w in range(width):
                        acc[w] = acc[w] | src[source + (row + 1) * inner + w]
                for w in range(width):
                    dst[target + w] = result(acc[w])

    return tvm.IRModule({"main": main})


def fold_columns(bits: int, sign: int, run: int, blocks: bool, parallel: bool) -> tvm.IRModule:
    """OR over runs of the last dimension, and transpose.

    ``src[outer, rows, size] -> dst[outer, slots, pitch]``, of which the first ``rows`` of each
    ``pitch`` are written.
    Parameters as in :func:`fold_rows`; ``run`` is ``extent`` as a constant, for short runs, or 0
    for any extent. Without ``blocks``, ``grain`` must be 1 (this saves two divisions per flag).
    ``pitch`` should be an odd number of cache lines: with a multiple of 4096 bytes all slots of
    one row would share one cache set.
    """
    dtype = f"uint{bits}"
    lanes = BLOCK
    loop = T.parallel if parallel else T.serial

    def live(entries: tvm.ir.Expr, n: int) -> tvm.ir.Expr:
        if n == 1:
            return flag(entries, sign, dtype)
        zero, ones = const(0, dtype), const(sign, dtype)
        found = (entries & T.Broadcast(ones, n)) != T.Broadcast(zero, n)
        return T.Cast("uint8", T.call_llvm_pure_intrin("bool", _reduce_or(n), found))

    @T.inline
    def fold_any(src, at, width, acc, one, turned, to):
        if width >= lanes:
            for w in T.vectorized(lanes):  # first the last vector, which may overlap another
                acc[w] = src[at + width - lanes + w]
            for vec in range((width - 1) // lanes):
                for w in T.vectorized(lanes):
                    acc[w] = acc[w] | src[at + vec * lanes + w]
            turned[to] = live(acc[T.Ramp(0, 1, lanes)], lanes)
        else:
            one[0] = const(0, dtype)
            for w in range(width):
                one[0] = one[0] | src[at + w]
            turned[to] = live(one[0], 1)

    @T.prim_func(s_tir=True)
    def main(
        src: T.Buffer((n_src,), dtype, align=bits // 8),
        dst: T.Buffer((n_dst,), "uint8", align=1),
        outer: T.int64,
        rows: T.int64,
        size: T.int64,
        slots: T.int64,
        extent: T.int64,
        grain: T.int64,
        limit: T.int64,
        pitch: T.int64,
    ):
        for task in loop(outer * T.ceildiv(rows, BLOCK)):
            start: T.let = task % T.ceildiv(rows, BLOCK) * BLOCK
            batch: T.let = task // T.ceildiv(rows, BLOCK)
            height: T.let = T.min(T.int64(BLOCK), rows - start)
            acc = T.alloc_buffer((lanes,), dtype)
            one = T.alloc_buffer((1,), dtype)
            turned = T.alloc_buffer((BLOCK * BLOCK,), "uint8")
            for tile in range(T.ceildiv(slots, BLOCK)):
                slot: T.let = tile * BLOCK
                tops: T.let = T.min(T.int64(BLOCK), slots - slot)
                for r in range(height):
                    line: T.let = (batch * rows + start + r) * size
                    if run > 0:
                        whole: T.let = T.min(tops, limit // run - slot)
                        for s in range(whole):
                            turned[s * BLOCK + r] = live(
                                src[_lanes(line + (slot + s) * run, run)], run
                            )
                        if whole < tops:
                            tail: T.let = (slot + whole) * run
                            below: T.let = whole * BLOCK + r
                            fold_any(src, line + tail, limit - tail, acc, one, turned, below)
                    else:
                        for s in range(tops):
                            begin: T.let = (slot + s) * extent
                            end: T.let = T.min(begin + extent, limit)
                            first: T.let = begin // grain if blocks else begin
                            last: T.let = T.ceildiv(end, grain) if blocks else end
                            to: T.let = s * BLOCK + r
                            fold_any(src, line + first, last - first, acc, one, turned, to)
                for s in range(tops):
                    out: T.let = (batch * slots + slot + s) * pitch + start
                    if height == BLOCK:
                        for r in T.vectorized(BLOCK):
                            dst[out + r] = turned[s * BLOCK + r]
                    else:
                        for r in range(height):
                            dst[out + r] = turned[s * BLOCK + r]

    return tvm.IRModule({"main": main})


def _lanes(start: tvm.ir.Expr, n: int) -> tvm.ir.Expr:
    return T.Ramp(start, T.int64(1), n) if n > 1 else start


def _reduce_or(lanes: int) -> str:
    return f"llvm.vector.reduce.or.v{lanes}i1"


def unpack(parallel: bool) -> tvm.IRModule:
    """Bits to bytes: ``src[rows, ceil(columns / 8)] -> dst[rows, columns]``, 0 or 1, uint8."""
    loop = T.parallel if parallel else T.serial

    @T.prim_func(s_tir=True)
    def main(
        src: T.Buffer((n_src,), "uint8", align=1),
        dst: T.Buffer((n_dst,), "uint8", align=1),
        rows: T.int64,
        columns: T.int64,
    ):
        for row in loop(rows):
            for byte in range(columns // 8):
                for bit in T.vectorized(8):
                    dst[row * columns + byte * 8 + bit] = (
                        src[row * T.ceildiv(columns, 8) + byte] >> T.Cast("uint8", bit)
                    ) & T.uint8(1)
            for bit in range(columns % 8):
                dst[row * columns + columns // 8 * 8 + bit] = (
                    src[row * T.ceildiv(columns, 8) + columns // 8] >> T.Cast("uint8", bit)
                ) & T.uint8(1)

    return tvm.IRModule({"main": main})
