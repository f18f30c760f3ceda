"""Parts of attention on CPUs: squares that are turned, blocks of keys, queries and their sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from pit_tvm.op.elementary import exp_down
from pit_tvm.windows import Window

from .cpu_rows import float_bytes

GROUP = 2  # blocks of queries that share a packed block of keys
KEYS = 64  # keys to a block
LOWEST = -3.0e38  # stands for minus infinity, whose differences are no numbers
LOWEST_EXP = -87.0  # exp of less is 0 beside exp(0) in float32
LINE_BYTES = 64
_NEAR, _DATA = 3, 1  # arguments of LLVM's prefetch: to the nearest cache, data


@dataclass(frozen=True)
class AttentionForm:
    """What a kernel is built for; sizes count elements.

    ``head_dim`` of queries and keys, ``value_dim`` of values and what comes of them. ``lanes``:
    queries in a vector. A block of queries has one vector or two.
    """

    heads: int
    head_dim: int
    value_dim: int
    dtype: str
    window: Window
    scale: float
    sinks: bool
    lanes: int

    @property
    def sums(self) -> int:
        """Vectors in half of a register block: AVX-512 has twice as many registers as others."""
        return 8 if self.lanes == 16 else 4

    def room(self, width: int) -> int:
        """A width in scratch: whole squares and whole register blocks."""
        step = max(self.lanes, 2 * self.sums)
        return -(-width // step) * step

    @property
    def element_bytes(self) -> int:
        """Size of an element in memory."""
        return float_bytes(self.dtype)

    def reach(self, length: Expr) -> Expr:
        """Keys of a sequence that a query meets, roughly: what its block costs."""
        span = self.window.span
        return length if span is None else T.min(length, T.int64(span))

    def order(self, number: Expr, blocks: Expr) -> Expr:
        """Which block of a sequence comes as its ``number``-th.

        Where there is one limit blocks differ in cost: early and late in turns, so that any share
        of them is fair.
        """
        if (self.window.before is None) == (self.window.after is None):
            return number
        return tirx.Select(number % 2 == 0, number // 2, blocks - 1 - number // 2)


def decay(x: Expr) -> Expr:
    """exp(x) for float32 x <= 0, relative error 2e-7; NaN stays NaN."""
    lowest = T.float32(LOWEST_EXP)
    return exp_down(tirx.Select(x < lowest, lowest, x))


@T.meta_class
class Square:
    """Turns squares of ``lanes`` x ``lanes`` float32, from scratch to scratch."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.where = T.alloc_buffer((4,), "int64")

    def at(self, start: Expr) -> Expr:
        """Indices of one vector."""
        return T.Ramp(start, 1, self.lanes)

    def turn(
        self, src: Expr, src_at: Expr, src_pitch: Expr, dst: Expr, dst_at: Expr, dst_pitch: Expr
    ) -> None:
        """Emit ``dst[dst_at + c * dst_pitch + r] = src[src_at + r * src_pitch + c]``."""
        # through memory, because TVM takes long to work out which part of scratch is touched
        for number, value in enumerate((src_at, src_pitch, dst_at, dst_pitch)):
            T.buffer_store(self.where, T.Cast("int64", value), [number])
        src_at, src_pitch, dst_at, dst_pitch = (self.where[number] for number in range(4))
        rows = [T.Bind(src[self.at(src_at + r * src_pitch)]) for r in range(self.lanes)]
        step = self.lanes // 2
        while step:
            for r in [r for r in range(self.lanes) if not r & step]:
                rows[r], rows[r + step] = self._swapped(rows[r], rows[r + step], step)
            step //= 2
        for r, row in enumerate(rows):
            T.buffer_store(dst, row, [self.at(dst_at + r * dst_pitch)])

    def _swapped(self, low: Expr, high: Expr, step: int) -> tuple[Expr, Expr]:
        """Two rows ``step`` apart: lanes with that bit of the lower swapped for the others of the
        upper."""
        lanes = range(self.lanes)
        lower = [self.lanes + lane - step if lane & step else lane for lane in lanes]
        upper = [self.lanes + lane if lane & step else lane + step for lane in lanes]
        picks = [[tirx.const(lane, "int32") for lane in pick] for pick in (lower, upper)]
        return tuple(T.Bind(tirx.Shuffle([low, high], pick)) for pick in picks)


class HeadRows(Protocol):
    """Rows of a head, or of several, of an array."""

    def at(self, row: Expr, column: Expr) -> Expr:
        """An element as float32."""

    def put(self, row: Expr, column: Expr, value: Expr) -> None:
        """Emit a store of a float32 to an element."""


class Sunk(Protocol):
    """Scores of keys whose values are 0, one of each head."""

    def of(self, lane: Expr) -> Expr:
        """That of a block's query."""


@T.meta_class
class Rows:
    """Rows of ``width``, copied to float32 scratch, and stored from there."""

    def __init__(self, form: AttentionForm, width: int) -> None:
        self.lanes = form.lanes
        self.whole, self.rest = divmod(width, form.lanes)

    @T.inline
    def load(self, src, row, dst, to, factor):
        for c in range(self.whole):
            for w in T.vectorized(self.lanes):
                dst[to + c * self.lanes + w] = src.at(row, c * self.lanes + w) * factor
        for w in range(self.rest):
            dst[to + self.whole * self.lanes + w] = (
                src.at(row, self.whole * self.lanes + w) * factor
            )

    @T.inline
    def store(self, src, start, factor, out, row):
        for c in range(self.whole):
            for w in T.vectorized(self.lanes):
                out.put(row, c * self.lanes + w, src[start + c * self.lanes + w] * factor)
        for w in range(self.rest):
            at: T.let = self.whole * self.lanes + w
            out.put(row, at, src[start + at] * factor)


@T.meta_class
class Ahead:
    """Asks for the rows of the next head, or of the next sequence's first, while sums are made.

    Each head's part of a row is a line or few, far from the next row's: no prefetcher of the CPU
    follows, and without this the copies wait for memory half of the time.
    """

    def __init__(self, form: AttentionForm, arrays: Sequence[Expr]) -> None:
        self.arrays = arrays
        self.step = LINE_BYTES // form.element_bytes
        self.heads = form.heads
        self.where = T.alloc_buffer((3,), "int64")  # whether, distance of rows, head

    @T.inline
    def aim(self, wanted, head, length):
        self.where[0] = T.if_then_else(wanted, T.int64(1), T.int64(0))
        self.where[1] = T.if_then_else(head == self.heads - 1, length, T.int64(0))
        self.where[2] = (head + 1) % self.heads

    def ask(self, row: Expr) -> None:
        """Emit a request for the next head's part of one row of each array."""
        for array in self.arrays:
            for line in range(-(-int(array.shape[2]) // self.step)):
                first = array[row + self.where[1], self.where[2], line * self.step]
                T.evaluate(
                    T.call_intrin("void", "tirx.prefetch", T.address_of(first), 0, _NEAR, _DATA)
                )


@T.meta_class
class Queries:
    """A group's blocks of queries, each a vector or two: turned, with maxima and sums so far.

    Of block ``g`` with ``vectors`` vectors, column ``c`` of vector ``u`` begins ``(c * vectors +
    u) * lanes`` behind ``at(g)`` in ``turned`` and behind ``sums_at(g)`` in ``sums``. ``stat``
    holds the maxima of two vectors, then the sums of their exponentials.
    """

    def __init__(self, form: AttentionForm, square: Square, group: int) -> None:
        self.form, self.square = form, square
        self.rows, self.value_rows = Rows(form, form.head_dim), Rows(form, form.value_dim)
        self.lanes = form.lanes
        self.wide, self.value_wide = form.room(form.head_dim), form.room(form.value_dim)
        block = 2 * form.lanes
        self.tile = T.alloc_buffer((form.lanes * max(self.wide, self.value_wide),), "float32")
        self.turned = T.alloc_buffer((group * self.wide * block,), "float32")
        self.sums = T.alloc_buffer((group * self.value_wide * block,), "float32")
        self.stat = T.alloc_buffer((group * 4 * form.lanes,), "float32")

    def at(self, g: Expr) -> Expr:
        """Where block ``g`` begins in ``turned``."""
        return g * (self.wide * 2 * self.lanes)

    def sums_at(self, g: Expr) -> Expr:
        """Where block ``g`` begins in ``sums``."""
        return g * (self.value_wide * 2 * self.lanes)

    def top(self, g: Expr, u: Expr) -> Expr:
        """Where the maxima of a vector begin in ``stat``."""
        return (g * 4 + u) * self.lanes

    @T.inline
    def take(self, q, scale, sunk, begin, query, length, g, vectors):
        for u in range(vectors):
            for r in range(self.lanes):
                # beyond the end stands the last query again; nobody stores its results
                row: T.let = begin + T.min(query + u * self.lanes + r, length - 1)
                self.rows.load(q, row, self.tile, r * self.wide, scale)
            for c in range(self.wide // self.lanes):
                to: T.let = self.at(g) + (c * self.lanes * vectors + u) * self.lanes
                self.square.turn(
                    self.tile, c * self.lanes, self.wide, self.turned, to, vectors * self.lanes
                )
        for c in range(self.value_wide * 2):
            for w in T.vectorized(self.lanes):
                self.sums[self.sums_at(g) + c * self.lanes + w] = T.float32(0)
        for u in T.unroll(2):
            for w in T.vectorized(self.lanes):
                self.stat[self.top(g, u) + w] = self.least(sunk, u * self.lanes + w)
            for w in T.vectorized(self.lanes):
                self.stat[self.top(g, 2 + u) + w] = T.float32(1 if self.form.sinks else 0)

    def least(self, sunk: Sunk, lane: Expr) -> Expr:
        """The maximum before any key is met."""
        return sunk.of(lane) if self.form.sinks else T.float32(LOWEST)

    def under(self, total: Expr) -> Expr:
        """What makes of weighted values their mean; 0 of a query that sees no key."""
        return tirx.Select(total == 0, T.float32(0), T.float32(1) / total)

    @T.inline
    def give(self, out, begin, query, length, g, vectors):
        for u in range(vectors):
            for w in T.vectorized(self.lanes):
                self.stat[self.top(g, u) + w] = self.under(self.stat[self.top(g, 2 + u) + w])
            for c in range(self.value_wide // self.lanes):
                start: T.let = self.sums_at(g) + (c * self.lanes * vectors + u) * self.lanes
                pitch: T.let = vectors * self.lanes
                self.square.turn(
                    self.sums, start, pitch, self.tile, c * self.lanes, self.value_wide
                )
            for r in range(T.min(T.int64(self.lanes), length - query - u * self.lanes)):
                row: T.let = begin + query + u * self.lanes + r
                under: T.let = self.stat[self.top(g, u) + r]
                self.value_rows.store(self.tile, r * self.value_wide, under, out, row)
