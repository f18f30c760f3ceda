"""What happens to a reduction's result before it is stored: bias, activation, conversion.

The activations are arithmetic that LLVM vectorises on every instruction set.
NaN and infinity come out as the exact functions give them, -inf as 0 (relu) or a negative number
under 2e-36. So does relu of Hopper's own kernels and of torch, which computes dense products on
GPUs; their gelu, gelu_tanh and silu of -inf, and gelu of infinity in Hopper's, are NaN.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr

from ..errors import DTypeError, mismatch
from .arguments import DTypes, element_type
from .elementary import LARGEST_TAIL, LOWEST_EXP, exp_down, f32, normal_tail


def _gate(x: Expr, z: Expr) -> Expr:
    """x * sigmoid(z) for x and z of one sign, relative error 5e-7 in exact z."""
    decay = exp_down(f32(0.0) - tirx.min(tirx.abs(z), f32(LOWEST_EXP)))
    # The bound keeps -inf * 0 away; below it the result is 0 in float32 anyway.
    negative = tirx.max(x, f32(-LOWEST_EXP)) * decay
    return tirx.Select(z < f32(0.0), negative, x) / (f32(1.0) + decay)


def relu(x: Expr) -> Expr:
    """max(x, 0) for any type; NaN stays NaN."""
    zero = tirx.const(0, element_type(x))
    return tirx.Select(x < zero, zero, x)


def relu2(x: Expr) -> Expr:
    """max(x, 0) ** 2 for float32 x; NaN stays NaN."""
    value = relu(x)
    return value * value


def gelu(x: Expr) -> Expr:
    """x * Phi(x) for float32 x, exact (not tanh) form; relative error under 1e-6 for x > -5.

    Computed as max(x, 0) - |x| * Phi(-|x|), which keeps the relative accuracy of the negative
    tail that 1 + erf(x) loses.
    """
    a = tirx.min(tirx.abs(x), f32(LARGEST_TAIL))
    return relu(x) - a * exp_down(a * a * f32(-0.5)) * normal_tail(a)


def gelu_tanh(x: Expr) -> Expr:
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) for float32 x.

    Relative error 2e-6 for x > -5; beyond, the rounding of x**3 decides.
    """
    return _gate(x, x * (f32(1.5957691216057308) + f32(0.07135481627362546) * x * x))


def silu(x: Expr) -> Expr:
    """x * sigmoid(x) for float32 x, relative error under 5e-7 for x > -87."""
    return _gate(x, x)


ACTIVATIONS: dict[str, Callable[[Expr], Expr]] = {
    "relu": relu,
    "relu2": relu2,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
}


def check_activation(activation: str | None, dtypes: DTypes) -> None:
    """Refuse an unknown activation, and one of real numbers on an integer result.

    Raises
    ------
    DTypeError
        The activation cannot be computed in the epilogue's type.
    """
    known = isinstance(activation, str) and activation in ACTIVATIONS
    if activation is not None and not known:
        expected = f"None or one of {', '.join(ACTIVATIONS)}"
        raise DTypeError(mismatch("activation", expected, repr(activation)))
    if activation not in (None, "relu") and dtypes.epilogue != "float32":
        expected = f"None or 'relu' for a result of {dtypes.output}"
        advice = "pass out_dtype='float32'"
        raise DTypeError(mismatch("activation", expected, repr(activation), advice))


def epilogue(value: Expr, bias: Expr | None, activation: str | None, dtypes: DTypes) -> Expr:
    """activation(value + bias), computed in ``dtypes.epilogue`` and cast to ``dtypes.output``.

    ``value`` and ``bias`` are scalar expressions of any type; ``bias`` and ``activation`` may be
    None. `check_activation` has the errors.
    """
    value = value.astype(dtypes.epilogue)
    if bias is not None:
        value = value + bias.astype(dtypes.epilogue)
    if activation is not None:
        value = ACTIVATIONS[activation](value)
    return value.astype(dtypes.output)
