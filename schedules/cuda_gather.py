"""Live columns and live rows of matrices, side by side in new ones, on NVIDIA GPUs.

    gather_columns:   packed[i, j] = source[i, ids[j]]     rows i that a list names, or all
    turned:           packed[i, j] = source[ids[j], i]     columns i that a list names
    gather_rows:      packed[j, :] = source[ids[j], :]

j runs to the count, and zeros follow up to a whole step of `TILE_K`, of which there is one at
least: a product over the depth j may end there (`rows_kernel`'s ``deep``). ids is (1, capacity),
count (1,), int32; a source has any number of rows and columns.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from .cuda_pack import check_dtype
from .dependent import after_predecessor
from .hopper_knobs import TILE_K, require
from .hopper_ring import steps_of

_BLOCKS, _WARPS = 132 * 8, 8
_BAND, _AT_ONCE = 32, 8  # rows of one warp, and those that it reads at once
_PIECES = 8  # pairs of elements of a row that a lane copies
_ACROSS = 64 * _PIECES


@T.jit
def columns_gathered(
    source_h: T.handle,
    ids_h: T.handle,
    count_h: T.handle,
    rows_h: T.Optional(T.handle),  # type: ignore[valid-type]
    lives_h: T.Optional(T.handle),  # type: ignore[valid-type]
    packed_h: T.handle,
    *,
    dtype: T.constexpr,
):
    """The template of ``gather_columns``."""
    stored, k, capacity, high, deep = T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
    source = T.match_buffer(source_h, (stored, k), dtype, align=2)
    ids = T.match_buffer(ids_h, (1, capacity), "int32", align=4)
    count = T.match_buffer(count_h, (1,), "int32", align=4)
    if rows_h is not None:
        room = T.int32()
        rows = T.match_buffer(rows_h, (1, room), "int32", align=4)
        lives = T.match_buffer(lives_h, (1,), "int32", align=4)
    packed = T.match_buffer(packed_h, (high, deep), dtype, align=16)
    T.device_entry()
    block = T.cta_id([_BLOCKS])
    warp = T.warp_id([_WARPS])
    lane = T.lane_id([32])
    values = T.alloc_local([_AT_ONCE, 2], dtype)
    places = T.alloc_local([_AT_ONCE], "int32")
    columns = T.alloc_local([2], "int32")
    after_predecessor()
    live: T.let = count[0]
    pieces: T.let = steps_of(capacity, count)
    lines: T.int32 = stored
    if rows_h is not None:
        lines = lives[0]
    bands: T.let = T.truncdiv(lines + (_BAND - 1), _BAND)
    item: T.int32 = block * _WARPS + warp
    while item < pieces * bands:
        first: T.let = T.truncdiv(item, pieces) * _BAND
        place: T.let = T.truncmod(item, pieces) * TILE_K + lane * 2
        for c in T.unroll(2):
            columns[c] = -1
            if place + c < live:
                columns[c] = ids[0, place + c]
        for part in T.serial(_BAND // _AT_ONCE):
            for r in T.unroll(_AT_ONCE):
                line: T.let = first + part * _AT_ONCE + r
                places[r] = -1
                if line < lines:
                    places[r] = line
                    if rows_h is not None:
                        places[r] = rows[0, line]
                for c in T.unroll(2):
                    values[r, c] = T.cast(0, dtype)
                    if (places[r] >= 0) & (columns[c] >= 0):
                        values[r, c] = source[
                            T.cast(places[r], "int64"), T.cast(columns[c], "int64")
                        ]
            for r in T.unroll(_AT_ONCE):
                if places[r] >= 0:
                    for v in T.vectorized(2):
                        packed[T.cast(places[r], "int64"), T.cast(place, "int64") + v] = values[
                            r, v
                        ]
        item = item + _BLOCKS * _WARPS


@T.jit
def turned_gathered(
    source_h: T.handle,
    ids_h: T.handle,
    count_h: T.handle,
    columns_h: T.handle,
    lives_h: T.handle,
    packed_h: T.handle,
    *,
    dtype: T.constexpr,
):
    """The template of ``gather_columns`` of a source stored the other way round: a warp reads along
    its rows, and turns a band through shared memory."""
    k, stored, capacity, high, deep = T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
    room = T.int32()
    source = T.match_buffer(source_h, (k, stored), dtype, align=2)
    ids = T.match_buffer(ids_h, (1, capacity), "int32", align=4)
    count = T.match_buffer(count_h, (1,), "int32", align=4)
    columns = T.match_buffer(columns_h, (1, room), "int32", align=4)
    lives = T.match_buffer(lives_h, (1,), "int32", align=4)
    packed = T.match_buffer(packed_h, (high, deep), dtype, align=16)
    T.device_entry()
    block = T.cta_id([_BLOCKS])
    warp = T.warp_id([_WARPS])
    lane = T.lane_id([32])
    # Lines of an odd number of words: lanes that write a column meet no other's bank.
    pool = T.SMEMPool()
    band = pool.alloc((_WARPS, _BAND, TILE_K + 2), dtype, align=16)
    pool.commit()
    values = T.alloc_local([_AT_ONCE], dtype)
    after_predecessor()
    live: T.let = count[0]
    lines: T.let = lives[0]
    pieces: T.let = steps_of(capacity, count)
    bands: T.let = T.truncdiv(lines + (_BAND - 1), _BAND)
    item: T.int32 = block * _WARPS + warp
    while item < pieces * bands:
        line: T.let = T.truncdiv(item, pieces) * _BAND + lane
        first: T.let = T.truncmod(item, pieces) * TILE_K
        place: T.int32 = -1
        if line < lines:
            place = columns[0, line]
        for part in T.serial(TILE_K // _AT_ONCE):
            for u in T.unroll(_AT_ONCE):
                at: T.let = first + part * _AT_ONCE + u
                values[u] = T.cast(0, dtype)
                if (at < live) & (place >= 0):
                    values[u] = source[T.cast(ids[0, at], "int64"), T.cast(place, "int64")]
            for u in T.unroll(_AT_ONCE):
                band[warp, lane, part * _AT_ONCE + u] = values[u]
        T.cuda.warp_sync()
        for r in T.unroll(_BAND):
            row: T.let = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), place, r, 32)
            if row >= 0:
                for v in T.vectorized(2):
                    packed[T.cast(row, "int64"), T.cast(first + lane * 2, "int64") + v] = band[
                        warp, r, lane * 2 + v
                    ]
        T.cuda.warp_sync()
        item = item + _BLOCKS * _WARPS


@T.jit
def rows_gathered(
    source_h: T.handle,
    ids_h: T.handle,
    count_h: T.handle,
    packed_h: T.handle,
    *,
    dtype: T.constexpr,
):
    """The template of ``gather_rows``."""
    stored, n, capacity, deep, wide = T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
    source = T.match_buffer(source_h, (stored, n), dtype, align=2)
    ids = T.match_buffer(ids_h, (1, capacity), "int32", align=4)
    count = T.match_buffer(count_h, (1,), "int32", align=4)
    packed = T.match_buffer(packed_h, (deep, wide), dtype, align=16)
    T.device_entry()
    block = T.cta_id([_BLOCKS])
    warp = T.warp_id([_WARPS])
    lane = T.lane_id([32])
    values = T.alloc_local([_PIECES, 2], dtype)
    after_predecessor()
    live: T.let = count[0]
    lines: T.let = steps_of(capacity, count) * TILE_K
    parts: T.let = T.truncdiv(n + (_ACROSS - 1), _ACROSS)
    item: T.int32 = block * _WARPS + warp
    while item < lines * parts:
        line: T.let = T.truncdiv(item, parts)
        first: T.let = T.truncmod(item, parts) * _ACROSS + lane * 2
        row: T.int32 = -1
        if line < live:
            row = ids[0, line]
        for p in T.unroll(_PIECES):
            for c in T.unroll(2):
                values[p, c] = T.cast(0, dtype)
                if (row >= 0) & (first + p * 64 + c < n):
                    values[p, c] = source[T.cast(row, "int64"), T.cast(first + p * 64 + c, "int64")]
        for p in T.unroll(_PIECES):
            if first + p * 64 < n:
                for v in T.vectorized(2):
                    packed[T.cast(line, "int64"), T.cast(first + p * 64, "int64") + v] = values[
                        p, v
                    ]
        item = item + _BLOCKS * _WARPS


def gather_columns(dtype: str, rows: bool = False, turned: bool = False) -> tvm.tirx.PrimFunc:
    """The kernel: source (m, k), ids, count, [rows (1, room), lives (1,),] packed (m or more,
    capacity of ids).

    Parameters
    ----------
    dtype : float16 or bfloat16
    rows : of the first ``lives`` rows that a list names, int32, and not of all
    turned : the source is stored (k, m); with ``rows`` alone

    Raises
    ------
    DTypeError
    ScheduleError for ``turned`` without ``rows``
    """
    check_dtype(dtype)
    require("gather_columns", f"rows={rows}", {"rows with turned": rows or not turned})
    if turned:
        return turned_gathered.specialize(dtype=dtype)
    absent = {} if rows else {"rows_h": None, "lives_h": None}
    return columns_gathered.specialize(dtype=dtype, **absent)


def gather_rows(dtype: str) -> tvm.tirx.PrimFunc:
    """The kernel: source (k, n), ids, count, packed (capacity of ids, n or more), whose rows are an
    even number of elements: of one more than n for an odd n the last is 0.

    Parameters
    ----------
    dtype : float16 or bfloat16

    Raises
    ------
    DTypeError
    """
    check_dtype(dtype)
    return rows_gathered.specialize(dtype=dtype)
