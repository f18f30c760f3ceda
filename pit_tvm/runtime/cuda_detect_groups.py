"""CUDA kernels for group ids: the positions of every group, ascending.

Few ids: every group has a CTA that reads them all (or see `cuda_detect_cluster`). Many: CTAs share
the ids, count them by group, and place them with the counts of the parts before. Ids come in as
int32 or int64 (``bits``) and leave as int32; those out of range belong to no group.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from ..schedules.bits import below, is_set
from ..schedules.dependent import after_predecessor, let_successor_in
from .cuda_detect_device import (
    AT_ONCE,
    WARP,
    full_warp,
    load_ids,
    popcount,
    same_lanes,
    warp_scan,
    warps_scan,
)

THREADS = 1024
SEARCHED = 16  # ids that a thread compares at once
MOST_GROUPS = 1024  # of the kernels that share the ids
SHARE_THREADS = 256
_WARPS = SHARE_THREADS // WARP

# Bit v * each + e: id number `start + v * 32 * each + lane * each + e` is `group`, where a thread
# loads `each` ids, 16 bytes, at a time.
_SEARCH = """__forceinline__ __device__ unsigned pit_search{bits}(
    const {type}* ids, int start, int size, int lane, {type} group) {{
  constexpr int each = 16 / sizeof({type});
  unsigned found = 0u;
  if (start + 512 <= size && (reinterpret_cast<unsigned long long>(ids + start) & 15) == 0) {{
    uint4 some[16 / each];
#pragma unroll
    for (int v = 0; v < 16 / each; ++v)
      some[v] = __ldg(reinterpret_cast<const uint4*>(ids + start) + v * 32 + lane);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      found |= unsigned(reinterpret_cast<const {type}*>(some)[i] == group) << i;
  }} else {{
#pragma unroll
    for (int i = 0; i < 16; ++i) {{
      int at = start + (i / each * 32 + lane) * each + i % each;
      if (at < size) found |= unsigned(__ldg(ids + at) == group) << i;
    }}
  }}
  return found;
}}
"""


def _search(ids: Any, start: Any, size: Any, lane: Any, group: Any, bits: int) -> Any:
    code = _SEARCH.format(bits=bits, type=f"int{bits}_t")
    name = f"pit_search{bits}"
    return T.cuda.func_call(
        name, ids, start, size, lane, group, source_code=code, return_type="uint32"
    )


def _byte(word: Any, number: int) -> Any:
    return T.bitwise_and(T.shift_right(word, 8 * number), 255)


def search_groups(bits: int) -> tvm.tirx.PrimFunc:
    """Positions in ``src`` (size,) of every group id; one CTA to a group reads all ids.

    A warp takes 512 neighbours, each lane 16 bytes at a time; counts of four such steps are summed
    in the bytes of one word.
    """
    each = 128 // bits  # ids in 16 bytes
    steps = SEARCHED // each

    @T.prim_func
    def kernel(
        src: T.Buffer(("size",), f"int{bits}", align=bits // 8),
        ids: T.Buffer(("groups", "capacity"), "int32", align=4),
        count: T.Buffer(("groups",), "int32", align=4),
    ):
        size, groups = T.int32(), T.int32()
        T.device_entry()
        group = T.cta_id([groups])
        thread = T.thread_id([THREADS])
        lane: T.let = T.truncmod(thread, WARP)
        totals = T.alloc_shared([WARP], "int32")
        value = T.alloc_local([1], "int32")
        total = T.alloc_local([1], "int32")
        before = T.alloc_local([steps // 4], "int32")
        across = T.alloc_local([steps // 4], "int32")
        found: T.int32 = 0
        hits: T.uint32 = T.uint32(0)
        some: T.uint32 = T.uint32(0)
        place: T.int32 = 0
        base: T.int32 = 0
        start: T.int32 = 0
        while base < size:
            start = base + T.truncdiv(thread, WARP) * (WARP * SEARCHED)
            hits = _search(
                T.address_of(src[0]), start, size, lane, T.cast(group, f"int{bits}"), bits
            )
            place = 0
            for h in T.unroll(steps // 4):
                value[0] = 0
                for v in T.unroll(4):
                    some = T.bitwise_and(
                        T.shift_right(hits, T.uint32((h * 4 + v) * each)),
                        T.uint32((1 << each) - 1),
                    )
                    value[0] = value[0] + T.shift_left(popcount(some), 8 * v)
                before[h] = value[0]
                warp_scan(value, lane)
                before[h] = value[0] - before[h]
                across[h] = T.cuda.__shfl_sync(full_warp(), value[0], WARP - 1, 32)
                for v in T.unroll(4):
                    place = place + _byte(across[h], v)
            if lane == 0:
                totals[T.truncdiv(thread, WARP)] = place
            warps_scan(value, total, totals, thread, THREADS // WARP)
            place = found + value[0]
            for v in T.unroll(steps):
                some = T.shift_right(hits, T.uint32(v * each))
                for e in T.unroll(each):
                    if is_set(some, e) != 0:
                        ids[
                            T.int64(group),
                            T.int64(
                                place
                                + _byte(before[v // 4], v % 4)
                                + popcount(T.bitwise_and(some, T.uint32((1 << e) - 1)))
                            ),
                        ] = start + (v * WARP + lane) * each + e
                place = place + _byte(across[v // 4], v % 4)
            found = found + total[0]
            base = base + THREADS * SEARCHED
        if thread == 0:
            count[group] = found

    return kernel


@T.inline
def _tally(tally, loaded, lane):
    """Count the ids of a warp in ``tally`` (shared, int32); -1 counts nothing."""
    for u in T.unroll(AT_ONCE):
        # One atomic for all lanes of a group: routing may be very uneven.
        same: T.uint32 = same_lanes(loaded[u])
        if (loaded[u] >= 0) & (T.bitwise_and(same, below(lane)) == T.uint32(0)):
            T.evaluate(T.cuda.atomic_add(T.address_of(tally[loaded[u]]), popcount(same)))


def count_groups(bits: int) -> tvm.tirx.PrimFunc:
    """``sizes[p, g]``: how often group g stands in part p of ``src``, ``share`` ids to a part.

    ``sizes`` (parts, groups), int32, at most `MOST_GROUPS` groups.
    """

    @T.prim_func
    def kernel(
        src: T.Buffer(("size",), f"int{bits}", align=bits // 8),
        share: T.int32,
        sizes: T.Buffer(("parts", "groups"), "int32", align=4),
    ):
        size, parts, groups = T.int32(), T.int32(), T.int32()
        T.device_entry()
        part = T.cta_id([parts])
        thread = T.thread_id([SHARE_THREADS])
        let_successor_in()
        lane: T.let = T.truncmod(thread, WARP)
        tally = T.alloc_shared([MOST_GROUPS], "int32")
        loaded = T.alloc_local([AT_ONCE], "int32")
        last: T.int32 = T.min((part + 1) * share, size)
        at: T.int32 = thread
        while at < groups:
            tally[at] = 0
            at = at + SHARE_THREADS
        T.cuda.cta_sync()
        at = part * share + thread
        while at - lane < last:
            load_ids(loaded, src, at, SHARE_THREADS, last, groups, bits)
            _tally(tally, loaded, lane)
            at = at + SHARE_THREADS * AT_ONCE
        T.cuda.cta_sync()
        at = thread
        while at < groups:
            sizes[T.int64(part), T.int64(at)] = tally[at]
            at = at + SHARE_THREADS

    return kernel


def place_groups(bits: int) -> tvm.tirx.PrimFunc:
    """Positions of every group id, from the ``sizes`` of `count_groups` for the same ``share``.

    ``share`` is a multiple of `SHARE_THREADS`; each warp takes an equal part of it. ``1 << lanes``
    threads, at most `SHARE_THREADS`, sum the sizes of as many groups.
    """

    @T.prim_func
    def kernel(
        src: T.Buffer(("size",), f"int{bits}", align=bits // 8),
        share: T.int32,
        lanes: T.int32,
        sizes: T.Buffer(("parts", "groups"), "int32", align=4),
        ids: T.Buffer(("groups", "capacity"), "int32", align=4),
        count: T.Buffer(("groups",), "int32", align=4),
    ):
        size, parts, groups = T.int32(), T.int32(), T.int32()
        T.device_entry()
        part = T.cta_id([parts])
        thread = T.thread_id([SHARE_THREADS])
        after_predecessor()
        lane: T.let = T.truncmod(thread, WARP)
        warp: T.let = T.truncdiv(thread, WARP)
        # Row w: where warp w puts the next id of each group; row 0 begins with earlier parts.
        next_place = T.alloc_shared([_WARPS * MOST_GROUPS], "int32")
        loaded = T.alloc_local([AT_ONCE], "int32")
        first: T.int32 = part * share + T.truncdiv(share, _WARPS) * warp
        last: T.int32 = T.min(first + T.truncdiv(share, _WARPS), size)
        same: T.uint32 = T.uint32(0)
        run: T.int32 = 0
        row: T.int32 = 0
        teams: T.int32 = T.shift_right(SHARE_THREADS, lanes)
        at: T.int32 = thread
        while at < _WARPS * groups:
            next_place[at] = 0
            at = at + SHARE_THREADS
        T.cuda.cta_sync()
        at = T.bitwise_and(thread, T.shift_left(1, lanes) - 1)
        while at < groups:
            run = 0
            row = T.shift_right(thread, lanes)
            while row < part:
                for u in T.unroll(AT_ONCE):
                    if row + u * teams < part:
                        run = run + sizes[T.int64(row + u * teams), T.int64(at)]
                row = row + teams * AT_ONCE
            if run > 0:
                T.evaluate(T.cuda.atomic_add(T.address_of(next_place[at]), run))
            at = at + T.shift_left(1, lanes)
        # What the warps before hold of a group, one row further down.
        at = first + lane
        if warp < _WARPS - 1:
            while at - lane < last:
                load_ids(loaded, src, at, WARP, last, groups, bits)
                for u in T.unroll(AT_ONCE):
                    if loaded[u] >= 0:
                        loaded[u] = loaded[u] + (warp + 1) * groups
                _tally(next_place, loaded, lane)
                at = at + WARP * AT_ONCE
        T.cuda.cta_sync()
        at = thread
        while at < groups:
            run = next_place[at]
            if part == parts - 1:
                count[at] = run + sizes[T.int64(part), T.int64(at)]
            for w in T.serial(_WARPS - 1):
                run = run + next_place[(w + 1) * groups + at]
                next_place[(w + 1) * groups + at] = run
            at = at + SHARE_THREADS
        T.cuda.cta_sync()
        at = first + lane
        while at - lane < last:
            load_ids(loaded, src, at, WARP, last, groups, bits)
            for u in T.unroll(AT_ONCE):
                same = same_lanes(loaded[u])
                run = 0
                if loaded[u] >= 0:
                    run = next_place[warp * groups + loaded[u]]
                    ids[
                        T.int64(loaded[u]),
                        T.int64(run + popcount(T.bitwise_and(same, below(lane)))),
                    ] = at + u * WARP
                T.cuda.warp_sync()
                if (loaded[u] >= 0) & (T.bitwise_and(same, below(lane)) == T.uint32(0)):
                    next_place[warp * groups + loaded[u]] = run + popcount(same)
                T.cuda.warp_sync()
            at = at + WARP * AT_ONCE

    return kernel
