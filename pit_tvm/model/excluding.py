"""Numbers that exclude a key from attention, and whether an expression may come to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import ir, relax

from .rebuild import is_op

# Added to a score, numbers below these leave a weight of exactly 0 beside scores that are not as
# large themselves: models add the least number of their type.
_EXCLUDED, _EXCLUDED_HALF = -1e30, -6e4
MILD = 1e3  # no number that models exclude keys by, nor a factor that makes one of others
_SPREAD = ("astype", "reshape", "expand_dims", "broadcast_to")  # keep numbers as they are
_POLES = ("log", "log_add_exp", "rsqrt", "tan", "atanh")


def excluding(dtype: Any) -> float:
    """What numbers of a type must be below to exclude a key when they are added to its score."""
    return _EXCLUDED_HALF if str(dtype) == "float16" else _EXCLUDED


def may_exclude(
    expr: relax.Expr,
    made_by: Callable[[relax.Var], Any],
    live: relax.Var,
    operands: Sequence[relax.Var],
) -> bool:
    """Whether what computes ``expr`` has a number in it that excludes a key, an operator that makes
    one of others, or an input that may hold one, ``operands`` apart."""
    seen: set[relax.Expr] = {live, *operands}
    left = [expr]
    while left:
        node = left.pop()
        if isinstance(node, relax.Tuple):
            left.extend(node.fields)
        elif isinstance(node.ty, relax.TensorType) and "float" in str(node.ty.dtype):
            if isinstance(node, ir.GenericConst):
                # A wider type's number may be infinite in the one that scores have.
                least = max(excluding(dtype) for dtype in (node.ty.dtype, expr.ty.dtype))
                if (abs(node.value.numpy()) > -least).any():
                    return True
            elif isinstance(node, relax.Var) and node not in seen:
                seen.add(node)
                made = made_by(node)
                if made is None:
                    return True
                left.append(made)
            elif isinstance(node, relax.Call):
                if _has_pole(node, made_by):
                    return True
                left.extend(node.args)
    return False


def _has_pole(call: relax.Call, made_by: Callable[[relax.Var], Any]) -> bool:
    """Whether an operator may give large numbers of small ones, as a logarithm does of a window of
    0 and 1, a quotient by it, and its power."""

    def numbers(at: int) -> np.ndarray | None:
        expr: Any = call.args[at]
        while isinstance(expr, relax.Var) or is_op(expr, "full", *_SPREAD):
            if isinstance(expr, relax.Var):
                expr = made_by(expr)
            else:
                expr = expr.args[1 if is_op(expr, "full") else 0]
        return expr.value.numpy() if isinstance(expr, ir.GenericConst) else None

    if is_op(call, "power"):
        base, exponent = numbers(0), numbers(1)
        whole = exponent is not None and (exponent >= 0).all()
        return not (whole or base is not None and (base > 1 / MILD).all())
    if is_op(call, "divide", "floor_divide"):
        by = numbers(1)
        return by is None or bool((abs(by) < 1 / MILD).any())
    return is_op(call, *_POLES)
