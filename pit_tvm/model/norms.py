"""Layer norms of a graph, with the sum of a residual before them, as one kernel over rows."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import ir, relax

from .kernels import Kernels
from .rebuild import extents_of, flat_rows, is_op, rebuild, same_shape, shape_of


def extract_norms(module: tvm.IRModule, kernels: Kernels) -> tvm.IRModule:
    """Replace every layer norm over the last axis with constant scale and shift, and the sum of
    two tensors of its shape before it, by one kernel."""

    def rule(builder: relax.BlockBuilder, call: relax.Call, _: relax.Var) -> relax.Expr:
        if not is_row_norm(call):
            return call
        made = builder.lookup_binding(call.args[0])
        together = is_op(made, "add") and all(same_shape(a, call) for a in made.args)
        terms = list(made.args) if together else [call.args[0]]
        return _emit(builder, call, terms, kernels)

    return rebuild(module, rule)


def is_row_norm(call: relax.Call) -> bool:
    """Whether a call is a layer norm over the last axis with constant scale and shift."""
    if not is_op(call, "nn.layer_norm") or shape_of(call) is None:
        return False
    attrs, scale, shift = call.attrs, call.args[1], call.args[2]
    last = [int(a) % call.ty.ndim for a in attrs.axes] == [call.ty.ndim - 1]
    constant = isinstance(scale, ir.GenericConst) and isinstance(shift, ir.GenericConst)
    return bool(last and constant and attrs.center and attrs.scale)


def _emit(
    builder: relax.BlockBuilder, call: relax.Call, terms: Sequence[relax.Expr], kernels: Kernels
) -> relax.Call:
    rows = [flat_rows(builder, t) for t in terms]
    scale, shift = call.args[1:]
    out = builder.emit(kernels.norm(builder, rows, scale, shift, float(call.attrs.epsilon)))
    return relax.op.reshape(out, list(extents_of(call)))
