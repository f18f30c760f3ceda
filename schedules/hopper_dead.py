"""Rows of zeros that a product stores beside its own: dead rows, whose list detection made.

A warp of the producer stores some at every step, between its gathers: they take memory's time, of
which a product leaves much, and none of the tensor cores'. What is more than the steps hide, the
consumers store when their tiles are done.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

STORING = 3  # warp of the producer that stores: another one than fetches the other operand
BESIDE = 4  # pieces that a step of the product hides
WARP = 32
EACH = 8  # elements in the 16 bytes that a lane stores at once
PIECE = 4 * WARP * EACH  # elements of a row that a warp stores at a time


@T.meta_class
class DeadRows:
    """The dead rows of a CTA, every ``sms``-th of the list, and the one among its warps' own that
    the calling warp stores next.

    Parameters
    ----------
    ids, count : Buffer (1, capacity) and (1,) int32, the list in global memory
    out : Buffer (rows, n) of a 16-bit type; n is a multiple of 8
    sms : CTAs
    """

    def __init__(self, ids: Any, count: Any, out: Any, sms: int) -> None:
        self.ids, self.count, self.out, self.sms = ids, count, out, sms
        self.n = out.shape[1]
        self.pieces = T.truncdiv(self.n + (PIECE - 1), PIECE)  # of a row
        self.rows = T.local_scalar("int32")  # of the CTA
        self.beside = T.local_scalar("int32")  # of them those that steps hide
        self.first = T.local_scalar("int32")  # place of the warp's first row in the list
        self.stride = T.local_scalar("int32")  # between its rows there
        self.left = T.local_scalar("int32")  # pieces of them
        self.pace = T.local_scalar("int32")  # pieces at a step
        self.turn = T.local_scalar("int32")  # of the row that comes next
        self.column = T.local_scalar("int32")  # in it
        self.held = T.local_scalar("int32")  # ids of 32 rows, a lane each
        self.coming = T.local_scalar("int32")  # of the next 32: they take long to come

    @T.inline
    def share(self, cta, steps):
        """How many rows are the CTA's, and how many of them its ``steps`` hide."""
        self.rows = T.truncdiv(T.max(self.count[0] - cta, 0) + (self.sms - 1), self.sms)
        self.beside = T.min(self.rows, T.truncdiv(steps * BESIDE, self.pieces))

    @T.inline
    def begin_beside(self, cta, steps, lane):
        """By the producer's warp, before as many calls of `store_beside`."""
        self.share(cta, steps)
        self.begin(cta, 0, self.beside, 1, lane)
        self.pace = T.truncdiv(self.left + steps - 1, T.max(steps, 1))

    @T.inline
    def store_beside(self, lane):
        """Some rows, for which nobody waits."""
        self.store(self.pace, lane)

    @T.inline
    def store_rest(self, cta, steps, warp, warps, lane):
        """By each of the consumers' ``warps``: the rows that ``steps`` do not hide."""
        self.share(cta, steps)
        self.begin(cta, self.beside + warp, self.rows, warps, lane)
        self.store(self.left, lane)

    @T.inline
    def begin(self, cta, first, last, every, lane):
        """The warp's rows are each ``every``-th of the CTA's from ``first`` to ``last`` - 1."""
        self.first = cta + first * self.sms
        self.stride = every * self.sms
        self.left = T.truncdiv(T.max(last - first, 0) + (every - 1), every) * self.pieces
        self.column = 0
        self.turn = 0
        self.ask(lane)
        self.held = self.coming
        self.turn = WARP
        self.ask(lane)
        self.turn = 0

    @T.inline
    def ask(self, lane):
        """Ask for the ids of 32 rows from ``turn`` on."""
        at: T.let = self.first + (self.turn + lane) * self.stride
        self.coming = 0
        if at < self.count[0]:
            self.coming = self.ids[0, at]

    @T.inline
    def store(self, most, lane):
        """The next pieces of the warp's rows, at most so many."""
        number: T.let = T.min(self.left, most)
        for _ in T.serial(number):
            row: T.int32 = T.cuda.__shfl_sync(
                T.uint32(0xFFFFFFFF), self.held, T.bitwise_and(self.turn, WARP - 1), WARP
            )
            for e in T.unroll(PIECE // (WARP * EACH)):
                column: T.let = self.column + (e * WARP + lane) * EACH
                if column < self.n:
                    for v in T.vectorized(EACH):
                        self.out[T.int64(row), T.int64(column + v)] = T.cast(0, self.out.dtype)
            self.column = self.column + PIECE
            if self.column >= self.n:
                self.column = 0
                self.turn = self.turn + 1
                if T.bitwise_and(self.turn, WARP - 1) == 0:
                    self.held = self.coming
                    self.turn = self.turn + WARP
                    self.ask(lane)
                    self.turn = self.turn - WARP
        self.left = self.left - number
