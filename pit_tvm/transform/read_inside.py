"""Holds the indices that arrays tell to the tensors that are read at them."""

from __future__ import annotations

from collections.abc import Collection

import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad

from .axis_map import Expr


def read_inside(func: tirx.PrimFunc, lookups: Collection[tuple[str, str, int]]) -> tirx.PrimFunc:
    """``func`` with every index ``ids[i]`` of a tensor replaced by the nearest one of its extent.

    ``lookups`` names them: the array of indices, the tensor, and the dimension that they index. A
    tensor without elements in that dimension has no such index: it must not be read.
    """
    if not lookups:
        return func

    def held(load: TensorLoad) -> Expr:
        indices = [
            _within(index, extent) if _is_told(index, load, dim, lookups) else index
            for dim, (index, extent) in enumerate(zip(load.indices, load.source.shape, strict=True))
        ]
        return tirx.BufferLoad(load.source, indices)

    body = tvm_ffi.structural_map(func.body, [(TensorLoad, held)])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


def _is_told(
    index: Expr, load: TensorLoad, dim: int, lookups: Collection[tuple[str, str, int]]
) -> bool:
    if not isinstance(index, TensorLoad):
        return False
    return (str(index.source.name), str(load.source.name), dim) in lookups


def _within(index: Expr, extent: Expr) -> Expr:
    # Narrow types cannot hold every extent, and unsigned ones have other minima.
    wide = index if str(index.ty.dtype) == "int32" else index.astype("int64")
    dtype = str(wide.ty.dtype)
    last = extent.astype(dtype) - tirx.const(1, dtype)
    return tirx.max(tirx.min(wide, last), tirx.const(0, dtype))
