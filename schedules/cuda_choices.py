"""Products of few tokens by the weights of the experts that they chose.

    out[t, c, :] = act(w[ids[t, c]] @ x[t] + bias[ids[t, c]])          of every choice
    out[t, :] = sum over c of factors[t, c] * (w[ids[t, c]] @ x[t, c] + bias[ids[t, c]])

Where hardly two tokens share an expert, tiles are filled by one row, and an index, a row of tiles
for each expert and sums of their results cost more than the arithmetic. Here ids are read where
they are needed (SRead of whole matrices, PIT, SOSP'23, section 3.3): a warp makes a few elements of
out, its lanes read 16 bytes each of as many rows of the weights, all of them before the first is
used, and add up what they have at the end. The bytes of the weights bound it.

Sums are fp32 and in fixed order: equal inputs give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script import tirx as T

from pit_tvm.gates import Gate

from .dependent import after_predecessor
from .hopper_combine import UNPACK, unpack
from .hopper_knobs import ACTS, require
from .hopper_swrite import activate, multiply

LANES = 32
WARPS = 8
CHUNK = 8  # elements of 16 bits in the 16 bytes that a lane reads at once
STEP = LANES * CHUNK
FACTORS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ChoicesTile:
    """What a kernel computes, and how.

    ``rows`` of the weights are read by a warp, ``ahead`` times `STEP` elements of each at once;
    ``deep`` warps take choices of the same columns of a sum in turn. ``gate``: half of the columns
    are gates. ``factors``: the type of the factors of a sum; "" leaves every choice its own row.
    """

    dtype: str
    ids: str
    act: str = "none"
    gate: Gate | None = None
    factors: str = ""
    bias: bool = False
    rows: int = 8
    ahead: int = 2
    deep: int = 1

    @property
    def halves(self) -> int:
        """Columns of the weights that make one of out."""
        return 1 if self.gate is None else 2

    @property
    def across(self) -> int:
        """Warps side by side."""
        return WARPS // self.deep

    @property
    def columns(self) -> int:
        """Of out, that a warp makes."""
        return self.rows // self.halves

    @property
    def owned(self) -> int:
        """Columns of out that a CTA makes."""
        return self.columns * self.across

    def place(self, column: Any, side: int, n: Any) -> Any:
        """The column of the weights that makes a ``side`` of a column of out, gates being 0."""
        if self.gate is None:
            return column
        return column * 2 + side if self.gate.interleaved else column + side * n

    def check(self) -> None:
        """Raise ScheduleError (a ValueError) for what the template cannot build."""
        rules = {
            "dtype float16 or bfloat16": self.dtype in UNPACK,
            "ids int32 or int64": self.ids in ("int32", "int64"),
            f"act one of {', '.join(ACTS)}": self.act in ACTS,
            "act that takes the gate's alpha": self.gate is None or self.gate.fits(self.act),
            f"factors one of {', '.join(FACTORS)}, or none": self.factors in ("", *FACTORS),
            "sums without act": not self.factors or self.act == "none",
            "sums without gates": not self.factors or self.gate is None,
            "rows 2, 4 or 8": self.rows in (2, 4, 8),
            "ahead at least 1": self.ahead > 0,
            "deep 1, 2, 4 or 8": self.deep in (1, 2, 4, 8),
            "deep 1 without sums": self.deep == 1 or bool(self.factors),
        }
        require("choices_kernel", self, rules)


def product_tile(
    dtype: str, ids: str, act: str, gate: Gate | None = None, *, bias: bool = False
) -> ChoicesTile:
    """The fastest of those measured on an H200 for products of every choice."""
    return ChoicesTile(dtype, ids, act, gate, bias=bias)


def sum_tile(
    dtype: str, ids: str, factors: str, tokens: int, top_k: int, *, bias: bool = False
) -> ChoicesTile:
    """The fastest of those measured on an H200 for sums: one token's are few, so that more warps
    share them."""
    how: dict[str, Any] = {"factors": factors, "bias": bias}
    if tokens == 1 and top_k >= 4:
        return ChoicesTile(dtype, ids, **how, rows=4, ahead=2, deep=4)
    return ChoicesTile(dtype, ids, **how, rows=4, ahead=4, deep=min(top_k, 2))


# No branch, so that all loads are under way before the first is waited for.
_LOAD = """
__forceinline__ __device__ void pit_load_16(unsigned* to, const void* from, int inside) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0;"
               " mov.b32 %2, 0; mov.b32 %3, 0;"
               " @p ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4]; }"
               : "=&r"(to[0]), "=&r"(to[1]), "=&r"(to[2]), "=&r"(to[3]) : "l"(from), "r"(inside));
}
"""


@T.meta_class
class _Dots:
    """Products of a vector by ``rows`` rows of a matrix; every lane of a warp has its part."""

    def __init__(self, tile: ChoicesTile, lane: Any) -> None:
        self.tile, self.lane = tile, lane
        self.sums = T.alloc_local([tile.rows], "float32")
        self.read = T.alloc_local([tile.ahead, tile.rows + 1, 4], "uint32")

    def load(self, u: Any, r: Any, source: Any, inside: Any) -> Any:
        """Read 16 bytes of a row of the weights, or, last, of the vector; zeros behind its end."""
        given = (self.read.ptr_to([u, r, 0]), source, inside)
        return T.cuda.func_call("pit_load_16", *given, source_code=_LOAD)

    @T.inline
    def begin(self, bias, group, places):
        """Begin sums; one lane's with the bias."""
        for r in T.unroll(self.tile.rows):
            self.sums[r] = T.float32(0)
            if bias is not None:
                if self.lane == 0:
                    self.sums[r] = T.float32(bias[group, T.int64(places[r])])

    @T.inline
    def add(self, x, row, weight, group, places, k):
        """Add x[row] times the rows ``places`` of weight[group]; k is their length."""
        rows = T.meta_var(self.tile.rows)
        ahead = T.meta_var(self.tile.ahead)
        for s in T.serial(T.truncdiv(k + ahead * STEP - 1, ahead * STEP)):
            for u in T.unroll(ahead):
                at: T.let = (s * ahead + u) * STEP + self.lane * CHUNK
                inside: T.let = T.int32(at < k)
                for r in T.unroll(rows):
                    place = T.meta_var([group, T.int64(places[r]), T.int64(at)])
                    T.evaluate(self.load(u, r, weight.ptr_to(place), inside))
                vector = T.meta_var(x.ptr_to([T.int64(row), T.int64(at)]))
                T.evaluate(self.load(u, rows, vector, inside))
            for u in T.unroll(ahead):
                for i in T.unroll(4):
                    low: T.let = self.value(u, rows, i, 0)
                    high: T.let = self.value(u, rows, i, 1)
                    for r in T.unroll(rows):
                        self.sums[r] = self.sums[r] + low * self.value(u, r, i, 0)
                        self.sums[r] = self.sums[r] + high * self.value(u, r, i, 1)

    def value(self, u: Any, r: Any, i: Any, upper: int) -> Any:
        """Half of a word that was read, as fp32."""
        return unpack(self.read[u, r, i], self.tile.dtype, upper)

    @T.inline
    def add_up(self):
        """The sums of all lanes."""
        for r in T.unroll(self.tile.rows):
            for s in T.unroll(5):
                self.sums[r] = self.sums[r] + T.cuda.__shfl_xor_sync(
                    T.uint32(0xFFFFFFFF), self.sums[r], T.shift_left(1, s), LANES
                )


@T.jit
def product_of_choices(
    x: T.Buffer(("tokens", "k"), tile.dtype, align=16),
    ids: T.Buffer(("tokens", "choices"), tile.ids),
    weight: T.Buffer(("groups", "wide", "k"), tile.dtype, align=16),
    bias: T.Optional(T.Buffer(("groups", "wide"), tile.dtype, align=2)),
    out: T.Buffer(("rows", "n"), tile.dtype, align=16),
    *,
    tile: T.constexpr,
):
    """The template of what every choice has its own row of; ``choices_kernel`` explains it."""
    tokens, choices, k, groups, n = T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
    T.device_entry()
    # Neighbouring CTAs take the same columns: what choices have in common is read at one time.
    bx = T.cta_id([tokens * choices * T.truncdiv(n + tile.owned - 1, tile.owned)])
    tx = T.thread_id([WARPS * LANES])
    lane: T.let = T.truncmod(tx, LANES)
    row: T.let = T.truncmod(bx, tokens * choices)
    token: T.let = T.truncdiv(row, choices)
    first: T.let = T.truncdiv(bx, tokens * choices) * tile.owned
    col: T.let = first + T.truncdiv(tx, LANES) * tile.columns
    dots = _Dots(tile, lane)
    places = T.alloc_local([tile.rows], "int32")
    after_predecessor()
    if col < n:
        for r in T.unroll(tile.columns):
            for side in T.unroll(tile.halves):
                places[side * tile.columns + r] = tile.place(T.min(col + r, n - 1), side, n)
        dots.begin(None, 0, places)
        group: T.let = T.int64(ids[token, T.truncmod(row, choices)])
        if (group >= T.int64(0)) & (group < T.int64(groups)):
            dots.begin(bias, group, places)
            dots.add(x, token, weight, group, places, k)
        dots.add_up()
        for r in T.unroll(tile.columns):
            if (lane == r) & (col + r < n):
                if tile.gate is None:
                    out[row, col + r] = T.cast(activate(tile.act, dots.sums[r]), tile.dtype)
                else:
                    out[row, col + r] = T.cast(
                        multiply(tile.act, tile.gate, dots.sums[r], dots.sums[tile.columns + r]),
                        tile.dtype,
                    )


@T.jit
def sum_of_choices(
    x: T.Buffer(("rows", "k"), tile.dtype, align=16),
    ids: T.Buffer(("tokens", "choices"), tile.ids),
    factors: T.Buffer(("tokens", "choices"), tile.factors),
    weight: T.Buffer(("groups", "n", "k"), tile.dtype, align=16),
    bias: T.Optional(T.Buffer(("groups", "n"), tile.dtype, align=2)),
    out: T.Buffer(("tokens", "n"), tile.dtype, align=16),
    *,
    tile: T.constexpr,
):
    """The template of the sum over a token's choices; ``choices_kernel`` explains it."""
    tokens, choices, k, groups, n = T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
    T.device_entry()
    bx = T.cta_id([tokens * T.truncdiv(n + tile.owned - 1, tile.owned)])
    tx = T.thread_id([WARPS * LANES])
    lane: T.let = T.truncmod(tx, LANES)
    warp: T.let = T.truncdiv(tx, LANES)
    token: T.let = T.truncmod(bx, tokens)
    first: T.let = T.truncdiv(bx, tokens) * tile.owned
    col: T.let = first + T.truncmod(warp, tile.across) * tile.columns
    turn0: T.let = T.truncdiv(warp, tile.across)
    turns: T.let = T.truncdiv(choices - turn0 + tile.deep - 1, tile.deep)
    pool = T.SMEMPool()
    parts = pool.alloc((tile.deep, tile.owned), "float32", align=16)
    pool.commit()
    dots = _Dots(tile, lane)
    places = T.alloc_local([tile.rows], "int32")
    total = T.alloc_local([tile.rows], "float32")
    for r in T.unroll(tile.rows):
        places[r] = T.min(col + r, n - 1)
        total[r] = T.float32(0)
    after_predecessor()
    if col < n:
        for turn in T.serial(turns):
            choice: T.let = turn * tile.deep + turn0
            factor: T.let = T.float32(factors[token, choice])
            group: T.let = T.int64(ids[token, choice])
            if (group >= T.int64(0)) & (group < T.int64(groups)) & (factor != T.float32(0)):
                dots.begin(bias, group, places)
                dots.add(x, token * choices + choice, weight, group, places, k)
                for r in T.unroll(tile.rows):
                    total[r] = total[r] + factor * dots.sums[r]
    for r in T.unroll(tile.rows):
        dots.sums[r] = total[r]
    dots.add_up()
    for r in T.unroll(tile.rows):
        if lane == r:
            parts[turn0, T.truncmod(warp, tile.across) * tile.rows + r] = dots.sums[r]
    T.cuda.cta_sync()
    if (tx < tile.owned) & (first + tx < n):
        value: T.float32 = 0.0
        for d in T.unroll(tile.deep):
            value = value + parts[d, tx]
        out[token, first + tx] = T.cast(value, tile.dtype)


def choices_kernel(tile: ChoicesTile) -> tvm.tirx.PrimFunc:
    """Without ``tile.factors``: x (tokens, k), ids (tokens, choices), weight, [bias,] out (tokens *
    choices, n); zeros, activated, where an id is no group's. ``weight`` is (groups, wide, k) and
    ``bias`` (groups, wide), wide being n, or with a gate 2 n.

    With: x (tokens * choices, k), ids, factors (tokens, choices), weight, [bias,] out (tokens, n).
    Choices whose id is no group's, and those whose factor is zero, are not read.

    k and n are multiples of 8, rows aligned to 16 bytes; no extent is 0.

    Raises
    ------
    ScheduleError (a ValueError) for what cannot be built
    """
    tile.check()
    absent = {} if tile.bias else {"bias": None}
    template = sum_of_choices if tile.factors else product_of_choices
    return template.specialize(tile=tile, **absent)
