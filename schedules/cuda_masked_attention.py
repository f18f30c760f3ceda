"""Attention over the keys that lists name, on NVIDIA GPUs from Ampere on.

A CTA takes a tile of queries of one head, gathers the keys and values that its list names, and adds
up weighted values as one does over all keys in turn: sums are scaled down whenever a larger score
is met (Milakov and Gimelshein, 2018). Scores that a query's bit excludes weigh nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm
from tvm.script import tirx as T

from .cuda_listed_products import KEYS, ROWS, cap, load
from .cuda_listed_rows import (
    ALL,
    LANES,
    PART_FACTS,
    QUERIES,
    SLOTS,
    THREADS,
    WORDS,
    ListedRows,
    ListedTile,
    ctas_of,
)
from .dependent import after_predecessor
from .hopper_combine import PACK


@dataclass(frozen=True)
class AttentionTile(ListedTile):
    """Queries and keys are ``deep``, values ``wide``; ``sinks``: the type of heads' sinks, if they
    have any."""

    sinks: str = ""

    @property
    def held(self) -> bool:
        """Whether queries stay in registers, which gains a group nothing."""
        return not self.grouped and self.deep <= 128

    @property
    def laid(self) -> int:
        """float32 numbers that a thread leaves of a part of a tile: sums, scores, weights."""
        return self.wide // 2 + 4

    @property
    def ctas(self) -> int:
        """CTAs that share a multiprocessor, by its registers and shared memory."""
        return self._ctas(self.slots)

    @property
    def slots(self) -> tuple[int, int]:
        """One of values, where another CTA has room then, and of keys, where one would be alone:
        what it costs to wait for rows, other CTAs make up for."""
        slots = max((SLOTS, SLOTS), (SLOTS, 1), key=self._ctas)
        return slots if self._ctas(slots) > 1 else (1, 1)

    def _ctas(self, slots: tuple[int, int]) -> int:
        most = 2 if self.wide > 128 else 3 if self.wide > 64 else 4  # by sums in registers
        most = most if self.grouped else max(2, most - 1)
        return ctas_of(QUERIES * max(self.deep, self.wide), self, slots, most)


_MOST = 2.0**12  # that weights of a lane's query may add up to in a step, which float16 holds
_LOG2_E = math.log2(math.e)
_UNSEEN = -3.4028234663852886e38  # float32's lowest: with it for a peak, any score weighs too much


@T.meta_class
class _Queries(ListedRows):
    """The queries of a tile, and what they have met."""

    def __init__(self, tile: AttentionTile) -> None:
        super().__init__(tile, 4 * (tile.deep // 16 if tile.held else 1))
        self.heads = self.pool.alloc((QUERIES,), "int32", align=16)
        self.q, self.out = self.region(max(tile.deep, tile.wide))
        self.pool.commit()
        self.sums = T.alloc_local([tile.wide // 2], "float32")
        self.peak = T.alloc_local([2], "float32")
        self.weight = T.alloc_local([2], "float32")
        self.base = T.alloc_local([2], "float32")
        self.step = T.alloc_local([2], "float32")
        self.pair = T.alloc_local([2], "float32")
        self.scale = T.local_scalar("float32")

    @T.inline
    def begin(self):
        """No key has been seen."""
        for i in T.unroll(self.tile.wide // 2):
            self.sums[i] = T.float32(0)
        for r in T.unroll(2):
            self.peak[r] = T.float32("-inf")
            self.weight[r] = T.float32(0)
            self.base[r] = T.float32(_UNSEEN)

    @T.inline
    def weigh(self):
        """``p``: weights of ``scores``, by the peak of earlier steps as long as none is larger by
        much; else sums of earlier steps are scaled down to a new one. That a step's weights do not
        add up to much tells it without looking for its largest score."""
        self._raise()
        within: T.let = (self.step[0] <= T.float32(_MOST)) & (self.step[1] <= T.float32(_MOST))
        if T.cuda.ballot_sync(T.uint32(ALL), T.cast(within, "int32")) != T.uint32(ALL):
            for r in T.unroll(2):
                top: T.float32 = self.peak[r]
                for j in T.unroll(KEYS // 8):
                    for e in T.unroll(2):
                        top = T.max(top, self.scores[j * 4 + r * 2 + e])
                for s in T.unroll(2):
                    top = T.max(top, T.cuda.__shfl_xor_sync(T.uint32(ALL), top, 1 << s, 32))
                self._measure_by(r, top)
                self.weight[r] = self.weight[r] * self.factor[r]
            for i in T.unroll(self.tile.wide // 2):
                self.sums[i] = self.sums[i] * self.factor[i // 2 % 2]
            self._raise()
        for r in T.unroll(2):
            self.weight[r] = self.weight[r] + self.step[r]

    @T.inline
    def _raise(self):
        """2 to the power of scores, packed, and ``step``: what they add up to."""
        for r in T.unroll(2):
            self.step[r] = T.float32(0)
        for i in T.unroll(KEYS // 4):
            r = T.meta_var(i % 2)
            for e in T.unroll(2):
                T.ptx["ex2.approx.ftz.f32"](
                    self.pair[e], self.scores[i * 2 + e] * self.scale - self.base[r]
                )
                self.step[r] = self.step[r] + self.pair[e]
            T.ptx[PACK[self.tile.dtype]](self.p[i], self.pair[1], self.pair[0])

    @T.inline
    def _measure_by(self, r, top):
        """``top`` becomes the peak; ``factor`` is what this makes of earlier sums."""
        # Of a query that has seen no key yet, nothing may become a difference of infinities.
        self.base[r] = T.if_then_else(
            top == T.float32("-inf"), T.float32(_UNSEEN), top * self.scale
        )
        T.ptx["ex2.approx.ftz.f32"](self.factor[r], self.peak[r] * self.scale - self.base[r])
        self.peak[r] = top

    @T.inline
    def lay_out(self, laid, at, step):
        """Leave what the thread has, for the CTA that adds up the tile."""
        half = T.meta_var(self.tile.wide // 2)
        for i in T.unroll(half):
            laid[at + i * step] = self.sums[i]
        for r in T.unroll(2):
            laid[at + (half + r) * step] = self.peak[r]
            laid[at + (half + 2 + r) * step] = self.weight[r]

    @T.inline
    def take_in(self, laid, at, step):
        """Add what a thread has left."""
        half = T.meta_var(self.tile.wide // 2)
        for r in T.unroll(2):
            other: T.float32 = laid[at + (half + r) * step]
            self._measure_by(r, T.max(self.peak[r], other))
            T.ptx["ex2.approx.ftz.f32"](self.base[r], other * self.scale - self.base[r])
            self.weight[r] = (
                self.weight[r] * self.factor[r] + laid[at + (half + 2 + r) * step] * self.base[r]
            )
        for i in T.unroll(half):
            self.sums[i] = (
                self.sums[i] * self.factor[i // 2 % 2] + laid[at + i * step] * self.base[i // 2 % 2]
            )

    @T.inline
    def end(self, weights, at, queries, told, sinks, first, warp, lane):
        """``factor``: one by the sum of weights, 0 where no key is seen. ``told`` 1: its logarithm
        to the base of 2 goes to ``weights``, of the scores as they are scaled; infinity for 0.
        ``sinks`` are those of heads from ``first`` on."""
        for r in T.unroll(2):
            for s in T.unroll(2):
                self.weight[r] = self.weight[r] + T.cuda.__shfl_xor_sync(
                    T.uint32(ALL), self.weight[r], 1 << s, 32
                )
            if self.tile.sinks != "":
                self._sink(r, sinks, first + self.heads[warp * ROWS + r * 8 + T.truncdiv(lane, 4)])
            self.factor[r] = T.if_then_else(
                self.weight[r] == T.float32(0), T.float32(0), T.float32(1) / self.weight[r]
            )
            own: T.let = warp * ROWS + r * 8 + T.truncdiv(lane, 4)
            row: T.int32 = self.rows[own]
            if (told != 0) & (row >= 0) & (T.truncmod(lane, 4) == 0):
                T.ptx["lg2.approx.ftz.f32"](self.base[r], self.weight[r])
                weights[at + T.cast(self.heads[own] * queries + row, "int64")] = T.if_then_else(
                    self.weight[r] == T.float32(0),
                    T.float32("inf"),
                    self.peak[r] * self.scale + self.base[r],
                )

    @T.inline
    def _sink(self, r, sinks, head):
        """A head's sink is one more score, if a key is seen. Far above others it outweighs them."""
        if self.weight[r] != T.float32(0):
            sunk: T.let = T.cast(sinks[head], "float32") * T.float32(_LOG2_E)
            T.ptx["ex2.approx.ftz.f32"](self.pair[0], sunk - self.peak[r] * self.scale)
            self.weight[r] = self.weight[r] + self.pair[0]


@T.jit
def attention_by_lists(
    q_h: T.handle,
    k_h: T.handle,
    v_h: T.handle,
    ids_h: T.handle,
    bits_h: T.handle,
    order_h: T.handle,
    work_h: T.handle,
    laid_h: T.handle,
    arrived_h: T.handle,
    sinks_h: T.handle,
    out_h: T.handle,
    weights_h: T.handle,
    ordered: T.int32,
    slots: T.int32,
    told: T.int32,
    batch: T.int32,
    heads: T.int32,
    beside: T.int32,
    queries: T.int32,
    shared: T.int32,
    fit: T.int32,
    dim: T.int32,
    v_dim: T.int32,
    share: T.int32,
    plane_batch: T.int32,
    plane_head: T.int32,
    q_batch: T.int64,
    q_head: T.int64,
    q_row: T.int64,
    q_jump: T.int64,
    k_batch: T.int64,
    k_head: T.int64,
    k_row: T.int64,
    v_batch: T.int64,
    v_head: T.int64,
    v_row: T.int64,
    out_batch: T.int64,
    out_head: T.int64,
    out_row: T.int64,
    out_jump: T.int64,
    scale: T.float32,
    bend: T.float32,
    *,
    tile: T.constexpr,
):
    """The template; ``masked_attention`` explains it."""
    q_size, k_size, v_size, out_size = T.int64(), T.int64(), T.int64(), T.int64()
    planes, lines, capacity, places = T.int32(), T.int32(), T.int32(), T.int32()
    items, numbers, counters, told_rows = T.int32(), T.int32(), T.int32(), T.int64()
    sunk = T.int32()
    q = T.match_buffer(q_h, (q_size,), tile.dtype, align=16)
    k = T.match_buffer(k_h, (k_size,), tile.dtype, align=16)
    v = T.match_buffer(v_h, (v_size,), tile.dtype, align=16)
    ids = T.match_buffer(ids_h, (planes, lines, capacity), "int32", align=16)
    bits = T.match_buffer(bits_h, (planes, lines, WORDS, capacity), "int32", align=16)
    work = T.match_buffer(work_h, (planes, items, PART_FACTS), "int32", align=4)
    order = T.match_buffer(order_h, (planes, places), "int32", align=4)
    laid = T.match_buffer(laid_h, (numbers,), "float32", align=4)
    arrived = T.match_buffer(arrived_h, (counters,), "int32", align=4)
    sinks = T.match_buffer(sinks_h, (sunk,), tile.sinks or "float32", align=2)
    out = T.match_buffer(out_h, (out_size,), tile.dtype, align=16)
    weights = T.match_buffer(weights_h, (told_rows,), "float32", align=4)
    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.ctas})
    place, group = T.cta_id([items * beside, T.truncdiv(batch * heads + beside - 1, beside)])
    thread = T.thread_id([THREADS])
    own = _Queries(tile)
    warp: T.let = T.truncdiv(thread, LANES)
    lane: T.let = T.truncmod(thread, LANES)
    own.find(place, group, beside, heads)
    number: T.int64 = T.cast(own.sequence, "int64")
    own_head: T.int64 = T.cast(own.head, "int64")
    kv_head: T.int64 = T.cast(T.truncdiv(own.head, share), "int64")
    own.plane = own.sequence * plane_batch + own.head * plane_head
    own.first_at = number * k_batch + kv_head * k_head
    own.second_at = number * v_batch + kv_head * v_head
    own.scale = scale
    own.bend = bend
    own.begin()
    after_predecessor()
    block: T.int32 = -1
    if own.number < batch * heads:
        block = work[own.plane, own.item, 0]
    if block >= 0:
        first: T.int32 = work[own.plane, own.item, 1]
        end: T.int32 = work[own.plane, own.item, 2]
        own.begin_work(work, T.min(block, lines - 1))
        own.look(ids, first, end, lane)
        own.learn(order, ordered, block, queries, thread, shared, fit)
        q_at: T.int64 = number * q_batch + own_head * q_head
        if first < end:
            own.fetch_first(0, k, k_row, dim, bits, first, thread)
            if tile.slots[1] > 1:
                own.fetch_second(0, v, v_row, v_dim, thread)
        own.fetch_own(own.q, tile.deep, q, q_at, q_row, dim, thread, q_jump)
        T.ptx.cp.async_.commit_group()
        own.look(ids, first + 1, end, lane)
        if tile.held:
            own.arrive()
            for s in T.unroll(tile.deep // 16):
                load(own, own.q, s, s * 4, warp, lane)
        for i in T.serial(end - first):
            own.settle()
            own.arrive()
            slot: T.let = T.truncmod(i, SLOTS)
            coming: T.let = T.truncmod(i + 1, SLOTS)
            ahead: T.let = first + i + 1
            held = T.meta_var(0 if tile.held else -1)
            k_slot = T.meta_var(slot if tile.slots[0] > 1 else 0)
            v_slot = T.meta_var(slot if tile.slots[1] > 1 else 0)
            own.score(own.scores, own.q, held, own.first, k_slot, tile.deep, warp, lane)
            if tile.slots[1] == 1:
                own.fetch_second(0, v, v_row, v_dim, thread)
                T.ptx.cp.async_.commit_group()
            if tile.slots[0] > 1:
                if ahead < end:
                    own.fetch_first(coming, k, k_row, dim, bits, ahead, thread)
                    if tile.slots[1] > 1:
                        own.fetch_second(coming, v, v_row, v_dim, thread)
                T.ptx.cp.async_.commit_group()
                own.look(ids, ahead + 1, end, lane)
            own.see(k_slot, warp, lane)
            own.settle()
            if tile.capped:
                cap(own)
            own.exclude(own.scores, "-inf", k_slot, warp, lane)
            own.weigh()
            if tile.slots[1] == 1:
                own.arrive(tile.slots[0] - 1)
            if tile.slots[0] == 1:
                if ahead < end:
                    own.fetch_first(0, k, k_row, dim, bits, ahead, thread)
                T.ptx.cp.async_.commit_group()
                own.look(ids, ahead + 1, end, lane)
            own.add(own.sums, own.second, v_slot, tile.wide, lane, 0)
        own.settle()
        own.arrive()  # queries of other threads may be under way where there is no key
        own.join(laid, arrived, own.number * slots, queries * shared, thread)
        if own.stores != 0:
            told_at: T.int64 = T.cast(own.number, "int64") * T.cast(queries * shared, "int64")
            first_head: T.let = own.head * shared
            own.end(weights, told_at, queries, told, sinks, first_head, warp, lane)
            out_at: T.int64 = number * out_batch + own_head * out_head
            own.store(
                own.sums, own.out, tile.wide, out, out_at, out_row, v_dim, warp, lane, out_jump
            )


def masked_attention(tile: AttentionTile) -> tvm.tirx.PrimFunc:
    """``out = softmax(scale * q @ k.T) @ v`` over the keys that lists name: q, k, v, ids, bits,
    order, work, laid, arrived, sinks, out, weights, and numbers. Lists are those of
    `pit_tvm.runtime.cuda_mask_lists`, what CTAs do of `pit_tvm.runtime.cuda_mask_parts`.

    q, k, v and out: flat, of ``tile.dtype``; element ``c`` of a row lies at ``batch * *_batch +
    head * *_head + row * *_row + c``, all of these multiples of 8, and addresses of 16 bytes.
    Of ``dim`` columns of q and k and ``v_dim`` of v and out there are at most ``tile.deep`` and
    ``tile.wide``; both are multiples of 8. A tile has ``fit`` queries, each of ``shared`` heads
    that see the same, ``*_jump`` apart: what is called a head here is a group of these. ``share``
    of them have the same head of k and v; CTAs of ``beside``, of all sequences, run side by side.
    The list of a tile is in plane ``batch * plane_batch + head * plane_head``; with a single line
    all tiles have that one. ``ordered`` 1: order (planes, places) names the queries of tiles, -1
    for none; with 0 they follow one another, and any array stands in its place. Parts of cut tiles
    are left in laid, ``tile.laid`` float32 of each of `holders_of` the rows for each of ``slots``
    of each head and sequence, and counted in arrived, as many zeros as there are slots, which are
    zeros afterwards; the CTA that comes last adds them up in order. ``told`` 1: weights, flat
    [batch, heads, shared, queries], gets what gradients need of a query's weights, the logarithm of
    their sum to the base of 2. ``scale`` is positive and holds log2(e); with ``tile.capped`` scores
    become ``tanh(bend * score) / bend`` before. A query that sees no key
    gets zeros, and infinity. sinks: with ``tile.sinks``, for every head of queries the score of one
    more key, whose value is 0 (Xiao and others, 2024), else any array.

    Raises
    ------
    ScheduleError (a ValueError) for what cannot be built
    """
    tile.check("masked_attention")
    return attention_by_lists.specialize(tile=tile)
