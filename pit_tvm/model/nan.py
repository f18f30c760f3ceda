"""Rules by which comparisons, maxima, their places and sorts keep NaN, as torch and ONNX have it.

TVM's own take numbers to be ordered: of a number and NaN they keep the number, for CPUs NaN differs
from nothing, and what is compared with itself is found equal unread. Where many numbers are
compared, integers in their order take their place: then TVM's rules are right, and those that sort,
which take bfloat16 for integers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import ir, relax, te, tirx, topi

from ..op.epilogue import relu
from .rebuild import is_at_most_one
from .wide import NARROW, WIDE

RULE = "FLegalize"  # the attribute of an operator with TVM's own
# As many bits, and those of a NaN, above infinity.
_INTEGERS = {"float32": ("int32", 0x7FC00000), "float64": ("int64", 0x7FF8 << 48)}
_Make = Callable[..., te.Tensor]


def keeping(name: str, make: _Make, tensors: int) -> Callable[..., relax.Expr]:
    """The rule that calls ``make`` for an operator whose first ``tensors`` arguments are tensors of
    floating-point numbers, and TVM's own for others."""

    def rule(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if all(map(_is_of_numbers, call.args[:tensors])):
            return builder.call_te(make, *call.args, primfunc_name_hint=make.__name__.strip("_"))
        return ir.Op.get(name).get_attr(RULE)(builder, call)

    return rule


def _in_order(
    name: str, reduce: _Make, high: bool, given: bool = True
) -> Callable[..., relax.Expr]:
    """The rule that reduces integers: those of NaN are above all others (``high``) or below. What
    ``reduce`` gives are such integers again (``given``), or places."""

    def make(data: te.Tensor, axis: Any, keepdims: bool) -> te.Tensor:
        found = reduce(_keys(data, high), axis, keepdims)
        return _numbers(found, str(data.dtype)) if given else found

    def rule(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        data, attrs = call.args[0], call.attrs
        if not _is_of_numbers(data):
            return ir.Op.get(name).get_attr(RULE)(builder, call)
        hint = name.removeprefix("relax.")
        return builder.call_te(make, data, attrs.axis, attrs.keepdims, primfunc_name_hint=hint)

    return rule


def _sorted(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """The rule that sorts integers, among which those of NaN are the largest, or tells their
    places."""
    data = call.args[0]
    if not _is_of_numbers(data):
        return call
    keys = builder.emit_te(_keys, data, True)
    found = builder.emit(relax.Call(call.op, [keys], call.attrs))
    if isinstance(call.ty, relax.TensorType):
        return _numbers_of(builder, found, call.ty)
    parts = [relax.TupleGetItem(found, place) for place in range(len(call.ty.fields))]
    return relax.Tuple(
        [
            _numbers_of(builder, builder.emit(part), ty)
            for part, ty in zip(parts, call.ty.fields, strict=True)
        ]
    )


def _numbers_of(builder: relax.BlockBuilder, found: relax.Expr, ty: Any) -> relax.Expr:
    """What was found of `_keys` in a type: numbers, or places as they are."""
    dtype = str(ty.dtype)
    return builder.emit_te(_numbers, found, dtype) if "float" in dtype else found


def _is_of_numbers(expr: relax.Expr) -> bool:
    """Whether an argument is a tensor of floating-point numbers."""
    return isinstance(expr.ty, relax.TensorType) and "float" in str(expr.ty.dtype)


def _keys(data: te.Tensor, high: bool) -> te.Tensor:
    """Integers in the order of numbers, both zeros the same; see `_turned`."""

    def key(number: Any) -> Any:
        x = wide(number)
        kind, nan = _INTEGERS[str(x.ty.dtype)]
        limit = tirx.const(nan if high else ~nan, kind)
        found = tirx.Select(x == 0, tirx.const(0, kind), _turned(tirx.reinterpret(kind, x)))
        return tirx.Select(tirx.isnan(x), limit, found)

    return each("T_keys", key, data)


def _numbers(keys: te.Tensor, dtype: str) -> te.Tensor:
    """The numbers of `_keys`."""
    within = WIDE if dtype in NARROW else dtype

    def number(key: Any) -> Any:
        found = tirx.reinterpret(within, _turned(key))
        return found if within == dtype else tirx.Cast(dtype, found)

    return each("T_numbers", number, keys)


def _turned(bits: Any) -> Any:
    """The bits of a number as an integer in the order of numbers, or back: of negative ones all but
    the sign are inverted."""
    kind = str(bits.ty.dtype)
    sign = tirx.const(tvm.DataType(kind).bits - 1, kind)
    return bits ^ ((bits >> sign) & tirx.max_value(kind))


def _relu(data: te.Tensor) -> te.Tensor:
    return each("T_relu", lambda x: once(relu, x), data)


def _clip(data: te.Tensor, least: Any, most: Any) -> te.Tensor:
    def inside(x: Any) -> Any:
        low, high = (tirx.Cast(x.ty, bound) for bound in (least, most))
        return tirx.Select(x < low, low, tirx.Select(x > high, high, x))

    return each("T_clip", lambda x: once(inside, x), data)


def _maximum(a: te.Tensor, b: te.Tensor) -> te.Tensor:
    return both("T_maximum", _first(lambda x, y: x > y), a, b)


def _minimum(a: te.Tensor, b: te.Tensor) -> te.Tensor:
    return both("T_minimum", _first(lambda x, y: x < y), a, b)


def _first(comes: Callable[..., Any]) -> Callable[..., Any]:
    """``x`` where ``comes`` says so or it is NaN, else ``y``."""
    return lambda x, y: tirx.Select(tirx.Or(tirx.isnan(wide(x)), comes(x, y)), x, y)


def _holds(name: str, compare: Callable[..., Any]) -> _Make:
    """Whether both are numbers of which ``compare`` holds, also where they are one and the same."""

    def make(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        return both(
            f"T_{name}", lambda x, y: tirx.And(compare(x, y), tirx.Not(tirx.isnan(wide(x)))), a, b
        )

    make.__name__ = name
    return make


def _not_equal(a: te.Tensor, b: te.Tensor) -> te.Tensor:
    def differ(x: Any, y: Any) -> Any:
        nan = tirx.Or(tirx.isnan(wide(x)), tirx.isnan(wide(y)))
        return tirx.Or(tirx.NE(x, y), nan)

    return both("T_not_equal", differ, a, b)


def _asked(question: Callable[[Any], Any]) -> _Make:
    """Whether elements are what ``question`` asks, of which TVM asks none of bfloat16."""

    def make(data: te.Tensor) -> te.Tensor:
        return each(f"T_{question.__name__}", lambda x: question(wide(x)), data)

    make.__name__ = question.__name__
    return make


def each(name: str, make: Callable[[Any], Any], data: te.Tensor) -> te.Tensor:
    """What ``make`` makes of each element of a tensor."""
    return te.compute(data.shape, lambda *at: make(data(*at)), name=name, tag="elemwise")


def both(name: str, make: Callable[..., Any], a: te.Tensor, b: te.Tensor) -> te.Tensor:
    """What ``make`` makes of every two elements of tensors that are broadcast."""

    def element(*at: Any) -> Any:
        return once(make, spread(a, at), spread(b, at))

    return te.compute(topi.add(a, b).shape, element, name=name, tag="broadcast")


def wide(x: Any) -> Any:
    """A number of 16 bits in 32; others as they are."""
    return tirx.Cast(WIDE, x) if str(x.ty.dtype) in NARROW else x


def once(make: Callable[..., Any], *values: Any) -> Any:
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


def spread(array: te.Tensor, at: Sequence[Any]) -> Any:
    """The element of an array that belongs to a place of what it is broadcast to."""
    own = zip(array.shape, at[len(at) - len(array.shape) :], strict=True)
    return array(*(0 if is_at_most_one(extent) else index for extent, index in own))


RULES = (
    {
        f"relax.{name}": keeping(f"relax.{name}", make, tensors)
        for name, make, tensors in (
            ("nn.relu", _relu, 1),
            ("clip", _clip, 1),
            ("maximum", _maximum, 2),
            ("minimum", _minimum, 2),
            ("equal", _holds("equal", tirx.EQ), 2),
            ("less_equal", _holds("less_equal", tirx.LE), 2),
            ("greater_equal", _holds("greater_equal", tirx.GE), 2),
            ("not_equal", _not_equal, 2),
            ("isnan", _asked(tirx.isnan), 1),
            ("isinf", _asked(tirx.isinf), 1),
            ("isfinite", _asked(tirx.isfinite), 1),
        )
    }
    | {
        f"relax.{name}": _in_order(f"relax.{name}", *how)
        for name, *how in (
            ("max", topi.max, True),
            ("min", topi.min, False),
            ("argmax", topi.argmax, True, False),
            ("argmin", topi.argmin, False, False),
        )
    }
    | dict.fromkeys(("relax.sort", "relax.argsort", "relax.topk"), _sorted)
)
