"""Operators of a graph as loops, by TVM's rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import ir, relax, sym, te, tirx, topi

from ..op.epilogue import relu
from .rebuild import extents_of, is_one
from .wide import NARROW, WIDE

_TAKE, _EXPAND = "relax.take", "relax.broadcast_to"
_RULE = "FLegalize"
_MOST = 2**31  # of a size


def legalize(kept: Sequence[str] = ()) -> tvm.ir.transform.Pass:
    """The pass that calls a function for every operator, but for those that are ``kept``."""
    skipped = [f"relax.{name}" for name in kept]
    return relax.transform.LegalizeOps({_TAKE: _take, _EXPAND: _expand, **_OWN}, skip_ops=skipped)


def _keeping(name: str, make: Callable[..., te.Tensor], tensors: int) -> Callable[..., relax.Expr]:
    """The rule that calls ``make`` for an operator whose first ``tensors`` arguments are tensors of
    floating-point numbers, and TVM's own for others."""

    def rule(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        types = [argument.ty for argument in call.args[:tensors]]
        if all(isinstance(ty, relax.TensorType) and "float" in str(ty.dtype) for ty in types):
            return builder.call_te(make, *call.args, primfunc_name_hint=make.__name__.strip("_"))
        return ir.Op.get(name).get_attr(_RULE)(builder, call)

    return rule


def _relu(data: te.Tensor) -> te.Tensor:
    return te.compute(data.shape, lambda *at: _once(relu, data(*at)), name="T_relu", tag="elemwise")


def _clip(data: te.Tensor, least: Any, most: Any) -> te.Tensor:
    def inside(x: Any) -> Any:
        low, high = (tirx.Cast(x.ty, bound) for bound in (least, most))
        return tirx.Select(x < low, low, tirx.Select(x > high, high, x))

    return te.compute(
        data.shape, lambda *at: _once(inside, data(*at)), name="T_clip", tag="elemwise"
    )


def _maximum(a: te.Tensor, b: te.Tensor) -> te.Tensor:
    return _either(a, b, lambda x, y: x > y, "T_maximum")


def _minimum(a: te.Tensor, b: te.Tensor) -> te.Tensor:
    return _either(a, b, lambda x, y: x < y, "T_minimum")


def _either(a: te.Tensor, b: te.Tensor, first: Callable[..., Any], name: str) -> te.Tensor:
    """``a`` where ``first`` says so or it is NaN, else ``b``."""

    def chosen(x: Any, y: Any) -> Any:
        return tirx.Select(tirx.Or(tirx.isnan(_wide(x)), first(x, y)), x, y)

    def element(*at: Any) -> Any:
        return _once(chosen, _spread(a, at), _spread(b, at))

    return te.compute(topi.add(a, b).shape, element, name=name, tag="broadcast")


def _round(data: te.Tensor) -> te.Tensor:
    """As TVM's own, which names a function for 16 bits that CUDA does not have."""

    def element(*at: Any) -> Any:
        x = data(*at)
        return tirx.Cast(x.ty, tirx.nearbyint(_wide(x)))

    return te.compute(data.shape, element, name="T_round", tag="elemwise")


def _asked(question: Callable[[Any], Any]) -> Callable[..., te.Tensor]:
    """Whether elements are what ``question`` asks, of which TVM asks none of bfloat16."""

    def make(data: te.Tensor) -> te.Tensor:
        name = f"T_{question.__name__}"
        return te.compute(
            data.shape, lambda *at: question(_wide(data(*at))), name=name, tag="elemwise"
        )

    make.__name__ = question.__name__
    return make


def _wide(x: Any) -> Any:
    """A number of 16 bits in 32; others as they are."""
    return tirx.Cast(WIDE, x) if str(x.ty.dtype) in NARROW else x


def _once(make: Callable[..., Any], *values: Any) -> Any:
    """What ``make`` makes of values that it uses more than once: each has a name, lest fused
    operators, one inside the other, become as many times as long. Those of bfloat16 have none:
    TVM's passes that make other types of it do not look behind names."""
    if str(values[0].ty.dtype) == "bfloat16":
        return make(*values)
    names = [tirx.Var(f"x{at}", value.ty) for at, value in enumerate(values)]
    made = make(*names)
    for name, value in zip(reversed(names), reversed(values), strict=True):
        made = tirx.Let(name, value, made)
    return made


def _spread(array: te.Tensor, at: Sequence[Any]) -> Any:
    """The element of an array that belongs to a place of what it is broadcast to."""
    own = zip(array.shape, at[len(at) - len(array.shape) :], strict=True)
    return array(*(0 if _is_at_most_one(extent) else index for extent, index in own))


# TVM's own rules are maxima and minima that take the number of a number and NaN; torch and ONNX
# keep NaN.
_OWN = {
    name: _keeping(name, make, tensors)
    for name, make, tensors in (
        ("relax.nn.relu", _relu, 1),
        ("relax.clip", _clip, 1),
        ("relax.round", _round, 1),
        ("relax.maximum", _maximum, 2),
        ("relax.minimum", _minimum, 2),
        ("relax.isnan", _asked(tirx.isnan), 1),
        ("relax.isinf", _asked(tirx.isinf), 1),
        ("relax.isfinite", _asked(tirx.isfinite), 1),
    )
}


def _take(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Rows of a table by ids that are known to be inside: TVM's own rule writes to the standard
    error, for each call, that they had better be."""
    data, ids = call.args
    axis = call.attrs.axis
    if str(call.attrs.mode) != "fast" or axis is None or not isinstance(ids.ty, relax.TensorType):
        return ir.Op.get(_TAKE).get_attr(_RULE)(builder, call)
    return builder.call_te(_picked, data, ids, int(axis) % data.ty.ndim, primfunc_name_hint="take")


def _expand(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """A tensor repeated where its extent is 1, also where that is no constant but at most 1, as of
    the first tokens of sequences that may be empty: TVM's own rule reads others behind them."""
    extents = extents_of(call.args[0])
    if all(is_one(extent) or not _is_at_most_one(extent) for extent in extents):
        return ir.Op.get(_EXPAND).get_attr(_RULE)(builder, call)
    return builder.call_te(_expanded, *call.args, primfunc_name_hint="broadcast_to")


def _expanded(data: te.Tensor, shape: Any) -> te.Tensor:
    return te.compute(shape, lambda *at: _spread(data, at), name="T_broadcast_to", tag="broadcast")


def _is_at_most_one(extent: Any) -> bool:
    """Whether an extent is 1, or no more for any sizes."""
    analyzer = sym.Analyzer()
    for var in tirx.analysis.undefined_vars(extent):
        analyzer.bind(var, ir.Range.from_min_extent(0, _MOST))
    return is_one(extent) or analyzer.can_prove(extent <= 1)


def _picked(data: te.Tensor, ids: te.Tensor, axis: int) -> te.Tensor:
    before, behind = data.shape[:axis], data.shape[axis + 1 :]

    def element(*at: Any) -> Any:
        end = axis + len(ids.shape)
        return data(*at[:axis], ids(*at[axis:end]), *at[end:])

    return te.compute((*before, *ids.shape, *behind), element, name="T_take", tag="injective")
