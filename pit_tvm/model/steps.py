"""What operators with steps read, in bfloat16, as it is stored.

On CPUs TVM computes what is fused in float32 and rounds to bfloat16 only what leaves. Where a
result jumps (of a comparison, a largest place, a floor) a number that is not rounded, as torch's
is, may lie on the other side.
"""

from __future__ import annotations

import tvm
from tvm import relax

from .rebuild import is_op, rebuild, values_of

_STEPS = ("floor", "ceil", "round", "trunc", "sign", "floor_divide", "floor_mod", "mod")
# What these read meets in a sum, of which torch has another order.
_SUMS = ("matmul", "call_dps_packed", "call_pure_packed")


def stored_before_steps(module: tvm.IRModule) -> tvm.IRModule:
    """``main`` with a `MatchCast`, which nothing is fused across, of every number of bfloat16 that
    ends in an operator with steps."""
    values = values_of(module["main"])
    stored: set[relax.Var] = set()
    for var, value in reversed(values.items()):
        if _has_steps(value) or var in stored and not is_op(value, *_SUMS):
            stored.update(relax.analysis.free_vars(value))

    def rule(builder: relax.BlockBuilder, call: relax.Call, var: relax.Var) -> relax.Expr:
        narrow = isinstance(call.ty, relax.TensorType) and str(call.ty.dtype) == "bfloat16"
        stays = narrow and var in stored
        return builder.match_cast(builder.emit(call), call.ty) if stays else call

    return rebuild(module, rule)


def _has_steps(value: relax.Expr) -> bool:
    """Whether a call gives integers or truth values, or rounded numbers."""
    types = value.ty.fields if isinstance(value.ty, relax.TupleType) else [value.ty]
    whole = any(isinstance(t, relax.TensorType) and "float" not in str(t.dtype) for t in types)
    return isinstance(value, relax.Call) and (whole or is_op(value, *_STEPS))
