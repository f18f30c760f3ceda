"""Parameters that promise no more than their element's alignment.

Compiled CPU code otherwise assumes 64 bytes, and crashes on a view that starts elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, tirx


def unalign(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """``func`` with every buffer parameter declared at its element's alignment."""
    table = {p: unaligned(p) for p in func.params if is_buffer(p)}
    body = tvm_ffi.structural_map(func.body, [(ir.Var, lambda v: table.get(v, v))])
    params = [table.get(p, p) for p in func.params]
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs)


def unaligned(
    param: ir.Var, shape: Sequence[Any] | None = None, dtype: str | None = None
) -> ir.Var:
    """A buffer like ``param`` at its element's alignment, of another shape or dtype if given."""
    return parameter(param.name, param.shape if shape is None else shape, dtype or str(param.dtype))


def parameter(name: str, shape: Sequence[Any], dtype: str) -> ir.Var:
    """A buffer parameter at its element's alignment, row-major like those of ``te``."""
    plain = {"bfloat16": "uint16", "bool": "uint8"}.get(dtype, dtype)
    align = np.dtype(plain).itemsize
    return tirx.decl_buffer(shape, dtype, name, data_alignment=align, layout=None)


def is_buffer(param: ir.Var) -> bool:
    """Whether a parameter is a buffer, not a scalar."""
    return isinstance(param.ty, tirx.BufferType)
