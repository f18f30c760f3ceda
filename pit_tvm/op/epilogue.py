"""What happens to a reduction's result before it is stored: bias, activation, conversion.

The activations are branch-free arithmetic that LLVM vectorises on every instruction set; a call
of libm's ``erff`` or ``expf`` in the inner loop is scalar and costs six to twenty times more.
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

# exp(r) for |r| <= ln(2) / 2: minimax polynomial, relative error 7.5e-8.
_EXP = (
    1.0000000716556101,
    0.9999996919882389,
    0.49998894841613617,
    0.16667574733215598,
    0.04191538307675703,
    0.008297655219488335,
)
# Phi(-a) * exp(a * a / 2) for 0 <= a <= 13, Phi being the normal distribution function: a ratio
# of polynomials, relative error 4.8e-9. All coefficients are positive, so nothing cancels.
_TAIL_OVER = (
    0.5000000023692139,
    0.43497579658316254,
    0.1807837050825129,
    0.03980868365714635,
    0.003994339014393131,
)
_TAIL_UNDER = (
    1.0,
    1.6678364966543586,
    1.1923044293907794,
    0.46299998994273883,
    0.09979322380447582,
    0.010012172930139557,
)
_LOG2_E = 1.4426950408889634
# ln(2) in two parts; the product of the first with a small integer is exact in float32.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Adding 1.5 * 2**23 rounds a small float32 to an integer, held in the sum's low bits.
_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000
_LOWEST_EXP = 87.0  # exp(-87) is still a normal float32


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")


def _polynomial(coefficients: tuple[float, ...], x: Expr) -> Expr:
    value = _f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + _f32(coefficient)
    return value


def exp(x: Expr) -> Expr:
    """exp(x) for float32 x in [-87, 0], relative error 2e-7: 2**n * exp(x - n * ln(2))."""
    shifted = tirx.reinterpret("int32", x * _f32(_LOG2_E) + _f32(_ROUND))
    # From the bits, because subtracting _ROUND again invites simplification.
    n = (shifted - _ROUND_BITS).astype("float32")
    rest = x - n * _f32(_LN2_HIGH) - n * _f32(_LN2_LOW)
    mantissa = tirx.reinterpret("int32", _polynomial(_EXP, rest))
    # _ROUND_BITS has 22 zeros at its end, so the shift leaves n alone in the exponent's place.
    return tirx.reinterpret("float32", mantissa + (shifted << 23))


def _gate(x: Expr, z: Expr) -> Expr:
    """x * sigmoid(z) for x and z of one sign, relative error 5e-7 in exact z."""
    decay = exp(_f32(0.0) - tirx.min(tirx.abs(z), _f32(_LOWEST_EXP)))
    # The bound keeps -inf * 0 away; below it the result is 0 in float32 anyway.
    negative = tirx.max(x, _f32(-_LOWEST_EXP)) * decay
    return tirx.Select(z < _f32(0.0), negative, x) / (_f32(1.0) + decay)


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
    a = tirx.min(tirx.abs(x), _f32(13.0))
    tail = _polynomial(_TAIL_OVER, a) / _polynomial(_TAIL_UNDER, a)
    return relu(x) - a * exp(a * a * _f32(-0.5)) * tail


def gelu_tanh(x: Expr) -> Expr:
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) for float32 x.

    Relative error 2e-6 for x > -5; beyond, the rounding of x**3 decides.
    """
    return _gate(x, x * (_f32(1.5957691216057308) + _f32(0.07135481627362546) * x * x))


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
