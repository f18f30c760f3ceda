"""Checks of the arguments that all operators share: extents, flags and element types."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TypeAlias

from tvm import te
from tvm.ir import Expr, Var

from ..errors import DTypeError, ShapeError, mismatch
from ..structs import MOST_EXTENT

Extent: TypeAlias = int | Var | None

_FLOATS = ("float32", "float16", "bfloat16")
# Storage type -> (accumulator, output types).
_OUTPUTS = {dtype: ("float32", _FLOATS) for dtype in _FLOATS} | {
    "int8": ("int32", ("int32", "float32"))
}


@dataclass(frozen=True)
class DTypes:
    """Element types of one operator.

    ``storage``: operands. ``accumulator``: the reduction. ``bias``: the bias operand.
    ``epilogue``: what bias and activation are computed in. ``output``: the result.
    """

    storage: str
    accumulator: str
    bias: str
    epilogue: str
    output: str


def resolve_dtypes(dtype: str, out_dtype: str | None = None) -> DTypes:
    """Element types for operands of ``dtype`` and a result of ``out_dtype`` (None: the default).

    float32, float16 and bfloat16 accumulate in float32 and give ``dtype`` by default; int8
    accumulates in int32 and gives int32 by default, float32 if asked. An int8 operator has an
    int32 bias.

    Raises
    ------
    DTypeError
        A type is not in this table.
    """
    if not isinstance(dtype, str) or dtype not in _OUTPUTS:
        raise DTypeError(mismatch("dtype", f"one of {', '.join(_OUTPUTS)}", repr(dtype)))
    accumulator, outputs = _OUTPUTS[dtype]
    default = dtype if dtype in outputs else accumulator
    output = default if out_dtype is None else out_dtype
    if output not in outputs:
        expected = f"one of {', '.join(outputs)} for operands of {dtype}"
        raise DTypeError(mismatch("out_dtype", expected, repr(out_dtype)))
    whole = dtype == "int8"
    epilogue = "int32" if output == "int32" else "float32"
    return DTypes(dtype, accumulator, "int32" if whole else dtype, epilogue, output)


def resolve_extent(argument: str, value: Extent, lowest: int = 0) -> int | Var:
    """``value`` itself if it is a length or a symbolic variable; a new int32 variable for None.

    Operators that share a variable share that extent. Extents that are summed over are at least
    1, also at run time: TVM sets a sum to zero in the first step of its loop.

    Raises
    ------
    ShapeError
        ``value`` is below ``lowest``, or neither an integer nor a variable.
    """
    if value is None:
        return te.var(argument)
    if isinstance(value, Var):
        return value
    return at_least(argument, value, lowest)


def at_least(argument: str, value: object, lowest: int) -> int:
    """``value`` as an int; ShapeError unless it is an int32 of at least ``lowest``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < lowest:
        expected = f"an integer of at least {lowest}"
        raise ShapeError(mismatch(argument, expected, repr(value)))
    if int(value) > MOST_EXTENT:
        raise ShapeError(mismatch(argument, f"an integer of at most {MOST_EXTENT}", value))
    return int(value)


def pair(argument: str, value: int | tuple[int, int], lowest: int) -> tuple[int, int]:
    """(vertical, horizontal) of one number or of two; ShapeError if it is anything else."""
    values = value if isinstance(value, (tuple, list)) else (value, value)
    if len(values) != 2:
        raise ShapeError(mismatch(argument, "an integer or two of them", repr(value)))
    return at_least(argument, values[0], lowest), at_least(argument, values[1], lowest)


def element_type(value: Expr) -> str:
    """Element type of an expression, or of one element of a tensor."""
    return str(value.expr_ty().dtype)
