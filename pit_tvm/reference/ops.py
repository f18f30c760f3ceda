"""What every operator of `pit_tvm.op` means, in float64 numpy.

Arguments are arrays of any type that numpy converts to float64; results are float64. A mask is a
boolean array of its operand's shape (or one that broadcasts to it): the operand counts as zero
where the mask is False. Nothing here is meant to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DTypeError, mismatch

Float64: TypeAlias = NDArray[np.float64]
Stage: TypeAlias = str | tuple[str, float]

_erfc = np.vectorize(math.erfc, otypes=[np.float64])

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def live(array: ArrayLike, mask: ArrayLike | None = None) -> Float64:
    """``array`` in float64, zero where ``mask`` is False."""
    values = np.asarray(array).astype(np.float64)
    return values if mask is None else np.where(np.asarray(mask, bool), values, 0.0)


def activate(x: Float64, activation: str | None) -> Float64:
    """relu, relu2 (its square), gelu (exact), gelu_tanh, silu or nothing, of every element."""
    if activation is None:
        return x
    if activation == "relu":
        return np.maximum(x, 0.0)
    if activation == "relu2":
        return np.square(np.maximum(x, 0.0))
    if activation == "gelu":
        return 0.5 * x * _erfc(-x / math.sqrt(2.0))
    if activation == "gelu_tanh":
        return x * _sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))
    if activation == "silu":
        return x * _sigmoid(x)
    expected = "None, relu, relu2, gelu, gelu_tanh or silu"
    raise DTypeError(mismatch("activation", expected, repr(activation)))


def _sigmoid(x: Float64) -> Float64:
    decay = np.exp(-np.abs(x))
    return np.where(x < 0, decay, 1.0) / (1.0 + decay)


def matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    activation: str | None = None,
    lhs_mask: ArrayLike | None = None,
    rhs_mask: ArrayLike | None = None,
) -> Float64:
    """``activation(lhs @ rhs + bias)``: [m, k] (or [k, m]) times [k, n] (or [n, k]), bias [n]."""
    left, right = live(lhs, lhs_mask), live(rhs, rhs_mask)
    out = (left.T if transpose_lhs else left) @ (right.T if transpose_rhs else right)
    return activate(out if bias is None else out + live(bias), activation)


def linear(
    lhs: ArrayLike,
    rhs: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | None = None,
    lhs_mask: ArrayLike | None = None,
    rhs_mask: ArrayLike | None = None,
) -> Float64:
    """``activation(lhs @ rhs.T + bias)``: [m, k] times [n, k], bias [n]."""
    return matmul(
        lhs,
        rhs,
        bias,
        transpose_rhs=True,
        activation=activation,
        lhs_mask=lhs_mask,
        rhs_mask=rhs_mask,
    )


def batch_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    activation: str | None = None,
    lhs_mask: ArrayLike | None = None,
    rhs_mask: ArrayLike | None = None,
) -> Float64:
    """One product per batch element: [b, m, k] (or [b, k, m]) and [b, k, n] (or [b, n, k])."""
    left, right = live(lhs, lhs_mask), live(rhs, rhs_mask)
    left = left.swapaxes(1, 2) if transpose_lhs else left
    right = right.swapaxes(1, 2) if transpose_rhs else right
    return activate(left @ right, activation)


def grouped_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    bias: ArrayLike | None,
    group_ids: ArrayLike,
    *,
    transpose_rhs: bool = False,
    activation: str | None = None,
    lhs_mask: ArrayLike | None = None,
    rhs_mask: ArrayLike | None = None,
) -> Float64:
    """Row r of ``lhs`` [m, k] times ``rhs[group_ids[r]]``, plus ``bias[group_ids[r]]``.

    ``rhs`` is [num_groups, k, n] or [num_groups, n, k], ``bias`` [num_groups, n]. Rows of group
    -1 do not exist: they are NaN in the result.
    """
    left, right = live(lhs, lhs_mask), live(rhs, rhs_mask)
    right = right.swapaxes(1, 2) if transpose_rhs else right
    groups = np.asarray(group_ids)
    out = np.full((left.shape[0], right.shape[2]), np.nan)
    for row in np.flatnonzero(groups >= 0):
        out[row] = left[row] @ right[groups[row]]
        if bias is not None:
            out[row] += live(bias)[groups[row]]
    return activate(out, activation)


def reduce_sum(data: ArrayLike, *, data_mask: ArrayLike | None = None) -> Float64:
    """Sum of [p, l] along l."""
    return live(data, data_mask).sum(axis=1)


def elementwise(
    stages: Sequence[Stage],
    data: ArrayLike,
    *operands: ArrayLike,
    data_mask: ArrayLike | None = None,
) -> Float64:
    """The stages one after the other; each binary stage without a number takes an operand."""
    value, others = live(data, data_mask), iter(operands)
    for stage in stages:
        if isinstance(stage, tuple):
            value = BINARY[stage[0]](value, stage[1])
        elif stage in BINARY:
            value = BINARY[stage](value, live(next(others)))
        else:
            value = activate(value, stage)
    return value


def conv2d(
    data: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    activation: str | None = None,
    data_mask: ArrayLike | None = None,
    weight_mask: ArrayLike | None = None,
) -> Float64:
    """Convolution of [n, c, height, width] with [f, c, i, j], bias [f]."""
    (sx, sy), (dx, dy), (px, py) = _pair(stride), _pair(dilation), _pair(padding)
    image = np.pad(live(data, data_mask), ((0, 0), (0, 0), (px, px), (py, py)))
    taps = live(weight, weight_mask)
    kx, ky = taps.shape[2:]
    rows = (image.shape[2] - dx * (kx - 1) - 1) // sx + 1
    columns = (image.shape[3] - dy * (ky - 1) - 1) // sy + 1
    out = np.zeros((image.shape[0], taps.shape[0], rows, columns))
    for i in range(kx):
        for j in range(ky):
            x = slice(i * dx, i * dx + sx * (rows - 1) + 1, sx)
            y = slice(j * dy, j * dy + sy * (columns - 1) + 1, sy)
            out += np.einsum("ncxy,fc->nfxy", image[:, :, x, y], taps[:, :, i, j])
    if bias is not None:
        out += live(bias)[:, None, None]
    return activate(out, activation)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)
