"""Attention over the keys that lists name, on NVIDIA GPUs from Ampere on (mma.sync).

A CTA takes a tile of queries of one head, gathers the keys and values that its list names while
they go to shared memory (SRead; PIT, SOSP'23, section 3.2), and adds up weighted values as one does
over all keys in turn: sums are scaled down whenever a larger score is met (Milakov and Gimelshein,
2018). Scores that a query's bit excludes weigh nothing. Rows and columns beyond the operands are
zeros in shared memory.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from .cuda_masked_attention_parts import (
    LANES,
    PART_FACTS,
    QUERIES,
    THREADS,
    WORDS,
    AttentionTile,
    QueryTile,
    comes_last,
)
from .dependent import after_predecessor


@T.jit
def attention_by_lists(
    q_h: T.handle,
    k_h: T.handle,
    v_h: T.handle,
    ids_h: T.handle,
    bits_h: T.handle,
    work_h: T.handle,
    order_h: T.handle,
    laid_h: T.handle,
    arrived_h: T.handle,
    out_h: T.handle,
    ordered: T.int32,
    slots: T.int32,
    batch: T.int32,
    heads: T.int32,
    queries: T.int32,
    dim: T.int32,
    v_dim: T.int32,
    share: T.int32,
    plane_batch: T.int32,
    plane_head: T.int32,
    q_batch: T.int64,
    q_head: T.int64,
    q_row: T.int64,
    k_batch: T.int64,
    k_head: T.int64,
    k_row: T.int64,
    v_batch: T.int64,
    v_head: T.int64,
    v_row: T.int64,
    out_batch: T.int64,
    out_head: T.int64,
    out_row: T.int64,
    scale: T.float32,
    *,
    tile: T.constexpr,
):
    """The template; ``masked_attention`` explains it."""
    q_size, k_size, v_size, out_size = T.int64(), T.int64(), T.int64(), T.int64()
    planes, lines, capacity, places = T.int32(), T.int32(), T.int32(), T.int32()
    items, numbers, counters = T.int32(), T.int32(), T.int32()
    q = T.match_buffer(q_h, (q_size,), tile.dtype, align=16)
    k = T.match_buffer(k_h, (k_size,), tile.dtype, align=16)
    v = T.match_buffer(v_h, (v_size,), tile.dtype, align=16)
    ids = T.match_buffer(ids_h, (planes, lines, capacity), "int32", align=16)
    bits = T.match_buffer(bits_h, (planes, lines, WORDS, capacity), "uint32", align=16)
    work = T.match_buffer(work_h, (planes, items, PART_FACTS), "int32", align=4)
    order = T.match_buffer(order_h, (planes, places), "int32", align=4)
    laid = T.match_buffer(laid_h, (numbers,), "float32", align=4)
    arrived = T.match_buffer(arrived_h, (counters,), "int32", align=4)
    out = T.match_buffer(out_h, (out_size,), tile.dtype, align=16)
    STAGES = T.meta_var(tile.stages)
    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.ctas})
    item, head, sequence = T.cta_id([items, heads, batch])
    thread = T.thread_id([THREADS])
    own = QueryTile(tile)
    warp: T.let = T.truncdiv(thread, LANES)
    lane: T.let = T.truncmod(thread, LANES)
    own.plane = sequence * plane_batch + head * plane_head
    own.q_at = T.cast(sequence, "int64") * q_batch + T.cast(head, "int64") * q_head
    own.out_at = T.cast(sequence, "int64") * out_batch + T.cast(head, "int64") * out_head
    kv_head: T.int64 = T.cast(T.truncdiv(head, share), "int64")
    own.k_at = T.cast(sequence, "int64") * k_batch + kv_head * k_head
    own.v_at = T.cast(sequence, "int64") * v_batch + kv_head * v_head
    own.begin()
    after_predecessor()
    block: T.int32 = work[own.plane, item, 0]
    if block >= 0:
        first: T.int32 = work[own.plane, item, 1]
        end: T.int32 = work[own.plane, item, 2]
        slot0: T.int32 = work[own.plane, item, 3]
        own.line = T.min(block, lines - 1)
        own.fetch_queries(q, q_row, order, ordered, block * QUERIES, queries, dim, thread)
        for u in T.unroll(STAGES - 1):
            own.look(ids, first + u, end, lane)
            own.fetch(u, k, k_row, dim, v, v_row, v_dim, bits, first + u, end, thread)
        own.look(ids, first + STAGES - 1, end, lane)
        if tile.held:
            T.ptx.cp.async_.wait_group(STAGES - 1)
            T.cuda.cta_sync()
            for s in T.unroll(tile.deep // 16):
                own.load_queries(s, s * 4, warp, lane)
        for i in T.serial(end - first):
            T.ptx.cp.async_.wait_group(STAGES - 2)
            T.cuda.cta_sync()
            slot: T.let = T.truncmod(i, STAGES)
            coming: T.let = T.truncmod(i + STAGES - 1, STAGES)
            ahead: T.let = first + i + STAGES - 1
            own.fetch(coming, k, k_row, dim, v, v_row, v_dim, bits, ahead, end, thread)
            own.look(ids, ahead + 1, end, lane)
            own.score(slot, warp, lane)
            own.exclude(slot, warp, lane)
            own.weigh(scale)
            own.add(slot, lane)
        T.ptx.cp.async_.wait_group(0)
        T.cuda.cta_sync()  # queries of other threads may be under way where there is no key
        stores: T.int32 = 1
        if slot0 >= 0:
            place: T.int32 = (sequence * heads + head) * slots + slot0
            part: T.int32 = work[own.plane, item, 4]
            parts: T.int32 = work[own.plane, item, 5]
            own.lay_out(laid, (place + part) * tile.laid, thread)
            T.cuda.cta_sync()
            if thread == 0:
                own.last[0] = comes_last(arrived.ptr_to([place]), parts)
            T.cuda.cta_sync()
            stores = own.last[0]
            if stores != 0:
                own.begin()
                for p in T.serial(parts):  # in one order, whoever comes last
                    own.take_in(laid, (place + p) * tile.laid, thread, scale)
        if stores != 0:
            own.store(out, out_row, v_dim, warp, lane)


def masked_attention(tile: AttentionTile) -> tvm.tirx.PrimFunc:
    """``out = softmax(scale * q @ k.T) @ v`` over the keys that lists name: q, k, v, ids, bits,
    work, order, laid, arrived, out, and numbers. Lists are those of
    `pit_tvm.runtime.cuda_mask_lists`, what CTAs do of `pit_tvm.runtime.cuda_mask_parts`.

    q, k, v and out: flat, of ``tile.dtype``; element ``c`` of a row lies at ``batch * *_batch +
    head * *_head + row * *_row + c``, all of these multiples of 8, and addresses of 16 bytes. Of
    ``dim`` columns of q and k and ``v_dim`` of v and out there are at most ``tile.deep`` and
    ``tile.wide``; both are multiples of 8. ``share`` heads of q have the same head of k and v. The
    list of a tile is in plane ``batch * plane_batch + head * plane_head``; with a single line all
    tiles have that one. ``ordered`` 1: order (planes, places) names the queries of tiles, -1 for
    none; with 0 they follow one another, and any array stands in its place. Parts of cut tiles are
    left in laid, ``tile.laid`` float32 for each of ``slots`` of each head and sequence, and counted
    in arrived, as many zeros, which are zeros afterwards; the CTA that comes last adds them up in
    order. ``scale`` is positive and holds log2(e). A query that sees no key gets zeros.

    Raises
    ------
    ScheduleError (a ValueError) for what cannot be built
    """
    tile.check()
    return attention_by_lists.specialize(tile=tile)
