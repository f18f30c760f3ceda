"""Sums of the rows of a list, column by column: the gradients of biases.

    out[g, j] = sum of rows[i, j] over i in list g

A CTA takes some columns of a list, 16 bytes to a thread, and its threads take rows in turn. Of one
list there are few CTAs, which are narrow and large; many lists are short, and theirs are wide and
small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch

from .dependent import after_predecessor
from .hopper_combine import CHUNK, PACK, UNPACK, store_words, unpack


class Form(NamedTuple):
    """Of a CTA: threads beside each other, warps, and rows that a thread has under way."""

    beside: int
    warps: int
    at_once: int

    @property
    def columns(self) -> int:
        """Of a CTA."""
        return self.beside * CHUNK

    @property
    def in_turn(self) -> int:
        """Rows that a CTA reads at once."""
        return self.warps * 32 // self.beside


ONE_LIST = Form(2, 32, 8)
LISTS = Form(8, 8, 4)


def _across(x: Any, beside: int) -> Any:
    """float32: the sum of a value over the lanes of a warp that stand in the same columns."""
    name = f"pit_sum_across_{beside}"
    code = f"""__forceinline__ __device__ float {name}(float x) {{
#pragma unroll
  for (int apart = 16; apart >= {beside}; apart >>= 1)
    x += __shfl_xor_sync(0xffffffffu, x, apart);
  return x;
}}
"""
    return T.cuda.func_call(name, x, source_code=code, return_type="float32")


@T.inline
def _load(words, first, source):
    T.ptx["ld.global.v4.b32"](*[words[first + i] for i in range(4)], source)


@T.inline
def _add(total, words, first, dtype):
    for w in T.unroll(CHUNK // 2):
        total[w * 2] = total[w * 2] + unpack(words[first + w], dtype, 0)
        total[w * 2 + 1] = total[w * 2 + 1] + unpack(words[first + w], dtype, 1)


@T.jit
def summed_rows(
    rows_h: T.handle,
    ids_h: T.handle,
    count_h: T.handle,
    out_h: T.handle,
    *,
    dtype: T.constexpr,
    form: T.constexpr,
):
    """The template; ``sum_rows`` explains it."""
    number, n, groups, capacity = T.int32(), T.int32(), T.int32(), T.int32()
    rows = T.match_buffer(rows_h, (number, n), dtype)
    ids = T.match_buffer(ids_h, (groups, capacity), "int32")
    count = T.match_buffer(count_h, (groups,), "int32")
    out = T.match_buffer(out_h, (groups, n), dtype)
    COLUMNS = T.meta_var(form.columns)
    BESIDE = T.meta_var(form.beside)
    WARPS = T.meta_var(form.warps)
    AT_ONCE = T.meta_var(form.at_once)
    IN_TURN = T.meta_var(form.in_turn)
    T.device_entry()
    per_group: T.let = T.truncdiv(n + COLUMNS - 1, COLUMNS)
    bx = T.cta_id([T.truncdiv(n + COLUMNS - 1, COLUMNS) * groups])
    tx = T.thread_id([WARPS * 32])
    parts = T.alloc_shared([WARPS, COLUMNS], "float32")
    total = T.alloc_local([CHUNK], "float32")
    words = T.alloc_local([AT_ONCE * 4], "uint32")
    after_predecessor()
    beside: T.let = T.truncmod(tx, BESIDE) * CHUNK
    turn: T.let = T.truncdiv(tx, BESIDE)
    group: T.let = T.truncdiv(bx, per_group)
    col: T.let = T.truncmod(bx, per_group) * COLUMNS + beside
    live: T.let = count[group]
    for v in T.unroll(CHUNK):
        total[v] = T.float32(0)
    if col < n:
        for step in T.serial(T.truncdiv(live + AT_ONCE * IN_TURN - 1, AT_ONCE * IN_TURN)):
            for u in T.unroll(AT_ONCE):
                for w in T.unroll(4):
                    words[u * 4 + w] = T.uint32(0)
                place: T.let = (step * AT_ONCE + u) * IN_TURN + turn
                if place < live:
                    row: T.let = ids[T.cast(group, "int64"), T.cast(place, "int64")]
                    _load(words, u * 4, rows.ptr_to([T.cast(row, "int64"), T.cast(col, "int64")]))
            for u in T.unroll(AT_ONCE):
                _add(total, words, u * 4, dtype)
    for v in T.unroll(CHUNK):
        total[v] = _across(total[v], BESIDE)
        if T.truncmod(tx, 32) < BESIDE:
            parts[T.truncdiv(tx, 32), beside + v] = total[v]
    T.cuda.cta_sync()
    if (tx < BESIDE) & (col < n):
        for v in T.unroll(CHUNK):
            total[v] = T.float32(0)
            for w in T.unroll(WARPS):
                total[v] = total[v] + parts[w, beside + v]
        for w in T.unroll(4):
            T.ptx[PACK[dtype]](words[w], total[w * 2 + 1], total[w * 2])
        store_words(out.ptr_to([T.cast(group, "int64"), T.cast(col, "int64")]), words)


def sum_rows(dtype: str, form: Form = ONE_LIST) -> tvm.tirx.PrimFunc:
    """rows (number, n), ids (groups, capacity) int32, count (groups,) int32, out (groups, n).

    ``out[g]`` is the sum of the first ``count[g]`` rows that ``ids[g]`` names, 0 of none; others
    are not read. Rows are of ``dtype``, float16 or bfloat16, sums fp32, in one order. n is a
    multiple of 8.

    Raises
    ------
    ScheduleError (a ValueError) for other types
    """
    if dtype not in UNPACK:
        raise ScheduleError(mismatch("dtype", "float16 or bfloat16", dtype))
    return summed_rows.specialize(dtype=dtype, form=form)
