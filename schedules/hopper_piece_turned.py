"""The sums of the Hopper family of pieces where the product is computed turned: their SWrite."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from .hopper_knobs import RowsOptions
from .hopper_piece_parts import WORD, PiecesTile
from .hopper_piece_sums import QUAD, PieceSums


@T.meta_class
class TurnedSums(PieceSums):
    """Sums whose columns are rows of out. Rows with a single live piece wait in halves of slots,
    finished, in 16 bits."""

    def __init__(
        self, pool: Any, biases: Any, n: Any, knobs: PiecesTile, options: RowsOptions
    ) -> None:
        PieceSums.__init__(self, pool, biases, n, knobs, options)
        pool.move_base_to(pool.offset - knobs.rows * knobs.cols * 4)
        self.flat = pool.alloc((knobs.rows * knobs.cols,), "float32", align=128)  # the same
        self.biases = T.alloc_local([8], "float32")  # of rows
        self.own = T.alloc_local([2], "float32")  # of this lane's rows of the accumulators

    @T.inline
    def ask_bias(self, bias, rows):
        """Ask for the bias of this lane's two rows; -1 is none."""
        for side in T.unroll(2):
            self.own[side] = T.float32(0)
            if rows[side] >= 0:
                self.own[side] = T.float32(bias[0, T.int64(rows[side])])

    @T.inline
    def keep(self, acc, slots, begin, rows, lane):
        """Finish this lane's two rows of the accumulators, and put them into their halves of slots:
        ``rows``, -1 is none. Each lane leaves its pairs of columns of 32 side by side."""
        words = T.alloc_local([4], "uint32")
        for side in T.unroll(2):
            if rows[side] >= 0:
                spot: T.let = slots.half(rows[side] - self.row0, begin)
                for g in T.unroll(self.quads // 2):
                    for j in T.unroll(4):
                        at = T.meta_var((g * 4 + j) * 4 + side * 2)
                        low: T.float32 = self.activated(acc[at], self.own[side])
                        upper: T.float32 = self.activated(acc[at + 1], self.own[side])
                        T.ptx[self.convert](words[j], upper, low)
                    T.ptx["st.shared.v4.b32"](
                        self.flat.ptr_to([spot * (self.columns // 2) + g * QUAD + self.part]),
                        *[words[i] for i in range(4)],
                    )

    @T.inline
    def write(self, out, bias, slots, begin, end, first, step, lane):
        """By a warp: finish and store the rows of the words from ``first`` on, one of every
        ``step``, before word ``end`` of a walk that began with word ``begin``: columns of their
        sums are rows of ``out``, and each row has a bias. Those with half a slot are finished.

        Two lanes share 32 bytes of a row. They read different quads, so that no bank is asked
        twice, and then change places.
        """
        half = T.alloc_local([2, 4], "uint32")
        own = T.alloc_local([1], "int32")  # where this lane's row of a word lies: see `locate`
        places = T.alloc_local([8], "int32")
        side: T.let = T.truncdiv(lane, QUAD)
        place: T.let = T.truncmod(lane, QUAD)
        word: T.int32 = first
        while word < end:
            slots.locate(own, begin, word, lane)
            for s in T.unroll(2):
                row: T.let = self.row0 + word * WORD + s * QUAD + side * 8
                for i in T.unroll(8):
                    from_lane: T.let = s * QUAD + side * 8 + i
                    places[i] = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), own[0], from_lane, 32)
                    self.biases[i] = T.float32(0)
                    if self.options.bias:
                        if row < self.last:
                            self.biases[i] = T.float32(bias[0, T.int64(row + i)])
                for j in T.unroll(self.quads // 2):
                    for h in T.unroll(2):
                        quad: T.let = j * 2 + T.bitwise_xor(T.int32(h), side)
                        for i in T.unroll(8):
                            self.read(h, i, places[i], quad, place, slots.found)
                        for i in T.unroll(4):
                            T.ptx[self.convert](
                                half[h, i], self.held[h, i * 2 + 1], self.held[h, i * 2]
                            )
                    for h in T.unroll(2):
                        col: T.let = (
                            self.col0
                            + (j * 2 + h) * QUAD
                            + T.truncdiv(place, 4) * 2
                            + T.truncdiv(T.truncmod(place, 4), 2) * 8
                            + T.truncmod(place, 2)
                        )
                        if (row < self.last) & (col < self.n):
                            T.ptx["st.global.v4.b32"](
                                out.ptr_to([T.int64(col), T.int64(row)]),
                                *[
                                    T.if_then_else(side == 1, half[1 - h, i], half[h, i])
                                    for i in range(4)
                                ],
                            )
            word = word + step

    @T.inline
    def read(self, h, i, place, quad, column, halves):
        """``held[h, i]`` is the finished value of a row in a ``column`` of a quad. ``place``: its
        sum's, of the element in column 0; less than -1: of its half a slot, -2 - place.

        The words of that are pairs of columns, the odd ones above: see `keep`.
        """
        found: T.float32 = T.float32(0)
        if place >= 0:
            found = self.flat[place + quad * QUAD + column]
        self.held[h, i] = self.activated(found, self.biases[i])
        if halves:
            if place < -1:
                pair: T.let = (
                    T.truncdiv(quad, 2) * QUAD
                    + T.truncdiv(column, 4) * 4
                    + T.truncmod(quad, 2) * 2
                    + T.truncmod(T.truncdiv(column, 2), 2)
                )
                bits: T.let = T.shift_right(
                    T.reinterpret("uint32", self.flat[-2 - place + pair]),
                    T.uint32(T.truncmod(column, 2) * 16),
                )
                self.held[h, i] = T.float32(
                    T.reinterpret(self.options.dtype, T.cast(bits, "uint16"))
                )


def sums_of(flip: bool) -> Any:
    """The class of the sums, for products that are computed as they are or turned."""
    return TurnedSums if flip else PieceSums
