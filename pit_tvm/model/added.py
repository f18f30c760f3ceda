"""What pit-tvm adds to Relax: operators of its own, and functions that come with their schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.ir.op import register_op_attr

_SCHEDULED = "pit.scheduled"


@cache
def operator(
    name: str, about: str, type_of: Callable[[relax.Call, relax.BlockBuilder], relax.Type]
) -> ir.Op:
    """The operator ``relax.<name>``, without side effects; registered when it is first asked for,
    with what it is ``about`` and what infers the type of its calls."""
    full = f"relax.{name}"
    tvm_ffi.get_global_func("ir.RegisterOp")(full, about)
    register_op_attr(full, "FInferType", type_of)
    register_op_attr(full, "FPurity", True)
    return ir.Op.get(full)


def scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function for a graph that keeps the schedule it has; others get the generic one."""
    return func.with_attr(_SCHEDULED, True).without_attr("global_symbol")


def is_scheduled(func: tirx.PrimFunc) -> bool:
    """Whether `scheduled` made a function."""
    return _SCHEDULED in (func.attrs or {})
