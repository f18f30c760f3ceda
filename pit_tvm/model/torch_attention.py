"""Attention as torch's one operator of it computes it, in steps that `attention` recognises."""

from __future__ import annotations

import math
from typing import Any

from torch import fx
from tvm import relax
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter

from .products import Convert
from .wide import NARROW, WIDE


def attention_converters() -> dict[str, Convert]:
    """By the name of torch's operator, in the form that `from_exported_program` takes."""
    return {"scaled_dot_product_attention.default": _attention}


def _attention(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """``softmax(scale * q k^T + mask) v`` in the forms that `fragments.stays` admits, 16 bits in
    float32 inside; a row without keys is 0."""
    emit = importer.block_builder.emit
    query, keys, values, *_ = given = importer.retrieve_args(node)
    mask = given[3] if len(given) > 3 else importer.env.get(node.kwargs.get("attn_mask"))
    dtype = str(query.ty.dtype)
    wide = WIDE if dtype in NARROW else dtype

    def widened(x: relax.Expr) -> relax.Expr:
        return x if str(x.ty.dtype) == wide else emit(relax.op.astype(x, wide))

    scale: Any = node.kwargs.get("scale")
    depth = int(query.ty.shape.values[-1])
    # Half of it on either side, as in torch.
    factor = relax.const(math.sqrt(1 / math.sqrt(depth) if scale is None else scale), wide)
    rows = emit(relax.op.multiply(widened(query), factor))
    turned = emit(relax.op.permute_dims(widened(keys), [0, 1, 3, 2]))
    columns = emit(relax.op.multiply(turned, factor))
    scores = emit(relax.op.matmul(rows, columns))
    weights = _weights(scores, mask, importer)
    found = emit(relax.op.matmul(weights, widened(values)))
    return found if wide == dtype else emit(relax.op.astype(found, dtype))


def _weights(scores: relax.Expr, mask: Any, importer: BaseFXGraphImporter) -> relax.Expr:
    emit, dtype = importer.block_builder.emit, str(scores.ty.dtype)
    excluded, zero = relax.const(-math.inf, dtype), relax.const(0.0, dtype)
    if mask is not None:
        if str(mask.ty.dtype) == "bool":
            mask = emit(relax.op.where(mask, zero, excluded))
        elif str(mask.ty.dtype) != dtype:
            mask = emit(relax.op.astype(mask, dtype))
        scores = emit(relax.op.add(scores, mask))
    seen = emit(relax.op.logical_not(emit(relax.op.equal(scores, excluded))))
    most = emit(relax.op.max(emit(relax.op.astype(seen, "int8")), [-1], True))
    has_none = emit(relax.op.logical_not(emit(relax.op.astype(most, "bool"))))
    return emit(relax.op.where(has_none, zero, emit(relax.op.nn.softmax(scores, -1))))
