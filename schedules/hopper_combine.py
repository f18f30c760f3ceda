"""Sums the choices of every token in fixed order: the deterministic end of top-k routing."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch

from .dependent import after_predecessor

THREADS = 256
CHUNK = 8  # columns of one thread: 16 bytes of a 16-bit type
MOST_CHUNKS = 2**31 - THREADS  # rounded up to whole CTAs they are counted in 32 bits

# The lower and the upper half of a 32-bit word as fp32.
UNPACK = {
    "float16": (
        "return __half2float(__ushort_as_half((unsigned short)(x & 0xffffu)));",
        "return __half2float(__ushort_as_half((unsigned short)(x >> 16)));",
    ),
    "bfloat16": ("return __uint_as_float(x << 16);", "return __uint_as_float(x & 0xffff0000u);"),
}
PACK = {"float16": "cvt.rn.f16x2.f32", "bfloat16": "cvt.rn.bf16x2.f32"}


def unpack(word: Any, dtype: str, upper: int) -> Any:
    """float32: one half of a 32-bit word that holds two elements of ``dtype``."""
    name = f"pit_{'upper' if upper else 'lower'}_{dtype}"
    body = UNPACK[dtype][upper]
    code = f"__forceinline__ __device__ float {name}(unsigned int x) {{ {body} }}"
    return T.cuda.func_call(name, word, source_code=code, return_type="float32")


@T.inline
def load_words(words, source, first=0):
    """Four 32-bit words from global memory at once, to ``words`` from number ``first`` on."""
    T.ptx["ld.global.v4.b32"](*[words[first + i] for i in range(4)], source)


@T.inline
def store_words(target, words):
    """Four 32-bit words to global memory at once."""
    T.ptx["st.global.v4.b32"](target, *[words[i] for i in range(4)])


@T.jit
def combined_rows(
    partial: T.Buffer(("tokens", "choices", "n"), dtype),
    weights: T.Optional(T.Buffer(("tokens", "choices"), factor_dtype)),
    ids: T.Optional(T.Buffer(("tokens", "choices"), id_dtype)),
    groups: T.int32,
    out: T.Buffer(("tokens", "n"), dtype),
    *,
    dtype: T.constexpr,
    factor_dtype: T.constexpr,
    id_dtype: T.constexpr,
):
    """The template; ``combine_rows`` explains it."""
    tokens, choices, n = T.int32(), T.int32(), T.int32()
    T.device_entry()
    per_row: T.let = T.truncdiv(n, CHUNK)
    bx = T.cta_id([T.truncdiv(tokens * T.truncdiv(n, CHUNK) + THREADS - 1, THREADS)])
    tx = T.thread_id([THREADS])
    after_predecessor()
    place: T.let = bx * THREADS + tx
    token: T.let = T.truncdiv(place, per_row)
    col: T.let = T.truncmod(place, per_row) * CHUNK
    if token < tokens:
        total = T.alloc_local([CHUNK], "float32")
        words = T.alloc_local([4], "uint32")
        for v in T.unroll(CHUNK):
            total[v] = T.float32(0)
        for c in T.serial(choices):
            factor: T.float32 = T.float32(1)
            if weights is not None:
                factor = T.float32(weights[token, c])
            if ids is not None:
                chosen: T.int64 = T.int64(ids[token, c])
                if (chosen < T.int64(0)) | (chosen >= T.int64(groups)):
                    factor = T.float32(0)
            if factor != T.float32(0):
                at = T.meta_var([T.int64(token), T.int64(c), T.int64(col)])
                load_words(words, partial.ptr_to(at))
                for w in T.unroll(4):
                    total[w * 2] = total[w * 2] + factor * unpack(words[w], dtype, 0)
                    total[w * 2 + 1] = total[w * 2 + 1] + factor * unpack(words[w], dtype, 1)
        for w in T.unroll(4):
            T.ptx[PACK[dtype]](words[w], total[w * 2 + 1], total[w * 2])
        store_words(out.ptr_to([T.int64(token), T.int64(col)]), words)


def combine_rows(dtype: str, *, factors: str = "", ids: str = "") -> tvm.tirx.PrimFunc:
    """out[t, :] = sum over choices c, in order, of [weights[t, c] *] partial[t, c, :].

    Arguments of the kernel: partial (tokens, choices, n) of ``dtype``, [weights (tokens, choices)
    of type ``factors``,] [ids (tokens, choices) of ``ids``,] groups, out (tokens, n) of ``dtype``.
    Choices whose id is no group, from 0 to ``groups - 1``, and those whose weight is zero are not
    read. Sums are fp32 and in order: the result does not depend on when rows were computed. n is a
    multiple of 8, tokens * n / 8 from 1 to `MOST_CHUNKS`.

    Raises
    ------
    ScheduleError (a ValueError) for other element types than float16 and bfloat16, factors that are
    neither one of these nor float32, and ids that are not int32 or int64
    """
    if dtype not in UNPACK:
        raise ScheduleError(mismatch("dtype", "float16 or bfloat16", dtype))
    if ids not in ("", "int32", "int64"):
        raise ScheduleError(mismatch("ids", "int32 or int64", ids))
    if factors not in ("", "float32", *UNPACK):
        raise ScheduleError(mismatch("factors", "float32, float16 or bfloat16", factors))
    given = {"weights": factors, "ids": ids}
    absent = {name: None for name, kind in given.items() if not kind}
    return combined_rows.specialize(dtype=dtype, factor_dtype=factors, id_dtype=ids, **absent)
