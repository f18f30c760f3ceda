"""Products of rows with the weights of their groups, as an operator of Relax: what layers of
experts are made of.

It has loops like any other operator, so that the analysis of these says that tokens do not meet in
it; `experts.extract_grouped` hands those with constant weights to pit-tvm's own operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import ir, relax, te, tirx

from ..op.arguments import resolve_dtypes
from ..op.contraction import reduce_and_finish
from .added import operator
from .rebuild import extents_of, is_op, shape_of

GROUPED = "pit_tvm.grouped_linear"
_ABOUT = "Rows times the weights of their groups."


def grouped_linear(
    x: relax.Expr,
    ids: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr | None = None,
    activation: str | None = None,
) -> relax.Call:
    """``activation(x @ weight[g].T + bias[g])`` with the group ``g`` of every row, zeros where it
    is none.

    ``x`` is ``[..., k]``, ``ids`` int32 or int64 ``[...]`` or, several for each row, ``[..., c]``,
    ``weight`` ``[groups, n, k]`` and ``bias`` ``[groups, n]``; the result ``[*ids.shape, n]``.
    """
    given = [x, ids, weight] if bias is None else [x, ids, weight, bias]
    how = ir.make_node("ir.DictAttrs", activation=activation or "")
    return relax.Call(operator(GROUPED, _ABOUT, _type), given, how)


def grouped_parts(
    call: Any,
) -> tuple[relax.Expr, relax.Expr, relax.Expr, relax.Expr | None, str | None] | None:
    """What `grouped_linear` was given; None for another expression."""
    if not is_op(call, GROUPED):
        return None
    x, ids, weight, *bias = call.args
    return x, ids, weight, bias[0] if bias else None, _activation(call)


def _activation(call: relax.Call) -> str | None:
    return str(call.attrs["activation"]) or None


def _type(call: relax.Call, _: relax.BlockBuilder) -> relax.TensorType:
    x, ids, weight, *_others = call.args
    dtype = resolve_dtypes(str(x.ty.dtype)).output
    rows = shape_of(ids)
    if rows is None:
        return relax.TensorType(dtype=dtype, ndim=ids.ty.ndim + 1)
    return relax.TensorType([*rows, extents_of(weight)[1]], dtype)


def _legalized(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    how = {"activation": _activation(call), "primfunc_name_hint": "grouped_linear"}
    return builder.call_te(_loops, *call.args, **how)


def _loops(
    x: te.Tensor, ids: te.Tensor, weight: te.Tensor, *bias: te.Tensor, activation: str | None
) -> te.Tensor:
    dtypes = resolve_dtypes(str(x.dtype))
    depth, rows = te.reduce_axis((0, weight.shape[2]), "k"), len(x.shape) - 1

    def of_group(at: Sequence[Any], value: Callable[[Any], Any], dtype: str) -> Any:
        """What ``value`` makes of the group of a row, 0 where that is none."""
        group = ids(*at[:-1])
        is_one = tirx.all(group >= 0, group < weight.shape[0])
        return tirx.if_then_else(is_one, value(group), tirx.const(0, dtype))

    def product(*at: Any) -> Any:
        left = x(*at[:rows], depth).astype(dtypes.accumulator)

        def term(group: Any) -> Any:
            return left * weight(group, at[-1], depth).astype(dtypes.accumulator)

        return te.sum(of_group(at, term, dtypes.accumulator), axis=depth)

    def offset(*at: Any) -> Any:
        return of_group(at, lambda group: bias[0](group, at[-1]), dtypes.bias)

    shape = (*ids.shape, weight.shape[1])
    found = offset if bias else None
    return reduce_and_finish(shape, product, dtypes, bias=found, activation=activation)


#: The rule that lowers it to loops.
RULES = {f"relax.{GROUPED}": _legalized}
