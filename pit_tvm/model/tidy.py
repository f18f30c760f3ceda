"""The importer's detours taken out: what has no effect on shape or value, or hides one that has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, sym, tirx
from tvm.ir import prim

from ..analysis.expr import is_zero
from .rebuild import (
    extents_of,
    is_number,
    is_op,
    permutation_of,
    rebuild,
    same_extents,
    same_shape,
    shape_of,
    without_weights,
)
from .spelled import spelled_activation
from .wide import WIDE, is_narrow


def tidy(module: tvm.IRModule, size_bounds: Mapping[tirx.Var, int]) -> tvm.IRModule:
    """Rewrite ``main`` without operators that change nothing.

    Slices get their true extent where ``size_bounds`` (largest values of symbolic extents) shows
    that they end inside; copies to the same shape, casts to the same type or to a wider one and
    back, factors of 1, pairs of permutations that cancel, weights repeated for every batch, and
    parts without elements of what is joined go; a tensor that is split becomes slices, a slice of
    what was joined its parts, and an activation that is spelled out an operator.
    """
    analyzer = sym.Analyzer()
    for var, most in size_bounds.items():
        analyzer.bind(var, tvm.ir.Range.from_min_extent(0, most + 1))

    def made_by(builder: relax.BlockBuilder) -> Callable[[Any], Any]:
        return lambda e: builder.lookup_binding(e) if isinstance(e, relax.Var) else e

    def rule(builder: relax.BlockBuilder, call: relax.Call, _: relax.Var) -> relax.Expr:
        made = made_by(builder)
        simpler = (_simpler(call, made), _inbound(call, analyzer), _slices(call))
        for found in (*simpler, spelled_activation(call, made)):
            if found is not None:
                return found
        return call

    module = rebuild(module, rule, analyzer.simplify)
    same, plain = relax.transform.EliminateCommonSubexpr(), relax.transform.CanonicalizeBindings()
    return without_weights(module, same, plain)


def tidy_reshapes(module: tvm.IRModule) -> tvm.IRModule:
    """Rewrite ``main`` with one reshape for several in a row, and none to the same shape."""
    return without_weights(module, relax.transform.RemoveRedundantReshape())


def _inbound(call: relax.Call, analyzer: sym.Analyzer) -> relax.Call | None:
    """A slice from 0 by 1 that provably ends inside, with its extent said plainly."""
    if not is_op(call, "strided_slice") or call.attrs.assume_inbound:
        return None
    data, axes, begin, end, *strides = call.args
    extents = shape_of(data)
    if extents is None or not isinstance(axes, relax.Tuple):
        return None
    for axis, first, last in zip(axes.fields, begin.fields, end.fields, strict=True):
        inside = analyzer.can_prove(tirx.all(last >= 0, last <= extents[int(axis)]))
        if not (inside and analyzer.can_prove_equal(first, 0)):
            return None
    if strides and any(not analyzer.can_prove_equal(s, 1) for s in strides[0].fields):
        return None
    return relax.op.strided_slice(
        data, list(axes.fields), list(begin.fields), list(end.fields), assume_inbound=True
    )


def _slices(call: relax.Call) -> relax.Tuple | None:
    """The parts of a ``split`` between constant places, each by itself."""
    if not is_op(call, "split"):
        return None
    data, extents = call.args[0], shape_of(call.args[0])
    axis = int(call.attrs.axis) % data.ty.ndim
    if extents is None or not isinstance(extents[axis], prim.IntImm):
        return None
    sizes = [part.shape.values[axis] for part in call.ty.fields]
    ends = list(accumulate(map(int, sizes)))
    limits = zip([0, *ends], ends, strict=False)
    return relax.Tuple(
        [relax.op.strided_slice(data, [axis], [a], [b], assume_inbound=True) for a, b in limits]
    )


def _simpler(call: relax.Call, made_by: Callable[[Any], Any]) -> relax.Expr | None:
    """What ``call`` comes to without its detour; ``made_by`` gives the value of a variable."""
    if is_op(call, "broadcast_to", "reshape") and same_shape(call.args[0], call):
        return call.args[0]
    if is_op(call, *_ON_NUMBERS):
        number = _number(call, [made_by(arg) for arg in call.args])
        if number is not None:
            return number
    if is_op(call, "astype"):
        return _needless_cast(call, made_by(call.args[0]))
    if is_op(call, "multiply") and _is_factor_one(call.args[1]) and same_shape(call.args[0], call):
        return call.args[0]
    if is_op(call, "permute_dims") and widens(made_by(call.args[0])):
        return _cast_last(call, made_by(call.args[0]))
    moves = is_op(call, "permute_dims") or is_op(call, "reshape") and _splits(call)
    if moves and is_scaled(made_by(call.args[0])):
        return _scale_last(call, made_by(call.args[0]))
    if is_op(call, "permute_dims"):
        inner = made_by(call.args[0])
        if is_op(inner, "reshape"):
            return _fold_last(call, inner)
        return _single_permutation(call, inner)
    if is_op(call, "matmul"):
        return _shared_weight(call, made_by(call.args[1]))
    if is_op(call, "concat"):
        return _without_empty(call, made_by(call.args[0]))
    if is_op(call, "strided_slice") and is_op(made_by(call.args[0]), "concat"):
        joined = made_by(call.args[0])
        return _parts(call, joined, made_by(joined.args[0]))
    return None


_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "multiply": np.multiply,
    "sqrt": np.sqrt,
    "astype": np.asarray,  # the type is the result's
}


def _number(call: relax.Call, args: Sequence[Any]) -> relax.Expr | None:
    """What a call on numbers comes to: factors of scores are spelled out by some models."""
    if not all(map(is_number, args)):
        return None
    name = call.op.name.removeprefix("relax.")
    return relax.const(_ON_NUMBERS[name](*(arg.value.numpy() for arg in args)), call.ty.dtype)


def _without_empty(call: relax.Call, parts: Any) -> relax.Expr | None:
    """What is joined without parts that have no elements."""
    if not isinstance(parts, relax.Tuple):
        return None
    axis = int(call.attrs.axis) % call.ty.ndim
    extents = [shape_of(part) for part in parts.fields]
    full = [
        part
        for part, own in zip(parts.fields, extents, strict=True)
        if own is None or not is_zero(own[axis])
    ]
    if len(full) in (0, len(extents)):
        return None
    return full[0] if len(full) == 1 else relax.op.concat(full, axis)


def _parts(call: relax.Call, joined: relax.Call, parts: Any) -> relax.Expr | None:
    """What a slice between constant places takes of what is joined, if these are whole parts."""
    axis = int(joined.attrs.axis) % joined.ty.ndim
    bounds = _places(call, axis)
    if bounds is None or not isinstance(parts, relax.Tuple):
        return None
    extents = [shape_of(part) for part in parts.fields]
    if any(own is None or not isinstance(own[axis], prim.IntImm) for own in extents):
        return None
    ends = list(accumulate(int(own[axis]) for own in extents if own is not None))
    begin, end = bounds[0], min(bounds[1], ends[-1])
    if begin not in (0, *ends) or end not in ends or begin >= end:
        return None
    taken = [part for part, last in zip(parts.fields, ends, strict=True) if begin < last <= end]
    return taken[0] if len(taken) == 1 else relax.op.concat(taken, axis)


def _places(call: relax.Call, axis: int) -> tuple[int, int] | None:
    """Where a slice along ``axis`` alone, by 1, begins and ends; None if it is another, or these
    are not constant and counted from the front."""
    given = call.args[1:]
    if any(not isinstance(each, relax.Tuple) or len(each.fields) != 1 for each in given):
        return None
    numbers = [each.fields[0] for each in given]
    if not all(isinstance(number, prim.IntImm) for number in numbers):
        return None
    along, begin, end, *step = map(int, numbers)
    if along % call.ty.ndim != axis or begin < 0 or end < 0 or step not in ([], [1]):
        return None
    return begin, end


def widens(expr: Any) -> bool:
    """Whether ``expr`` makes float32 of 16-bit floats."""
    if not is_op(expr, "astype"):
        return False
    return str(expr.ty.dtype) == WIDE and is_narrow(expr.args[0])


def _needless_cast(call: relax.Call, inner: Any) -> relax.Expr | None:
    """What a cast to the same type, or back to the type before a wider one, began with."""
    if call.args[0].ty.dtype == call.ty.dtype:
        return call.args[0]
    return inner.args[0] if widens(inner) and inner.args[0].ty.dtype == call.ty.dtype else None


def _cast_last(call: relax.Call, cast: relax.Call) -> relax.Call:
    """Elements moved first, while they are small, and made wider then."""
    moved = relax.Call(call.op, [cast.args[0], *call.args[1:]], call.attrs)
    return relax.op.astype(moved, call.ty.dtype)


def _splits(call: relax.Call) -> bool:
    """Whether a reshape makes several dimensions of one."""
    return call.ty.ndim > call.args[0].ty.ndim


def is_scaled(expr: Any) -> bool:
    """Whether ``expr`` multiplies a tensor by a number."""
    return is_op(expr, "multiply") and is_number(expr.args[1])


def _scale_last(call: relax.Call, product: relax.Call) -> relax.Call:
    """Elements moved first and scaled then: attention takes a factor of its queries as its own."""
    moved = relax.Call(call.op, [product.args[0], *call.args[1:]], call.attrs)
    return relax.op.multiply(moved, product.args[1])


def _is_factor_one(expr: relax.Expr) -> bool:
    return isinstance(expr, ir.GenericConst) and bool(np.all(expr.value.numpy() == 1))


def _single_permutation(call: relax.Call, inner: relax.Expr) -> relax.Expr | None:
    """One permutation for two in a row; none where they cancel."""
    if not is_op(inner, "permute_dims"):
        return None
    first, second = permutation_of(inner), permutation_of(call)
    both = [first[a] for a in second]
    data = inner.args[0]
    return data if both == sorted(both) else relax.op.permute_dims(data, both)


def _fold_last(call: relax.Call, inner: relax.Call) -> relax.Call | None:
    """Rows and columns swapped first, and what lies before them made one dimension then: with heads
    told from the batch, attention knows its keys."""
    if permutation_of(call) != [0, 2, 1]:
        return None
    data, extents = inner.args[0], extents_of(call)
    before = shape_of(data) or ()
    if len(before) < 4 or not same_extents(before[-2:], extents[:0:-1]):
        return None
    axes = list(range(data.ty.ndim))
    moved = relax.op.permute_dims(data, [*axes[:-2], axes[-1], axes[-2]])
    return relax.op.reshape(moved, extents)


def _shared_weight(call: relax.Call, rhs: relax.Expr) -> relax.Expr | None:
    """A product with one matrix, where the matrix was repeated for every batch."""
    if not is_op(rhs, "broadcast_to"):
        return None
    weight, extents = rhs.args[0], shape_of(rhs.args[0])
    lhs = shape_of(call.args[0])
    if extents is None or lhs is None or len(extents) != 2:
        return None
    if not same_extents(lhs[:-1], extents_of(call)[:-1]):
        return None
    return relax.op.matmul(call.args[0], weight, call.attrs.out_dtype)
