"""CUDA kernel that turns a small block mask into lists at once: one CTA for each list."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from ..schedules.dependent import after_predecessor
from .cuda_detect_device import WARP, cta_scan, full_warp, load_any

THREADS = 256
MOST_BLOCKS = 4096  # along the PIT axis


def list_blocks() -> tvm.tirx.PrimFunc:
    """Lists of the positions in live blocks along the PIT axis, for every slot of a block mask of
    bytes: ids (slots, capacity), count (slots,) and lines (slots, words), uint32, of a bit for each
    block.

    Slots are ``band`` elements high on the other axis, of ``other`` elements in blocks of
    ``high``; neighbours on the axes are ``along`` and ``beside`` bytes apart. Along the PIT axis
    are ``entries`` blocks of ``grain`` positions, ``extent`` in all.
    """

    @T.prim_func
    def kernel(
        src: T.int64,
        along: T.int64,
        beside: T.int64,
        entries: T.int32,
        grain: T.int32,
        extent: T.int32,
        other: T.int32,
        band: T.int32,
        high: T.int32,
        ids: T.Buffer(("slots", "capacity"), "int32", align=4),
        count: T.Buffer(("slots",), "int32", align=4),
        lines: T.Buffer(("slots", "size"), "uint32", align=4),
    ):
        slots = T.int32()
        T.device_entry()
        slot = T.cta_id([slots])
        thread = T.thread_id([THREADS])
        live_blocks = T.alloc_shared([MOST_BLOCKS], "int32")
        totals = T.alloc_shared([WARP], "int32")
        loaded = T.alloc_local([4], "uint32")
        value = T.alloc_local([1], "int32")
        total = T.alloc_local([1], "int32")
        first: T.let = T.truncdiv(slot * band, high)
        end: T.let = T.truncdiv(T.min((slot + 1) * band, other) + (high - 1), high)
        found: T.int32 = 0
        begin: T.int32 = 0
        after_predecessor()
        while begin < entries:
            entry: T.int32 = begin + thread
            live: T.uint32 = T.uint32(0)
            row: T.int32 = first
            while row < end:
                load_any(
                    T.address_of(loaded[0]),
                    src + T.int64(entry) * along + T.int64(row) * beside,
                    T.if_then_else(entry < entries, 1, 0),
                )
                live = T.bitwise_or(live, loaded[0])
                row = row + 1
            value[0] = T.if_then_else(live != T.uint32(0), 1, 0)
            word: T.uint32 = T.cuda.ballot_sync(full_warp(), value[0])
            if (T.truncmod(thread, WARP) == 0) & (entry < entries):
                lines[T.int64(slot), T.int64(T.truncdiv(entry, WARP))] = word
            cta_scan(value, total, totals, thread, THREADS // WARP)
            if live != T.uint32(0):
                live_blocks[found + value[0]] = entry
            found = found + total[0]
            begin = begin + THREADS
            T.cuda.cta_sync()
        length: T.int32 = found * grain
        if found > 0:
            if live_blocks[found - 1] == entries - 1:  # the last one may reach beyond the extent
                length = length - (entries * grain - extent)
        if thread == 0:
            count[slot] = length
        at: T.int32 = thread
        while at < length:
            block: T.let = T.truncdiv(at, grain)
            ids[T.int64(slot), T.int64(at)] = live_blocks[block] * grain + at - block * grain
            at = at + THREADS

    return kernel
