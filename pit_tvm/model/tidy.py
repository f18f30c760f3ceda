"""The importer's detours taken out: what has no effect on shape or value, or hides one that has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, sym, tirx

from .rebuild import extents_of, is_op, rebuild, same_extents, same_shape, shape_of


def tidy(module: tvm.IRModule, size_bounds: Mapping[tirx.Var, int]) -> tvm.IRModule:
    """Rewrite ``main`` without operators that change nothing.

    Slices get their true extent where ``size_bounds`` (largest values of symbolic extents) shows
    that they end inside; copies to the same shape, factors of 1, pairs of permutations that
    cancel, and weights repeated for every batch go.
    """
    analyzer = sym.Analyzer()
    for var, most in size_bounds.items():
        analyzer.bind(var, tvm.ir.Range.from_min_extent(0, most + 1))

    def made_by(builder: relax.BlockBuilder) -> Callable[[Any], Any]:
        return lambda e: builder.lookup_binding(e) if isinstance(e, relax.Var) else e

    def rule(builder: relax.BlockBuilder, call: relax.Call, _: relax.Var) -> relax.Expr:
        for found in (_inbound(call, analyzer), _simpler(call, made_by(builder))):
            if found is not None:
                return found
        return call

    module = rebuild(module, rule, analyzer.simplify)
    module = relax.transform.EliminateCommonSubexpr()(module)
    return relax.transform.CanonicalizeBindings()(module)


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


def _simpler(call: relax.Call, made_by: Callable[[Any], Any]) -> relax.Expr | None:
    """What ``call`` comes to without its detour; ``made_by`` gives the value of a variable."""
    if is_op(call, "broadcast_to", "reshape") and same_shape(call.args[0], call):
        return call.args[0]
    if is_op(call, "astype") and call.args[0].ty.dtype == call.ty.dtype:
        return call.args[0]
    if is_op(call, "multiply") and _is_factor_one(call.args[1]) and same_shape(call.args[0], call):
        return call.args[0]
    if is_op(call, "permute_dims"):
        return _single_permutation(call, made_by(call.args[0]))
    if is_op(call, "matmul"):
        return _shared_weight(call, made_by(call.args[1]))
    return None


def _is_factor_one(expr: relax.Expr) -> bool:
    return isinstance(expr, ir.GenericConst) and bool(np.all(expr.value.numpy() == 1))


def _single_permutation(call: relax.Call, inner: relax.Expr) -> relax.Expr | None:
    """One permutation for two in a row; none where they cancel."""
    if not is_op(inner, "permute_dims"):
        return None
    first, second = ([int(a) for a in each.attrs.axes] for each in (inner, call))
    both = [first[a] for a in second]
    data = inner.args[0]
    return data if both == sorted(both) else relax.op.permute_dims(data, both)


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
