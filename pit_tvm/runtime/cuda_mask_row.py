"""CUDA kernel that lists, from the bits of one row, the keys that all queries see."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from ..schedules.bits import below, is_set
from ..schedules.cuda_listed_rows import WORDS
from ..schedules.dependent import after_predecessor
from .cuda_detect_device import WARP, cta_scan, popcount
from .cuda_mask_lists import end_list

THREADS = 256
_WORDS = 64  # of a row, that a CTA lists
_WARPS = THREADS // WARP


def list_row() -> tvm.tirx.PrimFunc:
    """Lists as `cuda_mask_lists.list_keys` makes them, of planes whose one row, lines (planes, 1,
    words), is that of all queries. Each CTA counts the keys before its own, which costs less than
    telling each other.
    """

    @T.prim_func
    def kernel(
        lines: T.Buffer(("planes", 1, "words"), "int32", align=4),
        ids: T.Buffer(("planes", 1, "capacity"), "int32", align=16),
        bits: T.Buffer(("planes", 1, WORDS, "capacity"), "int32", align=16),
        count: T.Buffer(("planes", 1), "int32", align=4),
    ):
        planes, words = T.int32(), T.int32()
        T.device_entry()
        part, plane = T.cta_id([T.truncdiv(words + _WORDS - 1, _WORDS), planes])
        thread = T.thread_id([THREADS])
        pool = T.SMEMPool()
        own = pool.alloc((_WORDS,), "uint32", align=16)
        before = pool.alloc((_WORDS,), "int32", align=16)
        totals = pool.alloc((WARP,), "int32", align=16)
        pool.commit()
        value = T.alloc_local([1], "int32")
        earlier = T.alloc_local([1], "int32")
        total = T.alloc_local([1], "int32")
        after_predecessor()
        first: T.let = part * _WORDS
        value[0] = 0
        at: T.int32 = thread
        while at < first:
            value[0] = value[0] + popcount(T.reinterpret("uint32", lines[plane, 0, at]))
            at = at + THREADS
        cta_scan(value, earlier, totals, thread, _WARPS)
        word: T.uint32 = T.uint32(0)
        if (thread < _WORDS) & (first + thread < words):
            word = T.reinterpret("uint32", lines[plane, 0, first + thread])
        value[0] = popcount(word)
        cta_scan(value, total, totals, thread, _WARPS)
        if thread < _WORDS:
            own[thread] = word
            before[thread] = value[0]
        T.cuda.cta_sync()
        lane: T.let = T.truncmod(thread, WARP)
        for i in T.unroll(_WORDS // _WARPS):
            mine: T.let = i * _WARPS + T.truncdiv(thread, WARP)
            some: T.uint32 = own[mine]
            if is_set(some, lane) != 0:
                place: T.let = (
                    earlier[0] + before[mine] + popcount(T.bitwise_and(some, below(lane)))
                )
                ids[plane, 0, place] = (first + mine) * WARP + lane
                for w in T.unroll(WORDS):
                    bits[plane, 0, w, place] = -1
        if first + _WORDS >= words:
            end_list(ids, bits, count, plane, 0, earlier[0] + total[0], thread)

    return kernel
