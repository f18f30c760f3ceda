"""Activations of the rows that exist, and their gradients: what training keeps apart.

    out[i] = act(rows[i]),    drows[i] = dout[i] * act'(rows[i]),    i of a list

Bound by memory: rows that do not exist are not read, and of them zeros alone are written, of the
gradient nothing.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from .dependent import after_predecessor
from .hopper_combine import CHUNK, PACK, THREADS, load_words, store_words, unpack
from .hopper_gate import check_activated, slope
from .hopper_swrite import activate

BLOCKS = 132 * 8  # CTAs, as many as an H200 holds at once: they share what lives
_STRIDE = BLOCKS * THREADS
MOST_PIECES = 2**31 - _STRIDE  # rounded up to whole strides they are counted in 32 bits


@T.inline
def _half(value, word, given, dtype, act, half):
    x: T.float32 = unpack(word, dtype, half)
    if given is not None:
        value[half] = unpack(given, dtype, half) * slope(act, x)
    else:
        value[half] = activate(act, x)


@T.jit
def activated_rows(
    rows: T.Buffer(("number", "n"), dtype),
    down: T.Optional(T.Buffer(("number", "n"), dtype)),
    ids: T.Buffer((1, "capacity"), "int32"),
    count: T.Buffer((1,), "int32"),
    dead: T.Optional(T.Buffer((1, "capacity"), "int32")),
    without: T.Optional(T.Buffer((1,), "int32")),
    out: T.Buffer(("number", "n"), dtype),
    *,
    dtype: T.constexpr,
    act: T.constexpr,
):
    """The template; ``activate_rows`` explains it."""
    n = T.int32()
    T.device_entry()
    bx = T.cta_id([BLOCKS])
    tx = T.thread_id([THREADS])
    after_predecessor()
    per_row: T.let = T.truncdiv(n, CHUNK)
    first: T.let = bx * THREADS + tx
    words = T.alloc_local([4], "uint32")
    given = T.alloc_local([4], "uint32")
    value = T.alloc_local([2], "float32")
    live: T.let = count[0] * per_row
    for step in T.serial(T.truncdiv(live + _STRIDE - 1 - first, _STRIDE)):
        place: T.let = step * _STRIDE + first
        row: T.let = T.int64(ids[0, T.truncdiv(place, per_row)])
        col: T.let = T.int64(T.truncmod(place, per_row) * CHUNK)
        load_words(words, rows.ptr_to([row, col]))
        if down is not None:
            load_words(given, down.ptr_to([row, col]))
        for w in T.unroll(4):
            if down is not None:
                _half(value, words[w], given[w], dtype, act, 0)
                _half(value, words[w], given[w], dtype, act, 1)
            else:
                _half(value, words[w], None, dtype, act, 0)
                _half(value, words[w], None, dtype, act, 1)
            T.ptx[PACK[dtype]](words[w], value[1], value[0])
        store_words(out.ptr_to([row, col]), words)
    if dead is not None:
        for w in T.unroll(4):
            words[w] = T.uint32(0)
        empty: T.let = without[0] * per_row
        for step in T.serial(T.truncdiv(empty + _STRIDE - 1 - first, _STRIDE)):
            piece: T.let = step * _STRIDE + first
            none: T.let = T.int64(dead[0, T.truncdiv(piece, per_row)])
            at: T.let = T.int64(T.truncmod(piece, per_row) * CHUNK)
            store_words(out.ptr_to([none, at]), words)


def activate_rows(dtype: str, act: str, *, backward: bool = False) -> tvm.tirx.PrimFunc:
    """rows (number, n), ids and count of those that exist, of those that do not, and out (number,
    n); or with ``backward`` rows, the gradient to out, ids and count, and the gradient to rows,
    whose other rows are left as they are.

    Rows are of ``dtype``, float16 or bfloat16; lists (1, capacity) and counts (1,) int32. ``act``:
    relu, relu2, gelu, gelu_tanh or silu. n is a multiple of 8, and number * n / 8 at most
    `MOST_PIECES`.

    Raises
    ------
    ScheduleError (a ValueError) for other types and activations
    """
    check_activated(dtype, act)
    absent = ("dead", "without") if backward else ("down",)
    return activated_rows.specialize(dtype=dtype, act=act, **dict.fromkeys(absent))
