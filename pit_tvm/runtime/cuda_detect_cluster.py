"""CUDA kernel for group ids that one cluster of CTAs reads once: the positions of every group.

The ids stay in registers while CTAs tell each other, through the cluster's shared memory, how many
of each group they hold. Every CTA has a multiprocessor to itself (more than 32 registers).
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from ..schedules.bits import below
from ..schedules.dependent import after_predecessor
from .cuda_detect_device import AT_ONCE, WARP, lanes_of_group, load_ids, popcount, tell

CTAS = 8
THREADS = 1024
MOST_GROUPS = 256
STEP = CTAS * THREADS  # ids of all threads together, one of each
MOST_IDS = 3 * STEP  # beyond them other kernels, of more CTAs, are done sooner
_WARPS = THREADS // WARP


@T.inline
def _rank_in_warp(places, loaded, tally, each, groups, warp, lane):
    """places[u] = ids of the group of loaded[u] before it in this warp's part; tally gets all."""
    for u in T.unroll(AT_ONCE):
        if u * WARP < each:
            same: T.uint32 = lanes_of_group(loaded[u], groups)
            run: T.int32 = 0
            if loaded[u] >= 0:
                run = tally[warp * MOST_GROUPS + loaded[u]]
            places[u] = run + popcount(T.bitwise_and(same, below(lane)))
            T.cuda.warp_sync()
            if (loaded[u] >= 0) & (T.bitwise_and(same, below(lane)) == T.uint32(0)):
                tally[warp * MOST_GROUPS + loaded[u]] = run + popcount(same)
            T.cuda.warp_sync()


@T.inline
def _tell_counts(tally, told, rank, thread):
    """By a thread for each group: ``tally`` becomes the sums of the warps before; all CTAs of the
    cluster are told this one's sum of all warps."""
    run: T.int32 = 0
    for w in T.unroll(_WARPS):
        own: T.int32 = tally[w * MOST_GROUPS + thread]
        tally[w * MOST_GROUPS + thread] = run
        run = run + own
    for other in T.unroll(CTAS):
        tell(T.address_of(told[rank * MOST_GROUPS + thread]), other, run)


def cluster_groups(bits: int) -> tvm.tirx.PrimFunc:
    """Positions in ``src`` (size,) of every group id; each warp takes ``each`` neighbours.

    ``each`` is a multiple of 32, at most 256, and 256 * ``each`` is at least size. ``ids`` (groups,
    capacity) and ``count`` (groups,), int32, of at most `MOST_GROUPS` groups.
    """

    @T.prim_func
    def kernel(
        src: T.Buffer(("size",), f"int{bits}", align=bits // 8),
        each: T.int32,
        ids: T.Buffer(("groups", "capacity"), "int32", align=4),
        count: T.Buffer(("groups",), "int32", align=4),
    ):
        size, groups = T.int32(), T.int32()
        T.device_entry()
        cta = T.cta_id_in_cluster([CTAS])
        _block = T.cta_id([CTAS])
        thread = T.thread_id([THREADS])
        rank: T.int32 = cta
        lane: T.let = T.truncmod(thread, WARP)
        warp: T.let = T.truncdiv(thread, WARP)
        # Of each warp: its ids of each group, then where it puts the first of them.
        tally = T.alloc_shared([_WARPS * MOST_GROUPS], "int32")
        told = T.alloc_shared([CTAS * MOST_GROUPS], "int32")  # ids of each CTA, of each group
        loaded = T.alloc_local([AT_ONCE], "int32")
        places = T.alloc_local([AT_ONCE], "int32")
        first: T.int32 = (rank * _WARPS + warp) * each
        at: T.int32 = lane
        while at < groups:
            tally[warp * MOST_GROUPS + at] = 0
            at = at + WARP
        # No CTA may be written to before it has begun.
        T.ptx.barrier.cluster.arrive()
        T.ptx.barrier.cluster.wait()
        after_predecessor()
        load_ids(loaded, src, first + lane, WARP, T.min(first + each, size), groups, bits)
        _rank_in_warp(places, loaded, tally, each, groups, warp, lane)
        T.cuda.cta_sync()
        if thread < groups:
            _tell_counts(tally, told, rank, thread)
        T.ptx.barrier.cluster.arrive()
        T.ptx.barrier.cluster.wait()
        if thread < groups:
            before: T.int32 = 0
            total: T.int32 = 0
            for other in T.unroll(CTAS):
                if other == rank:
                    before = total
                total = total + told[other * MOST_GROUPS + thread]
            told[rank * MOST_GROUPS + thread] = before
            if rank == 0:
                count[thread] = total
        T.cuda.cta_sync()
        for u in T.unroll(AT_ONCE):
            if loaded[u] >= 0:
                place: T.int32 = (
                    told[rank * MOST_GROUPS + loaded[u]]
                    + tally[warp * MOST_GROUPS + loaded[u]]
                    + places[u]
                )
                ids[T.int64(loaded[u]), T.int64(place)] = first + u * WARP + lane

    return kernel
