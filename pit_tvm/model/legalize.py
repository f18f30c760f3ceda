"""Operators of a graph as loops, by TVM's rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import ir, relax, te

_TAKE = "relax.take"
_RULE = "FLegalize"


def legalize(kept: Sequence[str] = ()) -> tvm.ir.transform.Pass:
    """The pass that calls a function for every operator, but for those that are ``kept``."""
    skipped = [f"relax.{name}" for name in kept]
    return relax.transform.LegalizeOps({_TAKE: _take}, skip_ops=skipped)


def _take(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Rows of a table by ids that are known to be inside: TVM's own rule writes to the standard
    error, for each call, that they had better be."""
    data, ids = call.args
    axis = call.attrs.axis
    if str(call.attrs.mode) != "fast" or axis is None or not isinstance(ids.ty, relax.TensorType):
        return ir.Op.get(_TAKE).get_attr(_RULE)(builder, call)
    return builder.call_te(_picked, data, ids, int(axis) % data.ty.ndim, primfunc_name_hint="take")


def _picked(data: te.Tensor, ids: te.Tensor, axis: int) -> te.Tensor:
    before, behind = data.shape[:axis], data.shape[axis + 1 :]

    def element(*at: Any) -> Any:
        end = axis + len(ids.shape)
        return data(*at[:axis], ids(*at[axis:end]), *at[end:])

    return te.compute((*before, *ids.shape, *behind), element, name="T_take", tag="injective")
