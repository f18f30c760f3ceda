"""Linear layers over the rows that exist, as functions and as custom operators.

Each is registered as ``torch.ops.pit_tvm.<name>`` with a fake implementation, so ``torch.compile``
traces through it without a graph break. Rows that do not exist come out as zeros. They run on the
CPU in every type of `pit_tvm.op.linear` and on CUDA in float16 and bfloat16; under
``torch.autocast`` in its type, as torch's linear layers do. On CPUs products of experts, and all in
bfloat16, are torch's own on gathered rows, which pack no weights and multiply that type as it is.

Gradients go backward through them, to every floating-point argument and any number of times
(`pit_tvm.torch.gradients`). A mixture of experts is computed in parts for that, and activations
behind products. DTensors of ``torch.distributed`` are computed where they lie
(`pit_tvm.torch.sharding`). Tensors with tangents of forward mode (``torch.func.jvp``) are refused,
since they would be lost, and so are those with gradients of ``torch.func``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import forward_ad

from ..errors import DTypeError, ShapeError, mismatch
from ..gates import PLAIN, Gate
from ..op.epilogue import ACTIVATIONS
from ..structs import check_flags
from . import custom_ops
from .arguments import CAST, autocast, check_same_device, check_tensors, check_type
from .dispatch import differentiated, is_seen
from .gradients import activate_live, feed_forward_in_parts, split_activation
from .host import activate
from .operators import repeated_layer, repeated_rows

_TYPES = (*CAST, torch.int8)


def linear_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)`` where tokens exist, zeros elsewhere.

    Parameters
    ----------
    x
        ``[..., k]``, contiguous; all dimensions but the last are rows.
    weight, bias
        ``[n, k]`` as in ``torch.nn.Linear``, contiguous or ``.mT`` of what is, and ``[n]``.
    lengths, cu_seqlens, rows
        Exactly one: lengths ``[batch]`` of sequences padded to equal length; their running sums
        ``[batch + 1]``; or ids of the rows that exist, without repeats. int32 or int64, on the
        device of ``x``.
    activation
        None, "relu", "relu2", "gelu", "gelu_tanh" or "silu".

    Returns
    -------
    ``[..., n]`` of the type of ``x``; of int8 it is int32.

    Raises
    ------
    ShapeError, DTypeError
        An argument does not fit, or not exactly one pattern is given.
    """
    told = {"lengths": lengths, "cu_seqlens": cu_seqlens, "rows": rows}
    named = {kind: pattern for kind, pattern in told.items() if pattern is not None}
    if len(named) != 1:
        expected = "exactly one of lengths, cu_seqlens and rows"
        raise ShapeError(mismatch("pattern", expected, sorted(named) or "none"))
    ((kind, pattern),) = named.items()
    given = x, weight, bias, pattern
    if _may_be_repeated(activation, *given) and _fits_lengths(x, pattern, kind):
        made = repeated_rows(*given, kind, activation)
        if made is not None:
            return made
    beside = {"weight": weight, **_present(bias=bias), kind: pattern}
    check_tensors({"x": x, **beside})
    x, weight, bias = autocast(x, weight, bias)
    _check(x, weight, bias, 2, activation)
    check_same_device(x, beside)
    if not _fits_lengths(x, pattern, kind):
        expected = f"the {math.prod(x.shape[:-2])} sequences of x"
        raise ShapeError(mismatch(kind, expected, f"{_sequences(pattern, kind)} sequences"))
    fused, left = split_activation(activation, x, weight, bias)
    out = custom_ops.linear_rows(x, weight, bias, pattern, kind, fused)
    return out if left is None else activate_live(out, pattern, kind, left)


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    """``activation(x[i] @ weight[g].T + bias[g])`` with ``g = group_ids[i]``; zeros where it is -1.

    Parameters
    ----------
    x
        ``[..., k]``, contiguous.
    weight, bias
        ``[groups, n, k]``, contiguous or ``.mT`` of what is, and ``[groups, n]``. On CUDA n and k
        are multiples of 8.
    group_ids
        int32 or int64, on the device of ``x``: ``[...]``, one for each row, or ``[..., top_k]``,
        several, as a router gives them.
    activation
        As in `linear_rows`.

    Returns
    -------
    ``[..., n]``, or ``[..., top_k, n]``, of the type of ``x``; of int8 it is int32.

    Raises
    ------
    ShapeError, DTypeError
        An argument does not fit.
    """
    beside = {"weight": weight, **_present(bias=bias), "group_ids": group_ids}
    check_tensors({"x": x, **beside})
    x, weight, bias = autocast(x, weight, bias)
    _check(x, weight, bias, 3, activation)
    _check_ids("group_ids", group_ids)
    check_same_device(x, beside)
    lead = tuple(x.shape[:-1])
    if tuple(group_ids.shape[: len(lead)]) != lead or group_ids.dim() > len(lead) + 1:
        expected = f"{list(lead)}, or with a last dimension top_k"
        raise ShapeError(mismatch("group_ids", expected, tuple(group_ids.shape)))
    fused, left = split_activation(activation, x, weight, bias)
    out = custom_ops.grouped_linear(x, weight, bias, group_ids, fused)
    return out if left is None else activate(left)(out)


def moe_feed_forward(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    gated: bool | Gate = True,
) -> torch.Tensor:
    """A mixture-of-experts feed-forward layer, from routing to combined rows.

    ``out[t] = sum_c expert_weights[t, c] * (down[e] @ h(up[e] @ x[t] + up_bias[e]) +
    down_bias[e])``, ``e = expert_ids[t, c]``; ``h`` is the activation, or with ``gated`` the
    activation of the first half of the columns times the second half (SwiGLU), or what a
    `pit_tvm.gates.Gate` makes of them. The order of the sums is fixed. A choice of weight 0 adds
    nothing, also where its expert gives infinite values or NaN.

    Parameters
    ----------
    x
        ``[..., hidden]``, contiguous.
    expert_ids, expert_weights
        ``[..., top_k]``: int32 or int64, -1 for none; floating point.
    up, down
        ``[experts, inter, hidden]`` (``[experts, 2 * inter, hidden]`` if gated, as transformers
        stores ``gate_up_proj``) and ``[experts, hidden, inter]``, contiguous or ``.mT`` of what
        is. On CUDA ``hidden`` and ``inter`` are multiples of 8.
    up_bias, down_bias
        ``[experts, inter]`` (or ``2 * inter``, in the order of ``up``) and ``[experts, hidden]``,
        contiguous.
    activation
        As in `linear_rows`.
    gated
        True, False, or a `Gate` with limits, an offset or columns that alternate.

    Returns
    -------
    ``[..., hidden]`` of the type of ``x``.

    Raises
    ------
    ShapeError, DTypeError
        An argument does not fit.
    """
    if activation is None:
        raise DTypeError(mismatch("activation", f"one of {', '.join(ACTIVATIONS)}", None))
    gate = checked_gate(gated, activation)
    layer = x, expert_ids, expert_weights, up, down, up_bias, down_bias
    if _may_be_repeated(activation, *layer) and x.dim() == 2:
        made = repeated_layer(layer, activation, gate)
        if made is not None:
            return made
    beside: dict[str, Any] = {"up": up, "down": down, "expert_ids": expert_ids}
    beside |= {"expert_weights": expert_weights, **_present(up_bias=up_bias, down_bias=down_bias)}
    check_tensors({"x": x, **beside})
    x, up, down, up_bias, down_bias = autocast(x, up, down, up_bias, down_bias)
    _check(x, up, None, 3, activation, "up", CAST)
    check_type("down", down, x, x.dtype)
    _check_ids("expert_ids", expert_ids)
    check_same_device(x, beside)
    _check_routing(x, expert_ids, expert_weights)
    experts, wide, hidden = up.shape
    if gate is not None and wide % 2:
        raise ShapeError(mismatch("up", "an even number of columns, gates and others", wide))
    fits = (experts, hidden, wide if gate is None else wide // 2)
    if tuple(down.shape) != fits:
        raise ShapeError(mismatch("down", f"shape {list(fits)}", tuple(down.shape)))
    _check_bias("up_bias", up_bias, x, "up", up)
    _check_bias("down_bias", down_bias, x, "down", down)
    given = x, expert_ids, expert_weights, up, down
    if differentiated(x, expert_weights, up, down, up_bias, down_bias):
        return feed_forward_in_parts(*given, up_bias, down_bias, activation, gate)
    form = activation, gate is not None, up_bias, down_bias, *custom_ops.numbers_of(gate)
    return custom_ops.moe_feed_forward(*given, *form)


def checked_gate(gated: bool | Gate, activation: str) -> Gate | None:
    """The gate that ``gated`` tells, None for none; errors as `moe_feed_forward`."""
    if isinstance(gated, Gate):
        gated.check(activation)
        return gated
    check_flags(gated=gated)
    return PLAIN if gated else None


def _fits_lengths(x: torch.Tensor, pattern: torch.Tensor, kind: str) -> bool:
    """Whether a pattern, if it is of sequences, is of those of ``x``, where these are told."""
    if kind == "rows" or x.dim() <= 2:
        return True
    fits: bool = _sequences(pattern, kind) == math.prod(x.shape[:-2])
    return fits


def _sequences(pattern: torch.Tensor, kind: str) -> int:
    # As int: torch.compile of torch 2.11 takes no bool from a size that it does not know.
    return pattern.numel() - int(kind == "cu_seqlens")


def _may_be_repeated(activation: Any, x: Any, *others: Any) -> bool:
    """Whether only the operators themselves look at tensors of a call, rows ``x`` on a GPU and what
    is beside them: if it is like one before, it is right as that was."""
    given = x, *others
    if not isinstance(x, torch.Tensor) or not _on_gpu(x) or is_seen(given):
        return False
    if x.layout is not torch.strided or x.is_nested:
        return False
    if not all(each is None or isinstance(each, torch.Tensor) for each in others):
        return False
    if torch.is_autocast_enabled("cuda") or forward_ad._current_level >= 0:
        return False
    return (activation is None or isinstance(activation, str)) and not differentiated(*given)


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rank: int,
    activation: str | None,
    name: str = "weight",
    types: tuple[torch.dtype, ...] = _TYPES,
) -> None:
    """What the fake implementations need to be able to tell a shape, and torch to call them; and
    what operators would refuse by names of their own. ``name`` is that of ``weight``."""
    if activation is not None and not isinstance(activation, str):
        expected = f"None or one of {', '.join(ACTIVATIONS)}"
        raise DTypeError(mismatch("activation", expected, repr(activation)))
    if weight.dim() != rank:
        raise ShapeError(mismatch(name, f"{rank} dimensions", tuple(weight.shape)))
    if x.dim() < 1 or x.shape[-1] != weight.shape[-1]:
        expected = f"[..., {weight.shape[-1]}], the depth of {name}"
        turned = x.dim() > 0 and x.shape[-1] == weight.shape[-2]
        advice = f"{name} is [..., out, in]: pass {name}.mT" if turned else ""
        raise ShapeError(mismatch("x", expected, tuple(x.shape), advice))
    if x.shape[-1] == 0:
        raise ShapeError(mismatch("x", "a depth of at least 1", tuple(x.shape)))
    if x.dtype not in types:
        raise DTypeError(mismatch("x", f"one of {', '.join(map(str, types))}", x.dtype))
    if x.dtype == torch.int8 and activation not in (None, "relu"):
        expected, advice = "None or 'relu' for x of int8", "apply torch's own to result.float()"
        raise DTypeError(mismatch("activation", expected, repr(activation), advice))
    check_type(name, weight, x, x.dtype)
    _check_bias("bias", bias, x, name, weight)


def _check_bias(
    name: str, bias: torch.Tensor | None, x: torch.Tensor, of: str, weight: torch.Tensor
) -> None:
    """That a bias, if there is one, fits ``weight``, which is called ``of``."""
    if bias is None:
        return
    check_type(name, bias, x, torch.int32 if x.dtype == torch.int8 else x.dtype)
    if bias.shape != weight.shape[:-1]:  # torch would spread one of a single column
        expected = f"shape {list(weight.shape[:-1])}, as {of}"
        raise ShapeError(mismatch(name, expected, tuple(bias.shape)))


def _present(**arrays: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Those that there are."""
    return {name: array for name, array in arrays.items() if array is not None}


def _check_ids(name: str, ids: torch.Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise DTypeError(mismatch(name, "int32 or int64", ids.dtype))


def _check_routing(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Each token has its choices, and each choice a weight."""
    lead = tuple(x.shape[:-1])
    if ids.dim() != x.dim() or tuple(ids.shape[:-1]) != lead:
        expected = f"[{', '.join(map(str, (*lead, 'top_k')))}], choices of each row of x"
        raise ShapeError(mismatch("expert_ids", expected, tuple(ids.shape)))
    if weights.shape != ids.shape:
        expected = f"shape {list(ids.shape)}, as expert_ids"
        raise ShapeError(mismatch("expert_weights", expected, tuple(weights.shape)))
    if not weights.is_floating_point():
        raise DTypeError(mismatch("expert_weights", "a floating-point type", weights.dtype))
