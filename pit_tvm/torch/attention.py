"""Attention by a mask that may be new at every call."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from ..errors import DTypeError, ShapeError, mismatch
from ..schedules.cuda_attention_gradients import MOST_WIDE_GRADIENT
from . import attention_ops
from .arguments import autocast, check_same_device, check_tensors, check_type
from .dispatch import differentiated
from .host import attention
from .listed_mask import ListedMask, check_mask, listed, planes_of

ON_CUDA = (torch.float16, torch.bfloat16)
TYPES = (*ON_CUDA, torch.float32)


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | ListedMask,
    *,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """``softmax(scale * q @ k.T) @ v`` over the keys that ``mask`` lets each query see.

    As ``torch.nn.functional.scaled_dot_product_attention`` with a boolean mask, of which any
    pattern may be new at every call: windows with keys that all see, packed documents, blocks,
    keys picked by a model. On CUDA every 64 queries gather the keys that any of them sees, so the
    work is that of live columns of 64 x 1; the list is made on the device, by one pass over the
    mask (PIT, SOSP'23, section 3). Without gradients, the 64 are those of several heads where these
    share keys and the mask: 8 queries of 8 heads, and only their keys. Gradients take lists of 64
    queries of one head, and of the queries that see every 64 keys. On CPUs tiles have 32 rows (16
    with AVX2), of up to 4 heads that share keys and the mask, or more of few queries. They gather
    where that promises to take less time than torch's attention of all keys: of float32 and float16
    if tiles see at most some 90 % of all keys, of bfloat16 on chips with AMX 65 % (64 columns) or
    44 % (128), with sinks or softcap always; but not in calls that take torch less than 0.1 ms.
    Otherwise, and for all gradients on CPUs and those of heads wider than 128, torch computes it of
    all keys.

    Parameters
    ----------
    q, k, v
        ``[batch, heads, queries, dim]``, ``[batch, kv_heads, keys, dim]`` and ``[batch, kv_heads,
        keys, value_dim]``; kv_heads divides heads. float16 or bfloat16, on CPUs float32 as well.
        Heads are at most 256 wide on CUDA (above 128 that takes the shared memory of an A100 or a
        later chip of its kind). Best where columns are contiguous and multiples of 8: others are
        copied.
    mask
        bool, of a shape that broadcasts to ``[batch, heads, queries, keys]``: True where a query
        sees a key. Or what `list_mask` gave, where layers share a mask.
    scale
        Of the scores; ``1 / sqrt(dim)`` if None.
    sinks
        ``[heads]``, float32, float16 or bfloat16: for every head the score, as it is, of one more
        key that all its queries see and whose value is 0, as GPT-OSS has it. Gradients go to them
        as well.
    softcap
        A positive number that scores, once they are scaled, come close to: they become ``softcap *
        tanh(score / softcap)``, as Gemma 2 has it.

    Returns
    -------
    ``[batch, heads, queries, value_dim]`` of the type of ``q``: zeros for queries that see no key.
    Heads of a query lie side by side in memory.

    Raises
    ------
    ShapeError, DTypeError
        An argument does not fit.
    """
    lists, plain = (mask, mask.mask) if isinstance(mask, ListedMask) else (None, mask)
    check_tensors({"q": q, "k": k, "v": v, "mask": plain})
    q, k, v = autocast(q, k, v)
    check_same_device(q, {"k": k, "v": v, "mask": plain}, "q")
    _check(q, k, v)
    sinks = checked_sinks(sinks, q)
    factor, cap = checked_scale(scale, q.shape[-1]), checked_softcap(softcap)
    if lists is None:
        check_mask(plain)
        plain = planes_of(plain, q.shape[:3], k.shape[2])
    else:
        lists.check(q, k.shape[2])
    if factor <= 0:  # kernels, torch's as well, look for the largest score before they scale
        q, factor = (-q, -factor) if factor else (q * 0, 1.0)
    if differentiated(q, k, v, sinks):
        return _differentiated(q, k, v, sinks, plain, lists, factor, cap)
    if lists is None or lists.queries is None:
        out: torch.Tensor = attention_ops.masked_attention(q, k, v, sinks, plain, factor, cap)
    else:
        out = attention_ops.listed_attention(q, k, v, sinks, *lists.queries, factor, cap)
    return out


def _differentiated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: torch.Tensor,
    lists: ListedMask | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """`masked_attention` where gradients may be asked for."""
    if not (has_gradients(q, v) and q.numel() and k.numel()):
        return attention(q, k, v, sinks, mask, scale, softcap)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    own = lists or listed(mask, shape, gradients=True, kv_heads=k.shape[1])
    if own.queries is None or own.keys is None:
        advice = "list_mask(mask, shape, gradients=True)"
        raise ShapeError(mismatch("mask", "lists for gradients", "lists without", advice))
    both = *own.queries[:4], *own.keys[:4], own.queries.planes
    out: torch.Tensor = attention_ops.told_attention(q, k, v, sinks, mask, *both, scale, softcap)[0]
    return out


def has_gradients(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether lists serve gradients as well."""
    return q.is_cuda and max(q.shape[-1], v.shape[-1]) <= MOST_WIDE_GRADIENT


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    types = ON_CUDA if q.is_cuda else TYPES
    if q.dtype not in types:
        raise DTypeError(mismatch("q", f"one of {', '.join(map(str, types))}", q.dtype))
    for name, each in (("k", k), ("v", v)):
        check_type(name, each, q, q.dtype, "q")
    for name, each in (("q", q), ("k", k), ("v", v)):
        if each.dim() != 4:
            expected = "[batch, heads, rows, columns]"
            raise ShapeError(mismatch(name, expected, tuple(each.shape)))
    batch, heads, _, dim = q.shape
    shape = batch, k.shape[1], k.shape[2], dim
    divides = heads % k.shape[1] == 0 if k.shape[1] else heads == 0
    if tuple(k.shape) != shape or not divides:
        expected = f"[{batch}, a divisor of {heads}, keys, {dim}], as q"
        raise ShapeError(mismatch("k", expected, tuple(k.shape)))
    if v.shape[:3] != k.shape[:3]:
        expected = f"[{', '.join(map(str, k.shape[:3]))}, columns], as k"
        raise ShapeError(mismatch("v", expected, tuple(v.shape)))
    if not dim:
        raise ShapeError(mismatch("q", "at least one column", tuple(q.shape)))


def checked_sinks(sinks: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Contiguous, as kernels read them; ShapeError or DTypeError for no sinks of the heads of q."""
    if sinks is None:
        return None
    check_tensors({"sinks": sinks})
    check_same_device(q, {"sinks": sinks}, "q")
    if tuple(sinks.shape) != (q.shape[1],):
        raise ShapeError(mismatch("sinks", f"[{q.shape[1]}], one of a head", tuple(sinks.shape)))
    if sinks.dtype not in TYPES:
        raise DTypeError(mismatch("sinks", f"one of {', '.join(map(str, TYPES))}", sinks.dtype))
    return (sinks if sinks.dtype == q.dtype else sinks.float()).contiguous()


def checked_scale(scale: Any, dim: int) -> float:
    """The scale of scores, that of ``dim`` columns if None; DTypeError for no finite number."""
    if scale is None:
        return 1 / math.sqrt(dim)
    if not _is_finite(scale):
        raise DTypeError(mismatch("scale", "a finite number or None", repr(scale)))
    return float(scale)


def checked_softcap(softcap: Any) -> float:
    """What bounds scores, 0 for None; DTypeError for no positive number."""
    if softcap is None:
        return 0.0
    if not _is_finite(softcap) or not softcap > 0:
        raise DTypeError(mismatch("softcap", "a positive number or None", repr(softcap)))
    return float(softcap)


def _is_finite(value: Any) -> bool:
    # `math.isfinite` knows neither symbols of compilers nor whole numbers beyond every float.
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max
