"""Chains of operators that treat every element by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypeAlias

from tvm import te, tirx
from tvm.ir import Expr, Var, prim

from ..errors import DTypeError, ShapeError, mismatch
from .arguments import DTypes, Extent, element_type, resolve_dtypes, resolve_extent
from .epilogue import ACTIVATIONS, check_activation

# "relu" works on the chain's value alone, "add" takes one more operand, ("mul", 0.5) a number.
Stage: TypeAlias = str | tuple[str, float]


def _product(x: Expr, y: Expr) -> Expr:
    """TVM takes 0 for a product with 0, though that of NaN or infinity is NaN."""
    if isinstance(y, prim.FloatImm) and not y.value:
        return x + x * tirx.const(-1, y.ty)
    return x * y


def _larger(x: Expr, y: Expr) -> Expr:
    """The larger one; NaN if either is, as numpy and torch have it."""
    return _or_nan(x, tirx.max(x, y), tirx.Select(x > y, x, y))


def _smaller(x: Expr, y: Expr) -> Expr:
    """The smaller one; NaN if either is."""
    return _or_nan(x, tirx.min(x, y), tirx.Select(x < y, x, y))


def _or_nan(x: Expr, whole: Expr, real: Expr) -> Expr:
    """``whole`` of integers; of real numbers x where it is NaN, else ``real``."""
    if element_type(x) == "int32":
        return whole
    return tirx.Select(tirx.isnan(x), x, real)


BINARY: dict[str, Callable[[Expr, Expr], Expr]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": _product,
    "max": _larger,
    "min": _smaller,
}
_AXES = ("p", "q")
_MOST_FLOAT = (2 - 2**-23) * 2.0**127  # the largest of float32


@dataclass(frozen=True)
class _Step:
    """One checked stage: what it does to the value, and what its second operand is."""

    apply: Callable[..., Expr]
    operand: te.Tensor | float | None


def elementwise(
    shape: Sequence[Extent],
    stages: Sequence[Stage],
    *,
    dtype: str = "float32",
    out_dtype: str | None = None,
) -> list[te.Tensor]:
    """``out = stage(.. stage(data, rhs) ..)`` element by element; axes p, or p and q.

    ``elementwise((None, 64), ["add", "relu", ("mul", 0.5)])`` is ``0.5 * relu(data + rhs)`` for
    ``data`` and ``rhs`` of shape [p, 64]. Every stage is a stage of the tensor expression.

    Parameters
    ----------
    shape
        One or two extents; None is symbolic.
    stages
        At least one of "add", "sub", "mul", "max", "min", alone or with a number, "relu",
        "relu2", "gelu", "gelu_tanh", "silu". Alone the first five take one more operand of the
        same shape, in order ``rhs``, ``rhs2``, ``rhs3`` ...
    dtype, out_dtype
        Types of the operands and of the result (`arguments.resolve_dtypes` has the table). 16-bit
        types are computed in float32, int8 in int32.

    Returns
    -------
    [data, rhs..., out]

    Raises
    ------
    ShapeError, DTypeError
        A shape, type or stage is not one of those above.
    """
    dtypes = resolve_dtypes(dtype, out_dtype)
    if not isinstance(shape, Sequence) or not 1 <= len(shape) <= len(_AXES):
        raise ShapeError(mismatch("shape", "one or two extents", repr(shape)))
    if not isinstance(stages, Sequence) or not stages:
        raise ShapeError(mismatch("stages", "at least one, in a list", repr(stages)))
    axes = list(_AXES[: len(shape)])
    extents = tuple(resolve_extent(name, value) for name, value in zip(axes, shape, strict=True))
    data = te.placeholder(extents, dtype, "data")
    operands: list[te.Tensor] = []
    value = data
    for position, stage in enumerate(stages):
        step = _read_stage(stage, operands, extents, dtypes)
        last = position == len(stages) - 1
        value = te.compute(
            extents,
            _body(value, step, dtypes, dtypes.output if last else dtypes.epilogue),
            name="out" if last else f"stage{position}",
            varargs_names=axes,
        )
    return [data, *operands, value]


def _read_stage(
    stage: Stage, operands: list[te.Tensor], extents: tuple[int | Var, ...], dtypes: DTypes
) -> _Step:
    """Check one stage; a binary one without a number appends its operand to ``operands``."""
    if isinstance(stage, str):
        if stage in BINARY:
            name = f"rhs{len(operands) + 1}" if operands else "rhs"
            operands.append(te.placeholder(extents, dtypes.storage, name))
            return _Step(BINARY[stage], operands[-1])
        if stage in ACTIVATIONS:
            check_activation(stage, dtypes)
            return _Step(ACTIVATIONS[stage], None)
    elif isinstance(stage, tuple) and len(stage) == 2 and isinstance(stage[0], str):
        number = _number(stage[1], dtypes.epilogue)
        if stage[0] in BINARY and number is not None:
            return _Step(BINARY[stage[0]], number)
    expected = f"one of {', '.join([*BINARY, *ACTIVATIONS])}, or (binary stage, number)"
    kind = "an integer chain takes integers" if dtypes.epilogue == "int32" else "it takes numbers"
    advice = f"{kind} of {dtypes.epilogue}"
    raise DTypeError(mismatch("stages", expected, repr(stage), advice))


def _number(value: object, dtype: str) -> int | float | None:
    """``value`` as a constant of the type that a chain is computed in; None if it cannot be one."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = int(value) if isinstance(value, Integral) else float(value)
        real = float(number)
    except OverflowError:
        return None
    if dtype == "int32":
        return number if isinstance(number, int) and -(2**31) <= number < 2**31 else None
    return number if abs(real) <= _MOST_FLOAT or not math.isfinite(real) else None


def _body(value: te.Tensor, step: _Step, dtypes: DTypes, dtype: str) -> Callable[..., Expr]:
    """Element of one stage over ``value``, computed in the epilogue's type, cast to ``dtype``."""

    def element(*index: Var) -> Expr:
        arguments = [value(*index).astype(dtypes.epilogue)]
        if isinstance(step.operand, te.Tensor):
            arguments.append(step.operand(*index).astype(dtypes.epilogue))
        elif step.operand is not None:
            arguments.append(tirx.const(step.operand, dtypes.epilogue))
        return step.apply(*arguments).astype(dtype)

    return element
