"""The custom operators of attention by masks, their fake implementations and derivative.

Lists are `pit_tvm.runtime.cuda_listed_mask.Lists`, one tensor after the other: those of what
queries see of keys, and behind them, where gradients are asked for, of the queries that see keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..runtime.cuda_listed_mask import Lists, Tiled, shapes_of, tiled_shape
from ..runtime.cuda_masked_attention import CudaMaskedAttention
from ..runtime.kernel_cache import KernelCache
from ..target import resolve_target
from . import host, host_attention
from .dispatch import CustomOperator, arguments, results

_LOG2_E = math.log2(math.e)
_Operator = partial(CustomOperator, strided=True)
_Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@_Operator
def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attention over the keys of a mask: see `pit_tvm.torch.masked_attention`."""
    out = _rows_of_heads(q, v)
    if not q.is_cuda:
        return host_attention.attention(q, k, v, sinks, mask, scale, softcap, out)
    attend = _attention()
    tiles = tiled_shape((*q.shape[:3], k.shape[2]), k.shape[1], mask.shape[:3])
    lists, _ = attend.lists.of_queries(mask.contiguous(), tiles)
    attend(q, k, v, lists, scale, out, None, sinks, softcap)
    return out


@masked_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    return _rows_of_heads(q, v)


@_Operator
def list_mask(mask: torch.Tensor, shape: Sequence[int]) -> _Five:
    """Lists of what queries see by a mask on a GPU, [batch or 1, heads or 1, queries or 1, keys],
    for sequences, heads and queries, ``shape``, or what `tiled_shape` makes of them; and bits of
    its rows, for `list_keys`."""
    lists, lines = _attention().lists.of_queries(mask.contiguous(), shape)
    return *lists[:4], lines


@list_mask.register_fake
def _(mask: torch.Tensor, shape: Sequence[int]) -> _Five:
    batch, heads, rows, keys = mask.shape
    made = _tensors(mask, shapes_of(batch * heads, rows, keys, Tiled(*shape)))
    lines = mask.new_empty((batch * heads, rows, made[0].shape[-1] // 32), dtype=torch.int32)
    return *made, lines


@_Operator
def list_keys(lines: torch.Tensor, planes: Sequence[int], shape: Sequence[int], keys: int) -> _Four:
    """Lists of the queries that see each of so many keys, by bits of the rows of a mask."""
    batch, heads = planes
    made = _attention().lists.of_keys(lines, (batch, heads), shape, keys)
    return made.ids, made.bits, made.order, made.work


@list_keys.register_fake
def _(lines: torch.Tensor, planes: Sequence[int], shape: Sequence[int], keys: int) -> _Four:
    return _tensors(lines, shapes_of(len(lines), keys, shape[2], Tiled(shape[0], shape[1], keys)))


@_Operator
def listed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    ids: torch.Tensor,
    bits: torch.Tensor,
    order: torch.Tensor,
    work: torch.Tensor,
    planes: Sequence[int],
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """`masked_attention` on a GPU by the lists of `list_mask`."""
    out = _rows_of_heads(q, v)
    lists = _lists(ids, bits, order, work, planes)
    _attention()(q, k, v, lists, scale, out, None, sinks, softcap)
    return out


@listed_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    return _rows_of_heads(q, v)


@_Operator
def told_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: torch.Tensor,
    ids: torch.Tensor,
    bits: torch.Tensor,
    order: torch.Tensor,
    work: torch.Tensor,
    key_ids: torch.Tensor,
    key_bits: torch.Tensor,
    key_order: torch.Tensor,
    key_work: torch.Tensor,
    planes: Sequence[int],
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`listed_attention` for gradients: also float32 [batch, heads, queries], what these need of
    weights. ``scale`` is positive; gradients of gradients read the mask."""
    out, weights = _rows_of_heads(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)
    lists = _lists(ids, bits, order, work, planes)
    _attention()(q, k, v, lists, scale, out, weights, sinks, softcap)
    return out, weights


@told_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rows_of_heads(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)


@_Operator
def attention_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ids: torch.Tensor,
    bits: torch.Tensor,
    order: torch.Tensor,
    work: torch.Tensor,
    key_ids: torch.Tensor,
    key_bits: torch.Tensor,
    key_order: torch.Tensor,
    key_work: torch.Tensor,
    planes: Sequence[int],
    scale: float,
    softcap: float,
    down: torch.Tensor,
    out: torch.Tensor,
    weights: torch.Tensor,
) -> _Four:
    """The gradients of `told_attention` to q, k and v, ``down`` being that to its first result; and
    the sums of its rows by ``down``, float32 [batch, heads, queries]."""
    dq, dk, dv = (_rows_of_heads(each, each) for each in (q, k, v))
    lists = (
        _lists(ids, bits, order, work, planes),
        _lists(key_ids, key_bits, key_order, key_work, planes),
    )
    given = (q, k, v), lists, scale, (down, out, weights)
    drops = _attention().gradients(*given, (dq, dk, dv), softcap)
    return dq, dk, dv, drops.view_as(weights)


@attention_gradients.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> _Four:
    dq, dk, dv = (_rows_of_heads(each, each) for each in (q, k, v))
    return dq, dk, dv, q.new_empty(q.shape[:3], dtype=torch.float32)


@told_attention.differentiate
def _(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, sinks, mask, *lists, planes, scale, softcap = arguments(ctx)
    wanted = ctx.needs_input_grad[:4]
    if torch.is_grad_enabled():  # somebody asks for gradients of this one
        with sdpa_kernel(SDPBackend.MATH):  # others have none
            made = host.attention(q, k, v, sinks, mask, scale, softcap)
        asked = [each for each, want in zip((q, k, v, sinks), wanted, strict=True) if want]
        grown = iter(torch.autograd.grad(made, asked, dy, create_graph=True))
        found = [next(grown) if want else None for want in wanted]
    else:
        _, weights = results(ctx)
        given = (q, k, v, *lists, planes, scale, softcap, dy, *results(ctx))
        *found, drops = attention_gradients(*given)
        found.append(_to_sinks(sinks, weights, drops) if wanted[3] else None)
    gradients = (one if want else None for one, want in zip(found, wanted, strict=True))
    return *gradients, *(None for _ in (mask, *lists, planes, scale, softcap))


def _to_sinks(sinks: torch.Tensor, weights: torch.Tensor, drops: torch.Tensor) -> torch.Tensor:
    """The gradient to sinks: each takes a share of the weights of all its head's queries."""
    shares = torch.exp2(sinks.float()[:, None] * _LOG2_E - weights)
    return -(shares * drops).sum((0, 2)).to(sinks.dtype)


def _lists(
    ids: torch.Tensor,
    bits: torch.Tensor,
    order: torch.Tensor,
    work: torch.Tensor,
    planes: Sequence[int],
) -> Lists:
    batch, heads, rows, shared = planes
    return Lists(ids, bits, order, work, (batch, heads, rows, shared))


def _tensors(like: torch.Tensor, shapes: Any) -> Any:
    """Of int32."""
    return tuple(like.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _rows_of_heads(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Memory for [batch, heads, queries, value_dim] in which heads of a query lie side by side, as
    what follows attention takes them."""
    batch, heads, queries, _ = q.shape
    width = v.shape[-1]
    steps = (queries * heads * width, width, heads * width, 1)
    return q.new_empty_strided((batch, heads, queries, width), steps)


@cache
def _attention() -> CudaMaskedAttention:
    return CudaMaskedAttention(KernelCache(), resolve_target("cuda").isa)
