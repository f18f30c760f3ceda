"""Gradients of attention over the keys that lists name, on NVIDIA GPUs from Ampere on.

    p = exp2(scale * q @ k.T - weights),  d = p * (dout @ v.T - drops)
    dq = d @ k,    dk = d.T @ q,    dv = p.T @ dout

where a query sees a key, ``drops`` being sums of ``dout * out`` along rows (Dao and others, 2022).
One template: a CTA has a tile of queries and the keys that any of them sees, or a tile of keys and
the queries that see any of them, from lists of the mask that is turned. No two CTAs write one row,
so equal calls give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch

from .cuda_listed_products import KEYS, ROWS, load
from .cuda_listed_rows import (
    LANES,
    PART_FACTS,
    QUERIES,
    THREADS,
    WORDS,
    ListedRows,
    ListedTile,
    ctas_of,
)
from .dependent import after_predecessor

MOST_WIDE_GRADIENT = 128  # registers hold the sums of no more columns


@dataclass(frozen=True)
class GradientTile(ListedTile):
    """Queries and keys are ``deep``, values and gradients to results ``wide``; ``of_keys``: tiles
    are of keys, steps of queries."""

    of_keys: bool

    @property
    def held(self) -> bool:
        """Whether the tile's rows stay in registers, which gains a group nothing."""
        return not (self.grouped or self.of_keys) and self.deep + self.wide <= 128

    @property
    def laid(self) -> int:
        """float32 numbers of a part of a tile."""
        return (self.deep + self.wide * self.of_keys) // 2 * THREADS

    @property
    def ctas(self) -> int:
        """CTAs that share a multiprocessor, by its registers and shared memory."""
        most = 3 if self.deep + self.wide <= 128 else 2
        return ctas_of(QUERIES * (self.deep + self.wide), self, most)


@T.meta_class
class _Rows(ListedRows):
    """Queries with gradients to their results, or keys with values, and their sums."""

    def __init__(self, tile: GradientTile) -> None:
        held = (tile.deep + tile.wide) // 4 if tile.held else 4
        super().__init__(tile, held, KEYS // 4 * (1 + tile.of_keys))
        # float32 of the queries of a step: weights, drops.
        self.facts = self.pool.alloc((tile.stages, 2, KEYS), "float32", align=16)
        self.own_a, self.out_a = self.region(tile.deep)
        self.own_b, self.out_b = self.region(tile.wide)
        self.pool.commit()
        self.slopes = T.alloc_local([KEYS // 2], "float32")
        self.sums_a = T.alloc_local([tile.deep // 2], "float32")
        self.sums_b = T.alloc_local([tile.wide // 2 if tile.of_keys else 1], "float32")
        self.weight = T.alloc_local([2], "float32")
        self.drop = T.alloc_local([2], "float32")

    @T.inline
    def begin(self):
        """Nothing has been added up."""
        for i in T.unroll(self.tile.deep // 2):
            self.sums_a[i] = T.float32(0)
        if self.tile.of_keys:
            for i in T.unroll(self.tile.wide // 2):
                self.sums_b[i] = T.float32(0)

    @T.inline
    def learn_facts(self, weights, drops, at, warp, lane):
        """``weight`` and ``drop`` of the lane's two queries."""
        for r in T.unroll(2):
            row: T.int32 = self.rows[warp * ROWS + r * 8 + T.truncdiv(lane, 4)]
            self.weight[r] = T.float32("inf")
            self.drop[r] = T.float32(0)
            if row >= 0:
                self.weight[r] = weights[at + T.cast(row, "int64")]
                self.drop[r] = drops[at + T.cast(row, "int64")]

    @T.inline
    def fetch_facts(self, slot, weights, drops, at, thread):
        """Ask for ``facts`` of a step's queries, whose places are known; those of none are of the
        first, which their bits exclude."""
        half: T.let = T.truncmod(T.truncdiv(thread, LANES), 2)
        own: T.let = T.Select(half == 0, self.places[0], self.places[1])
        place: T.let = at + T.cast(T.max(own, 0), "int64")
        there: T.let = half * LANES + T.truncmod(thread, LANES)
        if thread < KEYS:
            T.ptx["cp.async.ca.shared.global"](
                self.facts.ptr_to([slot, 0, there]), weights.ptr_to([place]), 4
            )
        else:
            T.ptx["cp.async.ca.shared.global"](
                self.facts.ptr_to([slot, 1, there]), drops.ptr_to([place]), 4
            )

    @T.inline
    def weigh(self, slot, scale, lane):
        """``scores`` become weights."""
        for i in T.unroll(KEYS // 2):
            if self.tile.of_keys:
                column: T.let = i // 4 * 8 + T.truncmod(lane, 4) * 2 + i % 2
                T.ptx["ex2.approx.ftz.f32"](
                    self.scores[i], self.scores[i] * scale - self.facts[slot, 0, column]
                )
            else:
                T.ptx["ex2.approx.ftz.f32"](
                    self.scores[i], self.scores[i] * scale - self.weight[i // 2 % 2]
                )

    @T.inline
    def slope(self, slot, lane):
        """``slopes`` become gradients to scores."""
        for i in T.unroll(KEYS // 2):
            if self.tile.of_keys:
                column: T.let = i // 4 * 8 + T.truncmod(lane, 4) * 2 + i % 2
                self.slopes[i] = self.scores[i] * (self.slopes[i] - self.facts[slot, 1, column])
            else:
                self.slopes[i] = self.scores[i] * (self.slopes[i] - self.drop[i // 2 % 2])

    @T.inline
    def lay_out(self, laid, at, thread):
        """Leave what the CTA has, for the one that adds up the tile."""
        half = T.meta_var(self.tile.deep // 2)
        for i in T.unroll(half):
            laid[at + i * THREADS + thread] = self.sums_a[i]
        if self.tile.of_keys:
            for i in T.unroll(self.tile.wide // 2):
                laid[at + (half + i) * THREADS + thread] = self.sums_b[i]

    @T.inline
    def take_in(self, laid, at, thread):
        """Add what a CTA has left."""
        half = T.meta_var(self.tile.deep // 2)
        for i in T.unroll(half):
            self.sums_a[i] = self.sums_a[i] + laid[at + i * THREADS + thread]
        if self.tile.of_keys:
            for i in T.unroll(self.tile.wide // 2):
                self.sums_b[i] = self.sums_b[i] + laid[at + (half + i) * THREADS + thread]


@T.jit
def gradients_by_lists(
    own_a_h: T.handle,
    own_b_h: T.handle,
    first_h: T.handle,
    second_h: T.handle,
    ids_h: T.handle,
    bits_h: T.handle,
    order_h: T.handle,
    work_h: T.handle,
    weights_h: T.handle,
    drops_h: T.handle,
    laid_h: T.handle,
    arrived_h: T.handle,
    made_a_h: T.handle,
    made_b_h: T.handle,
    ordered: T.int32,
    slots: T.int32,
    batch: T.int32,
    heads: T.int32,
    rows: T.int32,
    queries: T.int32,
    dim: T.int32,
    v_dim: T.int32,
    share: T.int32,
    plane_batch: T.int32,
    plane_head: T.int32,
    a_batch: T.int64,
    a_head: T.int64,
    a_row: T.int64,
    b_batch: T.int64,
    b_head: T.int64,
    b_row: T.int64,
    first_batch: T.int64,
    first_head: T.int64,
    first_row: T.int64,
    second_batch: T.int64,
    second_head: T.int64,
    second_row: T.int64,
    made_a_batch: T.int64,
    made_a_head: T.int64,
    made_a_row: T.int64,
    made_b_batch: T.int64,
    made_b_head: T.int64,
    made_b_row: T.int64,
    scale: T.float32,
    by: T.float32,
    *,
    tile: T.constexpr,
):
    """The template; ``attention_gradients`` explains it."""
    a_size, b_size, first_size, second_size = T.int64(), T.int64(), T.int64(), T.int64()
    made_a_size, made_b_size, told_rows = T.int64(), T.int64(), T.int64()
    planes, lines, capacity, places = T.int32(), T.int32(), T.int32(), T.int32()
    items, numbers, counters = T.int32(), T.int32(), T.int32()
    own_a = T.match_buffer(own_a_h, (a_size,), tile.dtype, align=16)
    own_b = T.match_buffer(own_b_h, (b_size,), tile.dtype, align=16)
    first = T.match_buffer(first_h, (first_size,), tile.dtype, align=16)
    second = T.match_buffer(second_h, (second_size,), tile.dtype, align=16)
    ids = T.match_buffer(ids_h, (planes, lines, capacity), "int32", align=16)
    bits = T.match_buffer(bits_h, (planes, lines, WORDS, capacity), "int32", align=16)
    work = T.match_buffer(work_h, (planes, items, PART_FACTS), "int32", align=4)
    order = T.match_buffer(order_h, (planes, places), "int32", align=4)
    weights = T.match_buffer(weights_h, (told_rows,), "float32", align=4)
    drops = T.match_buffer(drops_h, (told_rows,), "float32", align=4)
    laid = T.match_buffer(laid_h, (numbers,), "float32", align=4)
    arrived = T.match_buffer(arrived_h, (counters,), "int32", align=4)
    made_a = T.match_buffer(made_a_h, (made_a_size,), tile.dtype, align=16)
    made_b = T.match_buffer(made_b_h, (made_b_size,), tile.dtype, align=16)
    STAGES = T.meta_var(tile.stages)
    DEEP, WIDE = T.meta_var(tile.deep), T.meta_var(tile.wide)
    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.ctas})
    item, head, sequence = T.cta_id([items, heads, batch])
    thread = T.thread_id([THREADS])
    own = _Rows(tile)
    warp: T.let = T.truncdiv(thread, LANES)
    lane: T.let = T.truncmod(thread, LANES)
    number: T.int64 = T.cast(sequence, "int64")
    q_head: T.int64 = T.cast(head, "int64")
    kv_head: T.int64 = T.cast(T.truncdiv(head, share), "int64")
    own_head = T.meta_var(kv_head if tile.of_keys else q_head)
    other_head = T.meta_var(q_head if tile.of_keys else kv_head)
    own.plane = sequence * plane_batch + head * plane_head
    own.first_at = number * first_batch + other_head * first_head
    own.second_at = number * second_batch + other_head * second_head
    told: T.int64 = T.cast(sequence * heads + head, "int64") * T.cast(queries, "int64")
    own.begin()
    after_predecessor()
    block: T.int32 = work[own.plane, item, 0]
    if block >= 0:
        begin: T.int32 = work[own.plane, item, 1]
        end: T.int32 = work[own.plane, item, 2]
        own.line = T.min(block, lines - 1)
        own.learn(order, ordered, block * QUERIES, rows, thread)
        a_at: T.int64 = number * a_batch + own_head * a_head
        b_at: T.int64 = number * b_batch + own_head * b_head
        own.fetch_own(own.own_a, DEEP, own_a, a_at, a_row, dim, thread)
        own.fetch_own(own.own_b, WIDE, own_b, b_at, b_row, v_dim, thread)
        T.ptx.cp.async_.commit_group()
        for u in T.unroll(STAGES - 1):
            own.look(ids, begin + u, end, lane)
            if begin + u < end:
                own.fetch(
                    u, first, first_row, dim, second, second_row, v_dim, bits, begin + u, thread
                )
                if tile.of_keys:
                    own.fetch_facts(u, weights, drops, told, thread)
            T.ptx.cp.async_.commit_group()
        own.look(ids, begin + STAGES - 1, end, lane)
        if not tile.of_keys:
            own.learn_facts(weights, drops, told, warp, lane)
        if tile.held:
            own.arrive(STAGES - 1)
            for s in T.unroll(DEEP // 16):
                load(own, own.own_a, s, s * 4, warp, lane)
            for s in T.unroll(WIDE // 16):
                load(own, own.own_b, s, (DEEP // 16 + s) * 4, warp, lane)
        for i in T.serial(end - begin):
            own.settle()
            own.arrive(STAGES - 2)
            slot: T.let = T.truncmod(i, STAGES)
            coming: T.let = T.truncmod(i + STAGES - 1, STAGES)
            ahead: T.let = begin + i + STAGES - 1
            held_a = T.meta_var(0 if tile.held else -1)
            held_b = T.meta_var(DEEP // 4 if tile.held else -1)
            own.score(own.scores, own.own_a, held_a, own.first, slot, DEEP, warp, lane)
            own.score(own.slopes, own.own_b, held_b, own.second, slot, WIDE, warp, lane)
            if ahead < end:
                own.fetch(
                    coming, first, first_row, dim, second, second_row, v_dim, bits, ahead, thread
                )
                if tile.of_keys:
                    own.fetch_facts(coming, weights, drops, told, thread)
            T.ptx.cp.async_.commit_group()
            own.look(ids, ahead + 1, end, lane)
            own.see(slot, warp, lane)
            own.settle()
            own.weigh(slot, scale, lane)
            own.exclude(own.scores, 0, slot, warp, lane)
            own.slope(slot, lane)
            own.exclude(own.slopes, 0, slot, warp, lane)
            if tile.of_keys:
                own.add(own.sums_b, own.scores, own.second, slot, WIDE, lane, KEYS // 4)
            own.add(own.sums_a, own.slopes, own.first, slot, DEEP, lane, 0)
        own.settle()
        own.arrive(0)  # rows of other threads may be under way where the list is empty
        own.join(work, item, laid, arrived, (sequence * heads + head) * slots, thread)
        if own.stores != 0:
            for r in T.unroll(2):
                own.factor[r] = by
            to_a: T.int64 = number * made_a_batch + q_head * made_a_head
            own.store(own.sums_a, own.out_a, DEEP, made_a, to_a, made_a_row, dim, warp, lane)
            if tile.of_keys:
                for r in T.unroll(2):
                    own.factor[r] = T.float32(1)
                to_b: T.int64 = number * made_b_batch + q_head * made_b_head
                own.store(own.sums_b, own.out_b, WIDE, made_b, to_b, made_b_row, v_dim, warp, lane)


def attention_gradients(tile: GradientTile) -> tvm.tirx.PrimFunc:
    """Gradients to queries, or to keys and values of every head of queries, by lists: the tile's
    two operands, those of steps, ids, bits, order, work, weights, drops, laid, arrived, what is
    made, and numbers.

    Operands are q and dout, made along k and v, or with ``tile.of_keys`` k and v along q and dout;
    made_a has the shape of the tile's first operand with all ``heads``, made_b of its second, and
    is not read or written without ``of_keys``. ``rows`` are of tiles. weights and drops: flat
    [batch, heads, queries]. ``scale`` is positive and holds log2(e), ``by`` is without it. All else
    is as `pit_tvm.schedules.cuda_masked_attention.masked_attention` has it; lists of keys are those
    of the mask that is turned.

    Raises
    ------
    ScheduleError (a ValueError) for what cannot be built
    """
    tile.check("attention_gradients")
    if max(tile.deep, tile.wide) > MOST_WIDE_GRADIENT:
        expected = f"at most {MOST_WIDE_GRADIENT} columns"
        raise ScheduleError(mismatch("attention_gradients", expected, tile))
    return gradients_by_lists.specialize(tile=tile)
