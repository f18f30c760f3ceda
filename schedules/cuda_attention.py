"""Attention of sequences of which tokens are missing in between, by windows, on NVIDIA GPUs.

Kernels of others tell by the order of tokens which keys a query sees. A window goes by positions,
which differ from the order behind a token that is missing. Few batches have such sequences, and
these alone are computed here: a warp for each query, key by key. Others cost what it takes to
see that they have no hole.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import DTypeError, mismatch

from .dependent import after_predecessor
from .hopper_combine import UNPACK

WARPS = 8  # of a CTA
QUERIES = 64  # of a CTA: of one sequence and head
MOST_DIM = 256  # of a head
_LOWEST = -3.0e38  # stands for minus infinity, whose differences are no numbers


def attention_of_holed(dtype: str) -> tvm.tirx.PrimFunc:
    """Rows of ``out`` whose sequence has a token missing between others; other rows stay.

    q, k and v: flat, ``dtype``, an element of ``row`` and ``head`` ``row * *_row + head * *_head +
    column``; starts (batch + 1,) and position (t,), int32, as `pit_tvm.runtime.live_tokens` has
    them; sinks, float32 (heads,) or, without them, (0,); out (t, heads, dim). ``dim`` is that of
    all heads, at most 256. A query sees the keys of positions from ``before`` its own to ``after``
    it. ``blocks`` of 64 rows are all of the longest sequence.

    Raises
    ------
    DTypeError
        ``dtype`` is neither float16 nor bfloat16.
    """
    if dtype not in UNPACK:
        raise DTypeError(mismatch("dtype", "float16 or bfloat16", repr(dtype)))
    each = MOST_DIM // 32  # columns of a lane

    @T.prim_func
    def kernel(
        p_q: T.handle,
        p_k: T.handle,
        p_v: T.handle,
        starts: T.Buffer(("edges",), "int32", align=4),
        position: T.Buffer(("tokens",), "int32", align=4),
        sinks: T.Buffer(("sunk",), "float32", align=4),
        out: T.Buffer(("rows", "heads", "dim"), dtype, align=2),
        q_row: T.int64,
        q_head: T.int64,
        k_row: T.int64,
        k_head: T.int64,
        v_row: T.int64,
        v_head: T.int64,
        before: T.int32,
        after: T.int32,
        scale: T.float32,
        blocks: T.int32,
    ):
        q_size = T.int64()
        k_size = T.int64()
        v_size = T.int64()
        edges, sunk, heads, dim = T.int32(), T.int32(), T.int32(), T.int32()
        q = T.match_buffer(p_q, (q_size,), dtype, align=2)
        k = T.match_buffer(p_k, (k_size,), dtype, align=2)
        v = T.match_buffer(p_v, (v_size,), dtype, align=2)
        T.device_entry()
        place, head = T.cta_id([(edges - 1) * blocks, heads])
        thread = T.thread_id([WARPS * 32])
        query = T.alloc_local([each], "float32")
        total = T.alloc_local([each], "float32")
        after_predecessor()
        lane: T.let = T.truncmod(thread, 32)
        sequence: T.let = T.truncdiv(place, blocks)
        begin: T.let = starts[sequence]
        end: T.let = starts[sequence + 1]
        holed: T.int32 = 0
        if begin < end:
            holed = position[end - 1] - position[begin] + 1 - (end - begin)
        if holed > 0:
            for step in T.serial(QUERIES // WARPS):
                block: T.let = T.truncmod(place, blocks)
                row: T.let = begin + block * QUERIES + step * WARPS + T.truncdiv(thread, 32)
                if row < end:
                    for c in T.unroll(each):
                        total[c] = T.float32(0)
                        query[c] = T.float32(0)
                        if lane + c * 32 < dim:
                            query[c] = (
                                T.float32(
                                    q[
                                        T.int64(row) * q_row
                                        + T.int64(head) * q_head
                                        + T.int64(lane + c * 32)
                                    ]
                                )
                                * scale
                            )
                    peak: T.float32 = T.float32(_LOWEST)
                    weight: T.float32 = T.float32(0)
                    if sunk > 0:
                        peak = sinks[head]
                        weight = T.float32(1)
                    first: T.let = T.max(begin, row - before)
                    last: T.let = T.min(end, row + after + 1)
                    for key in T.serial(last - first):
                        at: T.let = first + key
                        far: T.let = position[row] - position[at]
                        if (far <= before) & (far >= 0 - after):
                            score: T.float32 = T.float32(0)
                            for c in T.unroll(each):
                                if lane + c * 32 < dim:
                                    score = score + query[c] * T.float32(
                                        k[
                                            T.int64(at) * k_row
                                            + T.int64(head) * k_head
                                            + T.int64(lane + c * 32)
                                        ]
                                    )
                            for s in T.unroll(5):
                                score = score + T.cuda.__shfl_xor_sync(
                                    T.uint32(0xFFFFFFFF), score, T.shift_left(1, s), 32
                                )
                            top: T.float32 = T.max(peak, score)
                            shrink: T.float32 = T.exp(peak - top)
                            part: T.float32 = T.exp(score - top)
                            weight = weight * shrink + part
                            peak = top
                            for c in T.unroll(each):
                                if lane + c * 32 < dim:
                                    total[c] = total[c] * shrink + part * T.float32(
                                        v[
                                            T.int64(at) * v_row
                                            + T.int64(head) * v_head
                                            + T.int64(lane + c * 32)
                                        ]
                                    )
                    for c in T.unroll(each):
                        if lane + c * 32 < dim:
                            out[row, head, lane + c * 32] = T.cast(total[c] / weight, dtype)

    return kernel
