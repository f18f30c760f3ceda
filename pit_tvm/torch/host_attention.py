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
# What a gathered key takes over what one takes torch, where all see all: CPU time of one thread of
# a Xeon (Sapphire Rapids). In float32 and float16 0.6 to 1.1, for heads of 32 to 256 columns;
# beside products by AMX 0.97, 1.5, 2.3 and 2.9 for 32, 64, 128 and 256 columns: as if these took
# torch a quarter of the time, and the rest that of 26.
_PACE = 1.1
_AMX_FIXED, _AMX_COLUMN = 26.0, 0.24
_SUNK_PACE = 0.5  # torch has no sinks: scores are written and read several times
_MORE = 8  # queries of each head that torch could meet in the time that it takes beside them


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """``softmax(scale * q @ k.T) @ v`` over the keys of a mask, [batch or 1, heads or 1, queries or
    1, keys], zeros for queries that see none: ``out`` [batch, heads, queries, value_dim], or memory
    like it. ``scale`` is positive; beside the scores of a head stands its sink, if there are any.
    Scores that ``softcap``, other than 0, bounds are of all keys.
    """
    batch, heads, queries, dim = q.shape
    keys, width, seeing = k.shape[2], dim + v.shape[-1], False
    many = batch * heads * queries * keys * width >= _MANY
    if many and v.shape[-1] and not softcap and not Threads.lost:
        attend = _gathered()
        lists = attend.lists(_rows(mask.view(torch.uint8)), queries, heads // k.shape[1])
        pairs = attend.pairs(lists, (batch, heads, queries))
        pace = _SUNK_PACE if sinks is not None else _pace(q.dtype, width)
        if pairs * pace < batch * heads * (queries + _MORE) * keys:
            sunk = None if sinks is None else _rows(sinks.float())
            attend(_rows(q), _rows(k), _rows(v), lists, scale, out, sunk)
            return out
        seeing = lists.seeing
    made = host.attention(q, k, v, sinks, mask, scale, softcap, seeing)
    return made if made.stride() == out.stride() else out.copy_(made)


@cache
def _pace(dtype: torch.dtype, width: int) -> float:
    """How long gathering a key takes, over what it takes torch; ``width``: columns of keys and
    values."""
    has = {
        torch.bfloat16: torch.cpu._is_amx_tile_supported,
        torch.float16: torch.cpu._is_amx_fp16_supported,
    }
    if dtype not in has or not has[dtype]():
        return _PACE
    return max(_PACE, width / (2 * _AMX_FIXED + _AMX_COLUMN * width))


def _rows(array: torch.Tensor) -> torch.Tensor:
    """The tensor as compiled functions take it: a copy if elements of its rows lie apart."""
    plain = array.detach().resolve_neg()
    if plain.stride(-1) != 1 or plain.data_ptr() % plain.itemsize:
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain


@cache
def _gathered() -> MaskedAttention:
    return MaskedAttention(KernelCache(), resolve_target("llvm"))
