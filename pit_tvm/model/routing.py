"""What routes tokens to experts, and what experts do with them, from torch's operators to Relax."""

from __future__ import annotations

from torch import fx
from tvm import relax
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter

from .grouped import grouped_linear
from .products import Convert


def routing_converters() -> dict[str, Convert]:
    """By the name of torch's operator, in the form that `from_exported_program` takes."""
    return {"topk.default": _topk, "grouped_linear.default": _grouped}


def _topk(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """The places of the largest or smallest along an axis, in order, and what stands there: two
    tensors, of which each may be one of single tokens."""
    emit, args = importer.block_builder.emit, importer.retrieve_args(node)
    x, k, axis, largest = (*args, *(-1, True)[len(args) - 2 :])[:4]
    axis, largest = node.kwargs.get("dim", axis), node.kwargs.get("largest", largest)
    found = relax.op.topk(x, k, axis, "indices", bool(largest), "int64")
    places = emit(found)
    return emit(relax.Tuple([emit(relax.op.gather_elements(x, places, axis)), places]))


def _grouped(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    x, weight, bias, ids, activation = importer.retrieve_args(node)
    return importer.block_builder.emit(grouped_linear(x, ids, weight, bias, activation))
