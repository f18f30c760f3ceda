"""Operators whose operands torch first makes of the result's type.

TVM's importer gives a number the type of the tensor beside it, and divides whole numbers as such;
it counts in the type that is given, where torch takes 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tvm import relax
from tvm.ir import prim
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter

from ..analysis.expr import is_one
from ..errors import UnsupportedModel, mismatch
from ..runtime.cuda_arrays import dtype_name
from .products import Convert
from .rebuild import is_at_most_one, shape_of
from .wide import NARROW, WIDE

Operator = Callable[[relax.Expr, relax.Expr], relax.Expr]

_FORMS = ("Tensor", "Scalar")
_ARITHMETIC: dict[str, Operator] = {
    "add": relax.op.add,
    "add_": relax.op.add,
    "sub": relax.op.subtract,
    "mul": relax.op.multiply,
    "mul_": relax.op.multiply,
    "remainder": relax.op.floor_mod,
    "fmod": relax.op.mod,
}
_COMPARISONS: dict[str, Operator] = {
    "eq": relax.op.equal,
    "ne": relax.op.not_equal,
    "ge": relax.op.greater_equal,
    "gt": relax.op.greater,
    "le": relax.op.less_equal,
    "lt": relax.op.less,
}
# On truth values.
_LOGICAL: dict[Operator, Operator] = {
    relax.op.add: relax.op.logical_or,
    relax.op.multiply: relax.op.logical_and,
}


def promoting_converters() -> dict[str, Convert]:
    """By the name of torch's operator, in the form that `from_exported_program` takes."""
    named = {
        f"{name}.{form}": _arithmetic(operator)
        for name, operator in _ARITHMETIC.items()
        for form in _FORMS
    }
    compared = {
        f"{name}.{form}": _comparison(operator)
        for name, operator in _COMPARISONS.items()
        for form in _FORMS
    }
    reverse = dict.fromkeys((f"rsub.{form}" for form in _FORMS), _reverse_subtract)
    power = dict.fromkeys(("pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor"), _power)
    others = {
        "div.Tensor": _arithmetic(relax.op.divide),
        "div.Scalar": _arithmetic(relax.op.divide),
        "remainder.Scalar_Tensor": _arithmetic(relax.op.floor_mod),
        "div.Tensor_mode": _rounded_division,
        "div.Scalar_mode": _rounded_division,
        "floor_divide.default": _rounded_division,
        "maximum.default": _arithmetic(relax.op.maximum),
        "minimum.default": _arithmetic(relax.op.minimum),
        "cat.default": _joined,
        "where.self": _chosen,
        "reciprocal.default": _reciprocal,
        "cumsum.default": _running(relax.op.cumsum),
        "cumprod.default": _running(relax.op.cumprod),
    }
    casts = dict.fromkeys(
        ("to.dtype", "to.dtype_layout", "to.device", "type_as.default"), _as_known
    )
    return named | compared | reverse | power | others | casts | {"softmax.int": _softmax}


def _arithmetic(operator: Operator) -> Convert:
    def convert(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
        dtype = _result(node)
        left, right = _operands(node, importer, dtype)
        chosen = _LOGICAL.get(operator, operator) if dtype == "bool" else operator
        return importer.block_builder.emit(chosen(left, right))

    return convert


def _comparison(operator: Operator) -> Convert:
    def convert(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
        dtype = str(torch.result_type(*map(_known, node.args[:2]))).removeprefix("torch.")
        # Truth values cannot be compared where code is generated.
        left, right = _operands(node, importer, "int8" if dtype == "bool" else dtype)
        return importer.block_builder.emit(operator(left, right))

    return convert


def _reciprocal(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    dtype = _result(node)
    x = _cast(importer.env[node.args[0]], importer, dtype)
    return importer.block_builder.emit(relax.op.divide(relax.const(1, dtype), x))


def _joined(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    parts, *axis = importer.retrieve_args(node)
    parts = [_cast(part, importer, _result(node)) for part in parts]
    return importer.block_builder.emit(relax.op.concat(parts, *axis or [node.kwargs.get("dim", 0)]))


def _chosen(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    condition, *parts = importer.retrieve_args(node)
    left, right = (_cast(part, importer, _result(node)) for part in parts)
    return importer.block_builder.emit(relax.op.where(condition, left, right))


def _running(operator: Callable[[relax.Expr, int], relax.Expr]) -> Convert:
    def convert(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
        x, axis = importer.retrieve_args(node)[:2]
        return importer.block_builder.emit(operator(_cast(x, importer, _result(node)), axis))

    return convert


def _reverse_subtract(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    left, right = _operands(node, importer, _result(node))
    return importer.block_builder.emit(relax.op.subtract(right, left))


def _as_known(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """A tensor in the type of the result, all that there is to change."""
    return _cast(importer.env[node.args[0]], importer, _result(node))


def _softmax(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    return importer.block_builder.emit(relax.op.nn.softmax(_as_known(node, importer), node.args[1]))


def _rounded_division(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    emit, dtype = importer.block_builder.emit, _result(node)
    mode = node.kwargs.get("rounding_mode", "floor")
    # A number beside 16 bits is not rounded to them.
    by_number = dtype in NARROW and not all(isinstance(a, fx.Node) for a in node.args[:2])
    left, right = _operands(node, importer, WIDE if by_number else dtype)
    if mode == "floor":
        found = emit(relax.op.floor_divide(left, right))
    else:
        found = emit(relax.op.divide(left, right))
        # Whole numbers are divided towards zero.
        found = emit(relax.op.trunc(found)) if mode and dtype.endswith(_REAL) else found
    return _cast(found, importer, dtype)


def _power(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    emit, dtype = importer.block_builder.emit, _result(node)
    exponent = node.args[1]
    if dtype.endswith(_REAL):
        return emit(relax.op.power(*_operands(node, importer, dtype)))
    # Whole numbers, which TVM has no power of.
    if not isinstance(exponent, int):
        expected = "a constant exponent where the result is whole"
        advice = "raise real numbers to a power"
        raise UnsupportedModel(mismatch("pow", expected, str(exponent), advice))
    base = _cast(importer.env[node.args[0]], importer, dtype)
    result = base if exponent else emit(relax.op.ones_like(base))
    for _ in range(exponent - 1):
        result = emit(relax.op.multiply(result, base))
    return result


_REAL = ("float16", "float32", "float64")  # and bfloat16


def _result(node: fx.Node) -> str:
    return dtype_name(node.meta["val"])


def _known(argument: Any) -> Any:
    """What stands for an argument where only its type matters."""
    value = argument.meta["val"] if isinstance(argument, fx.Node) else argument
    return 1 if isinstance(value, torch.SymInt) else value


def _operands(
    node: fx.Node, importer: BaseFXGraphImporter, dtype: str
) -> tuple[relax.Expr, relax.Expr]:
    """Both operands of one type; ``alpha`` is a factor of the second (of rsub: of the first)."""
    left, right = (_cast(a, importer, dtype) for a in importer.retrieve_args(node)[:2])
    left, right = _spread(left, right, importer), _spread(right, left, importer)
    alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    alpha = importer.env.get(alpha, alpha)
    if isinstance(alpha, int | float) and alpha == 1:
        return left, right
    scaled = _cast(alpha, importer, dtype)
    if str(node.target).startswith("aten.rsub"):
        return importer.block_builder.emit(relax.op.multiply(left, scaled)), right
    return left, importer.block_builder.emit(relax.op.multiply(right, scaled))


def _spread(x: relax.Expr, other: relax.Expr, importer: BaseFXGraphImporter) -> relax.Expr:
    """``x`` as large as ``other`` where an extent is at most 1, as that of the first tokens of
    sequences that may be empty, which TVM does not compare with any."""
    mine, theirs = shape_of(x) or (), shape_of(other) or ()
    last = len(theirs) - len(mine)
    if last < 0:
        return x
    pairs = list(zip(mine, theirs[last:], strict=True))
    few = [not isinstance(o, prim.IntImm) and not is_one(e) and is_at_most_one(e) for e, o in pairs]
    if not any(few):
        return x
    extents = [o if spread else e for (e, o), spread in zip(pairs, few, strict=True)]
    return importer.block_builder.emit(relax.op.broadcast_to(x, extents))


def _cast(operand: Any, importer: BaseFXGraphImporter, dtype: str) -> relax.Expr:
    """A tensor or a number in a type."""
    if not isinstance(operand, relax.Expr):
        return relax.const(operand, dtype)
    if not isinstance(operand.ty, relax.TensorType):
        return importer._prim_value_to_scalar_tensor(operand, dtype)
    if str(operand.ty.dtype) == dtype:
        return operand
    return importer.block_builder.emit(relax.op.astype(operand, dtype))
