"""Operators of a graph as loops, by TVM's rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import ir, relax, te, tirx

from . import arithmetic, grouped, nan
from .nan import RULE, each, keeping, spread, wide
from .rebuild import extents_of, is_at_most_one, is_one

_TAKE, _EXPAND = "relax.take", "relax.broadcast_to"


def legalize(kept: Sequence[str] = ()) -> tvm.ir.transform.Pass:
    """The pass that calls a function for every operator, but for those that are ``kept``."""
    round_own = keeping("relax.round", _round, 1)
    own = {
        _TAKE: _take,
        _EXPAND: _expand,
        "relax.round": round_own,
        **nan.RULES,
        **arithmetic.RULES,
        **grouped.RULES,
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
