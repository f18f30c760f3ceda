"""SWrite by the kernel of a linear layer: it stores rows where their tokens stand in the plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax

from .linear import LinearLayer, called_layer
from .packing import ROW, STARTS, index_parts, is_unpack
from .rebuild import extents_of, is_op, readers_of, rebuild, values_of

PLACED = "pit_tvm.model.linear_in_place"


def store_in_place(
    module: tvm.IRModule,
    layers: Sequence[LinearLayer],
    fits: Callable[[LinearLayer], bool],
) -> tvm.IRModule:
    """Replace a scatter of what a call of `extract_linear` gives, and nothing else reads, by
    ``PLACED(number, x, row, starts, out)``: the layer stores its rows where ``row`` names their
    tokens, zeros elsewhere.

    ``fits``: whether there is such a kernel for a layer.
    """
    main = module["main"]
    index = {number: var for var, number in index_parts(main).items()}
    values, readers = values_of(main), readers_of(main)
    new: dict[relax.Expr, relax.Expr] = {}

    def layer_of(rows: relax.Expr) -> tuple[int, relax.Expr] | None:
        """The layer whose result ``rows`` is, behind reshapes, and its input."""
        value = values.get(rows)
        if value is None or len(readers[rows]) != 1:
            return None
        if is_op(value, "reshape"):
            return layer_of(value.args[0])
        return called_layer(value)

    def rule(builder: relax.BlockBuilder, expr: relax.Call, var: relax.Var) -> relax.Expr:
        old = values[var]
        found = layer_of(old.args[1].fields[0]) if is_unpack(old, module) else None
        if found is None or STARTS not in index:
            return expr
        number, x = found
        if not fits(layers[number]):
            return expr
        lists = [new[index[part]] for part in (ROW, STARTS)]
        given: list[Any] = [relax.prim_value(number), new[x], *lists]
        tokens, *parts = extents_of(expr)
        ty = relax.TensorType([tokens, len(layers[number].weight)], expr.ty.dtype)
        stored = relax.op.call_dps_packed(PLACED, given, ty)
        if len(parts) == 1:
            return stored
        return relax.op.reshape(builder.emit(stored), [tokens, *parts])

    return rebuild(module, rule, env=new)
