"""Products, attention, and what routes tokens to experts, from torch's operators to Relax.

Results are of the operands' type, as torch has them: TVM's importer makes every product float32,
which 16-bit models then cannot be added to. Attention is in steps that `attention` recognises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx
from tvm import relax
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter

from .grouped import grouped_linear
from .recurrence import recurrence
from .wide import NARROW, WIDE

#: What one of torch's operators becomes.
Convert = Callable[[fx.Node, BaseFXGraphImporter], relax.Expr]


def product_converters() -> dict[str, Convert]:
    """By the name of torch's operator, in the form that `from_exported_program` takes."""
    return {
        **dict.fromkeys(("mm.default", "bmm.default", "matmul.default"), _product),
        **dict.fromkeys(("addmm.default", "baddbmm.default"), _sum),
        "linear.default": _linear,
        "scaled_dot_product_attention.default": _attention,
        "masked_attention.default": _masked_attention,
        "topk.default": _topk,
        "grouped_linear.default": _grouped,
        "recurrence.default": _recurrence,
    }


def _product(node: Any, importer: BaseFXGraphImporter) -> relax.Var:
    left, right = (importer.env[a] for a in node.args[:2])
    return importer.block_builder.emit(relax.op.matmul(left, right))


def _sum(node: Any, importer: BaseFXGraphImporter) -> relax.Var:
    """``beta * added + alpha * (left @ right)``."""
    emit = importer.block_builder.emit
    added, left, right = (importer.env[a] for a in node.args[:3])
    product = emit(relax.op.matmul(left, right))
    alpha, beta = (node.kwargs.get(name, 1) for name in ("alpha", "beta"))
    if alpha != 1:
        product = emit(relax.op.multiply(product, relax.const(alpha, str(product.ty.dtype))))
    if beta == 0:  # as in torch, what is added may then hold anything
        return product
    if beta != 1:
        added = emit(relax.op.multiply(added, relax.const(beta, str(added.ty.dtype))))
    return emit(relax.op.add(product, added))


def _linear(node: Any, importer: BaseFXGraphImporter) -> relax.Var:
    emit = importer.block_builder.emit
    x, weight = (importer.env[a] for a in node.args[:2])
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    product = emit(relax.op.matmul(x, emit(relax.op.permute_dims(weight))))
    return product if bias is None else emit(relax.op.add(product, importer.env[bias]))


def _attention(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    query, keys, values, *_ = given = importer.retrieve_args(node)
    mask = given[3] if len(given) > 3 else importer.env.get(node.kwargs.get("attn_mask"))
    return _attended(importer, (query, keys, values), mask, node.kwargs.get("scale"))


def _masked_attention(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """Where heads have sinks or scores are capped: all else is torch's attention."""
    query, keys, values, sinks, mask, scale, softcap = importer.retrieve_args(node)
    heads = int(query.ty.shape.values[1])
    given = query, *(_shared(importer, one, heads) for one in (keys, values))
    return _attended(importer, given, mask, scale, sinks, softcap)


def _shared(importer: BaseFXGraphImporter, x: relax.Expr, heads: int) -> relax.Expr:
    """``[batch, kv_heads, tokens, dim]`` for so many heads."""
    batch, own, *others = x.ty.shape.values
    if int(own) == heads:
        return x
    emit, spread = importer.block_builder.emit, (batch, own, heads // int(own), *others)
    beside = emit(relax.op.broadcast_to(emit(relax.op.expand_dims(x, 2)), spread))
    return emit(relax.op.reshape(beside, (batch, heads, *others)))


def _attended(
    importer: BaseFXGraphImporter,
    given: tuple[relax.Expr, relax.Expr, relax.Expr],
    mask: relax.Expr | None,
    scale: Any,
    sinks: relax.Expr | None = None,
    softcap: float = 0.0,
) -> relax.Expr:
    """``softmax(scale * q k^T + mask) v`` in the forms that `fragments.stays` admits, 16 bits in
    float32 inside; a row without keys is 0."""
    emit = importer.block_builder.emit
    dtype = str(given[0].ty.dtype)
    wide = WIDE if dtype in NARROW else dtype

    def widened(x: relax.Expr) -> relax.Expr:
        return x if str(x.ty.dtype) == wide else emit(relax.op.astype(x, wide))

    query, keys, values = map(widened, given)
    depth = int(query.ty.shape.values[-1])
    # Half of it on either side, as in torch.
    factor = relax.const(math.sqrt(1 / math.sqrt(depth) if scale is None else scale), wide)
    rows = emit(relax.op.multiply(query, factor))
    turned = emit(relax.op.permute_dims(keys, [0, 1, 3, 2]))
    columns = emit(relax.op.multiply(turned, factor))
    scores = emit(relax.op.matmul(rows, columns))
    if softcap:
        bent = emit(relax.op.tanh(emit(relax.op.multiply(scores, relax.const(1 / softcap, wide)))))
        scores = emit(relax.op.multiply(bent, relax.const(softcap, wide)))
    if sinks is None:
        weights = _weights(scores, mask, importer)
    else:
        weights = _weights_beside(scores, mask, widened(sinks), importer)
    found = emit(relax.op.matmul(weights, values))
    return found if wide == dtype else emit(relax.op.astype(found, dtype))


def _weights_beside(
    scores: relax.Expr, mask: Any, sinks: relax.Expr, importer: BaseFXGraphImporter
) -> relax.Expr:
    """`_weights` with a column of sinks, one of a head, which is left out behind the softmax."""
    emit = importer.block_builder.emit
    batch, heads, queries, keys = scores.ty.shape.values
    column = emit(relax.op.reshape(sinks, (1, heads, 1, 1)))
    column = emit(relax.op.broadcast_to(column, (batch, heads, queries, 1)))
    both = emit(relax.op.concat([_masked(scores, mask, importer), column], -1))
    weights = emit(relax.op.nn.softmax(both, -1))
    return emit(relax.op.strided_slice(weights, [3], [0], [keys], assume_inbound=True))


def _masked(scores: relax.Expr, mask: Any, importer: BaseFXGraphImporter) -> relax.Expr:
    emit, dtype = importer.block_builder.emit, str(scores.ty.dtype)
    if mask is None:
        return scores
    if str(mask.ty.dtype) == "bool":
        excluded, zero = relax.const(-math.inf, dtype), relax.const(0.0, dtype)
        mask = emit(relax.op.where(mask, zero, excluded))
    elif str(mask.ty.dtype) != dtype:
        mask = emit(relax.op.astype(mask, dtype))
    return emit(relax.op.add(scores, mask))


def _weights(scores: relax.Expr, mask: Any, importer: BaseFXGraphImporter) -> relax.Expr:
    emit, dtype = importer.block_builder.emit, str(scores.ty.dtype)
    excluded, zero = relax.const(-math.inf, dtype), relax.const(0.0, dtype)
    scores = _masked(scores, mask, importer)
    seen = emit(relax.op.logical_not(emit(relax.op.equal(scores, excluded))))
    most = emit(relax.op.max(emit(relax.op.astype(seen, "int8")), [-1], True))
    has_none = emit(relax.op.logical_not(emit(relax.op.astype(most, "bool"))))
    return emit(relax.op.where(has_none, zero, emit(relax.op.nn.softmax(scores, -1))))


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


def _recurrence(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """States of recurrent cells, in float32 inside."""
    *given, lengths, kind, backwards = importer.retrieve_args(node)
    emit, dtype = importer.block_builder.emit, str(given[0].ty.dtype)
    wide = [one if str(one.ty.dtype) == WIDE else emit(relax.op.astype(one, WIDE)) for one in given]
    found = recurrence(emit, wide, lengths, kind, backwards)
    return found if dtype == WIDE else emit(relax.op.astype(found, dtype))
