"""Operators of a graph as loops, by TVM's rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import ir, relax, te, tirx, topi

from ..analysis.expr import is_one
from . import grouped, nan, recurrence
from .nan import RULE, both, each, keeping, once, spread, wide
from .rebuild import extents_of, is_at_most_one, is_number

_TAKE, _EXPAND = "relax.take", "relax.broadcast_to"

Rule = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def legalize(kept: Sequence[str] = ()) -> tvm.ir.transform.Pass:
    """The pass that calls a function for every operator, but for those that are ``kept``."""
    round_own = keeping("relax.round", _round, 1)
    own = {
        _TAKE: _take,
        _EXPAND: _expand,
        "relax.round": round_own,
        **nan.RULES,
        **_ARITHMETIC,
        **grouped.RULES,
        **recurrence.RULES,
    }
    skipped = [f"relax.{name}" for name in kept]
    return relax.transform.LegalizeOps(own, skip_ops=skipped)


def _round(data: te.Tensor) -> te.Tensor:
    """As TVM's own, which names a function for 16 bits that CUDA does not have."""
    return each("T_round", lambda x: tirx.Cast(x.ty, tirx.nearbyint(wide(x))), data)


def _take(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Rows of a table by ids that are known to be inside: TVM's own rule writes to the standard
    error, for each call, that they had better be."""
    data, ids = call.args
    axis = call.attrs.axis
    if str(call.attrs.mode) != "fast" or axis is None or not isinstance(ids.ty, relax.TensorType):
        return ir.Op.get(_TAKE).get_attr(RULE)(builder, call)
    return builder.call_te(_picked, data, ids, int(axis) % data.ty.ndim, primfunc_name_hint="take")


def _expand(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """A tensor repeated where its extent is 1, also where that is no constant but at most 1, as of
    the first tokens of sequences that may be empty: TVM's own rule reads others behind them."""
    extents = extents_of(call.args[0])
    if all(is_one(extent) or not is_at_most_one(extent) for extent in extents):
        return ir.Op.get(_EXPAND).get_attr(RULE)(builder, call)
    return builder.call_te(_expanded, *call.args, primfunc_name_hint="broadcast_to")


def _expanded(data: te.Tensor, shape: Any) -> te.Tensor:
    return te.compute(shape, lambda *at: spread(data, at), name="T_broadcast_to", tag="broadcast")


def _picked(data: te.Tensor, ids: te.Tensor, axis: int) -> te.Tensor:
    before, behind = data.shape[:axis], data.shape[axis + 1 :]

    def element(*at: Any) -> Any:
        end = axis + len(ids.shape)
        return data(*at[:axis], ids(*at[axis:end]), *at[end:])

    return te.compute((*before, *ids.shape, *behind), element, name="T_take", tag="injective")


# --------------------------------------------------------------------------------------------
# Arithmetic by which NaN and infinity come through, and quotients are torch's. TVM's simplifier
# takes numbers to be finite: what is multiplied by a constant 0, or taken from itself, is 0 to it,
# and so is 0 divided by anything. It divides by no constant 0. Its quotients that are rounded down,
# and remainders of them, are those of a quotient that was rounded before.


def _of_any_number(name: str, make: Callable[..., te.Tensor]) -> Rule:
    """TVM's rule, but a 0 among floating-point numbers is read as any tensor is."""

    def rule(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if any(map(_is_zero, call.args)):
            return builder.call_te(make, *call.args, primfunc_name_hint=make.__name__)
        return ir.Op.get(name).get_attr(RULE)(builder, call)

    return rule


def _of_zeros(name: str) -> Rule:
    """TVM's rule, but numbers that are 0 everywhere are read as any tensor is: kernels for GPUs
    take what makes a tensor in its place."""

    def rule(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        dtype = str(call.ty.dtype)
        extents, number = (*call.args, relax.const(0, dtype))[:2]
        if not _is_zero(number) or str(number.ty.dtype) != dtype:
            return ir.Op.get(name).get_attr(RULE)(builder, call)
        return builder.call_te(_filled, extents, number, primfunc_name_hint="full")

    return rule


def _filled(extents: Any, number: te.Tensor) -> te.Tensor:
    """A tensor as large as another one, or of these extents."""
    shape = extents.shape if isinstance(extents, te.Tensor) else extents
    return te.compute(shape, lambda *_: number(), name="T_full", tag="broadcast")


def _is_zero(expr: relax.Expr) -> bool:
    """Whether an expression is a floating-point 0."""
    return is_number(expr) and "float" in str(expr.ty.dtype) and not float(expr.value.numpy())


def _subtract(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    left, right = call.args
    if left.same_as(right) and "float" in str(left.ty.dtype):
        return builder.call_te(_from_itself, left, primfunc_name_hint="subtract")
    return ir.Op.get("relax.subtract").get_attr(RULE)(builder, call)


def _from_itself(data: te.Tensor) -> te.Tensor:
    return each("T_subtract", lambda x: x + x * tirx.const(-1, x.ty), data)


def _divided_down(a: te.Tensor, b: te.Tensor) -> te.Tensor:
    def quotient(x: Any, y: Any) -> Any:
        def without(rest: Any) -> Any:
            one, none = tirx.const(1, y.ty), tirx.const(0, y.ty)
            whole = (x - rest) / y - tirx.Select(_turns(y, rest), one, none)  # but for rounding
            below = tirx.floor(whole)
            return below + tirx.Select(whole - below > 0.5, one, none)

        # Of x too, all of which but NaN it lets pass: vectors of CUDA are not chosen by a scalar.
        by_zero = tirx.And(y == 0, x >= tirx.const(-math.inf, x.ty))
        return tirx.Select(by_zero, x / y, once(without, tirx.truncmod(x, y)))

    return both("T_floor_divide", quotient, a, b)


def _remainder(a: te.Tensor, b: te.Tensor) -> te.Tensor:
    """Of the sign of ``b``."""

    def signed(x: Any, y: Any) -> Any:
        def of(rest: Any) -> Any:
            return tirx.Select(_turns(y, rest), rest + y, rest)

        return once(of, tirx.truncmod(x, y))

    return both("T_floor_mod", signed, a, b)


def _turns(y: Any, rest: Any) -> Any:
    """Whether a remainder, of the sign of what was divided, is not 0 and has another than ``y``."""
    return tirx.Or(tirx.And(y < 0, rest > 0), tirx.And(y > 0, rest < 0))


_ARITHMETIC: dict[str, Rule] = {
    "relax.multiply": _of_any_number("relax.multiply", topi.multiply),
    "relax.divide": _of_any_number("relax.divide", topi.divide),
    **{
        f"relax.{name}": _of_zeros(f"relax.{name}")
        for name in ("full", "full_like", "zeros", "zeros_like")
    },
    "relax.subtract": _subtract,
    "relax.floor_divide": keeping("relax.floor_divide", _divided_down, 2),
    "relax.floor_mod": keeping("relax.floor_mod", _remainder, 2),
}
