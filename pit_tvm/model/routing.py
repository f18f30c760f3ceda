"""What routes tokens to experts, and what experts do with them, from torch's operators to Relax."""

from __future__ import annotations

import numpy as np
from torch import fx
from tvm import relax
from tvm.ir import prim
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter

from .converters import Convert
from .grouped import grouped_linear
from .rebuild import extents_of, same_extents

_MOST_PAIRS = 1 << 14  # of places and ids, all compared


def routing_converters() -> dict[str, Convert]:
    """By the name of torch's operator, in the form that `from_exported_program` takes."""
    scatters = ("scatter.value", "scatter.src")
    return {"topk.default": _topk, "grouped_linear.default": _grouped} | dict.fromkeys(
        scatters, _scatter
    )


def _topk(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """The places of the largest or smallest along an axis, in order, and what stands there: two
    tensors, of which each may be one of single tokens."""
    emit, args = importer.block_builder.emit, importer.retrieve_args(node)
    x, k, axis, largest = (*args, *(-1, True)[len(args) - 2 :])[:4]
    axis, largest = node.kwargs.get("dim", axis), node.kwargs.get("largest", largest)
    found = relax.op.topk(x, k, axis, "indices", bool(largest), "int64")
    places = emit(found)
    return emit(relax.Tuple([emit(relax.op.gather_elements(x, places, axis)), places]))


def _scatter(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """``x`` with ``source`` at the places ``ids`` of its last axis, the last one where places are
    equal. Every place looks for itself among the ids, which are few; TVM's own has no loops that
    could be judged. Others are TVM's."""
    emit, (x, axis, ids, source) = importer.block_builder.emit, importer.retrieve_args(node)
    *rows, extent = extents_of(x)
    *others, count = extents_of(ids)
    last = axis in (-1, x.ty.ndim - 1) and same_extents(rows, others)
    sizes = [int(e) for e in (extent, count) if isinstance(e, prim.IntImm)]
    if not last or len(sizes) < 2 or sizes[0] * sizes[1] > _MOST_PAIRS:
        return importer._scatter(node)
    whole, choices = (relax.const(np.arange(n), "int64") for n in sizes)
    at = emit(relax.op.expand_dims(whole, 1))
    found = emit(relax.op.equal(emit(relax.op.expand_dims(ids, -2)), at))
    place = emit(relax.op.max(emit(relax.op.where(found, choices, relax.const(-1, "int64"))), -1))
    if isinstance(source, relax.Expr):
        zero = relax.const(0, "int64")
        source = emit(relax.op.gather_elements(source, emit(relax.op.maximum(place, zero)), -1))
    else:
        source = relax.const(source, str(x.ty.dtype))
    is_hit = emit(relax.op.greater_equal(place, relax.const(0, "int64")))
    return emit(relax.op.where(is_hit, source, x))


def _grouped(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    x, weight, bias, ids, activation = importer.retrieve_args(node)
    return importer.block_builder.emit(grouped_linear(x, ids, weight, bias, activation))
