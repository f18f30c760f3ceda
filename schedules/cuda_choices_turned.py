"""Products of few tokens by weights (groups, k, n) of the experts that they chose.

What `cuda_choices` computes of weights that lie the other way, as GPT-OSS has them: lanes of a warp
read 16 bytes beside each other in a row of the weights, which one element of x multiplies, warps of
a CTA and lanes of a warp share the rows, and what they have is added up at the end.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from .cuda_choices_tile import CHUNK, LANES, ChoicesTile
from .dependent import after_predecessor
from .hopper_combine import unpack
from .hopper_swrite import activate, multiply

# No branch, so that all loads are under way before the first is waited for.
_LOAD = """
__forceinline__ __device__ void pit_load_16(unsigned* to, const void* from, int inside) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0;"
               " mov.b32 %2, 0; mov.b32 %3, 0;"
               " @p ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4]; }"
               : "=&r"(to[0]), "=&r"(to[1]), "=&r"(to[2]), "=&r"(to[3]) : "l"(from), "r"(inside));
}
"""


def load_16(to: Any, source: Any, inside: Any) -> Any:
    """Read 16 bytes, or zeros where they are not ``inside``."""
    return T.cuda.func_call("pit_load_16", to, source, inside, source_code=_LOAD)


@T.meta_class
class _Columns:
    """Products of a vector by `CHUNK` columns of a matrix; every thread has its part of the depth.

    Threads ``turn`` of every ``turns`` share it; ``sums`` are those of one choice.
    """

    def __init__(self, tile: ChoicesTile, turn: Any, turns: int) -> None:
        self.tile, self.turn, self.turns = tile, turn, turns
        self.sums = T.alloc_local([CHUNK], "float32")
        self.read = T.alloc_local([tile.ahead, 4], "uint32")
        self.factors = T.alloc_local([tile.ahead], "float32")

    @T.inline
    def begin(self, bias, group, place, inside):
        """Begin sums; those of the first thread with the bias."""
        for j in T.unroll(CHUNK):
            self.sums[j] = T.float32(0)
            if bias is not None:
                if (self.turn == 0) & inside:
                    self.sums[j] = T.cast(bias[group, T.cast(place + j, "int64")], "float32")

    @T.inline
    def add(self, x, row, weight, group, place, inside, k):
        """Add x[row] times columns from ``place`` on of weight[group], if they are ``inside``; k is
        their length."""
        ahead = T.meta_var(self.tile.ahead)
        for s in T.serial(T.truncdiv(k + ahead * self.turns - 1, ahead * self.turns)):
            for u in T.unroll(ahead):
                at: T.let = (s * ahead + u) * self.turns + self.turn
                source = T.meta_var([group, T.cast(at, "int64"), T.cast(place, "int64")])
                T.evaluate(
                    load_16(
                        self.read.ptr_to([u, 0]),
                        weight.ptr_to(source),
                        T.cast((at < k) & inside, "int32"),
                    )
                )
                self.factors[u] = T.float32(0)
                if at < k:
                    self.factors[u] = T.cast(x[row, at], "float32")
            for u in T.unroll(ahead):
                for i in T.unroll(4):
                    low: T.let = unpack(self.read[u, i], self.tile.dtype, 0)
                    high: T.let = unpack(self.read[u, i], self.tile.dtype, 1)
                    self.sums[i * 2] = self.sums[i * 2] + self.factors[u] * low
                    self.sums[i * 2 + 1] = self.sums[i * 2 + 1] + self.factors[u] * high

    @T.inline
    def lay(self, parts, warp, lane):
        """The sums of a warp to parts[warp], by columns."""
        for j in T.unroll(CHUNK):
            for s in T.unroll((LANES // self.tile.lanes).bit_length() - 1):
                self.sums[j] = self.sums[j] + T.cuda.__shfl_xor_sync(
                    T.uint32(0xFFFFFFFF), self.sums[j], T.shift_left(self.tile.lanes, s), LANES
                )
        if lane < self.tile.lanes:
            for j in T.unroll(CHUNK):
                parts[warp, lane * CHUNK + j] = self.sums[j]


@T.jit
def turned_product(
    x_h: T.handle,
    ids_h: T.handle,
    weight_h: T.handle,
    bias_h: T.Optional(T.handle),  # type: ignore[valid-type]
    out_h: T.handle,
    *,
    tile: T.constexpr,
):
    """The template of what every choice has its own row of; ``choices_kernel`` explains it."""
    tokens, choices, k = T.int32(), T.int32(), T.int32()
    groups, wide, rows, n = T.int32(), T.int32(), T.int32(), T.int32()
    x = T.match_buffer(x_h, (tokens, k), tile.dtype, align=16)
    ids = T.match_buffer(ids_h, (tokens, choices), tile.ids)
    weight = T.match_buffer(weight_h, (groups, k, wide), tile.dtype, align=16)
    if bias_h is not None:
        bias = T.match_buffer(bias_h, (groups, wide), tile.dtype, align=2)
    else:
        bias = T.meta_var(None)
    out = T.match_buffer(out_h, (rows, n), tile.dtype, align=16)
    T.device_entry()
    # Neighbouring CTAs take the same columns: what choices have in common is read at one time.
    bx = T.cta_id([tokens * choices * T.truncdiv(n + tile.owned - 1, tile.owned)])
    tx = T.thread_id([tile.warps * LANES])
    row: T.let = T.truncmod(bx, tokens * choices)
    token: T.let = T.truncdiv(row, choices)
    first: T.let = T.truncdiv(bx, tokens * choices) * tile.owned
    pool = T.SMEMPool()
    parts = pool.alloc((tile.warps, tile.lanes * CHUNK), "float32", align=16)
    pool.commit()
    columns = _Columns(tile, T.truncdiv(tx, tile.lanes), tile.warps * LANES // tile.lanes)
    place: T.let = tile.source(first, T.truncmod(tx, tile.lanes), n)[0]
    inside: T.let = place < tile.source(first, T.truncmod(tx, tile.lanes), n)[1]
    after_predecessor()
    group: T.let = T.cast(ids[token, T.truncmod(row, choices)], "int64")
    columns.begin(None, 0, 0, False)
    if (group >= T.int64(0)) & (group < T.cast(groups, "int64")):
        columns.begin(bias, group, place, inside)
        columns.add(x, token, weight, group, place, inside, k)
    columns.lay(parts, T.truncdiv(tx, LANES), T.truncmod(tx, LANES))
    T.cuda.cta_sync()
    if (tx < tile.owned) & (first + tx < n):
        value = T.alloc_local([2], "float32")
        for side in T.unroll(tile.halves):
            value[side] = T.float32(0)
            for w in T.unroll(tile.warps):
                value[side] = value[side] + parts[w, tile.place(tx, side, tile.owned)]
        if tile.gate is None:
            out[row, first + tx] = T.cast(activate(tile.act, value[0]), tile.dtype)
        else:
            out[row, first + tx] = T.cast(
                multiply(tile.act, tile.gate, value[0], value[1]), tile.dtype
            )


@T.jit
def turned_sum(
    x_h: T.handle,
    ids_h: T.handle,
    factors_h: T.handle,
    weight_h: T.handle,
    bias_h: T.Optional(T.handle),  # type: ignore[valid-type]
    out_h: T.handle,
    *,
    tile: T.constexpr,
):
    """The template of the sum over a token's choices; ``choices_kernel`` explains it."""
    tokens, choices, k = T.int32(), T.int32(), T.int32()
    groups, rows, n = T.int32(), T.int32(), T.int32()
    x = T.match_buffer(x_h, (rows, k), tile.dtype, align=16)
    ids = T.match_buffer(ids_h, (tokens, choices), tile.ids)
    factors = T.match_buffer(factors_h, (tokens, choices), tile.factors)
    weight = T.match_buffer(weight_h, (groups, k, n), tile.dtype, align=16)
    if bias_h is not None:
        bias = T.match_buffer(bias_h, (groups, n), tile.dtype, align=2)
    else:
        bias = T.meta_var(None)
    out = T.match_buffer(out_h, (tokens, n), tile.dtype, align=16)
    T.device_entry()
    bx = T.cta_id([tokens * T.truncdiv(n + tile.owned - 1, tile.owned)])
    tx = T.thread_id([tile.warps * LANES])
    token: T.let = T.truncmod(bx, tokens)
    first: T.let = T.truncdiv(bx, tokens) * tile.owned
    lot = T.meta_var(tile.across * LANES)  # threads that share a choice
    turn0: T.let = T.truncdiv(tx, lot)
    turns: T.let = T.truncdiv(choices - turn0 + tile.deep - 1, tile.deep)
    pool = T.SMEMPool()
    parts = pool.alloc((tile.warps, tile.owned), "float32", align=16)
    pool.commit()
    columns = _Columns(tile, T.truncdiv(T.truncmod(tx, lot), tile.lanes), lot // tile.lanes)
    place: T.let = first + T.truncmod(tx, tile.lanes) * CHUNK
    inside: T.let = place < n
    total = T.alloc_local([CHUNK], "float32")
    for j in T.unroll(CHUNK):
        total[j] = T.float32(0)
    after_predecessor()
    for t in T.serial(turns):
        choice: T.let = t * tile.deep + turn0
        factor: T.let = T.cast(factors[token, choice], "float32")
        group: T.let = T.cast(ids[token, choice], "int64")
        if (group >= T.int64(0)) & (group < T.cast(groups, "int64")) & (factor != T.float32(0)):
            columns.begin(bias, group, place, inside)
            columns.add(x, token * choices + choice, weight, group, place, inside, k)
            for j in T.unroll(CHUNK):
                total[j] = total[j] + factor * columns.sums[j]
    for j in T.unroll(CHUNK):
        columns.sums[j] = total[j]
    columns.lay(parts, T.truncdiv(tx, LANES), T.truncmod(tx, LANES))
    T.cuda.cta_sync()
    if (tx < tile.owned) & (first + tx < n):
        value: T.float32 = 0.0
        for w in T.unroll(tile.warps):
            value = value + parts[w, tx]
        out[token, first + tx] = T.cast(value, tile.dtype)
