"""Bits of words of 32, in CUDA."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T


def below(bit: Any) -> Any:
    """uint32 with the bits under bit number ``bit`` set."""
    return T.shift_left(T.uint32(1), T.uint32(bit)) - T.uint32(1)


def is_set(word: Any, bit: Any) -> Any:
    """int32: bit number ``bit`` of a uint32."""
    return T.int32(T.bitwise_and(T.shift_right(word, T.uint32(bit)), T.uint32(1)))


def lowest(word: Any) -> Any:
    """int32: the lowest bit of a uint32 that is set; -1 for none."""
    code = "__forceinline__ __device__ int pit_lowest(unsigned x) { return __ffs(x) - 1; }\n"
    return T.cuda.func_call("pit_lowest", word, source_code=code, return_type="int32")
