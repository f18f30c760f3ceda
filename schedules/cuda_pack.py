"""Live columns of a row-major matrix, turned and packed band by band, on NVIDIA GPUs.

    packed[b * capacity + i, r] = lhs[b * height + r, ids[b, i]],   i < count[b]

The k-axis family gathers its lhs by rows that hold one column of a band each. A row-major lhs has
no such rows: this makes them, of live columns alone, in one pass.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import DTypeError, ScheduleError, mismatch

from .dependent import after_predecessor

COLUMNS = 32  # of one warp, which takes `AT_ONCE` rows of each
AT_ONCE = 8  # elements of 16 bits that one thread writes
THREADS = 8 * 132 * 256  # that a chip runs well at a time


def pack_columns(dtype: str, height: int) -> tvm.tirx.PrimFunc:
    """The kernel: lhs (m, k), ids (bands, capacity), count (bands,), packed (bands * capacity,
    height).

    ids and count are int32, lhs and packed of ``dtype``, float16 or bfloat16; bands of ``height``
    rows, a multiple of 8. Rows beyond m are taken from row m - 1; rows of packed beyond the counts
    are not written. ids must be in range, and packed aligned to 16 bytes.

    Raises
    ------
    DTypeError, ScheduleError (a ValueError)
    """
    check_dtype(dtype)
    if height < AT_ONCE or height % AT_ONCE:
        raise ScheduleError(mismatch("height", f"a multiple of {AT_ONCE}", height))

    most = THREADS // (COLUMNS * height // AT_ONCE)

    @T.prim_func
    def kernel(
        lhs: T.Buffer(("m", "k"), dtype, align=2),
        ids: T.Buffer(("bands", "capacity"), "int32", align=4),
        count: T.Buffer(("bands",), "int32", align=4),
        packed: T.Buffer(("lines", height), dtype, align=16),
    ):
        m, bands, capacity = T.int32(), T.int32(), T.int32()
        T.device_entry()
        block = T.cta_id([bands * T.truncdiv(most + bands - 1, bands)])
        warp = T.warp_id([height // AT_ONCE])
        lane = T.lane_id([COLUMNS])
        after_predecessor()
        share: T.let = T.truncdiv(most + bands - 1, bands)  # CTAs of a band
        band: T.let = T.truncdiv(block, share)
        live: T.let = count[band]
        place: T.int32 = T.truncmod(block, share) * COLUMNS + lane
        line = T.alloc_local([AT_ONCE], dtype)
        while place < live:
            column: T.let = ids[T.int64(band), T.int64(place)]
            for r in T.unroll(AT_ONCE):
                line[r] = lhs[
                    T.int64(T.min(band * height + warp * AT_ONCE + r, m - 1)),
                    T.int64(column),
                ]
            for v in T.vectorized(AT_ONCE):
                packed[
                    T.int64(band) * capacity + place,
                    T.int64(warp * AT_ONCE + v),
                ] = line[v]
            place = place + share * COLUMNS

    return kernel


def check_dtype(dtype: str) -> None:
    """DTypeError unless a kernel that packs knows the type."""
    if dtype not in ("float16", "bfloat16"):
        raise DTypeError(mismatch("dtype", "float16 or bfloat16", repr(dtype)))
