"""The gradients of a token's weighted sum of its choices: to every choice's row, and to its weight.

    drows[t, c] = weights[t, c] * dout[t],    dweights[t, c] = sum of dout[t] * rows[t, c]

A warp takes one choice, and reads and writes its row once.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch

from .dependent import after_predecessor
from .hopper_combine import CHUNK, PACK, UNPACK, load_words, store_words, unpack

WARPS = 8  # of a CTA
LANES = 32
MOST_ROWS = 2**31 - WARPS  # rounded up to whole CTAs they are counted in 32 bits

_SUM = """
__forceinline__ __device__ float pit_lanes_sum(float x) {
#pragma unroll
  for (int apart = 16; apart; apart >>= 1) x += __shfl_xor_sync(0xffffffffu, x, apart);
  return x;
}
"""


@T.inline
def _half(value, dot, row, down, weight, dtype, half):
    """One of two elements: what is stored for it, and what it adds to the sum."""
    d: T.float32 = unpack(down, dtype, half)
    value[half] = weight * d
    dot[0] = dot[0] + d * unpack(row, dtype, half)


@T.jit
def spread_choices(
    rows: T.Buffer(("tokens", "choices", "n"), dtype),
    weights: T.Buffer(("tokens", "choices"), "float32"),
    ids: T.Buffer(("tokens", "choices"), id_dtype),
    down: T.Buffer(("tokens", "n"), dtype),
    drows: T.Buffer(("tokens", "choices", "n"), dtype),
    dweights: T.Buffer(("tokens", "choices"), "float32"),
    *,
    dtype: T.constexpr,
    id_dtype: T.constexpr,
):
    """The template; ``spread_rows`` explains it."""
    tokens, choices, n = T.int32(), T.int32(), T.int32()
    T.device_entry()
    bx = T.cta_id([T.truncdiv(tokens * choices + WARPS - 1, WARPS)])
    tx = T.thread_id([WARPS * LANES])
    lane: T.let = T.truncmod(tx, LANES)
    after_predecessor()
    place: T.let = bx * WARPS + T.truncdiv(tx, LANES)
    if place < tokens * choices:
        token: T.let = T.truncdiv(place, choices)
        choice: T.let = T.truncmod(place, choices)
        words = T.alloc_local([4], "uint32")
        given = T.alloc_local([4], "uint32")
        value = T.alloc_local([2], "float32")
        dot = T.alloc_local([1], "float32")
        dot[0] = T.float32(0)
        alive: T.let = T.int64(ids[token, choice]) >= T.int64(0)
        weight: T.float32 = T.if_then_else(alive, weights[token, choice], T.float32(0))
        for step in T.serial(T.truncdiv(n + LANES * CHUNK - 1, LANES * CHUNK)):
            col: T.let = T.int64((step * LANES + lane) * CHUNK)
            if (step * LANES + lane) * CHUNK < n:
                at = T.meta_var([T.int64(token), T.int64(choice), col])
                for w in T.unroll(4):
                    words[w] = T.uint32(0)
                    given[w] = T.uint32(0)
                if alive:
                    load_words(words, rows.ptr_to(at))
                    load_words(given, down.ptr_to([at[0], col]))
                for w in T.unroll(4):
                    _half(value, dot, words[w], given[w], weight, dtype, 0)
                    _half(value, dot, words[w], given[w], weight, dtype, 1)
                    T.ptx[PACK[dtype]](words[w], value[1], value[0])
                store_words(drows.ptr_to(at), words)
        total: T.float32 = T.cuda.func_call(
            "pit_lanes_sum", dot[0], source_code=_SUM, return_type="float32"
        )
        if lane == 0:
            dweights[token, choice] = total


def spread_rows(dtype: str, ids: str) -> tvm.tirx.PrimFunc:
    """rows (tokens, choices, n), weights (tokens, choices) float32, ids (tokens, choices) of type
    ``ids``, the gradient to the sums (tokens, n); then those to rows and to weights, 0 for choices
    whose id is below 0: they are not read.

    Rows are of ``dtype``, float16 or bfloat16, sums fp32, in one order. n is a multiple of 8, and
    there are 1 to `MOST_ROWS` choices.

    Raises
    ------
    ScheduleError (a ValueError) for other types, and for ids that are not int32 or int64
    """
    if dtype not in UNPACK:
        raise ScheduleError(mismatch("dtype", "float16 or bfloat16", dtype))
    if ids not in ("int32", "int64"):
        raise ScheduleError(mismatch("ids", "int32 or int64", ids))
    return spread_choices.specialize(dtype=dtype, id_dtype=ids)
