"""Arrays of one call against the operator's signature: sizes of symbolic extents, checked forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, sym

from ..errors import ShapeError, mismatch
from .arrays import as_tensor
from .program import Param


@dataclass(frozen=True)
class PackedOperand:
    """A weight packed once for the kernels of one operator, by ``Operator.pack``.

    ``array`` is the original, which the dense candidate reads: do not change it in place.
    """

    name: str
    array: Any
    packed: Any
    owner: object


@dataclass(frozen=True)
class Bound:
    """The checked arrays of one call. ``tensors`` are what compiled functions take, by name;
    ``arrays`` what the caller passed; ``sizes`` the symbolic extents by name."""

    arrays: dict[str, Any]
    tensors: dict[str, Any]
    packed: dict[str, Any]
    sizes: dict[str, int]


def bind(inputs: Sequence[Param], arrays: Sequence[Any], owner: object) -> Bound:
    """Check ``arrays`` against ``inputs``, in order.

    Raises
    ------
    ShapeError, DTypeError
        Another number of arrays, a wrong shape, dtype, device or layout; names the argument.
    """
    if len(arrays) != len(inputs):
        names = ", ".join(p.name for p in inputs)
        raise ShapeError(mismatch("arguments", f"{len(inputs)} arrays ({names})", len(arrays)))
    bound = Bound({}, {}, {}, {})
    for param, given in zip(inputs, arrays, strict=True):
        array = given
        if isinstance(given, PackedOperand):
            if given.owner is not owner or given.name != param.name:
                what = f"{param.name}: packed operand"
                raise ShapeError(mismatch(what, f"{param.name} packed by this operator", given.name))
            array, bound.packed[param.name] = given.array, given.packed
        expected = tuple(e if isinstance(e, int) else _known(e, bound.sizes) for e in param.shape)
        tensor = as_tensor(param.name, array, dtype=param.dtype, shape=expected)
        if None in expected:
            _learn(param, tensor.shape, bound.sizes)
        bound.arrays[param.name], bound.tensors[param.name] = array, tensor
    return bound


def resolve(shape: Sequence[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """``shape`` with its symbolic extents replaced; ShapeError if one is unknown."""
    out = []
    for extent in shape:
        value = extent if isinstance(extent, int) else _known(extent, sizes)
        if value is None:
            advice = "pass the arrays, or sizes={...}"
            raise ShapeError(mismatch(f"size {extent}", "a known extent", sorted(sizes), advice))
        out.append(value)
    return tuple(out)


def _known(extent: Any, sizes: Mapping[str, int]) -> int | None:
    if isinstance(extent, ir.Var):
        return sizes.get(str(extent.name))
    unknown: list[str] = []

    def replace(var: ir.Var) -> Any:
        name = str(var.name)
        if name not in sizes:
            unknown.append(name)
            return var
        return ir.prim.IntImm(str(var.dtype), sizes[name])

    value = tvm_ffi.structural_map(extent, [(ir.Var, replace)])
    return None if unknown else int(sym.Analyzer().simplify(value))


def _learn(param: Param, shape: Sequence[int], sizes: dict[str, int]) -> None:
    for extent, actual in zip(param.shape, shape, strict=True):
        if isinstance(extent, ir.Var):
            known = sizes.setdefault(str(extent.name), int(actual))
            if known != actual:
                what = f"{param.name}: extent {extent.name}"
                raise ShapeError(mismatch(what, known, int(actual)))
