"""CUDA kernel that turns the bits of a mask: which queries see a key."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from ..schedules.dependent import after_predecessor
from .cuda_detect_device import WARP, popcount, warp_scan
from .cuda_mask_lists import turn_words

_AT_ONCE = 4  # words of a thread that are under way together
_LOT = _AT_ONCE * WARP


def turn_lines() -> tvm.tirx.PrimFunc:
    """``turned`` (planes, keys, across): bit q of row i is bit i of row q of ``lines``
    (planes, rows, words), of the last row for all of ``queries`` behind it, 0 beyond them; count
    (planes, keys): how many are set. ``across`` words hold at least all queries."""

    @T.prim_func
    def kernel(
        lines: T.Buffer(("planes", "rows", "words"), "int32", align=4),
        queries: T.int32,
        turned: T.Buffer(("planes", "keys", "across"), "int32", align=4),
        count: T.Buffer(("planes", "keys"), "int32", align=4),
    ):
        planes, rows, keys, across = T.int32(), T.int32(), T.int32(), T.int32()
        T.device_entry()
        word, plane = T.cta_id([T.truncdiv(keys + WARP - 1, WARP), planes])
        thread = T.thread_id([WARP * WARP])
        pool = T.SMEMPool()
        square = pool.alloc((_AT_ONCE, WARP, WARP + 1), "uint32", align=16)
        pool.commit()
        own = T.alloc_local([_AT_ONCE], "uint32")
        total = T.alloc_local([1], "int32")
        after_predecessor()
        lane: T.let = T.truncmod(thread, WARP)
        warp: T.let = T.truncdiv(thread, WARP)
        key: T.int32 = word * WARP + warp
        total[0] = 0
        for step in T.serial(T.truncdiv(across + _LOT - 1, _LOT)):
            for u in T.unroll(_AT_ONCE):
                query: T.let = (step * _LOT + u * WARP + warp) * WARP + lane
                own[u] = T.uint32(0)
                if query < queries:
                    own[u] = T.reinterpret("uint32", lines[plane, T.min(query, rows - 1), word])
            for u in T.unroll(_AT_ONCE):
                turn_words(own, u, lane)
                square[u, lane, warp] = own[u]
            T.cuda.cta_sync()
            for u in T.unroll(_AT_ONCE):
                at: T.let = step * _LOT + u * WARP + lane
                if (key < keys) & (at < across):
                    turned[plane, key, at] = T.reinterpret("int32", square[u, warp, lane])
                    total[0] = total[0] + popcount(square[u, warp, lane])
            T.cuda.cta_sync()
        warp_scan(total, lane)
        if (key < keys) & (lane == WARP - 1):
            count[plane, key] = total[0]

    return kernel
