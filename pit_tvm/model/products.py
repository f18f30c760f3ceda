"""Products as torch has them: the result is of the operands' type.

TVM's importer makes every product float32, which 16-bit models then cannot be added to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from tvm import relax
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter

#: What one of torch's operators becomes.
Convert = Callable[[fx.Node, BaseFXGraphImporter], relax.Expr]


def product_converters() -> dict[str, Convert]:
    """What `from_exported_program` takes as ``custom_convert_map``."""
    plain = ("mm.default", "bmm.default", "matmul.default")
    sums = ("addmm.default", "baddbmm.default")
    return dict.fromkeys(plain, _product) | dict.fromkeys(sums, _sum) | {"linear.default": _linear}


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
