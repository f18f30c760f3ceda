"""Layer norms of a graph, with the sum of a residual before them, as one kernel over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, relax

from .kernels import Kernels, RowNorm
from .rebuild import (
    extents_of,
    flat_rows,
    is_op,
    readers_of,
    rebuild,
    same_extents,
    same_shape,
    shape_of,
    values_of,
)


def extract_norms(module: tvm.IRModule, kernels: Kernels) -> tvm.IRModule:
    """Replace every layer norm over the last axis with constant scale and shift, and the sum of
    two tensors before it, by one kernel; where the sum is read elsewhere as well and there is a
    kernel that stores both, by that."""
    values, readers = values_of(module["main"]), readers_of(module["main"])
    sums = {norm: found for norm in values if (found := _sum_before(norm, values, readers))}
    norm_of = {found.var: norm for norm, found in reversed(sums.items()) if found.shared}
    new: dict[relax.Expr, relax.Expr] = {}
    normed: dict[relax.Var, relax.Expr] = {}

    def rule(builder: relax.BlockBuilder, call: relax.Call, var: relax.Var) -> relax.Expr:
        if var in normed:
            return relax.op.reshape(normed[var], list(extents_of(call)))
        if var in norm_of:
            norm = norm_of[var]
            pair = _with_norm(builder, call, sums[norm].how, kernels)
            if pair is None:
                return call
            normed[norm], whole = pair
            return relax.op.reshape(whole, list(extents_of(call)))
        how = row_norm(call)
        if how is None:
            return call
        found, terms = sums.get(var), call.args[:1]
        if found is not None and (found.direct or not found.shared):
            terms = [new.get(term, term) for term in values[found.var].args]
        made = kernels.norm(builder, [flat_rows(builder, term) for term in terms], how)
        if made is None:
            return call
        return relax.op.reshape(builder.emit(made), list(extents_of(call)))

    return rebuild(module, rule, env=new)


def _with_norm(
    builder: relax.BlockBuilder, sum_: relax.Call, how: RowNorm, kernels: Kernels
) -> tuple[relax.Var, relax.Var] | None:
    """A norm and the sum before it, as rows; None if there is no kernel for both."""
    rows = [flat_rows(builder, term) for term in sum_.args]
    pair = kernels.norm(builder, rows, how, stores_sum=True)
    if pair is None:
        return None
    both = builder.emit(pair)
    normed, whole = (builder.emit(relax.TupleGetItem(both, part)) for part in (0, 1))
    return normed, whole


@dataclass(frozen=True, eq=False)
class _Sum:
    """A sum of two tensors of its shape that a norm reads. ``shared``: something else reads it too;
    ``direct``: no reshape is between."""

    how: RowNorm
    var: relax.Var
    shared: bool
    direct: bool


def _sum_before(
    norm: relax.Var,
    values: Mapping[relax.Var, Any],
    readers: Mapping[relax.Var, Sequence[relax.Var | None]],
) -> _Sum | None:
    """The sum that a norm reads, behind reshapes that keep its rows."""
    call = values[norm]
    how = row_norm(call)
    if how is None:
        return None
    source = call.args[0]
    if source not in readers:  # a weight
        return None
    shared = len(readers[source]) > 1
    while is_op(values.get(source), "reshape"):
        source = values[source].args[0]
        shared |= len(readers[source]) > 1
    made = values.get(source)
    if not _is_plain_sum(made) or not same_extents(extents_of(source)[-1:], extents_of(call)[-1:]):
        return None
    return _Sum(how, source, shared, source.same_as(call.args[0]))


def _is_plain_sum(expr: Any) -> bool:
    """Whether ``expr`` adds two tensors of its shape."""
    return is_op(expr, "add") and all(same_shape(term, expr) for term in expr.args)


def row_norm(call: Any) -> RowNorm | None:
    """What a layer norm over the last axis with constant scale and shift does; None for others."""
    if not is_op(call, "nn.layer_norm") or shape_of(call) is None:
        return None
    attrs, (_, scale, shift) = call.attrs, call.args
    last = [int(a) % call.ty.ndim for a in attrs.axes] == [call.ty.ndim - 1]
    constant = isinstance(scale, ir.GenericConst) and isinstance(shift, ir.GenericConst)
    if not (last and constant and attrs.center and attrs.scale):
        return None
    return RowNorm(scale, shift, float(attrs.epsilon))
