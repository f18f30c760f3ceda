"""CUDA kernel that reads slots of columns once: straight to the lists of their live rows.

A strip is one slot of columns, or several that lie within 128 bytes of a row. A cluster of CTAs
shares its rows and tells each other how many live, so nothing is written but the lists. Entries,
``keep`` and bits are those of `cuda_detect_columns`.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from ..schedules.bits import below, lowest
from ..schedules.dependent import after_predecessor
from .cuda_detect_columns import vector_of
from .cuda_detect_device import (
    AT_ONCE,
    BYTES,
    ROOM,
    WARP,
    cta_scan,
    cut,
    full_warp,
    live_bits,
    popcount,
    some_live,
    tell,
)
from .cuda_detect_rows import load_rows

# Clusters of small CTAs begin soonest: an H200 takes 7.9 us for 4096 x 4096 bytes by these, 9.0 by
# two of 1024 threads, 8.5 by four of 512, and 11.8 by four of 1024.
CTAS = 8  # of a cluster
THREADS = 256
MOST_WORDS = THREADS  # of 32 rows of one slot, in one CTA
LANES = 8  # that share a row: AT_ONCE loads of a warp are 32 rows
STRIP_BYTES = LANES * BYTES
MOST_SLOTS = LANES  # of a strip
_WARPS = THREADS // WARP


@T.inline
def _vote(votes, loaded, kept, at, row_bytes, row, rows, left, wide, bits):
    """votes[u] = the lanes with a live entry in their 16 bytes, `load_rows`, of a fourth row."""
    load_rows(loaded, at, row_bytes, WARP // LANES, row, rows, left, wide, bits)
    for u in T.unroll(AT_ONCE):
        some: T.uint32 = some_live(loaded, u, kept, bits)
        votes[u] = T.cuda.ballot_sync(full_warp(), T.int32(some != T.uint32(0)))


@T.inline
def _tell_counts(told, place, before, count, slot0, slots, several, high, rank, thread):
    """By a thread for each slot: all CTAs are told how many live in this one's part; ``place``
    becomes the place of the first of them, less ``before``, and count gets the sum."""
    if thread < several:
        for other in T.unroll(CTAS):
            tell(
                T.address_of(told[rank * MOST_SLOTS + thread]),
                other,
                before[(thread + 1) * high] - before[thread * high],
            )
    T.ptx.barrier.cluster.arrive()
    T.ptx.barrier.cluster.wait()
    if thread < several:
        earlier: T.int32 = 0
        found: T.int32 = 0
        for other in T.unroll(CTAS):
            if other == rank:
                earlier = found
            found = found + told[other * MOST_SLOTS + thread]
        place[thread] = earlier - before[thread * high]
        if (rank == 0) & (slot0 + thread < slots):
            count[slot0 + thread] = found


@T.inline
def _write_lists(ids, words, place, before, slot0, row0, several, high, thread):
    """The rows of the bits in ``words``, eight of them by one thread."""
    at: T.int32 = thread
    while at < several * high * 4:
        word: T.let = T.shift_right(at, 2)
        first: T.let = T.bitwise_and(at, 3) * 8
        slot: T.let = T.truncdiv(word, high)
        alive: T.uint32 = words[word]
        into: T.int32 = place[slot] + before[word] + popcount(T.bitwise_and(alive, below(first)))
        row: T.int32 = row0 + T.truncmod(word, high) * 32 + first
        alive = T.bitwise_and(T.shift_right(alive, T.uint32(first)), T.uint32(255))
        while alive != T.uint32(0):
            ids[T.int64(slot0 + slot), T.int64(into)] = row + lowest(alive)
            into = into + 1
            alive = T.bitwise_and(alive, alive - T.uint32(1))
        at = at + THREADS


def list_rows(bits: int) -> tvm.tirx.PrimFunc:
    """Live rows of every slot of ``width`` columns, ascending; `CTAS` to a strip of slots.

    A CTA takes ``high * 32`` rows of the ``several`` slots of a strip, ``several * high`` at most
    `MOST_WORDS`. ``across`` lanes read 16 bytes each of a slot's row, ``chunks`` times; no 16 bytes
    belong to two slots. ``wide``: rows begin at multiples of 16 bytes.
    """
    vector = vector_of(bits)

    @T.prim_func
    def kernel(
        src: T.int64,
        row_bytes: T.int64,
        rows: T.int32,
        cols: T.int32,
        width: T.int32,
        several: T.int32,
        across: T.int32,
        chunks: T.int32,
        high: T.int32,
        wide: T.int32,
        keep: T.int32,
        ids: T.Buffer(("slots", "capacity"), "int32", align=4),
        count: T.Buffer(("slots",), "int32", align=4),
    ):
        slots = T.int32()
        T.device_entry()
        rank_in = T.cta_id_in_cluster([CTAS])
        block = T.cta_id([T.truncdiv(slots + several - 1, several) * CTAS])
        thread = T.thread_id([THREADS])
        rank: T.int32 = rank_in
        lane: T.let = T.truncmod(thread, WARP)
        words = T.alloc_shared([MOST_WORDS], "uint32")
        before = T.alloc_shared([MOST_WORDS + 1], "int32")
        totals = T.alloc_shared([WARP], "int32")
        told = T.alloc_shared([CTAS * MOST_SLOTS], "int32")  # live rows of each CTA, of each slot
        place = T.alloc_shared([MOST_SLOTS], "int32")  # of the first of a slot, less ``before``
        loaded = T.alloc_local([AT_ONCE, 4], "uint32")
        votes = T.alloc_local([AT_ONCE], "uint32")
        kept = T.alloc_local([4], "uint32")
        value = T.alloc_local([1], "int32")
        total = T.alloc_local([1], "int32")
        slot0: T.int32 = T.truncdiv(block, CTAS) * several
        row0: T.int32 = rank * high * 32
        begin: T.int32 = slot0 * width
        end: T.int32 = T.min(begin + several * width, cols)
        length: T.int64 = T.truncdiv(T.int64(cols) * bits + 7, 8)
        # The lanes of this lane's slot, among those that share a row, in every byte.
        peers: T.uint32 = T.uint32(0)
        if lane < several:
            peers = (T.shift_left(T.uint32(1), T.uint32(across)) - T.uint32(1)) * T.uint32(
                0x01010101
            )
            peers = T.shift_left(peers, T.uint32(lane * across))
        column: T.int32 = 0
        offset: T.int64 = 0
        left: T.int32 = 0
        alive: T.uint32 = T.uint32(0)
        row: T.int32 = 0
        at: T.int32 = T.truncdiv(thread, WARP)
        T.ptx.barrier.cluster.arrive()
        after_predecessor()
        while at < high:
            alive = T.uint32(0)
            column = begin + T.bitwise_and(lane, LANES - 1) * vector
            row = row0 + at * 32 + T.truncdiv(lane, LANES)
            for _ in T.serial(chunks):
                offset = T.truncdiv(T.int64(column) * bits, 8)
                left = 0
                if column < end:
                    left = T.int32(T.min(length - offset, T.int64(ROOM)))
                for w in T.unroll(4):
                    kept[w] = T.uint32(keep)
                    if bits == 1:
                        kept[w] = cut(T.uint32(0xFFFFFFFF), column + w * 32, begin, end)
                _vote(votes, loaded, kept, src + offset, row_bytes, row, rows, left, wide, bits)
                for half in T.unroll(2):
                    alive = T.bitwise_or(
                        alive,
                        T.shift_left(
                            live_bits(T.address_of(votes[half * 4]), peers, 8),
                            T.uint32(half * 16),
                        ),
                    )
                column = column + LANES * vector
            if lane < several:
                words[lane * high + at] = alive
            at = at + _WARPS
        T.cuda.cta_sync()
        value[0] = 0
        if thread < several * high:
            value[0] = popcount(words[thread])
        cta_scan(value, total, totals, thread, _WARPS)
        before[thread] = value[0]
        if thread == 0:
            before[MOST_WORDS] = total[0]
        T.cuda.cta_sync()
        # No CTA may be written to before it has begun.
        T.ptx.barrier.cluster.wait()
        _tell_counts(told, place, before, count, slot0, slots, several, high, rank, thread)
        T.cuda.cta_sync()
        _write_lists(ids, words, place, before, slot0, row0, several, high, thread)

    return kernel
