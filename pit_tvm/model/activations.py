"""Which linear layers read activations, many of which may be zero: ReLU's, or by a threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax

from .linear import LinearLayer, called_layer
from .rebuild import is_op, values_of

_NAMES = ("relu", "gelu", "gelu_tanh", "silu")
# Operators that keep the zeros of their first operand where they are.
_KEEP = ("reshape", "astype", "square")


def name_activations(module: tvm.IRModule, layers: Sequence[LinearLayer]) -> list[LinearLayer]:
    """``layers``, which ``main`` calls, each with the activation that its rows come from, through
    reshapes, casts and products with gates.

    Nothing depends on it but where zeros are looked for.
    """
    values, found = values_of(module["main"]), list(layers)
    for value in values.values():
        called = called_layer(value)
        if called is not None:
            number, rows = called
            found[number] = replace(layers[number], after=_source(rows, values, layers))
    return found


def _source(
    expr: relax.Expr,
    values: Mapping[relax.Var, relax.Expr],
    layers: Sequence[LinearLayer],
) -> str | None:
    """The activation that ``expr`` has its zeros from; ReLU rather than another."""
    value: Any = values.get(expr) if isinstance(expr, relax.Var) else expr
    called = called_layer(value)
    if called is not None:
        return layers[called[0]].activation
    for name in _NAMES:
        if is_op(value, f"nn.{name}"):
            return name
    if is_op(value, *_KEEP):
        return _source(value.args[0], values, layers)
    if is_op(value, "multiply"):
        left, right = value.args
        if any(_is_sigmoid(values.get(a), b) for a, b in ((left, right), (right, left))):
            return "silu"
        both = [_source(factor, values, layers) for factor in value.args]
        return "relu" if "relu" in both else both[0] or both[1]
    return None


def _is_sigmoid(value: Any, of: relax.Expr) -> bool:
    return is_op(value, "sigmoid") and value.args[0].same_as(of)
