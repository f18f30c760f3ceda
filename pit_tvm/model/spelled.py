"""Activations that a model spells out by arithmetic, as the operators that they are.

GELU and its approximation, as GPT-2, Phi, Bloom, T5 and ESM write them: a half of x times 1 + f(p),
where f is erf or tanh and p a polynomial of x. Factors and terms may stand in any order. A linear
layer takes such an operator into its tiles; spelled out it would take seven passes over memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tvm import relax

from .rebuild import describe, is_number, is_op, same_shape

Made = Callable[[Any], Any]
Polynomial = dict[int, float]  # coefficients by degree

_ROOT = math.sqrt(2 / math.pi)
_FORMS: dict[str, tuple[Callable[[relax.Expr], relax.Expr], Polynomial]] = {
    "erf": (relax.op.nn.gelu, {1: math.sqrt(0.5)}),
    "tanh": (relax.op.nn.gelu_tanh, {1: _ROOT, 3: 0.044715 * _ROOT}),
}
_ARITHMETIC = ("add", "subtract", "multiply", "divide", "power")
_DEEPEST = 8  # operators between an activation and its x
_RAISED = 4  # what 1 + f(p) counts for in degrees: more than any in p
_OUTER: Polynomial = {_RAISED + 1: 0.5}
# Constants are rounded to the type that is computed in, and more than once.
_ROUNDING = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
_SINGLE_ROUNDING = 4e-6


def spelled_activation(call: relax.Call, made_by: Made) -> relax.Expr | None:
    """The activation that ``call`` comes to; None for anything else. ``made_by`` gives the value of
    a variable."""
    if not is_op(call, "multiply", "divide"):
        return None
    limit = _ROUNDING.get(str(call.ty.dtype), _SINGLE_ROUNDING)
    factors = list(_parts(call, made_by, ("multiply", "divide")))
    for raised in factors:
        name, inner = _one_and(made_by(raised), made_by)
        if inner is None:
            continue
        activation, wanted = _FORMS[name]
        inside = list(_parts(inner, made_by, _ARITHMETIC))
        for x in (f for f in factors if any(f.same_as(part) for part in inside)):
            outer = _polynomial(call, [(x, 1), (raised, _RAISED)], made_by)
            inner_of_x = _polynomial(inner, [(x, 1)], made_by)
            alike = _alike(outer, _OUTER, limit) and _alike(inner_of_x, wanted, limit)
            if alike and same_shape(x, call):
                return activation(x)
    return None


def _parts(expr: Any, made_by: Made, through: tuple[str, ...], deep: int = 0) -> Iterator[Any]:
    """``expr``, and what it is computed from by the operators ``through``."""
    yield expr
    value = made_by(expr)
    if deep < _DEEPEST and is_op(value, *through):
        for operand in value.args:
            yield from _parts(operand, made_by, through, deep + 1)


def _one_and(value: Any, made_by: Made) -> tuple[str, Any]:
    """The function and its argument of 1 + f(argument)."""
    if is_op(value, "add"):
        for one, other in (value.args, reversed(value.args)):
            call = made_by(other)
            if _number(one) == 1.0 and is_op(call, *_FORMS):
                return describe(call), call.args[0]
    return "", None


def _number(expr: Any) -> float | None:
    """The value of a constant number."""
    return float(expr.value.numpy()) if is_number(expr) else None


def _alike(found: Polynomial | None, wanted: Polynomial, limit: float) -> bool:
    there = {degree: factor for degree, factor in (found or {}).items() if factor}
    return there.keys() == wanted.keys() and all(
        math.isclose(there[degree], factor, rel_tol=limit) for degree, factor in wanted.items()
    )


def _polynomial(
    expr: Any, symbols: Sequence[tuple[Any, int]], made_by: Made, deep: int = 0
) -> Polynomial | None:
    """Coefficients of a polynomial of ``symbols``, each with its degree; None for anything else."""
    for symbol, degree in symbols:
        if expr.same_as(symbol):
            return {degree: 1.0}
    number, value = _number(expr), made_by(expr)
    if number is not None:
        return {0: number}
    if not is_op(value, *_ARITHMETIC) or deep > _DEEPEST:
        return None
    left, right = (_polynomial(each, symbols, made_by, deep + 1) for each in value.args)
    if left is None or right is None:
        return None
    if is_op(value, "multiply"):
        return _product(left, right)
    if is_op(value, "add", "subtract"):
        sign = 1.0 if is_op(value, "add") else -1.0
        degrees = left.keys() | right.keys()
        return {d: left.get(d, 0.0) + sign * right.get(d, 0.0) for d in degrees}
    if set(right) != {0}:
        return None
    if is_op(value, "divide"):
        return _product(left, {0: 1 / right[0]}) if right[0] else None
    return _power(left, right[0])


def _product(left: Polynomial, right: Polynomial) -> Polynomial | None:
    if max(left) + max(right) > max(_OUTER):
        return None
    found: Polynomial = {}
    for degree, factor in left.items():
        for other, times in right.items():
            found[degree + other] = found.get(degree + other, 0.0) + factor * times
    return found


def _power(base: Polynomial, exponent: float) -> Polynomial | None:
    found: Polynomial | None = base
    if exponent not in (1, 2, 3):
        return None
    for _ in range(int(exponent) - 1):
        found = None if found is None else _product(found, base)
    return found
