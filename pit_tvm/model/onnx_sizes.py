"""Arithmetic on sizes in an ONNX graph: small arrays of integers and symbolic extents.

ONNX computes shapes by nodes on tensors. Their values are followed here symbolically, so that what
takes them (a reshape, a range) has the batch and the length of the inputs as extents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, sym, tirx
from tvm.ir import prim

# Values of a small tensor: numpy's array of Python integers, booleans and symbolic extents.
Sizes = np.ndarray
_MOST = 64  # elements that are followed; shapes have fewer
_FAR = 2**31  # beyond any extent: "to the end", as ONNX writes it


def as_sizes(values: Any) -> Sizes | None:
    """A tensor of int32, int64 or booleans of at most 64 elements; None for others."""
    array = np.asarray(values)
    if array.size > _MOST or array.dtype.name not in ("int32", "int64", "bool"):
        return None
    return array.astype(object)


def extents_as_sizes(extents: Sequence[Any]) -> Sizes:
    """A shape as a vector; constant extents become integers."""
    found = np.empty(len(extents), object)
    found[:] = [_plain(extent) for extent in extents]
    return found


def fold(op: str, inputs: Sequence[Sizes], attrs: Mapping[str, Any]) -> Sizes | None:
    """The result of an ONNX operator on known values; None if it is another operator, or depends
    on how large a symbolic extent is.

    ``inputs`` end with the last one that is given.
    """
    rule = _RULES.get(op)
    return None if rule is None else rule(list(inputs), attrs)


def resolve_shape(wanted: Sizes, data: Sequence[Any], zero_copies: bool) -> list[Any]:
    """The extents that a reshape of ``data`` is asked for: -1 is what is left, and 0 the data's own
    if ``zero_copies``. ValueError if they never hold what ``data`` does."""
    extents = [data[i] if _is(e, 0) and zero_copies else e for i, e in enumerate(_ints(wanted))]
    holes = [i for i, e in enumerate(extents) if _is(e, -1)]
    if len(holes) > 1:
        raise ValueError(f"{len(holes)} extents of -1, where one is possible")
    for hole in holes:
        others = extents[:hole] + extents[hole + 1 :]
        left = tirx.floordiv(_product(data), _product(others))
        extents[hole] = sym.Analyzer().simplify(left)
    more = _product(extents) - _product(data)
    if not holes and any(is_natural(one - 1, 1) for one in (more, -more)):
        raise ValueError(f"extents {extents} of another number of elements than {list(data)}")
    return extents


def resolve_expand(wanted: Sizes, data: Sequence[Any]) -> list[Any]:
    """The extents that ``data`` has after it is broadcast to the shape ``wanted`` and back."""
    extents, own = _ints(wanted), [_plain(extent) for extent in data]
    rank = max(len(extents), len(own))
    extents = [1] * (rank - len(extents)) + extents
    own = [1] * (rank - len(own)) + own
    pairs = zip(extents, own, strict=True)
    return [a if _is(b, 1) and not _is(a, -1) else b for a, b in pairs]


def bounds_of_slice(extent: Any, start: Any, end: Any, step: Any) -> tuple[Any, Any] | None:
    """First and end of a slice by 1 of a dimension, counted from its start; None for others."""
    if not _is(step, 1):
        return None
    first, last = _from_start(start, extent), _from_start(end, extent)
    if isinstance(start, int) and isinstance(end, int):
        last = _at_least(first, last)
    return first, last


def is_natural(size: Any, least: int = 0) -> bool:
    """Whether a size is 0 or more whatever its extents are, from ``least`` on."""
    if isinstance(size, int):
        return size >= 0
    analyzer = sym.Analyzer()

    def counts(var: ir.Var) -> None:
        analyzer.bind(var, ir.Range.from_min_extent(least, _FAR))

    tvm_ffi.structural_walk(size, (ir.Var, counts))
    return bool(analyzer.can_prove(size >= 0))


# --------------------------------------------------------------------------------------------


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, prim.IntImm) else value


def _ints(sizes: Sizes) -> list[Any]:
    return [int(e) if isinstance(e, bool | int | np.integer) else e for e in sizes.reshape(-1)]


def _product(extents: Sequence[Any]) -> Any:
    return math.prod(extents, start=tirx.IntImm("int64", 1))


def _from_start(at: Any, extent: Any) -> Any:
    if not isinstance(at, int):
        return at
    if at >= _FAR:
        return extent
    if at <= -_FAR:
        return 0
    size = _plain(extent)
    if isinstance(size, int):
        return min(max(at + size if at < 0 else at, 0), size)
    return _at_least(0, extent + at) if at < 0 else at


def _at_least(least: Any, size: Any) -> Any:
    """The larger one; extents are 1 or more."""
    if isinstance(least, int) and isinstance(size, int):
        return max(least, size)
    return size if is_natural(size - least, 1) else tirx.max(least, size)


def _axes(inputs: list[Sizes], attrs: Mapping[str, Any]) -> list[int] | None:
    given = inputs[1] if len(inputs) > 1 else attrs.get("axes")
    return None if given is None else [int(axis) for axis in np.asarray(given).reshape(-1)]


def _same(inputs: list[Sizes], _: Mapping[str, Any]) -> Sizes:
    return inputs[0]


def _gather(inputs: list[Sizes], attrs: Mapping[str, Any]) -> Sizes | None:
    data, ids = inputs
    if any(not isinstance(i, int) for i in _ints(ids)):
        return None
    return np.asarray(np.take(data, ids.astype(np.int64), int(attrs.get("axis", 0))), object)


def _concat(inputs: list[Sizes], attrs: Mapping[str, Any]) -> Sizes:
    return np.concatenate(inputs, int(attrs["axis"]))


def _squeeze(inputs: list[Sizes], attrs: Mapping[str, Any]) -> Sizes:
    axes = _axes(inputs, attrs)
    return np.squeeze(inputs[0], None if axes is None else tuple(axes))


def _unsqueeze(inputs: list[Sizes], attrs: Mapping[str, Any]) -> Sizes:
    return np.expand_dims(inputs[0], tuple(_axes(inputs, attrs) or ()))


def _slice(inputs: list[Sizes], _: Mapping[str, Any]) -> Sizes | None:
    data, *given = inputs
    numbers = [_ints(one) for one in given]
    if data.ndim != 1 or any(not isinstance(n, int) for one in numbers for n in one):
        return None
    begin, end = numbers[0][0], numbers[1][0]
    step = numbers[3][0] if len(numbers) > 3 else 1
    return data[slice(begin, end, step)] if step > 0 else None


def _reshape(inputs: list[Sizes], _: Mapping[str, Any]) -> Sizes | None:
    shape = _ints(inputs[1])
    if any(not isinstance(e, int) or e == 0 for e in shape):
        return None
    return inputs[0].reshape(shape)


def _cast(inputs: list[Sizes], attrs: Mapping[str, Any]) -> Sizes | None:
    return inputs[0] if int(attrs["to"]) in (6, 7) else None  # ONNX's numbers of int32 and int64


def _where(inputs: list[Sizes], _: Mapping[str, Any]) -> Sizes | None:
    if any(not isinstance(c, bool | int) for c in _ints(inputs[0])):
        return None
    return np.asarray(np.where(inputs[0].astype(bool), inputs[1], inputs[2]), object)


def _constant_of_shape(inputs: list[Sizes], attrs: Mapping[str, Any]) -> Sizes | None:
    shape = _ints(inputs[0])
    if any(not isinstance(e, int) for e in shape) or np.prod(shape) > _MOST:
        return None
    fill = attrs["fill"].item()
    return np.full(shape, fill, object) if isinstance(fill, int) else None


def _by_element(rule: Callable[[Any, Any], Any]) -> Callable[..., Sizes | None]:
    def apply(inputs: list[Sizes], _: Mapping[str, Any]) -> Sizes | None:
        left, right = np.broadcast_arrays(*inputs)
        found = [rule(a, b) for a, b in zip(_ints(left), _ints(right), strict=True)]
        if any(one is None for one in found):
            return None
        result = np.empty(len(found), object)
        result[:] = [_plain(one) for one in found]
        return result.reshape(left.shape)

    return apply


def _equal(a: Any, b: Any) -> bool | None:
    """Whether two sizes are equal, extents being 1 or more; None if that depends."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if (isinstance(a, int) and a < 0) or (isinstance(b, int) and b < 0):
        return False
    return True if sym.Analyzer().can_prove_equal(a, b) else None


def _divided(a: Any, b: Any) -> Any:
    """Rounded down, where ONNX rounds to 0: of what cannot be negative."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if a >= 0 and b > 0 else None
    if not _is_positive(b) or not is_natural(a):
        return None
    return sym.Analyzer().simplify(tirx.floordiv(a, b))


def _is_positive(size: Any) -> bool:
    return size > 0 if isinstance(size, int) else isinstance(size, tirx.Var)


def _simplified(rule: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(a: Any, b: Any) -> Any:
        found = rule(a, b)
        return found if isinstance(found, int) else sym.Analyzer().simplify(found)

    return apply


_RULES: dict[str, Callable[..., Sizes | None]] = {
    "Identity": _same,
    "Gather": _gather,
    "Concat": _concat,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Slice": _slice,
    "Reshape": _reshape,
    "Cast": _cast,
    "Where": _where,
    "ConstantOfShape": _constant_of_shape,
    "Add": _by_element(_simplified(lambda a, b: a + b)),
    "Sub": _by_element(_simplified(lambda a, b: a - b)),
    "Mul": _by_element(_simplified(lambda a, b: a * b)),
    "Div": _by_element(_divided),
    "Equal": _by_element(_equal),
}
