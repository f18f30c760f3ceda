"""CUDA kernel that deals lists of keys out to CTAs: long ones in parts.

A few queries that see all keys would keep one CTA busy when all others are done, and so would the
few tiles of a short sequence with many keys.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from ..schedules.cuda_listed_rows import KEYS, PART_FACTS
from ..schedules.dependent import after_predecessor
from .cuda_detect_device import WARP, cta_scan

THREADS = 1024
_WARPS = THREADS // WARP
_LEAST = 4  # steps of a part: fewer take less time than to add it up
SMS = 132  # of an H200
_ROUNDS = 4
_MOST = 2**16  # lists of which the mean is taken; of more, that of one plane


def _parts(keys: Any, cut: Any, spare: Any) -> Any:
    """int32: parts of a list, of about ``cut`` steps; one that is longer by less than one of
    ``spare`` parts of that stays whole."""
    code = (
        "__forceinline__ __device__ int pit_parts(int keys, int cut, int spare) {\n"
        f"  int steps = (keys + {KEYS - 1}) / {KEYS};\n"
        "  return steps - cut > cut / spare ? (steps + cut - 1) / cut : 1;\n}\n"
    )
    given = keys, cut, spare
    return T.cuda.func_call("pit_parts", *given, source_code=code, return_type="int32")


def _cut_of(mean: Any, lists: Any, own: Any, teams: Any) -> Any:
    """int32: steps of a part where each of ``lists`` lists, of ``mean`` steps, is its sequence's
    and head's only one, and one has ``own`` steps.

    All parts shall run at once, two on a multiprocessor, in as few rounds as leave room to cut: the
    last part of each list is half as long as the others. Parts are added up by ``teams`` side by
    side, each for as long as a step takes. Lists that fill many rounds are cut if they are long
    beside others.
    """
    code = (
        "__forceinline__ __device__ int pit_cut_of(float mean, int lists, int own, int teams) {\n"
        f"  int rounds = (lists + {SMS - 1}) / {SMS};\n"
        f"  float room = rounds * {2 * SMS}.0f - lists * 0.5f;\n"
        "  float cut = fmaxf(ceilf(mean * lists / room), sqrtf((float)own / teams));\n"
        f"  if (rounds > {_ROUNDS}) cut = fmaxf(cut, mean * 1.2f);\n"
        f"  return max((int)fminf(cut, 1e9f), {_LEAST});\n}}\n"
    )
    given = mean, lists, own, teams
    return T.cuda.func_call("pit_cut_of", *given, source_code=code, return_type="int32")


def deal_lists() -> tvm.tirx.PrimFunc:
    """``work`` (planes, items, `PART_FACTS`), int32: of each part of a list its tile, its first
    step, the one behind its last, the first slot of the tile, its number, and how many there are.

    count (planes, lines): keys of each list; the last one is that of all later of ``tiles`` tiles.
    A list is cut if it is much longer than the mean of ``tiles`` or of ``wanted`` lists of every
    plane, whichever are more; a single one of each of ``alike`` sequences and heads by `_cut_of`,
    where ``teams`` add up parts. Parts of cut lists have slots, at most ``slots``. Items are at
    least tiles and slots; behind the last part their tile is -1. A tile that is not cut has the
    slot -1.
    """

    @T.prim_func
    def kernel(
        count: T.Buffer(("planes", "lines"), "int32", align=4),
        tiles: T.int32,
        wanted: T.int32,
        alike: T.int32,
        teams: T.int32,
        slots: T.int32,
        work: T.Buffer(("planes", "items", PART_FACTS), "int32", align=4),
    ):
        planes, lines, items = T.int32(), T.int32(), T.int32()
        T.device_entry()
        plane = T.cta_id([planes])
        thread = T.thread_id([THREADS])
        pool = T.SMEMPool()
        totals = pool.alloc((WARP,), "int32", align=16)
        pool.commit()
        value = T.alloc_local([1], "int32")
        total = T.alloc_local([1], "int32")
        after_predecessor()
        turns: T.int32 = T.truncdiv(tiles + THREADS - 1, THREADS)
        first_plane: T.int32 = 0
        compared: T.int32 = planes
        if T.cast(planes, "int64") * T.cast(tiles, "int64") > _MOST:
            first_plane = plane
            compared = 1
        value[0] = 0
        for turn in T.serial(T.truncdiv(compared * tiles + THREADS - 1, THREADS)):
            at: T.let = turn * THREADS + thread
            if at < compared * tiles:
                keys: T.let = count[
                    first_plane + T.truncdiv(at, tiles), T.min(T.truncmod(at, tiles), lines - 1)
                ]
                value[0] = value[0] + T.truncdiv(keys + KEYS - 1, KEYS)
        cta_scan(value, total, totals, thread, _WARPS)
        mean: T.let = T.truncdiv(total[0], compared * T.max(tiles, wanted) * 2) * 3 + 1
        cut: T.int32 = T.max(mean, _LEAST)
        spare: T.int32 = 3
        if tiles == 1:
            own: T.let = T.truncdiv(count[plane, 0] + KEYS - 1, KEYS)
            average: T.let = T.cast(total[0], "float32") / T.cast(compared, "float32")
            most: T.let = T.max(slots, 1)
            cut = T.max(_cut_of(average, alike, own, teams), T.truncdiv(own + most - 1, most))
            spare = 6
        needed: T.int32 = slots + 1
        while needed > slots:
            value[0] = 0
            for turn in T.serial(turns):
                if turn * THREADS + thread < tiles:
                    parts: T.int32 = _parts(
                        count[plane, T.min(turn * THREADS + thread, lines - 1)], cut, spare
                    )
                    if parts > 1:
                        value[0] = value[0] + parts
            cta_scan(value, total, totals, thread, _WARPS)
            needed = total[0]
            if needed > slots:
                cut = cut * 2
        item: T.int32 = 0
        slot: T.int32 = 0
        for turn in T.serial(turns):
            tile: T.int32 = turn * THREADS + thread
            steps: T.int32 = 0
            number: T.int32 = 0
            if tile < tiles:
                mine: T.let = count[plane, T.min(tile, lines - 1)]
                steps = T.truncdiv(mine + KEYS - 1, KEYS)
                number = _parts(mine, cut, spare)
            value[0] = number
            cta_scan(value, total, totals, thread, _WARPS)
            place: T.int32 = item + value[0]
            item = item + total[0]
            value[0] = T.Select(number > 1, number, 0)
            cta_scan(value, total, totals, thread, _WARPS)
            first: T.int32 = T.Select(number > 1, slot + value[0], -1)
            slot = slot + total[0]
            for p in T.serial(number):
                work[plane, place + p, 0] = tile
                work[plane, place + p, 1] = T.truncdiv(steps * p, number)
                work[plane, place + p, 2] = T.truncdiv(steps * (p + 1), number)
                work[plane, place + p, 3] = first
                work[plane, place + p, 4] = p
                work[plane, place + p, 5] = number
        rest: T.int32 = item + thread
        while rest < items:
            work[plane, rest, 0] = -1
            rest = rest + THREADS

    return kernel
