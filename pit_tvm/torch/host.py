"""What torch itself computes for the custom operators on a CPU: products on gathered rows, group by
group, and activations and sums between them, with their gradients.

Only weights of groups that live are read, as they are. Our kernels would pack those of all groups
at every call, which is worth it only in types that torch's library converts element by element, as
float16 on most CPUs. Products are in the type that is given, also under ``torch.autocast``, which
may be on when gradients are asked for of what was computed without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import TypeVar

import torch
from torch.nn import functional

from ..errors import DTypeError, ShapeError, mismatch
from ..gates import PLAIN, Gate
from ..runtime.argument import told_groups

Run = TypeVar("Run", bound=Callable[..., object])


def _uncast(function: Run) -> Run:
    """The function, of tensors on a CPU, without ``torch.autocast``."""

    @wraps(function)
    def run(*args: object) -> object:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args)
        with torch.autocast("cpu", enabled=False):
            return function(*args)

    return run  # type: ignore[return-value]


def computes(dtype: torch.dtype) -> bool:
    """Whether torch's library multiplies this type by itself on this CPU."""
    if dtype == torch.float32:
        return True
    if dtype not in (torch.float16, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    library = torch.ops.mkldnn
    half = dtype == torch.float16
    known = library._is_mkldnn_fp16_supported if half else library._is_mkldnn_bf16_supported
    return bool(known())


@_uncast
def live_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    activation: str | None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)`` in ``rows``, zeros elsewhere."""
    out = x.new_zeros((len(x), weight.shape[0]))
    out[rows] = activate(activation)(functional.linear(x[rows], weight, bias))
    return out


@_uncast
def outer_live(left: torch.Tensor, right: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``left.T @ right`` over ``rows``."""
    return left[rows].T @ right[rows]


def check_ids(name: str, ids: torch.Tensor, groups: int) -> None:
    """ShapeError if an id is below -1, which stands for none, or no group."""
    wrong = (ids < -1) | (ids >= groups)
    if wrong.any():
        place = int(wrong.reshape(-1).nonzero()[0, 0])
        got = f"{int(ids.reshape(-1)[place])} at position {place}"
        raise ShapeError(mismatch(name, told_groups(groups), got))


def live_groups(ids: torch.Tensor, groups: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Each group that occurs among ``ids`` [rows], which `check_ids` has seen, and the places where
    it does, in order."""
    order = torch.argsort(ids, stable=True)
    none, *counts = torch.bincount(ids.long() + 1, minlength=groups + 1).tolist()
    begin = none
    for group, count in enumerate(counts):
        if count:
            yield group, order[begin : begin + count]
        begin += count


@_uncast
def grouped_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """[tokens * choices, n]: every choice ``ids[t, c]`` of a row; zeros where it is none."""
    choices, act = ids.shape[1], activate(activation)
    out = x.new_zeros((ids.numel(), weight.shape[1]))
    for group, places in live_groups(ids.reshape(-1), len(weight)):
        offset = None if bias is None else bias[group]
        out[places] = act(functional.linear(x[places // choices], weight[group], offset))
    return out


@_uncast
def outer_groups(
    left: torch.Tensor, right: torch.Tensor, ids: torch.Tensor, groups: int
) -> torch.Tensor:
    """[groups, n, k]: ``left.T @ right`` over the rows of each group; a row of ``right`` belongs to
    all choices."""
    choices = ids.shape[1]
    out = left.new_zeros((groups, left.shape[1], right.shape[1]))
    for group, places in live_groups(ids.reshape(-1), groups):
        out[group] = left[places].T @ right[places // choices]
    return out


@_uncast
def feed_forward(
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
    """The layer of `moe_feed_forward`, [tokens, hidden], both products of an expert in a row."""
    choices = ids.shape[1]
    out = x.new_zeros((ids.numel(), x.shape[1]))
    for group, places in live_groups(ids.reshape(-1), len(up)):
        first, second = (None if bias is None else bias[group] for bias in (up_bias, down_bias))
        rows = functional.linear(x[places // choices], up[group], first)
        rows = activate(activation)(rows) if gate is None else gate_halves(rows, activation, gate)
        out[places] = functional.linear(rows, down[group], second)
    return combined(out, ids, weights, x.dtype)


def activate(name: str | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """torch's activation of a name, None for nothing; DTypeError for a name of none."""
    return _activation(name)[0] if name is not None else lambda rows: rows


def activate_gradient(rows: torch.Tensor, down: torch.Tensor, activation: str) -> torch.Tensor:
    """The gradient to the rows of an activation, ``down`` being that to its result."""
    return _activation(activation)[1](down, rows)


def gate_halves(rows: torch.Tensor, activation: str, gate: Gate = PLAIN) -> torch.Tensor:
    """What ``gate`` makes of rows [..., 2 * width] of gates and others."""
    gates, others = _within(gate, *_columns(rows, gate))
    return _scaled(activation, gate.alpha)[0](gates) * _moved(others, gate)


def gate_gradient(
    rows: torch.Tensor, down: torch.Tensor, activation: str, gate: Gate = PLAIN
) -> torch.Tensor:
    """The gradient to the rows of `gate_halves`, ``down`` being that to its result: as of torch's
    clamps, none to what is beyond a limit."""
    given, (act, backward) = _columns(rows, gate), _scaled(activation, gate.alpha)
    gates, others = _within(gate, *given)
    found = backward(down * _moved(others, gate), gates), down * act(gates)
    if gate.limit != math.inf:
        passes = given[0] <= gate.limit, given[1].abs() <= gate.limit
        found = found[0].where(passes[0], 0.0), found[1].where(passes[1], 0.0)
    return torch.stack(found, -1).flatten(-2) if gate.interleaved else torch.cat(found, -1)


def _columns(rows: torch.Tensor, gate: Gate) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and others."""
    if gate.interleaved:
        return rows[..., ::2], rows[..., 1::2]
    gates, others = rows.chunk(2, -1)
    return gates, others


def _within(
    gate: Gate, gates: torch.Tensor, others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if gate.limit == math.inf:
        return gates, others
    return gates.clamp(max=gate.limit), others.clamp(-gate.limit, gate.limit)


def _moved(others: torch.Tensor, gate: Gate) -> torch.Tensor:
    return others + gate.offset if gate.offset else others


def _scaled(name: str, alpha: float) -> tuple[Callable[..., torch.Tensor], ...]:
    """An activation whose sigmoid multiplies ``alpha``, and its gradient, as `_activation`."""
    act, backward = _activation(name)
    if alpha == 1.0:
        return act, backward
    return lambda x: x * torch.sigmoid(alpha * x), lambda down, x: backward(down, alpha * x)


def spread(
    rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `combined` to rows [..., choices, n] and weights, ``down`` being that to its
    result."""
    none = ids < 0
    drows = down[..., None, :] * weights.masked_fill(none, 0.0)[..., None].to(down.dtype)
    dots = (rows.float() * down[..., None, :].float()).sum(-1)  # no product that autocast casts
    return drows, dots.masked_fill(none, 0.0).to(weights.dtype)


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


def _activation(name: str) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """An activation, and its gradient of one to its result and of its input."""
    aten = torch.ops.aten
    known: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
        "relu": (functional.relu, lambda down, x: aten.threshold_backward(down, x, 0)),
        "relu2": (_relu2, lambda down, x: 2.0 * aten.threshold_backward(down * x, x, 0)),
        "gelu": (functional.gelu, aten.gelu_backward),
        "gelu_tanh": (
            partial(functional.gelu, approximate="tanh"),
            partial(aten.gelu_backward, approximate="tanh"),
        ),
        "silu": (functional.silu, aten.silu_backward),
    }
    if name not in known:
        raise DTypeError(mismatch("activation", f"None or one of {', '.join(known)}", name))
    return known[name]


def combined(
    rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[tokens, n]: sums of the rows [tokens * choices, n] of a token, each by its weight."""
    live = weights.float().masked_fill(ids < 0, 0.0)
    picked = rows.reshape(*ids.shape, rows.shape[-1]).float() * live[..., None]
    # Nobody asked for what has no weight, which may be infinite.
    return picked.masked_fill((live == 0)[..., None], 0.0).sum(1).to(dtype)


@_uncast
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
    seeing: bool = False,
) -> torch.Tensor:
    """``softmax(scale * q @ k.T) @ v`` over the keys of a mask, zeros for queries that see none;
    beside the scores of a head stands its sink, if there are any, and ``softcap`` other than 0
    bounds scores. ``seeing``: all queries see a key."""
    if not seeing:
        blind = ~mask.any(dim=-1, keepdim=True)
        made = attention(q, k, v, sinks, mask | blind, scale, softcap, True)
        return made.masked_fill(blind, 0)
    if sinks is not None or softcap:
        return scored_attention(q, k, v, sinks, mask, scale, softcap)
    grouped = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}  # torch takes no symbol
    attend = functional.scaled_dot_product_attention
    return attend(q, k, v, mask, scale=scale, **grouped)


@_uncast
def scored_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """`attention` by all scores, with what torch's has not; ``mask`` may be numbers to add to
    scores. Without sinks, queries that see no key get the mean of all values, as transformers'."""
    shared = k.shape[1], q.shape[1] // max(1, k.shape[1])
    keys = k.float()[:, :, None].mT
    scores = (q.float().unflatten(1, shared) @ keys).flatten(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask.dtype is torch.bool:  # finite, as queries of padding may see no key
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    if sinks is not None:
        beside = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, beside], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]].to(v.dtype)
    weights = functional.dropout(weights, dropout)
    return (weights.unflatten(1, shared) @ v[:, :, None]).flatten(1, 2)
