"""Attention by masks on a CPU: of gathered keys, or torch's own of all keys, whichever promises to
take less time."""

from __future__ import annotations

from functools import cache

import torch

from ..forks import Threads
from ..runtime.kernel_cache import KernelCache
from ..runtime.masked_attention import MaskedAttention
from ..target import resolve_target
from . import host

# Multiplications from which on looking at the mask makes up for waking threads.
_MANY = 2**22


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """``softmax(scale * q @ k.T) @ v`` over the keys of a mask, [batch or 1, heads or 1, queries or
    1, keys], zeros for queries that see none: ``out`` [batch, heads, queries, value_dim], or memory
    like it. ``scale`` is positive; beside the scores of a head stands its sink, if there are any.
    """
    batch, heads, queries, dim = q.shape
    keys, seeing = k.shape[2], False
    many = batch * heads * queries * keys * (dim + v.shape[-1]) >= _MANY
    if many and v.shape[-1] and not Threads.lost:
        attend = _gathered()
        lists = attend.lists(_rows(mask.view(torch.uint8)))
        met = lists.met(batch, heads, -(-queries // attend.tile)) * attend.tile
        # Of fewer queries than a tile has torch's products are no faster than of a tile.
        all_of_them = batch * heads * max(queries, attend.tile) * keys
        if met * _pace(q.dtype, sinks is not None) < all_of_them:
            sunk = None if sinks is None else _rows(sinks.float())
            attend(_rows(q), _rows(k), _rows(v), lists, scale, out, sunk)
            return out
        seeing = lists.seeing
    made = host.attention(q, k, v, sinks, mask, scale, seeing)
    return made if made.stride() == out.stride() else out.copy_(made)


@cache
def _pace(dtype: torch.dtype, sinks: bool) -> float:
    """How many keys torch meets while a gathered one is met."""
    if sinks:  # torch writes and reads all scores several times
        return 0.5
    tiles = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return 2.5 if tiles else 1.25


def _rows(array: torch.Tensor) -> torch.Tensor:
    """The tensor as compiled functions take it: a copy if elements of its rows lie apart."""
    plain = array.detach().resolve_neg()
    if plain.stride(-1) != 1 or plain.data_ptr() % plain.itemsize:
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain


@cache
def _gathered() -> MaskedAttention:
    return MaskedAttention(KernelCache(), resolve_target("llvm"))
