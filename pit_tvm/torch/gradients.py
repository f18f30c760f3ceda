"""Derivatives of the custom operators, by each other: products of rows and sums of outer products.

    linear_rows(x, w):  dx = linear_rows(dy, w.mT),  dw = outer_rows(dy, x)
    outer_rows(a, b):   da = linear_rows(b, dw),     db = linear_rows(a, dw.mT)

and the same of groups, whose derivatives to rows are summed over a row's choices. Only rows that
exist are read, so that gradients of others may hold anything, and gradients of what does not exist
are zeros. A bias is the weight of an input that is always 1. Activations stand apart where
gradients are asked for: their inputs are what is kept.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import DTypeError, mismatch
from ..gates import Gate
from . import custom_ops
from .dispatch import arguments, differentiated, is_seen
from .host import activate, activate_gradient, check_ids, gate_halves, spread
from .operators import ONES, reads_live


@custom_ops.linear_rows.differentiate
def _(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias, pattern, kind, activation = arguments(ctx)
    _check_no_activation(activation)
    dy, (for_x, for_weight, for_bias) = dy.contiguous(), ctx.needs_input_grad[:3]
    linear, outer = custom_ops.linear_rows, custom_ops.outer_rows
    dx = linear(dy, weight.mT, None, pattern, kind, None) if for_x else None
    dw = outer(dy, x, pattern, kind) if for_weight else None
    db = outer(dy, _ones(x), pattern, kind)[:, 0] if for_bias else None
    return dx, dw, db, None, None, None


@custom_ops.outer_rows.differentiate
def _(ctx: Any, dw: torch.Tensor) -> tuple[Any, ...]:
    left, right, pattern, kind = arguments(ctx)
    dw, (for_left, for_right) = dw.contiguous(), ctx.needs_input_grad[:2]
    linear = custom_ops.linear_rows
    da = linear(right, dw, None, pattern, kind, None) if for_left else None
    db = linear(left, dw.mT, None, pattern, kind, None) if for_right else None
    return da, db, None, None


@custom_ops.activate_rows.differentiate
def _(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    rows, pattern, kind, activation = arguments(ctx)
    if torch.is_grad_enabled():  # somebody asks for gradients of this one
        out = activate(activation)(rows)
        return *torch.autograd.grad(out, rows, dy, create_graph=True), None, None, None
    if torch.is_anomaly_enabled():  # somebody looks for NaN, which memory may hold
        return activate_gradient(rows, dy, activation), None, None, None
    found = custom_ops.activate_rows_gradient(rows, dy.contiguous(), pattern, kind, activation)
    return found, None, None, None


@custom_ops.grouped_linear.differentiate
def _(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias, ids, activation = arguments(ctx)
    _check_no_activation(activation)
    dy, (for_x, for_weight, for_bias) = dy.contiguous(), ctx.needs_input_grad[:3]
    outer, groups = custom_ops.grouped_outer, weight.shape[0]
    dx = _of_choices(dy, weight.mT, ids, x) if for_x else None
    dw = outer(dy, x, ids, groups) if for_weight else None
    db = outer(dy, _ones(x), ids, groups)[..., 0] if for_bias else None
    return dx, dw, db, None, None


@custom_ops.grouped_outer.differentiate
def _(ctx: Any, dw: torch.Tensor) -> tuple[Any, ...]:
    left, right, ids, _ = arguments(ctx)
    dw, (for_left, for_right) = dw.contiguous(), ctx.needs_input_grad[:2]
    linear = custom_ops.grouped_linear
    da = linear(right, dw, None, ids, None) if for_left else None
    db = _of_choices(left, dw.mT, ids, right) if for_right else None
    return da, db, None, None


@custom_ops.gated_activation.differentiate
def _(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    rows, activation, *numbers = arguments(ctx)
    if torch.is_grad_enabled():  # somebody asks for gradients of this one
        out = gate_halves(rows, activation, custom_ops.gate_of(*numbers))
        (found,) = torch.autograd.grad(out, rows, dy, create_graph=True)
    else:
        found = custom_ops.gated_gradient(rows, dy.contiguous(), activation, *numbers)
    return found, *(None for _ in (activation, *numbers))


@custom_ops.combine_choices.differentiate
def _(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    rows, weights, ids = arguments(ctx)
    if torch.is_grad_enabled():  # of this one, too
        return *spread(rows, ids, weights, dy), None
    return *custom_ops.spread_choices(rows, weights, ids, dy.contiguous()), None


@custom_ops.sum_choices.differentiate
def _(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    (rows,) = arguments(ctx)
    return dy[..., None, :].expand(rows.shape)


def split_activation(
    activation: str | None, *tensors: torch.Tensor | None
) -> tuple[str | None, str | None]:
    """The activation that an operator computes itself, and the one that is left for its result: it
    is where gradients to ``tensors`` may be asked for, which need its input.

    DTypeError for a name of none.
    """
    if activation is None or not differentiated(*tensors):
        return activation, None
    activate(activation)
    return None, activation


def activate_live(
    out: torch.Tensor, pattern: torch.Tensor, kind: str, activation: str
) -> torch.Tensor:
    """The activation of what `pit_tvm.torch.linear_rows` gives, of the rows that exist alone where
    that is worth it."""
    if reads_live(out):
        return custom_ops.activate_rows(out, pattern, kind, activation)
    return activate(activation)(out)


def feed_forward_in_parts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    gate: Gate | None,
) -> torch.Tensor:
    """`pit_tvm.torch.moe_feed_forward` by operators that have derivatives; errors as
    `split_activation`, `custom_ops.check_layer` and, on CPUs, `check_ids`."""
    if not is_seen((x, ids, weights, up, down, up_bias, down_bias)):
        # Operators call them otherwise.
        custom_ops.check_layer(up, down, up_bias, down_bias)
        if ids.is_cpu:
            check_ids("expert_ids", ids, len(up))
    linear, act = custom_ops.grouped_linear, activate(activation)
    rows = linear(x, up, up_bias, ids, None)
    if gate is None:
        rows = act(rows)
    else:
        rows = custom_ops.gated_activation(rows, activation, *custom_ops.numbers_of(gate))
    rows = linear(rows, down, down_bias, ids, None)
    return custom_ops.combine_choices(rows, weights, ids)


def _of_choices(
    dy: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Rows of ``dy`` times the weights of their groups, summed over the choices of each of
    ``rows``."""
    made = custom_ops.grouped_linear(dy, weight, None, ids, None)
    if ids.dim() < rows.dim():
        return made
    return made.squeeze(-2) if ids.shape[-1] == 1 else custom_ops.sum_choices(made)


def _ones(x: torch.Tensor) -> torch.Tensor:
    return x.new_ones((*x.shape[:-1], ONES))


def _check_no_activation(activation: str | None) -> None:
    if activation is not None:
        advice = "apply torch's own to the result, as pit_tvm.torch's functions do"
        raise DTypeError(mismatch("activation", "None where gradients go", activation, advice))
