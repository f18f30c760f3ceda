"""Elementary functions of CPU code as arithmetic: calls of libm keep loops from being vectors."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx

from ..op.elementary import FUNCTIONS
from .axis_map import Expr


def spell_functions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """``func`` with exp, tanh, erf and sigmoid of float32 as `pit_tvm.op.elementary` has them.

    Their operand has a name, lest it be computed as often as they use it.
    """
    return func.with_body(tvm_ffi.structural_map(func.body, [(ir.Call, _spelled)]))


def _spelled(call: ir.Call) -> Expr:
    name = call.op.name.removeprefix("tirx.") if isinstance(call.op, ir.Op) else ""
    if name not in FUNCTIONS or str(call.ty.dtype) != "float32":
        return call
    x = tirx.Var("x", call.ty)
    return tirx.Let(x, call.args[0], FUNCTIONS[name](x))
