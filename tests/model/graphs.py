"""Small Relax functions over ``[batch, tokens]``, written as an expression of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from pit_tvm.model.plane import Plane
from pit_tvm.model.rebuild import describe, values_of

B, T = tirx.Var("batch", "int64"), tirx.Var("tokens", "int64")
PLANE = Plane(B, T)

# A parameter's extents, with a type in front unless that is float32.
Param = Sequence[Any]


def graph(make: Callable[..., Any], **params: Param) -> tvm.IRModule:
    """``main`` with these parameters, every operator of ``make``'s result bound to a variable."""
    builder = relax.BlockBuilder()
    variables = [tensor(name, param) for name, param in params.items()]
    with builder.function("main", variables):
        with builder.dataflow():
            result = builder.emit_output(make(*variables))
        builder.emit_func_output(result)
    return builder.finalize()


def tensor(name: str, param: Param) -> relax.Var:
    """A variable ``[extents]``, or of another type than float32: ``[type, extents]``."""
    dtype, extents = (param[0], param[1:]) if isinstance(param[0], str) else ("float32", param)
    return relax.Var(name, relax.TensorType(list(extents), dtype))


def weight(*shape: int) -> relax.Constant:
    """A constant of small numbers, another one at every call."""
    return relax.const(np.random.default_rng().uniform(-0.5, 0.5, shape).astype("float32"))


def values(module: tvm.IRModule) -> dict[relax.Var, Any]:
    """What computes every variable of ``main``."""
    return values_of(module["main"])


def calls(module: tvm.IRModule) -> list[relax.Call]:
    """The calls of ``main`` in order."""
    return [v for v in values(module).values() if isinstance(v, relax.Call)]


def names(module: tvm.IRModule) -> list[str]:
    """Names of the operators of ``main`` in order."""
    return [describe(call) for call in calls(module)]


def last_call(make: Callable[..., Any], **params: Param) -> relax.Call:
    """The outermost operator of ``make``, over variables."""
    return calls(graph(make, **params))[-1]


def real(mask: relax.Expr) -> relax.Expr:
    """A mask as numbers ``[batch, tokens, 1]``."""
    return relax.op.astype(relax.op.expand_dims(mask, [2]), "float32")
