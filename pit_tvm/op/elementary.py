"""Elementary functions of float32 as branch-free arithmetic, which LLVM vectorises.

libm's ``expf`` or ``erff`` in an inner loop is scalar and costs six to twenty times more.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr

# exp(r) for |r| <= ln(2) / 2: minimax polynomial that is 1 at 0, relative error 9.2e-8.
_EXP = (
    1.0,
    0.9999997063125393,
    0.49999147839199487,
    0.1666763812848922,
    0.04189815988121808,
    0.008290272148468943,
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
# (tanh(x) / x - 1) / x**2 for |x| <= 0.63, and erf(x) / x for |x| <= 1, by powers of x**2: minimax
# polynomials, relative errors of tanh and erf 5e-9 and 1.2e-9.
_TANH = (
    -0.3333327956741192,
    0.1333135436117997,
    -0.0537309400820003,
    0.020606705022262826,
    -0.005665330454335621,
)
_ERF = (
    1.1283791659138713,
    -0.37612627136333343,
    0.11283600179301292,
    -0.026854444696261387,
    0.005189535509036018,
    -0.0008020842578743457,
    7.889123290726699e-05,
)
_SMALL_TANH, _SMALL_ERF = 0.625, 1.0
_LOG2_E = 1.4426950408889634
# ln(2) in two parts; the product of the first with a small integer is exact in float32.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Adding 1.5 * 2**23 rounds a small float32 to an integer, held in the sum's low bits.
_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000
_MANTISSA, _BIAS = 23, 127  # bits of a float32's mantissa; the exponent of 1
LOWEST_EXP = 87.0  # exp(-87) is still a normal float32
LARGEST_TAIL = 13.0  # `normal_tail` of more is 0 beside 1e-37
# exp of less is 0, and of more infinite.
_LEAST, _MOST = -104.0, 89.0


def f32(value: float) -> Expr:
    """A constant."""
    return tirx.const(value, "float32")


def _polynomial(coefficients: tuple[float, ...], x: Expr) -> Expr:
    value = f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + f32(coefficient)
    return value


def _parts(x: Expr) -> tuple[Expr, Expr]:
    """n and exp(x - n * ln(2)) for the nearest whole n, of int32."""
    shifted = tirx.reinterpret("int32", x * f32(_LOG2_E) + f32(_ROUND))
    # From the bits, because subtracting _ROUND again invites simplification.
    n = shifted - _ROUND_BITS
    whole = n.astype("float32")
    rest = x - whole * f32(_LN2_HIGH) - whole * f32(_LN2_LOW)
    return n, _polynomial(_EXP, rest)


def exp_down(x: Expr) -> Expr:
    """exp(x) for x in [-87, 0], relative error 2e-7."""
    n, mantissa = _parts(x)
    bits = tirx.reinterpret("int32", mantissa) + (n << _MANTISSA)
    return tirx.reinterpret("float32", bits)


def exp(x: Expr) -> Expr:
    """exp(x) for any x, relative error 2e-7 down to the smallest normal number; NaN stays NaN."""
    below = x < f32(_LEAST)
    within = tirx.Select(below, f32(0.0), tirx.Select(x > f32(_MOST), f32(_MOST), x))
    # Not by underflow, which takes processors long: of what is masked most is below.
    return tirx.Select(below, f32(0.0), _named(within, _whole_exp))


def _whole_exp(x: Expr) -> Expr:
    n, mantissa = _parts(x)
    # Half of the exponent each, for the whole one may be none of a normal number.
    half = n >> 1
    low, high = (
        tirx.reinterpret("float32", (part + _BIAS) << _MANTISSA) for part in (half, n - half)
    )
    return mantissa * low * high


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + exp(-x)), relative error 5e-7 for x > -87; NaN stays NaN."""
    return f32(1.0) / (f32(1.0) + exp(f32(0.0) - x))


def tanh(x: Expr) -> Expr:
    """tanh(x), relative error 5e-7; NaN stays NaN."""
    size, square = tirx.abs(x), x * x
    decay = exp_down(f32(0.0) - tirx.min(size + size, f32(LOWEST_EXP)))
    large = _named(decay, lambda e: (f32(1.0) - e) / (f32(1.0) + e))
    small = x + x * square * _polynomial(_TANH, square)
    return _by_size(x, _SMALL_TANH, small, large)


def erf(x: Expr) -> Expr:
    """The error function of x, relative error 5e-7; NaN stays NaN."""
    size, square = tirx.abs(x), x * x
    decay = exp_down(f32(0.0) - tirx.min(square, f32(LOWEST_EXP)))
    tail = _named(tirx.min(size * f32(2.0**0.5), f32(LARGEST_TAIL)), normal_tail)
    large = f32(1.0) - f32(2.0) * decay * tail
    return _by_size(x, _SMALL_ERF, x * _polynomial(_ERF, square), large)


def _by_size(x: Expr, limit: float, small: Expr, large: Expr) -> Expr:
    """``small`` up to a size of x, and for NaN; else ``large`` with the sign of x."""
    signed = _named(large, lambda y: tirx.Select(x < f32(0.0), f32(0.0) - y, y))
    return tirx.Select(tirx.abs(x) >= f32(limit), signed, small)


def _named(value: Expr, use: Callable[[Expr], Expr]) -> Expr:
    """What is made of a value that is used more than once."""
    name = tirx.Var("part", value.ty)
    return tirx.Let(name, value, use(name))


def normal_tail(a: Expr) -> Expr:
    """Phi(-a) * exp(a * a / 2) for a in [0, 13], of the normal distribution function Phi."""
    return _polynomial(_TAIL_OVER, a) / _polynomial(_TAIL_UNDER, a)


FUNCTIONS = {"exp": exp, "sigmoid": sigmoid, "tanh": tanh, "erf": erf}
