"""The kernel that makes lists straight from a mask whose rows are folded, in one pass.

What `detect_kernels.fold_rows` and `detect_compact.compact` do one after the other; a slot's flags
never leave the nearest cache, and workers are woken once. Rows are read along, several at a time:
down a column every row is another page and, where rows are 4096 bytes apart, the same cache set.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T
from tvm.tirx import const

from .detect_compact import append, close, live_byte
from .detect_kernels import VECTOR_BYTES, flag, n_count, n_ids, n_src

CHUNK_BYTES = 4096  # of a row that are folded before their flags become list entries
ROWS = 8  # that are read side by side


def fold_compact(bits: int, sign: int, parallel: bool) -> tvm.IRModule:
    """Lists of the live micro-tiles of ``src[outer, size, inner]``, PIT innermost.

    Entries and the sizes of runs are as in ``fold_rows``; ``table``, ``ids``, ``count``, ``rows``
    and ``capacity`` as in ``compact``, with ``outer * slots`` lists. Needs at least
    64 bytes of entries in ``inner``.
    """
    dtype = f"uint{bits}"
    lanes, most = (size * 8 // bits for size in (VECTOR_BYTES, CHUNK_BYTES))
    loop = T.parallel if parallel else T.serial

    @T.inline
    def fold(src, folded, top, high, start, width, inner):
        """OR ``high`` rows from place ``top`` on to what is folded of a chunk."""
        acc = T.alloc_buffer((lanes,), dtype)
        for vec in range(T.ceildiv(width, lanes)):
            at: T.let = T.min(start + vec * lanes, inner - lanes)
            for w in T.vectorized(lanes):
                acc[w] = folded[at - start + lanes + w]
            for row in T.unroll(high):
                for w in T.vectorized(lanes):
                    acc[w] = acc[w] | src[top + row * inner + at + w]
            for w in T.vectorized(lanes):
                folded[at - start + lanes + w] = acc[w]

    @T.prim_func(s_tir=True)
    def main(
        src: T.Buffer((n_src,), dtype, align=bits // 8),
        table: T.Buffer((2048,), "uint8", align=1),
        ids: T.Buffer((n_ids,), "int32", align=4),
        count: T.Buffer((n_count,), "int32", align=4),
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
        for task in loop(outer * slots):
            # through memory, because TVM takes 10 s to simplify bound variables with divisions
            place = T.alloc_buffer((5,), "int64")
            place[0] = task // slots
            place[1] = task - place[0] * slots
            place[2] = place[1] * extent // grain
            place[3] = T.min(T.ceildiv(T.min((place[1] + 1) * extent, limit), grain), size)
            place[4] = (place[3] - place[2]) // ROWS
            top: T.let = (place[0] * size + place[2]) * inner
            # one vector more in front: the last one begins earlier, so that it is whole
            folded = T.alloc_buffer((lanes + most,), dtype)
            flags = T.alloc_buffer((most,), "uint8")
            end = T.alloc_buffer((1,), "int64")
            end[0] = task * capacity
            for chunk in range(T.ceildiv(inner, most)):
                start: T.let = chunk * most
                width: T.let = T.min(T.int64(most), inner - start)
                for vec in range(T.ceildiv(width, lanes) + 1):
                    for w in T.vectorized(lanes):
                        folded[vec * lanes + w] = const(0, dtype)
                for group in range(place[4]):
                    fold(src, folded, top + group * ROWS * inner, ROWS, start, width, inner)
                for row in range(place[3] - place[2] - place[4] * ROWS):
                    at: T.let = top + (place[4] * ROWS + row) * inner
                    fold(src, folded, at, 1, start, width, inner)
                for vec in range(T.ceildiv(width, lanes)):
                    for w in T.vectorized(lanes):
                        flags[vec * lanes + w] = flag(folded[(vec + 1) * lanes + w], sign, dtype)
                for word in range(T.ceildiv(T.min(width, rows - start), 8)):
                    live: T.let = live_byte(flags, word * 8)
                    append(ids, end, table, live, start + word * 8, rows)
            close(ids, count, end, task, capacity)

    return tvm.IRModule({"main": main})
