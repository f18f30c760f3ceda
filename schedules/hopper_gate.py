"""Gated activations of whole rows and their gradients, in one pass: what training keeps apart.

    out = act(gate) * other,    rows = [gate | other]
    dgate = dout * other * act'(gate),    dother = dout * act(gate)

Products of experts gate their rows in their own tiles; where gradients are asked for, what the gate
is computed of is kept instead, and both passes are bound by memory.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch

from .dependent import after_predecessor
from .hopper_combine import CHUNK, PACK, THREADS, UNPACK, load_words, store_words, unpack
from .hopper_swrite import GELU_TAIL, activate

# Derivatives of `hopper_swrite.ACTIVATIONS`, as torch's are: of relu 0 at 0.
_SLOPES = {
    "relu": "return x <= 0.f ? 0.f : 1.f;",
    "silu": "float s = __fdividef(1.f, 1.f + __expf(-x)); return s * fmaf(x, 1.f - s, 1.f);",
    "gelu": (
        f"{GELU_TAIL} float d = 0.3989422804f * __expf(-0.5f * x * x), side = 0.5f * tail;"
        " return fmaf(x, d, x < 0.f ? side : 1.f - side);"
    ),
    "gelu_tanh": (  # of x * s, s = sigmoid(2 u): s + x * s * (1 - s) * (2 u)'
        "float s = __fdividef(1.f, 1.f + __expf(-x * fmaf(0.07135481283f, x * x, 1.595769122f)));"
        " return s * fmaf(x * (1.f - s), fmaf(0.2140644388f, x * x, 1.595769122f), 1.f);"
    ),
}


def slope(act: str, x: Any) -> Any:
    """The derivative of an activation at an fp32 expression."""
    name = f"pit_{act}_slope"
    code = f"__forceinline__ __device__ float {name}(float x) {{ {_SLOPES[act]} }}"
    return T.cuda.func_call(name, x, source_code=code, return_type="float32")


@T.inline
def _half(value, beside, gate, other, given, dtype, act, half):
    """One of two elements: what is stored for it, and with ``given`` for its other one."""
    x: T.float32 = unpack(gate, dtype, half)
    y: T.float32 = unpack(other, dtype, half)
    if given is not None:
        d: T.float32 = unpack(given, dtype, half)
        value[half] = d * y * slope(act, x)
        beside[half] = d * activate(act, x)
    else:
        value[half] = activate(act, x) * y


@T.jit
def gated_rows(
    rows_h: T.handle,
    down_h: T.Optional(T.handle),  # type: ignore[valid-type]
    out_h: T.handle,
    *,
    dtype: T.constexpr,
    act: T.constexpr,
):
    """The template; ``gate_rows`` explains it."""
    number, width = T.int32(), T.int32()
    rows = T.match_buffer(rows_h, (number, 2, width), dtype)
    if down_h is not None:
        down = T.match_buffer(down_h, (number, width), dtype)
        spread = T.match_buffer(out_h, (number, 2, width), dtype)
    else:
        out = T.match_buffer(out_h, (number, width), dtype)
    T.device_entry()
    per_row: T.let = T.truncdiv(width, CHUNK)
    bx = T.cta_id([T.truncdiv(number * T.truncdiv(width, CHUNK) + THREADS - 1, THREADS)])
    tx = T.thread_id([THREADS])
    after_predecessor()
    place: T.let = bx * THREADS + tx
    row: T.let = T.cast(T.truncdiv(place, per_row), "int64")
    col: T.let = T.cast(T.truncmod(place, per_row) * CHUNK, "int64")
    if T.truncdiv(place, per_row) < number:
        gate = T.alloc_local([4], "uint32")
        other = T.alloc_local([4], "uint32")
        given = T.alloc_local([4], "uint32")
        value = T.alloc_local([2], "float32")
        beside = T.alloc_local([2], "float32")
        load_words(gate, rows.ptr_to([row, T.int64(0), col]))
        load_words(other, rows.ptr_to([row, T.int64(1), col]))
        if down_h is not None:
            load_words(given, down.ptr_to([row, col]))
        for w in T.unroll(4):
            if down_h is not None:
                _half(value, beside, gate[w], other[w], given[w], dtype, act, 0)
                _half(value, beside, gate[w], other[w], given[w], dtype, act, 1)
            else:
                _half(value, None, gate[w], other[w], None, dtype, act, 0)
                _half(value, None, gate[w], other[w], None, dtype, act, 1)
            T.ptx[PACK[dtype]](gate[w], value[1], value[0])
            if down_h is not None:
                T.ptx[PACK[dtype]](other[w], beside[1], beside[0])
        if down_h is not None:
            store_words(spread.ptr_to([row, T.int64(0), col]), gate)
            store_words(spread.ptr_to([row, T.int64(1), col]), other)
        else:
            store_words(out.ptr_to([row, col]), gate)


def check_activated(dtype: str, act: str) -> None:
    """ScheduleError for types and activations of no kernel here."""
    if dtype not in UNPACK:
        raise ScheduleError(mismatch("dtype", "float16 or bfloat16", dtype))
    if act not in _SLOPES:
        raise ScheduleError(mismatch("act", f"one of {', '.join(_SLOPES)}", act))


def gate_rows(dtype: str, act: str, *, backward: bool = False) -> tvm.tirx.PrimFunc:
    """rows (number, 2, width), gates first, and out (number, width); or with ``backward`` rows, the
    gradient to out, and the gradient to rows.

    All of ``dtype``, float16 or bfloat16; sums are fp32. ``act``: relu, gelu, gelu_tanh or silu.
    The width is a multiple of 8, number * width / 8 from 1 to
    `hopper_combine.MOST_CHUNKS`.

    Raises
    ------
    ScheduleError (a ValueError) for other types and activations
    """
    check_activated(dtype, act)
    absent = {} if backward else {"down_h": None}
    return gated_rows.specialize(dtype=dtype, act=act, **absent)
