"""Sums of products of two arrays' rows, on NVIDIA GPUs."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from .dependent import after_predecessor

_THREADS = 256
_EACH = 8  # lanes of a row, and its elements that a lane takes at once


@T.jit
def sums_of_products(
    left_h: T.handle,
    right_h: T.handle,
    out_h: T.handle,
    batch: T.int32,
    heads: T.int32,
    rows: T.int32,
    dim: T.int32,
    left_batch: T.int64,
    left_head: T.int64,
    left_row: T.int64,
    right_batch: T.int64,
    right_head: T.int64,
    right_row: T.int64,
    *,
    dtype: T.constexpr,
):
    """The template; ``row_products`` explains it."""
    left_size, right_size, out_size = T.int64(), T.int64(), T.int64()
    left = T.match_buffer(left_h, (left_size,), dtype, align=16)
    right = T.match_buffer(right_h, (right_size,), dtype, align=16)
    out = T.match_buffer(out_h, (out_size,), "float32", align=4)
    T.device_entry()
    some = T.meta_var(_THREADS // _EACH)
    block, head, sequence = T.cta_id([T.truncdiv(rows + some - 1, some), heads, batch])
    thread = T.thread_id([_THREADS])
    total = T.alloc_local([1], "float32")
    after_predecessor()
    row: T.let = block * some + T.truncdiv(thread, _EACH)
    lane: T.let = T.truncmod(thread, _EACH)
    own: T.int64 = T.cast(T.min(row, rows - 1), "int64")
    l_at: T.int64 = (
        T.cast(sequence, "int64") * left_batch + T.cast(head, "int64") * left_head + own * left_row
    )
    r_at: T.int64 = (
        T.cast(sequence, "int64") * right_batch
        + T.cast(head, "int64") * right_head
        + own * right_row
    )
    total[0] = T.float32(0)
    for step in T.serial(T.truncdiv(dim + _EACH * _EACH - 1, _EACH * _EACH)):
        first: T.let = (step * _EACH + lane) * _EACH
        if first < dim:
            for e in T.unroll(_EACH):
                total[0] = total[0] + T.cast(left[l_at + first + e], "float32") * T.cast(
                    right[r_at + first + e], "float32"
                )
    for s in T.unroll(3):
        total[0] = total[0] + T.cuda.__shfl_xor_sync(T.uint32(0xFFFFFFFF), total[0], 1 << s, 32)
    if (row < rows) & (lane == 0):
        line: T.int64 = T.cast(sequence * heads + head, "int64") * T.cast(rows, "int64")
        out[line + T.cast(row, "int64")] = total[0]


def row_products(dtype: str) -> tvm.tirx.PrimFunc:
    """``out``, flat [batch, heads, rows], float32: sums of left times right along ``dim`` columns,
    a multiple of 8; both are flat, element ``c`` of a row at
    ``batch * *_batch + head * *_head + row * *_row + c``."""
    return sums_of_products.specialize(dtype=dtype)
