"""Live columns of both operands of a product, side by side in new ones, on NVIDIA GPUs.

    packed[i, j] = source[i, ids[j]]        for the rows i that a list names
    beside[j, :] = dense[ids[j], :]         or beside[i, j] = dense[i, ids[j]] for all rows i

j runs to the count, and zeros follow up to a whole step of `TILE_K`, of which there is one at
least: a product over the depth j may end there (`rows_kernel`'s ``deep``). A source that is stored
the other way round is turned on the way. Warps deal with pieces of either operand, one launch with
both.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from .cuda_pack import check_dtype
from .dependent import after_predecessor
from .hopper_knobs import TILE_K, require
from .hopper_ring import steps_of

_BLOCKS, _WARPS = 132 * 6, 8  # as many as an H200 holds at once
_BAND, _AT_ONCE = 32, 8  # rows of one warp, and those that it reads at once
_PIECES = 8  # pairs of elements of a row that a lane copies
_ACROSS = 64 * _PIECES


@T.meta_class
class _Room:
    """Registers of a lane, and with ``turns`` a band of each warp in shared memory."""

    def __init__(self, dtype: str, turns: bool) -> None:
        self.pairs = T.alloc_local([_AT_ONCE, 2], dtype)
        self.places = T.alloc_local([_AT_ONCE], "int32")
        self.columns = T.alloc_local([2], "int32")
        if turns:
            pool: Any = T.SMEMPool()
            # Lines of an odd number of words: lanes that write a column meet no other's bank.
            self.band = pool.alloc((_WARPS, _BAND, TILE_K + 2), dtype, align=16)
            pool.commit()


@T.inline
def _columns(room, lane, source, ids, live, step, band, rows, lines, packed):
    """Columns of step ``step`` of the rows of a band; ``rows`` names these of ``lines``, unless it
    is None."""
    place: T.let = step * TILE_K + lane * 2
    for c in T.unroll(2):
        room.columns[c] = -1
        if place + c < live:
            room.columns[c] = ids[0, place + c]
    for part in T.serial(_BAND // _AT_ONCE):
        for r in T.unroll(_AT_ONCE):
            line: T.let = band * _BAND + part * _AT_ONCE + r
            room.places[r] = -1
            if line < lines:
                room.places[r] = line if rows is None else rows[0, line]
            for c in T.unroll(2):
                room.pairs[r, c] = T.cast(0, source.dtype)
                if (room.places[r] >= 0) & (room.columns[c] >= 0):
                    room.pairs[r, c] = source[T.int64(room.places[r]), T.int64(room.columns[c])]
        for r in T.unroll(_AT_ONCE):
            if room.places[r] >= 0:
                for v in T.vectorized(2):
                    packed[T.int64(room.places[r]), T.int64(place) + v] = room.pairs[r, v]


@T.inline
def _turned(room, warp, lane, source, ids, live, step, band, rows, lines, packed):
    """The same of a source stored the other way round: a warp reads along its rows, and turns a
    band through shared memory."""
    first: T.let = step * TILE_K
    place: T.int32 = -1
    if band * _BAND + lane < lines:
        place = rows[0, band * _BAND + lane]
    for part in T.serial(TILE_K // _AT_ONCE):
        for u in T.unroll(_AT_ONCE):
            at: T.let = first + part * _AT_ONCE + u
            room.pairs[u, 0] = T.cast(0, source.dtype)
            if (at < live) & (place >= 0):
                room.pairs[u, 0] = source[T.int64(ids[0, at]), T.int64(place)]
        for u in T.unroll(_AT_ONCE):
            room.band[warp, lane, part * _AT_ONCE + u] = room.pairs[u, 0]
    T.cuda.warp_sync()
    for r in T.unroll(_BAND):
        row: T.let = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), place, r, 32)
        if row >= 0:
            for v in T.vectorized(2):
                packed[T.int64(row), T.int64(first + lane * 2) + v] = room.band[
                    warp, r, lane * 2 + v
                ]
    T.cuda.warp_sync()


@T.inline
def _row(room, lane, source, ids, live, line, part, packed):
    """Part ``part`` of the row that is ``line`` of the packed ones."""
    n = T.meta_var(source.shape[1])
    first: T.let = part * _ACROSS + lane * 2
    row: T.int32 = -1
    if line < live:
        row = ids[0, line]
    for p in T.unroll(_PIECES):
        for c in T.unroll(2):
            room.pairs[p, c] = T.cast(0, source.dtype)
            if (row >= 0) & (first + p * 64 + c < n):
                room.pairs[p, c] = source[T.int64(row), T.int64(first + p * 64 + c)]
    for p in T.unroll(_PIECES):
        if first + p * 64 < n:
            for v in T.vectorized(2):
                packed[T.int64(line), T.int64(first + p * 64) + v] = room.pairs[p, v]


@T.jit
def both_gathered(
    source: T.Buffer(("high", "across"), dtype, align=2),
    rows: T.Buffer((1, "listed"), "int32", align=4),
    lives: T.Buffer((1,), "int32", align=4),
    ids: T.Buffer((1, "capacity"), "int32", align=4),
    count: T.Buffer((1,), "int32", align=4),
    dense: T.Buffer(("deep", "wide"), dtype, align=2),
    packed: T.Buffer(("own_high", "capacity"), dtype, align=16),
    beside: T.Buffer(("beside_high", "beside_wide"), dtype, align=16),
    *,
    dtype: T.constexpr,
    turned: T.constexpr,
    layout: T.constexpr,
):
    """The template; ``gather_both`` gives it its options."""
    capacity, deep, wide = T.int32(), T.int32(), T.int32()
    T.device_entry()
    block = T.cta_id([_BLOCKS])
    warp = T.warp_id([_WARPS])
    lane = T.lane_id([32])
    room = _Room(dtype, turned)
    after_predecessor()
    live: T.let = count[0]
    lines: T.let = lives[0]
    steps: T.let = steps_of(capacity, count)
    own: T.let = steps * T.truncdiv(lines + (_BAND - 1), _BAND)
    if layout == "kn":
        pieces = T.meta_var(T.truncdiv(wide + (_ACROSS - 1), _ACROSS))
        lots = T.meta_var(steps * TILE_K * pieces)
    else:
        pieces = T.meta_var(steps)
        lots = T.meta_var(steps * T.truncdiv(deep + (_BAND - 1), _BAND))
    item: T.int32 = block * _WARPS + warp
    while item < own + lots:
        if item < own:
            step: T.let = T.truncmod(item, steps)
            band: T.let = T.truncdiv(item, steps)
            if turned:
                _turned(room, warp, lane, source, ids, live, step, band, rows, lines, packed)
            else:
                _columns(room, lane, source, ids, live, step, band, rows, lines, packed)
        else:
            part: T.let = T.truncmod(item - own, pieces)
            line: T.let = T.truncdiv(item - own, pieces)
            if layout == "kn":
                _row(room, lane, dense, ids, live, line, part, beside)
            else:
                _columns(room, lane, dense, ids, live, part, line, None, deep, beside)
        item = item + _BLOCKS * _WARPS


def gather_both(dtype: str, layout: str, turned: bool = False) -> tvm.tirx.PrimFunc:
    """The kernel: source (m, k), rows (1, room), lives (1,), ids (1, capacity), count (1,), dense,
    packed (m or more, capacity), beside. ``rows`` and ``ids``, int32, name the live rows and
    columns of the source, of which ``lives`` and ``count`` there are.

    Parameters
    ----------
    dtype : float16 or bfloat16
    layout : "kn" for dense (k, n) and beside (capacity, n or more), whose rows are an even number
        of elements: of one more than n for an odd n the last is 0. "nk" for dense (n, k) and beside
        (n or more, capacity)
    turned : the source is stored (k, m)

    Raises
    ------
    DTypeError
    ScheduleError for another layout
    """
    check_dtype(dtype)
    require("gather_both", layout, {"layout kn or nk": layout in ("kn", "nk")})
    return both_gathered.specialize(dtype=dtype, turned=turned, layout=layout)
