"""The custom operators ``torch.ops.pit_tvm.*`` and their fake implementations.

`pit_tvm.torch.functional` checks what they are given and names it as users do;
`pit_tvm.torch.gradients` holds their derivatives. Gates are numbers at the end of what they take,
where no limit is None: schemas know no infinite default.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from ..gates import PLAIN, Gate
from ..runtime.torch_arrays import check_contiguous, check_signs, check_weight
from .dispatch import CustomOperator
from .operators import (
    activated_of_rows,
    combined_choices,
    gated_rows,
    gradient_of_activated,
    gradient_of_gated,
    grouped_choices,
    linear_of_rows,
    moe_layer,
    outer_of_groups,
    outer_of_rows,
    result_type,
    shaped,
    spec_of,
    spread_sums,
    summed_choices,
)


def numbers_of(gate: Gate | None) -> tuple[float | None, float, float, bool]:
    """A gate as operators take it; of none, what they do not read."""
    gate = PLAIN if gate is None else gate
    limit = None if gate.limit == math.inf else gate.limit
    return limit, gate.alpha, gate.offset, gate.interleaved


@lru_cache
def gate_of(
    limit: float | None = None,
    alpha: float = 1.0,
    offset: float = 0.0,
    interleaved: bool = False,
) -> Gate:
    """The gate of these numbers."""
    return Gate(math.inf if limit is None else limit, alpha, offset, interleaved)


@CustomOperator
def linear_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pattern: torch.Tensor,
    kind: str,
    activation: str | None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)`` in the rows that ``pattern`` names, zeros elsewhere."""
    flat = _flat(x)
    _check_contiguous(x=flat, bias=bias)
    check_weight("weight", weight)
    for name, array in {"x": x, "weight": weight, "bias": bias}.items():
        if array is not None:
            check_signs(name, array)
    out = linear_of_rows(flat, weight, bias, pattern, kind, activation)
    return shaped(out, (*x.shape[:-1], weight.shape[0]))


@linear_rows.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, pattern: Any, kind: str, *_: Any
) -> torch.Tensor:
    spec_of(kind)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=result_type(x))


@CustomOperator
def outer_rows(
    left: torch.Tensor, right: torch.Tensor, pattern: torch.Tensor, kind: str
) -> torch.Tensor:
    """[n, k]: the sum of ``left[i, :, None] * right[i]`` over the rows that ``pattern`` names, of
    [..., n] and [..., k]."""
    left, right = _flat(left), _flat(right)
    _check_contiguous(left=left, right=right)
    return outer_of_rows(left, right, pattern, kind)


@outer_rows.register_fake
def _(left: torch.Tensor, right: torch.Tensor, pattern: torch.Tensor, kind: str) -> torch.Tensor:
    spec_of(kind)
    return left.new_empty((left.shape[-1], right.shape[-1]))


@CustomOperator
def activate_rows(
    rows: torch.Tensor, pattern: torch.Tensor, kind: str, activation: str
) -> torch.Tensor:
    """The activation of the rows [..., n] that ``pattern`` names; all others are zeros, as their
    results are."""
    flat = _flat(rows)
    _check_contiguous(rows=flat)
    return shaped(activated_of_rows(flat, pattern, kind, activation), rows.shape)


@activate_rows.register_fake
def _(rows: torch.Tensor, pattern: Any, kind: str, *_: Any) -> torch.Tensor:
    spec_of(kind)
    return rows.new_empty(rows.shape)


@CustomOperator
def activate_rows_gradient(
    rows: torch.Tensor, down: torch.Tensor, pattern: torch.Tensor, kind: str, activation: str
) -> torch.Tensor:
    """The gradient to the rows of `activate_rows` that exist, ``down`` being that to its result;
    others hold anything."""
    flat, given = _flat(rows), _flat(down)
    _check_contiguous(rows=flat, down=given)
    return shaped(gradient_of_activated(flat, given, pattern, kind, activation), rows.shape)


@activate_rows_gradient.register_fake
def _(rows: torch.Tensor, down: Any, pattern: Any, kind: str, *_: Any) -> torch.Tensor:
    spec_of(kind)
    return rows.new_empty(rows.shape)


@CustomOperator
def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group_ids: torch.Tensor,
    activation: str | None,
) -> torch.Tensor:
    """Every row times the weight of each of its groups; zeros where the id is -1."""
    flat = _flat(x)
    _check_contiguous(x=flat, bias=bias)
    check_weight("weight", weight)
    ids = _choices(group_ids, len(flat))
    out = grouped_choices(flat, ids, weight, bias, activation)
    return shaped(out, (*group_ids.shape, weight.shape[1]))


@grouped_linear.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, group_ids: torch.Tensor, *_: Any
) -> torch.Tensor:
    return x.new_empty((*group_ids.shape, weight.shape[1]), dtype=result_type(x))


@CustomOperator
def grouped_outer(
    left: torch.Tensor, right: torch.Tensor, group_ids: torch.Tensor, groups: int
) -> torch.Tensor:
    """[groups, n, k]: of each group the sum of ``left[i, :, None] * right[i]`` over its choices, of
    ``left`` like ``group_ids`` and [n], and ``right`` [..., k] with a row for all choices."""
    left, right = _flat(left), _flat(right)
    _check_contiguous(left=left, right=right)
    return outer_of_groups(left, right, _choices(group_ids, len(right)), groups)


@grouped_outer.register_fake
def _(left: torch.Tensor, right: torch.Tensor, ids: Any, groups: int) -> torch.Tensor:
    return left.new_empty((groups, left.shape[-1], right.shape[-1]))


@CustomOperator
def gated_activation(
    rows: torch.Tensor,
    activation: str,
    limit: float | None = None,
    alpha: float = 1.0,
    offset: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """[..., n]: what a `Gate` makes of rows [..., 2 * n] of gates and others."""
    flat, gate = _flat(rows), gate_of(limit, alpha, offset, interleaved)
    _check_contiguous(rows=flat)
    shape = (*rows.shape[:-1], rows.shape[-1] // 2)
    return shaped(gated_rows(flat, activation, gate), shape)


@gated_activation.register_fake
def _(rows: torch.Tensor, *_: Any) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-1], rows.shape[-1] // 2))


@CustomOperator
def gated_gradient(
    rows: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    limit: float | None = None,
    alpha: float = 1.0,
    offset: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """The gradient to the rows of `gated_activation`, ``down`` being that to its result."""
    flat, given = _flat(rows), _flat(down)
    _check_contiguous(rows=flat, down=given)
    gate = gate_of(limit, alpha, offset, interleaved)
    return shaped(gradient_of_gated(flat, given, activation, gate), rows.shape)


@gated_gradient.register_fake
def _(rows: torch.Tensor, *_: Any) -> torch.Tensor:
    return rows.new_empty(rows.shape)


@CustomOperator
def combine_choices(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[..., n]: the sum of the rows [..., top_k, n] of a token, each by its weight [..., top_k]."""
    flat, shares, choices = _of_tokens(rows, weights, ids)
    out = combined_choices(flat, shares, choices)
    return shaped(out, (*rows.shape[:-2], rows.shape[-1]))


@combine_choices.register_fake
def _(rows: torch.Tensor, *_: Any) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-2], rows.shape[-1]))


@CustomOperator
def spread_choices(
    rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `combine_choices` to rows and weights, ``down`` [..., n] being that to its
    result."""
    given = _flat(down)
    _check_contiguous(down=given)
    flat, shares, choices = _of_tokens(rows, weights, ids)
    drows, dweights = spread_sums(flat, shares, choices, given)
    return shaped(drows, rows.shape), shaped(dweights, weights.shape).to(weights.dtype)


@spread_choices.register_fake
def _(rows: torch.Tensor, weights: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


@CustomOperator
def sum_choices(rows: torch.Tensor) -> torch.Tensor:
    """[..., n]: the sum of the rows [..., top_k, n] of a token."""
    tokens = rows.shape[:-2].numel()
    _check_contiguous(rows=rows)
    out = summed_choices(rows.reshape(tokens, *rows.shape[-2:]))
    return shaped(out, (*rows.shape[:-2], rows.shape[-1]))


@sum_choices.register_fake
def _(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-2], rows.shape[-1]))


@CustomOperator
def moe_feed_forward(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    gated: bool,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    offset: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """A layer of experts in one: see `pit_tvm.torch.moe_feed_forward`."""
    flat = _flat(x)
    _check_contiguous(x=flat)
    check_layer(up, down, up_bias, down_bias)
    if not x.is_cuda or expert_weights.dtype is torch.float64:  # kernels read 16 bits as well
        expert_weights = expert_weights.float()
    ids, weights = _routing(expert_ids, expert_weights)
    out = moe_layer(x.device.type)(
        *(flat, ids, weights, up, down),
        up_bias=up_bias,
        down_bias=down_bias,
        activation=activation,
        gate=gate_of(limit, alpha, offset, interleaved) if gated else None,
    )
    return shaped(out, x.shape)


@moe_feed_forward.register_fake
def _(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def check_layer(
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> None:
    """ShapeError for weights and biases of experts that do not lie in memory as operators take
    them."""
    check_weight("up", up)
    check_weight("down", down)
    _check_contiguous(up_bias=up_bias, down_bias=down_bias)


def _flat(rows: torch.Tensor) -> torch.Tensor:
    """Rows [number, n] of [..., n], where n may be 0."""
    if rows.dim() == 2:  # as most are: views take the host 2 us each
        return rows
    return rows.reshape(rows.shape[:-1].numel(), rows.shape[-1])


def _of_tokens(
    rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [tokens, choices, n], weights in float32 and ids [tokens, choices]."""
    _check_contiguous(rows=rows)
    choices, shares = _routing(ids, weights.float())
    return rows.reshape(*choices.shape, rows.shape[-1]), shares, choices


def _routing(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights of choices [..., top_k] as [tokens, top_k]."""
    return _flat(ids).contiguous(), _flat(weights).contiguous()


def _choices(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Groups of every row, [rows, choices]."""
    return ids.reshape(rows, ids.numel() // rows if rows else 1).contiguous()


def _check_contiguous(**arrays: torch.Tensor | None) -> None:
    for name, array in arrays.items():
        if array is not None:
            check_contiguous(name, array)
