"""Operators that TVM's importer lacks, by others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..torch import host
from ..torch.custom_ops import gate_of


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    places: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` ``[batch, channels, ...]`` as a norm over rows."""
    rows = x.reshape(batch, groups, -1)
    mean = rows.mean(-1, keepdim=True)
    inverse = torch.rsqrt((rows - mean).square().mean(-1, keepdim=True) + eps)
    found = ((rows - mean) * inverse).reshape(x.shape)
    shape = (channels, *[1] * (x.dim() - 2))
    if weight is not None:
        found = found * weight.reshape(shape)
    if bias is not None:
        found = found + bias.reshape(shape)
    return found, mean.squeeze(-1), inverse.squeeze(-1)


def _variance_and_mean(
    x: Tensor,
    dim: list[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    by = 1 if correction is None else correction
    return torch.var(x, dim, correction=by, keepdim=keepdim), torch.mean(x, dim, keepdim)


def _variance(
    x: Tensor,
    dim: list[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """Of unknown numbers of elements, which TVM divides by no corrected one."""
    axes = range(x.dim()) if not dim else dim
    number = math.prod(x.shape[axis] for axis in axes)
    by = 1 if correction is None else correction
    if isinstance(number, int) or by not in (0, 1):  # a negative number counts as 0 in torch
        return NotImplemented
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    apart = (wide - wide.mean(list(axes), keepdim=True)).square().mean(list(axes), keepdim)
    return (apart * number / (number - int(by)) if by else apart).to(x.dtype)


def _leaky(
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    """A random slope below 0; the one in the middle outside of training."""
    return NotImplemented if training else torch.where(x > 0, x, x * ((lower + upper) / 2))


def _leaky_and_noise(x: Tensor, _: Tensor, *slopes: Any) -> Any:
    found = _leaky(x, *slopes)
    return found if found is NotImplemented else (found, torch.empty_like(x))


def _hypotenuse(x: Tensor, y: Tensor) -> Tensor:
    """Without squares of large numbers."""
    x, y = x.abs(), y.abs()
    most, least = torch.maximum(x, y), torch.minimum(x, y)
    ratio = torch.where(most == least, torch.ones_like(x), least / most)
    found = torch.where(most == 0, most, most * torch.sqrt(1 + ratio * ratio))
    return torch.where(x.isinf() | y.isinf(), math.inf, found)


def _is_negative(x: Tensor) -> Tensor:
    """Whether numbers are less than 0, or the zero below it."""
    return torch.where(x == 0, x.reciprocal(), x) < 0


def _with_sign(x: Tensor, of: Tensor | float) -> Tensor:
    if isinstance(of, Tensor):
        return torch.where(_is_negative(of), -x.abs(), x.abs())
    return -x.abs() if math.copysign(1.0, of) < 0 else x.abs()


# ln(erfc(x) / t) + x * x for x >= 0 by powers of t = 1 / (1 + x / 2), to 1e-7: Numerical Recipes,
# section 6.2.
_LEFT = (
    *(-1.26551223, 1.00002369, 0.37409174, 0.0967858, -0.18629449),
    *(0.27888307, -1.13522494, 1.4885331, -0.82215987, 0.17087418),
)


def _left_of_error(x: Tensor) -> Any:
    """``1 - erf(x)``, small ones as exact as others."""
    if x.dtype == torch.float64 or not x.is_floating_point():
        return NotImplemented
    wide = x.double()  # float32 loses digits of the square
    t = 1 / (1 + wide.abs() / 2)
    powers = torch.zeros_like(t)
    for factor in reversed(_LEFT):
        powers = powers * t + factor
    found = t * torch.exp(powers - wide * wide)
    return torch.where(wide < 0, 2 - found, found).to(x.dtype)


def _of_numbers(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """One of two numbers, of which neither is NaN if the other is not."""

    def chosen(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x.isnan(), y, torch.where(y.isnan(), x, choose(x, y)))

    return chosen


def _feed_forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str,
    gated: bool,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *numbers: Any,
) -> Tensor:
    """A layer of experts by two grouped products."""
    rows = _PIT.grouped_linear(x, up, up_bias, ids, None if gated else activation)
    if gated:
        rows = _gated(rows, activation, *numbers)
    return _combined(_PIT.grouped_linear(rows, down, down_bias, ids, None), weights, ids)


def _gated(rows: Tensor, activation: str, *numbers: Any) -> Tensor:
    return host.gate_halves(rows, activation, gate_of(*numbers))


def _combined(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Sums of the rows [..., top_k, n] of a token, each by its weight [..., top_k]."""
    shares = weights.float().masked_fill(ids < 0, 0.0)[..., None]
    # Nobody asked for what has no weight, which may be infinite.
    return torch.where(shares == 0, 0.0, rows.float() * shares).sum(-2).to(rows.dtype)


def _linear_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pattern: Tensor,
    kind: str,
    activation: str | None,
) -> Tensor:
    """All rows, and zeros where no token is; of a list of rows there is no such form."""
    if kind == "rows" or not x.is_floating_point():
        return NotImplemented
    lengths = pattern.diff() if kind == "cu_seqlens" else pattern
    places = torch.arange(x.shape[-2], device=x.device)
    live = places < lengths.reshape(*x.shape[:-2], 1)
    rows = host.activate(activation)(torch.nn.functional.linear(x, weight, bias))
    return torch.where(live[..., None], rows, 0.0)


def _masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Tensor,
    scale: float,
    softcap: float,
) -> Tensor:
    """That of torch, zeros for queries that see no key as well; it has no sinks and no caps."""
    if sinks is not None or softcap:
        return NotImplemented
    attend, grouped = torch.nn.functional.scaled_dot_product_attention, k.shape[1] != q.shape[1]
    return attend(q, k, v, mask, scale=scale, enable_gqa=grouped)


def _distances(x: Tensor, y: Tensor, p: float, _: int | None) -> Tensor:
    """Of every row of ``x`` to every one of ``y``."""
    apart = x.unsqueeze(-2) - y.unsqueeze(-3)
    return torch.linalg.vector_norm(apart, p, -1)


def _extreme_norm(
    x: Tensor,
    ord: float = 2,  # noqa: A002  (torch's name)
    dim: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """How many numbers are not 0, or the size of the largest or smallest."""
    axes = list(range(x.dim())) if dim is None else dim
    x = x if dtype is None else x.to(dtype)
    if ord == 0:
        return (x != 0).to(x.dtype).sum(axes, keepdim)
    if abs(ord) != math.inf:
        return NotImplemented
    return (torch.amax if ord > 0 else torch.amin)(x.abs(), axes, keepdim)


def _largest_of_parts(x: Tensor, sizes: list[int]) -> Any:
    """Of images ``[..., height, width]`` in so many parts, all alike: the largest, and where."""
    if list(sizes) == [1, 1]:
        found, place = x.flatten(-2).max(-1, keepdim=True)
        return found[..., None], place[..., None]
    known = all(isinstance(extent, int) for extent in x.shape[-2:])
    if not known or any(e % n for e, n in zip(x.shape[-2:], sizes, strict=True)):
        return NotImplemented
    each = [extent // number for extent, number in zip(x.shape[-2:], sizes, strict=True)]
    return _ATEN.max_pool2d_with_indices(x, each)


def _bilinear(
    x: Tensor, weight: Tensor, y: Tensor, *expanded: list[int], unroll_dim: int = 1
) -> Any:
    """``sum_ij x[r, i] * weight[n, i, j] * y[r, j]``, the only form that layers have."""
    if [*map(list, expanded)] != [[1, 3], [0], [1, 2], [2, 3]]:
        return NotImplemented
    n, _, depth = weight.shape
    rows = torch.nn.functional.linear(x, weight.movedim(1, 2).reshape(n * depth, -1))
    return (rows.unflatten(-1, (n, depth)) * y[:, None]).sum(-1)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    turned: bool,
    *others: Any,
) -> Any:
    """Of every place by itself, of one dimension of places, as a linear layer; others in 32 bits
    instead of 16."""
    by_place = x.dim() == 3 and weight.shape[2] == 1 and weight.shape[1] == x.shape[1]
    if by_place and not turned and stride == [1] and padding == [0]:
        return torch.nn.functional.linear(x.mT, weight.squeeze(-1), bias).mT
    how = (stride, padding, dilation, turned, *others)
    return _widened(_ATEN.convolution.default)(x, weight, bias, *how)


def _widened(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of which TVM has none for 16 bits, in 32."""

    def run(x: Tensor, *others: Any) -> Any:
        if x.dtype not in (torch.float16, torch.bfloat16):
            return NotImplemented
        wide = [one.float() if isinstance(one, Tensor) else one for one in others]
        found = operator(x.float(), *wide)
        if isinstance(found, Tensor):
            return found.to(x.dtype)
        return found[0].to(x.dtype), *found[1:]

    return run


_ATEN, _PIT = torch.ops.aten, torch.ops.pit_tvm
#: By torch's operator; what gives NotImplemented stays as it is.
DECOMPOSITIONS = {
    _ATEN.native_group_norm.default: _group_norm,
    _ATEN.var_mean.correction: _variance_and_mean,
    _ATEN.var.correction: _variance,
    _ATEN.rrelu.default: _leaky,
    _ATEN.rrelu_.default: _leaky,
    _ATEN.rrelu_with_noise_functional.default: _leaky_and_noise,
    _ATEN.hypot.default: _hypotenuse,
    _ATEN.signbit.default: _is_negative,
    _ATEN.copysign.Tensor: _with_sign,
    _ATEN.copysign.Scalar: _with_sign,
    _ATEN.fmax.default: _of_numbers(torch.maximum),
    _ATEN.fmin.default: _of_numbers(torch.minimum),
    _ATEN.erfc.default: _left_of_error,
    _ATEN.exp2.default: lambda x: torch.pow(2.0, x),
    _PIT.linear_rows.default: _linear_rows,
    _PIT.moe_feed_forward.default: _feed_forward,
    _PIT.gated_activation.default: _gated,
    _PIT.combine_choices.default: _combined,
    _PIT.masked_attention.default: _masked_attention,
    _PIT.sum_choices.default: lambda rows: rows.sum(-2),
    _ATEN.linalg_vector_norm.default: _extreme_norm,
    _ATEN._cdist_forward.default: _distances,
    _ATEN._trilinear.default: _bilinear,
    _ATEN.adaptive_max_pool2d.default: _largest_of_parts,
    _ATEN.convolution.default: _convolution,
    _ATEN._native_batch_norm_legit_no_training.default: _widened(
        _ATEN._native_batch_norm_legit_no_training.default
    ),
}
#: Those of torch's own that its table of core operators lacks.
BY_TORCH = [_ATEN._native_batch_norm_legit.no_stats]
