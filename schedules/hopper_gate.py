"""Gated activations of whole rows and their gradients, in one pass: what training keeps apart.

    out = act(gate) * other
    dgate = dout * other * act'(gate),    dother = dout * act(gate)

with what a `Gate` does beside. Products of experts gate their rows in their own tiles; where
gradients are asked for, what the gate is computed of is kept instead, and both passes are bound by
memory.
"""

from __future__ import annotations

from math import inf
from typing import Any

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch
from pit_tvm.gates import PLAIN, Gate

from .dependent import after_predecessor
from .hopper_combine import CHUNK, PACK, THREADS, UNPACK, load_words, store_words, unpack
from .hopper_swrite import GELU_TAIL, gate_code, limited, multiply

# Derivatives of `hopper_swrite.ACTIVATIONS`, as torch's are: of relu 0 at 0.
_SLOPES = {
    "relu": "return x <= 0.f ? 0.f : 1.f;",
    "relu2": "return x <= 0.f ? 0.f : 2.f * x;",
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


def _scaled_slope(alpha: float) -> str:
    """That of ``x * sigmoid(alpha * x)``."""
    x = f"{alpha!r}f * x"
    return f"float s = __fdividef(1.f, 1.f + __expf(-{x})); return s * fmaf({x}, 1.f - s, 1.f);"


def _to_gate(act: str, gate: Gate, x: Any, y: Any) -> Any:
    """The derivative of `hopper_swrite.multiply` to the gate, of fp32 expressions. What is limited
    has one at the limit, and beyond it none."""
    slope = _SLOPES[act] if gate.alpha == 1.0 else _scaled_slope(gate.alpha)
    within = f"x <= {gate.limit!r}f" if gate.limit < inf else "true"
    code = (
        f"__forceinline__ __device__ float pit_slope(float x) {{ {slope} }}\n"
        "__forceinline__ __device__ float pit_to_gate(float x, float y) {"
        f" bool within = {within};{limited(gate)}"
        f" return within ? pit_slope(x) * (y + {gate.offset!r}f) : 0.f; }}"
    )
    return T.cuda.func_call("pit_to_gate", x, y, source_code=code, return_type="float32")


def _to_other(act: str, gate: Gate, x: Any, y: Any) -> Any:
    """The derivative to what is gated."""
    within = f"fabsf(y) <= {gate.limit!r}f" if gate.limit < inf else "true"
    code = (
        f"{gate_code(act, gate)}\n"
        "__forceinline__ __device__ float pit_to_other(float x, float y) {"
        f" bool within = {within};{limited(gate)} return within ? pit_gate_act(x) : 0.f; }}"
    )
    return T.cuda.func_call("pit_to_other", x, y, source_code=code, return_type="float32")


@T.inline
def _spread(x, y, first, second, dtype, gate):
    """Gates and what they gate, of 16 elements in a row or of 8 in each half."""
    for w in T.unroll(4):
        if gate.interleaved:
            x[w] = unpack(first[w], dtype, 0)
            y[w] = unpack(first[w], dtype, 1)
            x[w + 4] = unpack(second[w], dtype, 0)
            y[w + 4] = unpack(second[w], dtype, 1)
        else:
            x[w * 2] = unpack(first[w], dtype, 0)
            x[w * 2 + 1] = unpack(first[w], dtype, 1)
            y[w * 2] = unpack(second[w], dtype, 0)
            y[w * 2 + 1] = unpack(second[w], dtype, 1)


@T.inline
def _gather(first, second, x, y, dtype, gate):
    """The reverse."""
    for w in T.unroll(4):
        if gate.interleaved:
            T.ptx[PACK[dtype]](first[w], y[w], x[w])
            T.ptx[PACK[dtype]](second[w], y[w + 4], x[w + 4])
        else:
            T.ptx[PACK[dtype]](first[w], x[w * 2 + 1], x[w * 2])
            T.ptx[PACK[dtype]](second[w], y[w * 2 + 1], y[w * 2])


@T.inline
def _pass_down(x, y, c, given, act, gate):
    """Gradients take the place of column ``c``."""
    gradient: T.float32 = given
    to_gate: T.float32 = gradient * _to_gate(act, gate, x[c], y[c])
    y[c] = gradient * _to_other(act, gate, x[c], y[c])
    x[c] = to_gate


@T.jit
def gated_rows(
    rows: T.Buffer(("number", "wide"), dtype),
    down: T.Optional(T.Buffer(("number", "width"), dtype)),
    out_h: T.handle,
    *,
    dtype: T.constexpr,
    act: T.constexpr,
    gate: T.constexpr,
):
    """The template; ``gate_rows`` explains it."""
    number, wide, width = T.int32(), T.int32(), T.int32()
    if down is not None:
        spread = T.match_buffer(out_h, (number, wide), dtype)
    else:
        out = T.match_buffer(out_h, (number, width), dtype)
    T.device_entry()
    per_row: T.let = T.truncdiv(width, CHUNK)
    bx = T.cta_id([T.truncdiv(number * T.truncdiv(width, CHUNK) + THREADS - 1, THREADS)])
    tx = T.thread_id([THREADS])
    after_predecessor()
    place: T.let = bx * THREADS + tx
    row: T.let = T.int64(T.truncdiv(place, per_row))
    col: T.let = T.truncmod(place, per_row) * CHUNK
    one: T.let = T.int64(col * 2 if gate.interleaved else col)
    two: T.let = one + T.int64(CHUNK if gate.interleaved else width)
    if T.truncdiv(place, per_row) < number:
        first = T.alloc_local([4], "uint32")
        second = T.alloc_local([4], "uint32")
        given = T.alloc_local([4], "uint32")
        x = T.alloc_local([CHUNK], "float32")
        y = T.alloc_local([CHUNK], "float32")
        load_words(first, rows.ptr_to([row, one]))
        load_words(second, rows.ptr_to([row, two]))
        _spread(x, y, first, second, dtype, gate)
        if down is not None:
            load_words(given, down.ptr_to([row, T.int64(col)]))
            for w in T.unroll(4):
                _pass_down(x, y, w * 2, unpack(given[w], dtype, 0), act, gate)
                _pass_down(x, y, w * 2 + 1, unpack(given[w], dtype, 1), act, gate)
            _gather(first, second, x, y, dtype, gate)
            store_words(spread.ptr_to([row, one]), first)
            store_words(spread.ptr_to([row, two]), second)
        else:
            for w in T.unroll(4):
                x[w * 2] = multiply(act, gate, x[w * 2], y[w * 2])
                x[w * 2 + 1] = multiply(act, gate, x[w * 2 + 1], y[w * 2 + 1])
                T.ptx[PACK[dtype]](given[w], x[w * 2 + 1], x[w * 2])
            store_words(out.ptr_to([row, T.int64(col)]), given)


def check_activated(dtype: str, act: str) -> None:
    """ScheduleError for types and activations of no kernel here."""
    if dtype not in UNPACK:
        raise ScheduleError(mismatch("dtype", "float16 or bfloat16", dtype))
    if act not in _SLOPES:
        raise ScheduleError(mismatch("act", f"one of {', '.join(_SLOPES)}", act))


def gate_rows(
    dtype: str, act: str, gate: Gate = PLAIN, *, backward: bool = False
) -> tvm.tirx.PrimFunc:
    """rows (number, 2 * width), laid out as ``gate`` says, and out (number, width); or with
    ``backward`` rows, the gradient to out, and the gradient to rows.

    All of ``dtype``, float16 or bfloat16; sums are fp32. ``act``: relu, relu2, gelu, gelu_tanh or
    silu. The width is a multiple of 8, number * width / 8 from 1 to `hopper_combine.MOST_CHUNKS`.

    Raises
    ------
    ScheduleError (a ValueError) for other types and activations
    """
    check_activated(dtype, act)
    if not gate.fits(act):
        raise ScheduleError(mismatch("gate", f"an alpha that {act} takes", gate))
    absent = {} if backward else {"down": None}
    return gated_rows.specialize(dtype=dtype, act=act, gate=gate, **absent)
