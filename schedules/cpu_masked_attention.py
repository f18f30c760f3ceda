"""Attention over the keys that a mask lets queries see, on CPUs, by lists of these keys.

Every tile of queries gathers the rows of keys and values of its list (SRead, PIT, SOSP'23, section
3), block by block, into scratch; what follows is that of `cpu_attention`. Heads that share keys,
and see the same of them, share a tile, which has the fewer queries then, or what is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from pit_tvm.op.arguments import at_least
from pit_tvm.target import TargetInfo
from pit_tvm.windows import FULL

from .contraction_space import lanes_of
from .cpu_attention_parts import KEYS, AttentionForm, Queries, Square
from .cpu_attention_scores import Scores
from .cpu_attention_sight import ListedSight
from .cpu_rows import float_bytes

GROUP = 4  # tiles that share what is gathered
OVERHEAD = 16  # keys that a tile could meet while its queries are turned, and its results back


def masked_attention(
    head_dim: int, value_dim: int, dtype: str, sinks: bool = False, *, target: TargetInfo
) -> tirx.PrimFunc:
    """softmax(scale * q k^T) v over listed keys; ``main(q, k, v, ids, bits, counts, sinks, out,
    scale, of_batch, of_head, of_tile, together, fold)``.

    ``q``: ``dtype`` [batch, heads, queries, head_dim]; ``k``: [batch, kv_heads, keys, head_dim];
    ``v``: [batch, kv_heads, keys, value_dim]; ``out``: [batch, heads, queries, value_dim], zeros
    for queries that see no key; any strides but those of columns; kv_heads divides heads.
    Arithmetic in float32. ``ids``, ``bits``, ``counts`` are of `cpu_mask_lists.mask_lists`: int64
    numbers ``of_batch``, ``of_head``, ``of_tile`` say how far lists lie apart from one sequence,
    head and tile to the next, 0 for lists that they share. Rows of a tile are ``2 ** fold`` heads
    of a query, those of the next one, and so on; ``together`` tiles gather at once, at most
    `GROUP`: both are of heads that share keys and lists, whose number is a multiple of the former.
    ``sinks``: float32 [heads] or, without them, [0], as in `cpu_attention.attention`. Threads share
    the work by the lengths of lists.

    Raises
    ------
    ShapeError
        ``head_dim`` or ``value_dim`` is below 1.
    DTypeError
        ``dtype`` is none of float32, float16, bfloat16.
    TileNotFound
        The target is no CPU.
    """
    float_bytes(dtype)
    dims = at_least("head_dim", head_dim, 1), at_least("value_dim", value_dim, 1)
    lanes = lanes_of(target.isa)
    form = AttentionForm(1, *dims, dtype, FULL, 1.0, bool(sinks), lanes)
    return _function(form, target.threads)


def _function(form: AttentionForm, threads: int) -> tirx.PrimFunc:
    dtype, align = form.dtype, form.element_bytes
    dim, value_dim, one = (tirx.const(e, "int64") for e in (form.head_dim, form.value_dim, 1))
    loop = T.parallel if threads > 1 else T.serial

    @T.prim_func(s_tir=True)
    def main(
        p_q: T.handle,
        p_k: T.handle,
        p_v: T.handle,
        p_ids: T.handle,
        p_bits: T.handle,
        p_counts: T.handle,
        p_sinks: T.handle,
        p_out: T.handle,
        scale: T.float32,
        of_batch: T.int64,
        of_head: T.int64,
        of_tile: T.int64,
        together: T.int64,
        fold: T.int64,
    ):
        b, h, g, m, n = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        q0, q1, q2 = T.int64(), T.int64(), T.int64()
        k0, k1, k2 = T.int64(), T.int64(), T.int64()
        v0, v1, v2 = T.int64(), T.int64(), T.int64()
        o0, o1, o2 = T.int64(), T.int64(), T.int64()
        lists = T.int64()
        q = T.match_buffer(p_q, (b, h, m, dim), dtype, strides=(q0, q1, q2, one), align=align)
        k = T.match_buffer(p_k, (b, g, n, dim), dtype, strides=(k0, k1, k2, one), align=align)
        v = T.match_buffer(p_v, (b, g, n, value_dim), dtype, strides=(v0, v1, v2, one), align=align)
        ids = T.match_buffer(p_ids, (lists, n), "int32", align=4)
        bits = T.match_buffer(p_bits, (lists, n), "int32", align=4)
        counts = T.match_buffer(p_counts, (lists,), "int32", align=4)
        sinks = T.match_buffer(p_sinks, (h if form.sinks else 0,), "float32", align=4)
        out = T.match_buffer(
            p_out, (b, h, m, value_dim), dtype, strides=(o0, o1, o2, one), align=align
        )
        plan = Plan(form, counts, (b, h, g, m), (of_batch, of_head, of_tile, together, fold))
        plan.sum_up()
        for chunk in loop(threads):
            share = Share(form, (q, k, v, out), (ids, bits, counts), sinks)
            share.run(plan, chunk, threads, scale)

    return main


@T.meta_class
class Plan:
    """The tiles of all heads, in order: their lists, and what they cost."""

    def __init__(
        self, form: AttentionForm, counts: Expr, sizes: Sequence[Expr], steps: Sequence[Expr]
    ) -> None:
        self.counts, self.block = counts, 2 * form.lanes
        self.batch, self.heads, self.kv_heads, self.queries = sizes
        self.of_batch, self.of_head, self.of_tile, self.together, self.fold = steps
        self.shared = T.int64(1) << self.fold
        # rows' heads of one of keys, and parts of them that gather at once; tiles
        self.share = T.alloc_buffer((3,), "int64")
        self.total = T.alloc_buffer((1,), "int64")

    def listed(self, b: Expr, head: Expr, tile: Expr) -> Expr:
        """Which list a tile has."""
        return b * self.of_batch + head * self.of_head + tile * self.of_tile

    def cost(self, number: Expr, tiles: Expr) -> Expr:
        """What a list costs so many tiles, in keys."""
        return (T.Cast("int64", self.counts[number]) + OVERHEAD) * tiles

    def first(self, kv: Expr, part: Expr) -> Expr:
        """The first head of tiles that gather at once."""
        return (kv * self.share[0] + part * self.together) * self.shared

    def size(self, part: Expr) -> Expr:
        """How many they are."""
        return T.min(self.together, self.share[0] - part * self.together)

    @T.inline
    def sum_up(self):
        self.share[0] = self.heads // T.max(self.kv_heads * self.shared, T.int64(1))
        self.share[1] = (self.share[0] + self.together - 1) // self.together
        self.share[2] = (self.queries * self.shared + (self.block - 1)) // self.block
        self.total[0] = T.int64(0)
        for b in range(self.batch):
            for kv in range(self.kv_heads):
                for part in range(self.share[1]):
                    for tile in range(self.share[2]):
                        self.total[0] = self.total[0] + self.cost(
                            self.listed(b, self.first(kv, part), tile), self.size(part)
                        )


@dataclass(frozen=True)
class SharedRows:
    """Rows of 2 ** fold heads of a sequence from ``head`` on, [.., heads, rows, columns], those of
    a query one behind the other."""

    array: Expr
    sequence: Expr
    head: Expr
    fold: Expr | int

    def place(self, row: Expr, column: Expr) -> list[Expr]:
        """Where an element is."""
        if isinstance(self.fold, int):  # 0
            return [self.sequence, self.head, row, column]
        inside = row & ((T.int64(1) << self.fold) - 1)
        return [self.sequence, self.head + inside, row >> self.fold, column]

    def at(self, row: Expr, column: Expr) -> Expr:
        """As `HeadRows.at`."""
        return T.Cast("float32", self.array[tuple(self.place(row, column))])

    def put(self, row: Expr, column: Expr, value: Expr) -> None:
        """As `HeadRows.put`."""
        made = T.Cast(str(self.array.dtype), value)
        T.buffer_store(self.array, made, self.place(row, column))


@dataclass(frozen=True)
class SharedSinks:
    """Sinks of `SharedRows`, of which tiles have whole queries."""

    sinks: Expr
    head: Expr
    shared: Expr

    def of(self, lane: Expr) -> Expr:
        """As `Sunk.of`."""
        return self.sinks[self.head + T.Cast("int64", lane) % self.shared]


@T.meta_class
class Share:
    """One thread's part: the tiles whose cost begins within its ``span``."""

    def __init__(
        self, form: AttentionForm, arrays: Sequence[Expr], lists: Sequence[Expr], sinks: Expr
    ) -> None:
        self.q, self.k, self.v, self.out = arrays
        self.ids, self.bits, self.counts = lists
        self.sinks, self.lanes, self.block = sinks, form.lanes, 2 * form.lanes
        self.queries = Queries(form, Square(form.lanes), GROUP)
        self.sight = ListedSight(form)
        self.scores = Scores(form, self.queries, self.sight)
        self.span = T.alloc_buffer((2,), "int64")
        self.cost = T.alloc_buffer((2,), "int64")  # of all tiles before, and with this one
        self.vectors = T.alloc_buffer((1,), "int32")  # of a tile
        self.near = T.alloc_buffer((1,), "int64")  # keys of a packed block

    def rows(self, array: Expr, b: Expr, head: Expr, fold: Expr | int) -> SharedRows:
        """Rows of 2 ** fold heads from one on, those of a query after the other."""
        return SharedRows(array, b, head, fold)

    def sunk(self, head: Expr, shared: Expr) -> SharedSinks:
        """The sinks of these heads."""
        return SharedSinks(self.sinks, head, shared)

    @T.inline
    def run(self, plan, chunk, threads, scale):
        self.span[0] = T.Cast("int64", chunk) * plan.total[0] // threads
        self.span[1] = T.Cast("int64", chunk + 1) * plan.total[0] // threads
        self.cost[1] = T.int64(0)
        for b in range(plan.batch):
            for kv in range(plan.kv_heads):
                for part in range(plan.share[1]):
                    for tile in range(plan.share[2]):
                        head: T.let = plan.first(kv, part)
                        number: T.let = plan.listed(b, head, tile)
                        self.cost[0] = self.cost[1]
                        self.cost[1] = self.cost[1] + plan.cost(number, plan.size(part))
                        if (self.cost[0] >= self.span[0]) & (self.cost[0] < self.span[1]):
                            self.tile(plan, (b, kv), (head, plan.size(part)), tile, number, scale)

    @T.inline
    def tile(self, plan, where, heads, tile, number, scale):
        b, kv = where
        head, size = heads
        first: T.let = tile * self.block
        rows: T.let = plan.queries * plan.shared
        self.vectors[0] = T.if_then_else(first + self.lanes < rows, 2, 1)
        for g in range(size):
            self.queries.take(
                self.rows(self.q, b, head + g * plan.shared, plan.fold),
                scale,
                self.sunk(head + g * plan.shared, plan.shared),
                T.int64(0),
                first,
                rows,
                g,
                self.vectors[0],
            )
        count: T.let = T.Cast("int64", self.counts[number])
        for part in range((count + (KEYS - 1)) // KEYS):
            self.near[0] = T.min(T.int64(KEYS), count - part * KEYS)
            self.sight.look(self.ids, self.bits, number, part * KEYS, self.near[0])
            self.scores.pack(self.rows(self.k, b, kv, 0), self.rows(self.v, b, kv, 0), self.near[0])
            for g in range(size):
                if self.vectors[0] == 2:
                    self.scores.meet(g, self.near[0], 2)
                else:
                    self.scores.meet(g, self.near[0], 1)
        for g in range(size):
            self.queries.give(
                self.rows(self.out, b, head + g * plan.shared, plan.fold),
                T.int64(0),
                first,
                rows,
                g,
                self.vectors[0],
            )
