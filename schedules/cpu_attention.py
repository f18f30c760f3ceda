"""Attention of one sequence after the other, none padded, on CPUs.

Queries lie in the lanes of vectors: a block's scores stand transposed, so maxima, exponentials and
sums need no step across lanes, and keys and values are scalars that the multiplier broadcasts
from memory. Keys are met in blocks; a running maximum keeps every exponent at 0 or below, and
what was summed up before shrinks when the maximum grows (as in flash attention), so scratch does
not depend on lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from pit_tvm.errors import ShapeError, mismatch
from pit_tvm.op.arguments import at_least
from pit_tvm.target import TargetInfo
from pit_tvm.windows import Window

from .contraction_space import lanes_of
from .cpu_attention_parts import KEYS, Ahead, AttentionForm, Queries, Square
from .cpu_attention_scores import Scores
from .cpu_attention_sight import WindowSight
from .cpu_rows import float_bytes

GROUP = 2  # blocks of queries that share a packed block of keys


def attention(
    heads: int,
    head_dim: int,
    value_dim: int,
    dtype: str,
    window: Window,
    scale: float,
    sinks: bool = False,
    *,
    target: TargetInfo,
) -> tirx.PrimFunc:
    """softmax(scale * q k^T) v within each sequence and head; ``main(q, k, v, starts, position,
    sinks, out)``.

    ``q``, ``k``: ``dtype`` [t, heads, head_dim]; ``v``, ``out``: [t, heads, value_dim]; arithmetic
    in float32.
    ``starts``: int32 [b + 1], where sequences begin and the last one ends: from 0 to t, ascending;
    not checked. A sequence may have any length, also 0. A query sees the keys of ``window``, by
    ``position``, int32 [t], ascending in each sequence. ``sinks``, float32 [heads] or, without
    them, [0], are scores of keys whose values are 0. Threads share the work by its cost, whatever
    the lengths.

    Raises
    ------
    ShapeError
        ``heads``, ``head_dim`` or ``value_dim`` is below 1, or ``scale`` is not finite.
    DTypeError
        ``dtype`` is none of float32, float16, bfloat16.
    TileNotFound
        The target is no CPU.
    """
    float_bytes(dtype)
    if not isfinite(scale):
        raise ShapeError(mismatch("scale", "a finite number", repr(scale)))
    form = AttentionForm(
        at_least("heads", heads, 1),
        at_least("head_dim", head_dim, 1),
        at_least("value_dim", value_dim, 1),
        dtype,
        window,
        float(scale),
        bool(sinks),
        lanes_of(target.isa),
    )
    return _function(form, target.threads)


def _function(form: AttentionForm, threads: int) -> tirx.PrimFunc:
    heads, head_dim, value_dim, dtype = form.heads, form.head_dim, form.value_dim, form.dtype
    align, block = form.element_bytes, 2 * form.lanes
    loop = T.parallel if threads > 1 else T.serial

    @T.prim_func(s_tir=True)
    def main(
        p_q: T.handle,
        p_k: T.handle,
        p_v: T.handle,
        p_starts: T.handle,
        p_position: T.handle,
        p_sinks: T.handle,
        p_out: T.handle,
    ):
        t = T.int64()
        n = T.int64()
        q = T.match_buffer(p_q, (t, heads, head_dim), dtype, align=align)
        k = T.match_buffer(p_k, (t, heads, head_dim), dtype, align=align)
        v = T.match_buffer(p_v, (t, heads, value_dim), dtype, align=align)
        starts = T.match_buffer(p_starts, (n,), "int32", align=4)
        position = T.match_buffer(p_position, (t,), "int32", align=4)
        sinks = T.match_buffer(p_sinks, (heads if form.sinks else 0,), "float32", align=4)
        out = T.match_buffer(p_out, (t, heads, value_dim), dtype, align=align)
        total = T.alloc_buffer((1,), "int64")  # cost of one head: blocks of queries times keys
        total[0] = T.int64(0)
        for sequence in range(n - 1):
            length: T.let = T.Cast("int64", starts[sequence + 1] - starts[sequence])
            total[0] = total[0] + (length + (block - 1)) // block * form.reach(length)
        if total[0] > 0:
            for chunk in loop(threads):
                share = Share(form, (q, k, v, out), position, sinks)
                share.span[0] = T.Cast("int64", chunk) * heads * total[0] // threads
                share.span[1] = T.Cast("int64", chunk + 1) * heads * total[0] // threads
                share.run(starts, n - 1)

    return main


@dataclass(frozen=True)
class OneHead:
    """A head's part of an array: rows, [t, heads, columns], or its element, [heads]."""

    array: Expr
    head: Expr

    def at(self, row: Expr, column: Expr) -> Expr:
        """As `HeadRows.at`."""
        return T.Cast("float32", self.array[row, self.head, column])

    def put(self, row: Expr, column: Expr, value: Expr) -> None:
        """As `HeadRows.put`."""
        made = T.Cast(str(self.array.dtype), value)
        T.buffer_store(self.array, made, [row, self.head, column])

    def of(self, _: Expr) -> Expr:
        """As `Sunk.of`."""
        return self.array[self.head]


@T.meta_class
class Share:
    """One thread's part: the blocks of queries whose cost begins within its ``span``."""

    def __init__(
        self, form: AttentionForm, arrays: Sequence[Expr], position: Expr, sinks: Expr
    ) -> None:
        self.form, self.window = form, form.window
        self.q, self.k, self.v, self.out = arrays
        self.position, self.sinks = position, sinks
        self.heads, self.lanes, self.block = form.heads, form.lanes, 2 * form.lanes
        self.queries = Queries(form, Square(form.lanes), GROUP)
        self.ahead = Ahead(form, arrays)
        self.sight = WindowSight(form, GROUP)
        self.scores = Scores(form, self.queries, self.sight, self.ahead)
        self.span = T.alloc_buffer((2,), "int64")
        self.cost = T.alloc_buffer((1,), "int64")  # of all blocks before
        self.mine = T.alloc_buffer((2,), "int64")  # blocks of one sequence and head
        self.query = T.alloc_buffer((1,), "int64")  # first of a block, from its sequence's begin
        self.vectors = T.alloc_buffer((1,), "int32")  # of a block
        self.keys = T.alloc_buffer((2,), "int64")  # that a group needs: end and begin
        self.near = T.alloc_buffer((2,), "int64")  # keys of a packed block, and what one block sees

    def within(self, at: Expr, length: Expr, blocks: Expr) -> Expr:
        """How many of the next ``blocks`` blocks begin before cost ``at``."""
        cost = self.form.reach(length)
        steps = (at - self.cost[0] + cost - 1) // T.max(cost, T.int64(1))
        return T.min(T.max(steps, T.int64(0)), blocks)

    def of(self, array: Expr, head: Expr) -> OneHead:
        """One head's part of an array."""
        return OneHead(array, head)

    @T.inline
    def begin_block(self, number, blocks, length):
        # in memory, because TVM takes long to simplify what is bound to divisions
        self.query[0] = self.form.order(number, blocks) * self.block
        self.vectors[0] = T.if_then_else(self.query[0] + self.lanes < length, 2, 1)

    @T.inline
    def run(self, starts, batch):
        self.cost[0] = T.int64(0)
        for sequence in range(batch):
            begin: T.let = T.Cast("int64", starts[sequence])
            length: T.let = T.Cast("int64", starts[sequence + 1]) - begin
            blocks: T.let = (length + (self.block - 1)) // self.block
            for head in range(self.heads):
                self.mine[0] = self.within(self.span[0], length, blocks)
                self.mine[1] = self.within(self.span[1], length, blocks)
                self.cost[0] = self.cost[0] + blocks * self.form.reach(length)
                for group in range((self.mine[1] - self.mine[0] + (GROUP - 1)) // GROUP):
                    first: T.let = self.mine[0] + group * GROUP
                    count: T.let = T.min(T.int64(GROUP), self.mine[1] - first)
                    self.group(begin, length, blocks, head, first, count)

    @T.inline
    def group(self, begin, length, blocks, head, first, count):
        self.keys[0] = length if self.window.after is None else T.int64(0)
        self.keys[1] = T.int64(0) if self.window.before is None else length
        for g in range(count):
            self.begin_block(first + g, blocks, length)
            # Tokens are no further from each other by their order than by their positions.
            if self.window.after is not None:
                end: T.let = self.query[0] + (self.block + self.window.after)
                self.keys[0] = T.min(T.max(self.keys[0], end), length)
            if self.window.before is not None:
                low: T.let = self.query[0] - self.window.before
                self.keys[1] = T.max(T.min(self.keys[1], low), T.int64(0))
            self.queries.take(
                self.of(self.q, head),
                T.float32(self.form.scale),
                self.of(self.sinks, head),
                begin,
                self.query[0],
                length,
                g,
                self.vectors[0],
            )
            self.sight.take(self.position, begin, self.query[0], length, g, self.vectors[0])
        for part in range((self.keys[0] - self.keys[1] + (KEYS - 1)) // KEYS):
            start: T.let = self.keys[1] + part * KEYS
            self.near[0] = T.min(T.int64(KEYS), self.keys[0] - start)
            self.sight.look(self.position, begin + start, self.near[0])
            self.scores.pack(self.of(self.k, head), self.of(self.v, head), self.near[0])
            for g in range(count):
                self.begin_block(first + g, blocks, length)
                self.query[0] = self.query[0] - start
                self.sight.query[0] = self.query[0]
                self.near[1] = self.near[0]
                if self.window.after is not None:
                    end: T.let = self.query[0] + (self.block + self.window.after)
                    self.near[1] = T.min(self.near[1], end)
                if self.window.before is not None:
                    if self.near[0] + self.window.before <= self.query[0]:
                        self.near[1] = T.int64(0)
                self.ahead.aim((g == 0) & (first + count == blocks), head, length)
                if self.near[1] > 0:
                    if self.vectors[0] == 2:
                        self.scores.meet(g, self.near[1], 2)
                    else:
                        self.scores.meet(g, self.near[1], 1)
        for g in range(count):
            self.begin_block(first + g, blocks, length)
            self.queries.give(
                self.of(self.out, head), begin, self.query[0], length, g, self.vectors[0]
            )
