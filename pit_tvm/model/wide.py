"""16-bit operators of a graph in float32 inside, rounded once at their end, as torch has them.

TVM would round every step of a norm, a softmax or a sum to the type that it is stored in, and has
no norms at all for bfloat16.
"""

from __future__ import annotations

import tvm
from tvm import ir, relax

from ..errors import DTypeError, mismatch
from .rebuild import is_op, rebuild

NARROW = ("float16", "bfloat16")
WIDE = "float32"

_WIDENED = (
    *("nn.layer_norm", "nn.rms_norm", "nn.group_norm", "nn.instance_norm", "nn.batch_norm"),
    *("nn.softmax", "nn.log_softmax", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.softplus"),
    *("exp", "log", "erf", "tanh", "sigmoid", "sin", "cos", "sqrt", "rsqrt", "power", "divide"),
    *("floor_divide", "floor_mod", "mod"),
    *("sum", "mean", "variance", "std", "prod", "cumsum", "matmul"),
)


def is_widened(call: relax.Call) -> bool:
    """Whether a call is one of those that `widen` changes."""
    return is_op(call, *_WIDENED) and any(map(is_narrow, call.args))


def widen(module: tvm.IRModule) -> tvm.IRModule:
    """Every such call of ``main`` on operands in float32, its result in its own type again."""

    def rule(builder: relax.BlockBuilder, call: relax.Call, _: relax.Var) -> relax.Expr:
        if not is_widened(call) or not isinstance(call.ty, relax.TensorType):
            return call
        args = [relax.op.astype(a, WIDE) if is_narrow(a) else a for a in call.args]
        made = builder.normalize(relax.Call(call.op, args, call.attrs, call.ty_args))
        if str(made.ty.dtype) == str(call.ty.dtype):
            return made
        return relax.op.astype(builder.emit(made), str(call.ty.dtype))

    return rebuild(module, rule)


def check_narrow(dtype: str) -> None:
    """DTypeError for layers of another type than GPUs compute."""
    if dtype not in NARROW:
        advice = "convert the model with .half() or .bfloat16()"
        raise DTypeError(mismatch("dtype", " or ".join(NARROW), repr(dtype), advice))


def is_narrow(expr: relax.Expr) -> bool:
    """Whether an expression is a tensor of 16-bit floating-point numbers."""
    tensor = isinstance(expr, relax.Var | relax.Call | ir.GenericConst)
    return tensor and isinstance(expr.ty, relax.TensorType) and str(expr.ty.dtype) in NARROW
