"""The kernel that makes lists straight from a mask whose rows are folded, in one pass.

What `detect_kernels.fold_rows` and `detect_compact.compact` do one after the other; a slot's flags
never leave the nearest cache, and workers are woken once.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from .detect_compact import append, close, live_byte
from .detect_kernels import VECTOR_BYTES, flag

WIDTH = 512  # positions that are folded before their flags become list entries


def fold_compact(bits: int, sign: int, parallel: bool) -> tvm.IRModule:
    """Lists of the live micro-tiles of ``src[outer, size, inner]``, PIT innermost.

    Entries and the sizes of runs are as in ``fold_rows``; ``table``, ``ids``, ``count``, ``rows``
    and ``capacity`` as in ``compact``, with ``outer * slots`` lists. Needs at least
    64 bytes of entries in ``inner``.
    """
    dtype = f"uint{bits}"
    lanes = VECTOR_BYTES * 8 // bits
    loop = T.parallel if parallel else T.serial

    @T.prim_func(s_tir=True)
    def main(
        p_src: T.handle,
        p_table: T.handle,
        p_ids: T.handle,
        p_count: T.handle,
        outer: T.int64,
        size: T.int64,
        inner: T.int64,
        slots: T.int64,
        extent: T.int64,
        grain: T.int64,
        limit: T.int64,
        rows: T.int64,
        capacity: T.int64,
    ):
        n_src = T.int64()
        n_ids = T.int64()
        n_count = T.int64()
        src = T.match_buffer(p_src, (n_src,), dtype, align=bits // 8)
        table = T.match_buffer(p_table, (2048,), "uint8", align=1)
        ids = T.match_buffer(p_ids, (n_ids,), "int32", align=4)
        count = T.match_buffer(p_count, (n_count,), "int32", align=4)
        for task in loop(outer * slots):
            # through memory, because TVM takes 10 s to simplify bound variables with divisions
            place = T.alloc_buffer((4,), "int64")
            place[0] = task // slots
            place[1] = task - place[0] * slots
            place[2] = place[1] * extent // grain
            place[3] = T.min(T.ceildiv(T.min((place[1] + 1) * extent, limit), grain), size)
            height: T.let = place[3] - place[2]
            top: T.let = (place[0] * size + place[2]) * inner
            acc = T.alloc_buffer((lanes,), dtype)
            flags = T.alloc_buffer((WIDTH,), "uint8")
            end = T.alloc_buffer((1,), "int64")
            end[0] = task * capacity
            for chunk in range(T.ceildiv(inner, WIDTH)):
                start: T.let = chunk * WIDTH
                width: T.let = T.min(T.int64(WIDTH), inner - start)
                for vec in range(T.ceildiv(width, lanes)):
                    to: T.let = vec * lanes
                    # the last vector begins earlier, so that it is a whole one
                    back: T.let = T.max(start + to + lanes - inner, T.int64(0))
                    at: T.let = top + start + to - back
                    for w in T.vectorized(lanes):
                        acc[w] = src[at + w]
                    for row in range(height - 1):
                        for w in T.vectorized(lanes):
                            acc[w] = acc[w] | src[at + (row + 1) * inner + w]
                    if back == 0:
                        for w in T.vectorized(lanes):
                            flags[to + w] = flag(acc[w], sign, dtype)
                    else:
                        for w in range(lanes - back):
                            flags[to + w] = flag(acc[back + w], sign, dtype)
                for word in range(T.ceildiv(T.min(width, rows - start), 8)):
                    live: T.let = live_byte(flags, word * 8)
                    append(ids, end, table, live, start + word * 8, rows)
            close(ids, count, end, task, capacity)

    return tvm.IRModule({"main": main})
