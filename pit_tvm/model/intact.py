"""Operators by others that stay as they are: the importer takes them whole, and torch takes longer
to trace what one of them consists of than everything after it takes with the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_ATEN = torch.ops.aten
_Shape = list[str] | None  # extents as text, which ties no two of them
_Admits = Callable[[Any, Sequence[Any]], bool]


def stays(node: fx.Node) -> bool:
    """Whether an operator is in a form that the importer takes whole."""
    admits = _ADMITTED.get(node.target)
    return admits is not None and admits(node, [_shape(given) for given in node.args])


def _shape(given: Any) -> _Shape:
    """That of a tensor; None of anything else."""
    value = given.meta.get("val") if isinstance(given, fx.Node) else None
    return [str(extent) for extent in value.shape] if isinstance(value, Tensor) else None


def _always(*_: Any) -> bool:
    return True


def _has_axes(_: Any, shapes: Sequence[Any]) -> bool:
    return bool(shapes[0])


def _is_unknown(node: Any, _: Sequence[Any]) -> bool:
    """An extent that is no number."""
    return isinstance(node.meta["val"], torch.SymInt)


def _is_plain_product(_: Any, shapes: Sequence[Any]) -> bool:
    """Of matrices, as many on both sides, or of all rows by one matrix."""
    left, right = shapes[:2]
    return min(len(left), len(right)) > 1 and right[:-2] in ([], left[:-2])


def _is_affine(node: Any, shapes: Sequence[Any]) -> bool:
    """A norm with a scale and a shift."""
    return not node.kwargs and len(shapes) > 3 and None not in (shapes[2], shapes[3])


def _drops_nothing(node: Any, _: Sequence[Any]) -> bool:
    return len(node.args) == 3 and node.args[2] is False


def _is_plain_attention(node: Any, shapes: Sequence[Any]) -> bool:
    """With as many heads of keys and values, and a mask, if any, that says all about keys."""
    query, keys, values = shapes[:3]
    scale = node.kwargs.get("scale")
    return (
        len(query) == len(keys) == len(values) == 4
        and query[:2] == keys[:2] == values[:2]
        and query[3].isdigit()
        and query[3] == keys[3]
        and keys[2] == values[2]
        and not any(node.args[4:])  # dropout, and order
        and not node.kwargs.get("enable_gqa")
        and (scale is None or scale > 0)
    )


_ADMITTED: dict[Any, _Admits] = {
    _ATEN.linear.default: _is_plain_product,
    _ATEN.matmul.default: _is_plain_product,
    _ATEN.scaled_dot_product_attention.default: _is_plain_attention,
    _ATEN.layer_norm.default: _is_affine,
    _ATEN.dropout.default: _drops_nothing,
    _ATEN.transpose.int: _has_axes,
    _ATEN.softmax.int: _has_axes,
    _ATEN.sym_size.int: _is_unknown,
} | dict.fromkeys(
    (
        *(_ATEN.reshape.default, _ATEN.contiguous.default, _ATEN.arange.default),
        *(_ATEN.to.dtype, _ATEN.to.dtype_layout, _ATEN.to.device, _ATEN.type_as.default),
        *(_ATEN.__and__.Tensor, _ATEN.__or__.Tensor, _ATEN.floor_divide.default),
    ),
    _always,
)
