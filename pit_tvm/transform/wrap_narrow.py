"""Arithmetic of integers that C computes in ``int``: sources in C wrap it as other code does."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import prim

_NARROW = ("int8", "uint8", "int16", "uint16")


def wrap_narrow(mod: tvm.IRModule) -> tvm.IRModule:
    """Sums, differences and products of integers of 8 and 16 bits in 32 bits, cast back at once.

    C adds two of them as ``int``: what a quotient, a comparison or a wider type takes of the sum
    would not have wrapped.
    """
    wraps = [(node, _wrapped) for node in (prim.Add, prim.Sub, prim.Mul)]
    changed = {
        var: func.with_body(tvm_ffi.structural_map(func.body, wraps))
        for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }
    return tvm.IRModule({**mod.functions, **changed}, attrs=mod.attrs)


def _wrapped(node: Any) -> Any:
    dtype = str(node.ty.dtype)
    if dtype not in _NARROW:
        return node
    left, right = (prim.Cast("int32", side) for side in (node.a, node.b))
    return prim.Cast(dtype, type(node)(left, right))
