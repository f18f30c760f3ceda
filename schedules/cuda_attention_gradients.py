"""Gradients of attention over the keys that lists name, on NVIDIA GPUs from Ampere on.

    p = exp2(scale * q @ k.T - weights),  d = p * (dout @ v.T - drops)
    dq = d @ k,    dk = d.T @ q,    dv = p.T @ dout

where a query sees a key, ``drops`` being sums of ``dout * out`` along rows (Dao and others, 2022).
One template: a CTA has a tile of queries and the keys that any of them sees, and tells their drops,
or, after that, a tile of keys and the queries that see any of them, from lists of the mask that is
turned. No two CTAs write one row, so equal calls give equal bits.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch

from .cuda_gradient_rows import GradientRows, GradientTile
from .cuda_listed_products import KEYS, cap, load, pack
from .cuda_listed_rows import LANES, PART_FACTS, SLOTS, THREADS, WORDS
from .dependent import after_predecessor

MOST_WIDE_GRADIENT = 128  # registers hold the sums of no more columns


@T.jit
def gradients_by_lists(
    own_a_h: T.handle,
    own_b_h: T.handle,
    first_h: T.handle,
    second_h: T.handle,
    result_h: T.handle,
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
    beside: T.int32,
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
    result_batch: T.int64,
    result_head: T.int64,
    result_row: T.int64,
    made_a_batch: T.int64,
    made_a_head: T.int64,
    made_a_row: T.int64,
    made_b_batch: T.int64,
    made_b_head: T.int64,
    made_b_row: T.int64,
    scale: T.float32,
    by: T.float32,
    bend: T.float32,
    *,
    tile: T.constexpr,
):
    """The template; ``attention_gradients`` explains it."""
    a_size, b_size, first_size, second_size = T.int64(), T.int64(), T.int64(), T.int64()
    result_size, made_a_size, made_b_size = T.int64(), T.int64(), T.int64()
    told_rows = T.int64()
    planes, lines, capacity, places = T.int32(), T.int32(), T.int32(), T.int32()
    items, numbers, counters = T.int32(), T.int32(), T.int32()
    own_a = T.match_buffer(own_a_h, (a_size,), tile.dtype, align=16)
    own_b = T.match_buffer(own_b_h, (b_size,), tile.dtype, align=16)
    first = T.match_buffer(first_h, (first_size,), tile.dtype, align=16)
    second = T.match_buffer(second_h, (second_size,), tile.dtype, align=16)
    result = T.match_buffer(result_h, (result_size,), tile.dtype, align=16)
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
    DEEP, WIDE = T.meta_var(tile.deep), T.meta_var(tile.wide)
    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.ctas})
    place, group = T.cta_id([items * beside, T.truncdiv(batch * heads + beside - 1, beside)])
    thread = T.thread_id([THREADS])
    own = GradientRows(tile)
    warp: T.let = T.truncdiv(thread, LANES)
    lane: T.let = T.truncmod(thread, LANES)
    own.find(place, group, beside, heads)
    number: T.int64 = T.cast(own.sequence, "int64")
    q_head: T.int64 = T.cast(own.head, "int64")
    kv_head: T.int64 = T.cast(T.truncdiv(own.head, share), "int64")
    own_head = T.meta_var(kv_head if tile.of_keys else q_head)
    other_head = T.meta_var(q_head if tile.of_keys else kv_head)
    own.plane = own.sequence * plane_batch + own.head * plane_head
    own.first_at = number * first_batch + other_head * first_head
    own.second_at = number * second_batch + other_head * second_head
    own.bend = bend
    told: T.int64 = T.cast(own.number, "int64") * T.cast(queries, "int64")
    own.begin()
    after_predecessor()
    block: T.int32 = -1
    if own.number < batch * heads:
        block = work[own.plane, own.item, 0]
    if block >= 0:
        begin: T.int32 = work[own.plane, own.item, 1]
        end: T.int32 = work[own.plane, own.item, 2]
        own.begin_work(work, T.min(block, lines - 1))
        own.look(ids, begin, end, lane)
        own.learn(order, ordered, block, rows, thread)
        if begin < end:
            own.fetch_first(0, first, first_row, dim, bits, begin, thread)
            own.fetch_second(0, second, second_row, v_dim, thread)
            if tile.of_keys:
                own.fetch_facts(0, weights, drops, told, thread)
        a_at: T.int64 = number * a_batch + own_head * a_head
        b_at: T.int64 = number * b_batch + own_head * b_head
        own.fetch_own(own.own_a, DEEP, own_a, a_at, a_row, dim, thread)
        own.fetch_own(own.own_b, WIDE, own_b, b_at, b_row, v_dim, thread)
        T.ptx.cp.async_.commit_group()
        own.look(ids, begin + 1, end, lane)
        if not tile.of_keys:
            own.learn_weights(weights, told, warp, lane)
            r_at: T.int64 = number * result_batch + q_head * result_head
            own.look_at_results(result, r_at, result_row, v_dim, warp, lane)
            own.arrive()
            own.tell_drops(drops, told, warp, lane)
        if tile.held:
            for s in T.unroll(DEEP // 16):
                load(own, own.own_a, s, s * 4, warp, lane)
            for s in T.unroll(WIDE // 16):
                load(own, own.own_b, s, (DEEP // 16 + s) * 4, warp, lane)
        for i in T.serial(end - begin):
            own.settle()
            own.arrive()
            slot: T.let = T.truncmod(i, SLOTS)
            coming: T.let = T.truncmod(i + 1, SLOTS)
            after: T.let = begin + i + 1
            held_a = T.meta_var(0 if tile.held else -1)
            held_b = T.meta_var(DEEP // 4 if tile.held else -1)
            own.score(own.scores, own.own_a, held_a, own.first, slot, DEEP, warp, lane)
            own.score(own.slopes, own.own_b, held_b, own.second, slot, WIDE, warp, lane)
            if after < end:
                own.fetch_first(coming, first, first_row, dim, bits, after, thread)
                own.fetch_second(coming, second, second_row, v_dim, thread)
                if tile.of_keys:
                    own.fetch_facts(coming, weights, drops, told, thread)
            T.ptx.cp.async_.commit_group()
            own.look(ids, after + 1, end, lane)
            own.see(slot, warp, lane)
            own.settle()
            if tile.capped:
                cap(own)
            own.weigh(slot, scale, lane)
            if tile.of_keys:  # else weights are only factors of slopes
                own.exclude(own.scores, 0, slot, warp, lane)
            own.slope(slot, scale, lane)
            own.exclude(own.slopes, 0, slot, warp, lane)
            if tile.of_keys:
                pack(own, own.scores, KEYS // 4)
                own.add(own.sums_b, own.second, slot, WIDE, lane, KEYS // 4)
            pack(own, own.slopes, 0)
            own.add(own.sums_a, own.first, slot, DEEP, lane, 0)
        own.settle()
        own.arrive()  # rows of other threads may be under way where the list is empty
        own.join(laid, arrived, own.number * slots, rows, thread)
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
    two operands, those of steps, the result, ids, bits, order, work, weights, drops, laid, arrived,
    what is made, and numbers.

    Operands are q and dout, made along k and v, or with ``tile.of_keys`` k and v along q and dout;
    made_a has the shape of the tile's first operand with all ``heads``, made_b of its second, and
    is not read or written without ``of_keys``. ``rows`` are of tiles. weights and drops: flat
    [batch, heads, queries]; drops are written, from the result of attention, without ``of_keys``,
    and read with it, when the result is not. ``scale`` is positive and holds log2(e), ``by`` is
    without it. All else is as `pit_tvm.schedules.cuda_masked_attention.masked_attention` has it;
    lists of keys are those of the mask that is turned.

    Raises
    ------
    ScheduleError (a ValueError) for what cannot be built
    """
    tile.check("attention_gradients")
    if max(tile.deep, tile.wide) > MOST_WIDE_GRADIENT:
        expected = f"at most {MOST_WIDE_GRADIENT} columns"
        raise ScheduleError(mismatch("attention_gradients", expected, tile))
    return gradients_by_lists.specialize(tile=tile)
