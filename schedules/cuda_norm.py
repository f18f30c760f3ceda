"""Layer norm of rows, and of the sum of two, on NVIDIA GPUs: each row read once and written once;
the sum too, where a residual goes on with it.

A team of 1 to 8 warps has a row in registers, in float32: the mean first, then the variance of
what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import DTypeError, ShapeError, mismatch
from pit_tvm.op.arguments import at_least

from .dependent import after_predecessor
from .hopper_combine import PACK, UNPACK, unpack

WARPS = 8  # of a CTA
CHUNK = 8  # elements of 16 bits that one lane moves at once
MOST_CHUNKS = 4  # of one lane, where a team may still grow


@dataclass(frozen=True)
class NormForm:
    """What a kernel is built for. ``terms``: tensors that are added up, 1 or 2."""

    width: int
    dtype: str
    eps: float
    terms: int

    @property
    def chunk(self) -> int:
        """Elements that a lane moves at once: 1 where rows do not begin at 16 bytes."""
        return 1 if self.width % CHUNK else CHUNK

    @property
    def team(self) -> int:
        """Warps for one row: as few as leave a lane little to do."""
        chunks = -(-self.width // CHUNK)
        return next((w for w in (1, 2, 4) if chunks <= MOST_CHUNKS * 32 * w), WARPS)

    @property
    def steps(self) -> int:
        """Pieces of a row for each lane."""
        return -(-self.width // (self.chunk * 32 * self.team))


@T.inline
def add_up(total, shared, warp, lane, team):
    """``total[0]`` (local, float32) becomes the sum over the lanes of a team."""
    for s in T.unroll(5):
        total[0] = total[0] + T.cuda.__shfl_xor_sync(
            T.uint32(0xFFFFFFFF), total[0], T.shift_left(1, s), 32
        )
    if team > 1:
        if lane == 0:
            shared[warp] = total[0]
        T.cuda.cta_sync()
        first: T.let = T.truncdiv(warp, team) * team
        total[0] = T.float32(0)
        for other in T.unroll(team):
            total[0] = total[0] + shared[first + other]
        T.cuda.cta_sync()


@T.inline
def fetch(words, source, place, form):
    """The words of a lane's next elements, from ``place`` on."""
    if form.chunk == 1:
        words[0] = T.uint32(T.reinterpret("uint16", source[place]))
    else:
        T.ptx["ld.global.v4.b32"](*[words[i] for i in range(4)], source.ptr_to(list(place)))


@T.inline
def put(words, line, first, target, place, form):
    """Elements of ``line`` from ``first`` on go where `fetch` would read them."""
    if form.chunk == 1:
        target[place] = T.cast(line[first], form.dtype)
    else:
        for w in T.unroll(4):
            T.ptx[PACK[form.dtype]](words[w], line[first + w * 2 + 1], line[first + w * 2])
        T.ptx["st.global.v4.b32"](target.ptr_to(list(place)), *[words[i] for i in range(4)])


def element(words: Any, v: Any, form: NormForm) -> Any:
    """float32: element ``v`` of what `fetch` brought."""
    word = words[T.truncdiv(v, 2)]
    lower, upper = (unpack(word, form.dtype, half) for half in (0, 1))
    return T.if_then_else(T.truncmod(v, 2) == 0, lower, upper)


@T.jit
def normed_rows(
    x: T.Buffer(("rows", form.width), form.dtype),
    y: T.Optional(T.Buffer(("rows", form.width), form.dtype)),
    scale: T.Buffer((form.width,), form.dtype),
    shift: T.Buffer((form.width,), form.dtype),
    out: T.Buffer(("rows", form.width), form.dtype),
    whole: T.Optional(T.Buffer(("rows", form.width), form.dtype)),
    *,
    form: T.constexpr,
):
    """The template; ``norm_rows`` explains it."""
    rows = T.int32()
    TEAM = T.meta_var(form.team)
    STEPS = T.meta_var(form.steps)
    SIZE = T.meta_var(form.chunk)
    EACH = T.meta_var(WARPS // form.team)  # rows of one CTA
    T.device_entry()
    bx = T.cta_id([T.truncdiv(rows + EACH - 1, EACH)])
    tx = T.thread_id([WARPS * 32])
    sums = T.alloc_shared([WARPS], "float32")
    after_predecessor()
    warp: T.let = T.truncdiv(tx, 32)
    place: T.let = T.truncmod(tx, TEAM * 32)
    asked: T.let = bx * EACH + T.truncdiv(warp, TEAM)
    # A team without a row goes along with the last one and writes nothing.
    row: T.let = T.int64(T.min(asked, rows - 1))
    line = T.alloc_local([STEPS * SIZE], "float32")
    words = T.alloc_local([4], "uint32")
    total = T.alloc_local([1], "float32")
    total[0] = T.float32(0)
    for s in T.unroll(STEPS):
        col: T.let = T.int64((s * TEAM * 32 + place) * SIZE)
        if col < T.int64(form.width):
            fetch(words, x, (row, col), form)
            for v in T.unroll(SIZE):
                line[s * SIZE + v] = element(words, v, form)
            if y is not None:
                fetch(words, y, (row, col), form)
                for v in T.unroll(SIZE):
                    line[s * SIZE + v] = line[s * SIZE + v] + element(words, v, form)
            if whole is not None:
                if asked < rows:
                    put(words, line, s * SIZE, whole, (row, col), form)
            for v in T.unroll(SIZE):
                total[0] = total[0] + line[s * SIZE + v]
    add_up(total, sums, warp, T.truncmod(tx, 32), TEAM)
    mean: T.float32 = total[0] / T.float32(form.width)
    total[0] = T.float32(0)
    for s in T.unroll(STEPS):
        if (s * TEAM * 32 + place) * SIZE < form.width:
            for v in T.unroll(SIZE):
                line[s * SIZE + v] = line[s * SIZE + v] - mean
                total[0] = total[0] + line[s * SIZE + v] * line[s * SIZE + v]
    add_up(total, sums, warp, T.truncmod(tx, 32), TEAM)
    factor: T.float32 = T.rsqrt(total[0] / T.float32(form.width) + T.float32(form.eps))
    for s in T.unroll(STEPS):
        at: T.let = T.int64((s * TEAM * 32 + place) * SIZE)
        if (at < T.int64(form.width)) & (asked < rows):
            fetch(words, scale, (at,), form)
            for v in T.unroll(SIZE):
                line[s * SIZE + v] = line[s * SIZE + v] * factor * element(words, v, form)
            fetch(words, shift, (at,), form)
            for v in T.unroll(SIZE):
                line[s * SIZE + v] = line[s * SIZE + v] + element(words, v, form)
            put(words, line, s * SIZE, out, (row, at), form)


def norm_rows(
    width: int, dtype: str, eps: float, terms: int, *, stores_sum: bool = False
) -> tvm.tirx.PrimFunc:
    """Layer norm of x, or of x + y with two ``terms``: x, [y,] scale, shift, out, and with
    ``stores_sum`` x + y behind it.

    x, y, out and the sum are (rows, ``width``), scale and shift (``width``,), all of ``dtype``;
    arithmetic is float32. Addresses are multiples of 16 bytes where the width is one of 8. rows
    from 1 on.

    Raises
    ------
    ShapeError
        ``width`` is below 1, ``terms`` is neither 1 nor 2, or 1 with a sum to store, or ``eps`` is
        negative or not finite.
    DTypeError
        ``dtype`` is neither float16 nor bfloat16.
    """
    if dtype not in UNPACK:
        raise DTypeError(mismatch("dtype", "float16 or bfloat16", repr(dtype)))
    allowed = (2,) if stores_sum else (1, 2)
    if terms not in allowed:
        raise ShapeError(mismatch("terms", " or ".join(map(str, allowed)), terms))
    if not isfinite(eps) or eps < 0:
        raise ShapeError(mismatch("eps", "a finite number of at least 0", repr(eps)))
    form = NormForm(at_least("width", width, 1), dtype, float(eps), terms)
    absent = {} if terms == 2 else {"y": None}
    if not stores_sum:
        absent["whole"] = None
    return normed_rows.specialize(form=form, **absent)
