"""Live columns of bands of rows, turned, on NVIDIA GPUs.

    turned[c, r] = source[r, c]     for the columns c that live in the band of row r

Families that gather columns of a band want each of them to lie in one row. A warp takes what 32
columns have of 32 rows through its own shared memory, 16 bytes at a time. It leaves at once where
nothing lives, and reads no piece of 16 bytes without live columns.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import DTypeError, ScheduleError, mismatch

from .cuda_turn import AT_ONCE, bit_of, shifted
from .dependent import after_predecessor

SIDE = 32  # rows and columns of a warp
WARPS = 8  # of a CTA, side by side


@T.meta_class
class _Square:
    """What a warp turns. Chunks of 16 bytes of a row change places, so that lanes that read down
    a column, or down a chunk, ask every bank once."""

    def __init__(self, dtype: str, warp: Any, lane: Any) -> None:
        self.each = AT_ONCE[dtype]
        self.chunks = SIDE // self.each
        pool: Any = T.SMEMPool()
        self.tiles = pool.alloc((WARPS, SIDE, SIDE), dtype, align=128)
        pool.commit()
        self.warp, self.lane = warp, lane
        self.alive = T.alloc_local([1], "uint32")  # a bit of each column
        self.words = T.alloc_local([4], "uint32")
        self.line = T.alloc_local([self.each], dtype)

    def any(self) -> Any:
        """Whether any column lives."""
        return self.alive[0] != T.uint32(0)

    def some(self, chunk: Any) -> Any:
        """Whether any column of a chunk lives."""
        bits = T.uint32((1 << self.each) - 1)
        return T.bitwise_and(shifted(self.alive[0], chunk * self.each), bits) != T.uint32(0)

    def lives(self, column: Any) -> Any:
        """Whether a column lives."""
        return bit_of(self.alive[0], column) != T.uint32(0)

    def place(self, row: Any, chunk: Any) -> Any:
        """Where a chunk of a row begins."""
        return T.bitwise_xor(chunk, T.truncmod(T.truncdiv(row, self.each), self.chunks)) * self.each

    @T.inline
    def find(self, lines, line, column0, wide, grain):
        """alive = which columns live, of bits that stand for ``grain`` columns each."""
        entry: T.let = T.truncdiv(column0 + self.lane, grain)
        some: T.uint32 = T.uint32(0)
        if column0 + self.lane < wide:
            some = shifted(lines[line, T.shift_right(entry, 5)], T.bitwise_and(entry, 31))
        self.alive[0] = T.cuda.ballot_sync(
            T.uint32(0xFFFFFFFF), T.int32(T.bitwise_and(some, T.uint32(1)))
        )

    @T.inline
    def fetch(self, source, row0, column0):
        """Begin to copy the chunks that live."""
        chunk: T.let = T.truncmod(self.lane, self.chunks)
        if self.some(chunk):
            for p in T.unroll(self.chunks):
                row: T.let = p * self.each + T.truncdiv(self.lane, self.chunks)
                if row0 + row < source.shape[0]:
                    T.ptx["cp.async.cg.shared.global"](
                        self.tiles.ptr_to([self.warp, row, self.place(row, chunk)]),
                        source.ptr_to(
                            [
                                T.int64(row0 + row),
                                T.int64(column0 + chunk * self.each),
                            ]
                        ),
                        16,
                        16,
                    )

    @T.inline
    def store(self, turned, row0, column0):
        """Write the columns that live as rows."""
        for chunk in T.unroll(self.chunks):
            if self.some(chunk):
                if self.each == 4:
                    self.store_elements(turned, row0, column0, chunk)
                else:
                    self.store_matrices(turned, row0, column0, chunk)

    @T.inline
    def store_matrices(self, turned, row0, column0, chunk):
        """By the instruction that turns matrices of 8 x 8: of four, whose rows are chosen so that a
        lane gets eight neighbours."""
        row: T.let = (
            T.truncdiv(T.truncmod(self.lane, 8), 2) * 8
            + T.truncdiv(self.lane, 8) * 2
            + T.truncmod(self.lane, 2)
        )
        T.ptx["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"](
            *[self.words[i] for i in range(4)],
            self.tiles.ptr_to([self.warp, row, self.place(row, chunk)]),
        )
        own: T.let = chunk * 8 + T.truncdiv(self.lane, 4)
        first: T.let = row0 + T.truncmod(self.lane, 4) * 8
        if self.lives(own) & (first < turned.shape[1]):
            T.ptx["st.global.v4.b32"](
                turned.ptr_to([T.int64(column0 + own), T.int64(first)]),
                *[self.words[i] for i in range(4)],
            )

    @T.inline
    def store_elements(self, turned, row0, column0, chunk):
        """Eight lanes share the rows of a column."""
        inside: T.let = T.truncdiv(self.lane, 8)
        first: T.let = T.truncmod(self.lane, 8) * 4
        if self.lives(chunk * 4 + inside) & (row0 + first < turned.shape[1]):
            for i in T.unroll(4):
                self.line[i] = self.tiles[self.warp, first + i, self.place(first, chunk) + inside]
            column: T.let = T.int64(column0 + chunk * 4 + inside)
            for v in T.vectorized(4):
                turned[column, T.int64(row0 + first) + v] = self.line[v]


@T.jit
def turn_live(
    source: T.Buffer(("high", "wide"), dtype, align=16),
    lines: T.Buffer(("bands", "words"), "uint32", align=4),
    grain: T.int32,
    turned: T.Buffer(("deep", "room"), dtype, align=16),
    *,
    dtype: T.constexpr,
    band: T.constexpr,
):
    """The template; ``turn_live_kernel`` gives it its options."""
    high, wide = T.int32(), T.int32()
    T.device_entry()
    CTA = T.meta_var(SIDE * WARPS)
    across: T.let = T.truncdiv(wide + (CTA - 1), CTA)
    block = T.cta_id([T.truncdiv(high + (SIDE - 1), SIDE) * T.truncdiv(wide + (CTA - 1), CTA)])
    warp = T.warp_id([WARPS])
    lane = T.lane_id([32])
    square = _Square(dtype, warp, lane)
    row0: T.let = T.truncdiv(block, across) * SIDE
    column0: T.let = T.truncmod(block, across) * CTA + warp * SIDE
    after_predecessor()
    square.find(lines, T.truncdiv(row0, band), column0, wide, grain)
    if square.any():
        square.fetch(source, row0, column0)
        T.ptx.cp.async_.commit_group()
        T.ptx.cp.async_.wait_group(0)
        T.cuda.warp_sync()
        square.store(turned, row0, column0)


def turn_live_kernel(dtype: str, band: int) -> tvm.tirx.PrimFunc:
    """The kernel: source (high, wide), lines, grain, turned (wide or more, high or more).

    Rows of both matrices are multiples of 16 bytes, to which both are aligned: the caller checks.
    What does not live is not written; behind the last row stands anything.

    Parameters
    ----------
    dtype : float16, bfloat16 or float32
    band : rows of a band, a multiple of 32. ``lines`` (bands, words), uint32: bit i of word w of a
        line says whether the columns from (w * 32 + i) * ``grain`` on, as many, live in its band

    Raises
    ------
    DTypeError, ScheduleError (a ValueError)
    """
    if dtype not in AT_ONCE:
        raise DTypeError(mismatch("dtype", f"one of {list(AT_ONCE)}", repr(dtype)))
    if band < SIDE or band % SIDE:
        raise ScheduleError(mismatch("band", f"a multiple of {SIDE}", band))
    return turn_live.specialize(dtype=dtype, band=band)
