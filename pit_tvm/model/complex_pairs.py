"""Complex numbers as pairs of real ones, in a last dimension of 2: rotations are made of such."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, fx
from tvm import relax
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter

from ..errors import UnsupportedModel, mismatch
from .faults import LEAVE_OUT, place

_Converter = Callable[[fx.Node], Any]
_CHECK = "_assert_tensor_metadata.default"


def complex_pairs(
    known: Mapping[str, _Converter], importer: BaseFXGraphImporter
) -> dict[str, _Converter]:
    """Conversions by name of operators that take or give complex numbers, those that are ``known``
    where they do neither."""
    own = {name: partial(convert, importer=importer) for name, convert in _OPERATORS.items()}
    return {
        name: partial(_either, known.get(name), own.get(name))
        for name in (*known, *_OPERATORS)
        if name != _CHECK
    }


def is_complex(value: Any) -> bool:
    """Whether a node of a program, or another argument, is of complex numbers."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else value
    return isinstance(found, complex) or isinstance(found, Tensor) and found.is_complex()


def _either(known: _Converter | None, own: _Converter | None, node: fx.Node) -> Any:
    if not any(map(is_complex, (node, *node.args))):
        assert known is not None  # names that are not known are those of complex numbers
        return known(node)
    if own is None or any(isinstance(given, complex) for given in node.args):
        expected = "complex numbers in products and rotations only"
        raise UnsupportedModel(mismatch("model", expected, place(node), LEAVE_OUT))
    return own(node)


def _polar(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    emit, (size, angle) = importer.block_builder.emit, importer.retrieve_args(node)
    along, across = (
        emit(relax.op.multiply(size, emit(wave(angle)))) for wave in (relax.op.cos, relax.op.sin)
    )
    return _pair(along, across, importer)


def _same(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    return importer.env[node.args[0]]


def _moved(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """A copy, or a slice of all."""
    source: Any = node.args[0]
    before, after = (one.meta["val"] for one in (source, node))
    if before.dtype != after.dtype or str(before.shape) != str(after.shape):
        expected = "complex numbers that keep their type, and all of them"
        raise UnsupportedModel(mismatch("model", expected, place(node), LEAVE_OUT))
    return importer.env[source]


def _product(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    emit = importer.block_builder.emit

    def times(left: relax.Expr, right: relax.Expr) -> relax.Expr:
        return emit(relax.op.multiply(left, right))

    double = node.meta["val"].dtype.itemsize > 8
    dtype = "float64" if double else "float32"
    parts = [_parts(given, dtype, importer) for given in node.args[:2]]
    (a, b), (c, d) = parts
    if b is None or d is None:
        (a, b), factor = (parts[0], c) if d is None else (parts[1], a)
        return _pair(times(a, factor), times(b, factor), importer)
    real = emit(relax.op.subtract(times(a, c), times(b, d)))
    return _pair(real, emit(relax.op.add(times(a, d), times(b, c))), importer)


def _parts(
    given: Any, dtype: str, importer: BaseFXGraphImporter
) -> tuple[relax.Expr, relax.Expr | None]:
    """The real and the imaginary part in a type; of real numbers no other."""
    if not isinstance(given, fx.Node):
        return relax.const(given, dtype), None
    emit, whole = importer.block_builder.emit, importer.env[given]
    if str(whole.ty.dtype) != dtype:
        whole = emit(relax.op.astype(whole, dtype))
    if not is_complex(given):
        return whole, None
    places = (relax.const(number, "int64") for number in (0, 1))
    one, other = (emit(relax.op.take(whole, place, -1, "fast")) for place in places)
    return one, other


def _pair(real: relax.Expr, other: relax.Expr, importer: BaseFXGraphImporter) -> relax.Expr:
    return importer.block_builder.emit(relax.op.stack([real, other], -1))


def _longer(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    x, dim = importer.retrieve_args(node)[:2]
    dim = dim if dim >= 0 else dim - 1
    return importer.block_builder.emit(relax.op.expand_dims(x, dim))


_OPERATORS: dict[str, Callable[..., relax.Expr]] = {
    "polar.default": _polar,
    "view_as_complex.default": _same,
    "view_as_real.default": _same,
    **dict.fromkeys(("to.device", "to.dtype", "to.dtype_layout", "slice.Tensor"), _moved),
    "mul.Tensor": _product,
    "mul.Scalar": _product,
    "unsqueeze.default": _longer,
}
