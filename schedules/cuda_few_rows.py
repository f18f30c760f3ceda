"""Products of a few rows that read only those rows of the weights whose activations live (NVIDIA).

    out[i, :] = sum of x[i, s] * w[s, :] over the s where a row of x is not 0, + bias

The micro-tile is as high as the operand, so there is one list of live columns, and nobody makes it:
every warp finds those of its part of k while it reads x, and gathers their rows of w at once (SRead
with the detection inside; PIT, SOSP'23, sections 3.2 and 3.3). The weights are (k, n), so that a
row is contiguous. Parts of k are added up by a second kernel in a fixed order: equal inputs give
equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch

from .dependent import after_predecessor
from .hopper_combine import UNPACK, unpack

WARPS = 8  # of a CTA, each with a part of k
LANES = 32
AT_ONCE = 8  # rows of w that a lane has under way
HEIGHTS = (1, 2, 4, 8)
EACH = (2, 4, 8)  # elements of k that a lane looks at


@dataclass(frozen=True)
class FewRowsTile:
    """``rows``: of x at most; ``each``: elements of k that a lane looks at, at once."""

    dtype: str
    rows: int
    each: int

    @property
    def part(self) -> int:
        """Elements of k of one CTA."""
        return WARPS * LANES * self.each

    @property
    def pairs(self) -> int:
        """Pairs of columns of one lane: 16 bytes, or 8 where sums of many rows take registers."""
        return 4 if self.rows <= 4 else 2

    @property
    def columns(self) -> int:
        """Columns of one CTA."""
        return LANES * self.pairs * 2

    def check(self) -> None:
        """Raise ScheduleError (a ValueError) for what the template cannot build."""
        rules = {
            "dtype float16 or bfloat16": self.dtype in UNPACK,
            f"rows one of {HEIGHTS}": self.rows in HEIGHTS,
            f"each one of {EACH}": self.each in EACH,
        }
        for rule, holds in rules.items():
            if not holds:
                raise ScheduleError(mismatch("few_rows", rule, self))


@T.inline
def look(words, x, row, first, rows, k, each):
    """The lane's elements of one row of x, two in a word; zeros beyond its end."""
    for j in T.unroll(each // 2):
        words[row * (each // 2) + j] = T.uint32(0)
    if (row < rows) & (first < k):
        for j in T.unroll(each // 2):
            T.ptx["ld.global.b32"](words[row * (each // 2) + j], x.ptr_to([row, first + j * 2]))


@T.inline
def fetch(rows, first, w, row, col, pairs):
    """The lane's columns of one row of w."""
    if pairs == 4:
        T.ptx["ld.global.v4.b32"](
            *[rows[first + i] for i in range(4)], w.ptr_to([T.cast(row, "int64"), col])
        )
    else:
        T.ptx["ld.global.v2.b32"](
            rows[first], rows[first + 1], w.ptr_to([T.cast(row, "int64"), col])
        )


@T.inline
def add(acc, first, value, word, dtype):
    """acc (+)= ``value`` times the two elements of a word of w."""
    acc[first] = acc[first] + value * unpack(word, dtype, 0)
    acc[first + 1] = acc[first + 1] + value * unpack(word, dtype, 1)


def half(words: Any, v: int) -> Any:
    """uint32: element ``v`` of packed 16-bit elements, in the lower half."""
    word = words[v // 2]
    return T.bitwise_and(T.shift_right(word, T.uint32(16 * (v % 2))), T.uint32(0xFFFF))


def is_live(words: Any, v: int, bit: int) -> Any:
    """uint32: ``1 << bit`` if element ``v`` is not 0, NaN included; else 0."""
    found = T.bitwise_and(half(words, v), T.uint32(0x7FFF)) != T.uint32(0)
    return T.shift_left(T.cast(found, "uint32"), T.uint32(bit))


@T.jit
def partial_products(x_h: T.handle, w_h: T.handle, partial_h: T.handle, *, tile: T.constexpr):
    """The template; ``few_rows`` explains it."""
    m, n, k, parts = T.int32(), T.int32(), T.int32(), T.int32()
    x = T.match_buffer(x_h, (m, k), tile.dtype)
    w = T.match_buffer(w_h, (k, n), tile.dtype)
    partial = T.match_buffer(partial_h, (parts, m, n), "float32")
    M = T.meta_var(tile.rows)
    EACH = T.meta_var(tile.each)
    SPAN = T.meta_var(LANES * tile.each)
    ONCE = T.meta_var(AT_ONCE)
    PAIRS = T.meta_var(tile.pairs)
    WIDE = T.meta_var(tile.columns)
    T.device_entry()
    tiles: T.let = T.truncdiv(n + WIDE - 1, WIDE)
    bx = T.cta_id([T.truncdiv(n + WIDE - 1, WIDE) * parts])
    tx = T.thread_id([WARPS * LANES])
    ids = T.alloc_shared([WARPS * SPAN], "int32")
    held = T.alloc_shared([WARPS * SPAN * M], "uint16")
    sums = T.alloc_shared([WARPS * WIDE], "float32")
    after_predecessor()
    warp: T.let = T.truncdiv(tx, LANES)
    lane: T.let = T.truncmod(tx, LANES)
    part: T.let = T.truncdiv(bx, tiles)
    column: T.let = T.truncmod(bx, tiles) * WIDE
    mine: T.let = column + lane * PAIRS * 2
    first: T.let = (part * WARPS + warp) * SPAN + lane * EACH
    own: T.let = warp * SPAN
    words = T.alloc_local([M * EACH // 2], "uint32")
    live = T.alloc_local([1], "uint32")
    live[0] = T.uint32(0)
    for r in T.unroll(M):
        look(words, x, r, first, m, k, EACH)
    for r in T.unroll(M):
        for v in T.unroll(EACH):
            live[0] = T.bitwise_or(live[0], is_live(words, r * EACH + v, v))
    found: T.int32 = 0
    for v in T.unroll(EACH):
        lives: T.let = T.bitwise_and(T.shift_right(live[0], T.cast(v, "uint32")), T.uint32(1))
        votes: T.uint32 = T.cuda.ballot_sync(T.uint32(0xFFFFFFFF), T.cast(lives, "int32"))
        if lives != T.uint32(0):
            before: T.let = T.bitwise_and(
                votes, T.shift_left(T.uint32(1), T.cast(lane, "uint32")) - T.uint32(1)
            )
            at: T.int32 = own + found + T.cast(T.popcount(before), "int32")
            ids[at] = first + v
            for r in T.unroll(M):
                held[at * M + r] = T.cast(half(words, r * EACH + v), "uint16")
        found = found + T.cast(T.popcount(votes), "int32")
    T.cuda.warp_sync()
    acc = T.alloc_local([M * PAIRS * 2], "float32")
    for v in T.unroll(M * PAIRS * 2):
        acc[v] = T.float32(0)
    rows = T.alloc_local([ONCE * PAIRS], "uint32")
    if mine < n:
        for step in T.serial(T.truncdiv(found + ONCE - 1, ONCE)):
            for u in T.unroll(ONCE):
                if step * ONCE + u < found:
                    fetch(rows, u * PAIRS, w, ids[own + step * ONCE + u], mine, PAIRS)
            for u in T.unroll(ONCE):
                if step * ONCE + u < found:
                    for r in T.unroll(M):
                        value: T.float32 = unpack(
                            T.cast(held[(own + step * ONCE + u) * M + r], "uint32"), tile.dtype, 0
                        )
                        for i in T.unroll(PAIRS):
                            add(acc, (r * PAIRS + i) * 2, value, rows[u * PAIRS + i], tile.dtype)
    for r in T.unroll(M):
        if r < m:
            for v in T.unroll(PAIRS * 2):
                sums[warp * WIDE + lane * PAIRS * 2 + v] = acc[r * PAIRS * 2 + v]
            T.cuda.cta_sync()
            if tx < WIDE:
                total: T.float32 = sums[tx]
                for other in T.unroll(WARPS - 1):
                    total = total + sums[(other + 1) * WIDE + tx]
                if column + tx < n:
                    partial[part, r, column + tx] = total
            T.cuda.cta_sync()


@T.jit
def added_parts(
    partial_h: T.handle,
    bias_h: T.Optional(T.handle),  # type: ignore[valid-type]
    out_h: T.handle,
    *,
    dtype: T.constexpr,
):
    """The template; ``add_parts`` explains it."""
    m, n, parts = T.int32(), T.int32(), T.int32()
    partial = T.match_buffer(partial_h, (parts, m, n), "float32")
    if bias_h is not None:
        bias = T.match_buffer(bias_h, (n,), dtype)
    out = T.match_buffer(out_h, (m, n), dtype)
    T.device_entry()
    bx = T.cta_id([T.truncdiv(m * n + WARPS * LANES - 1, WARPS * LANES)])
    tx = T.thread_id([WARPS * LANES])
    after_predecessor()
    place: T.let = bx * (WARPS * LANES) + tx
    if place < m * n:
        row: T.let = T.truncdiv(place, n)
        col: T.let = T.truncmod(place, n)
        total: T.float32 = 0.0
        for part in T.serial(parts):
            total = total + partial[part, row, col]
        if bias_h is not None:
            total = total + T.cast(bias[col], "float32")
        out[row, col] = T.cast(total, dtype)


def few_rows(tile: FewRowsTile) -> tvm.tirx.PrimFunc:
    """partial[p, i, :] = sum of x[i, s] * w[s, :] over the live s of part p: x, w, partial.

    x is (m, k) with m at most ``tile.rows``, w (k, n), of ``tile.dtype``; partial is (parts, m, n)
    float32 with parts = k / ``tile.part`` rounded up. k and n are multiples of 8, all addresses of
    16 bytes. Rows of w whose column of x is 0 are not read.

    Raises
    ------
    ScheduleError (a ValueError) for a tile that cannot be built
    """
    tile.check()
    return partial_products.specialize(tile=tile)


def add_parts(dtype: str, bias: bool) -> tvm.tirx.PrimFunc:
    """out = sum of partial over its parts, in order, + bias: partial, [bias,] out.

    Raises
    ------
    ScheduleError (a ValueError) for another type than float16 and bfloat16
    """
    if dtype not in UNPACK:
        raise ScheduleError(mismatch("dtype", "float16 or bfloat16", dtype))
    return added_parts.specialize(dtype=dtype, **({} if bias else {"bias_h": None}))
