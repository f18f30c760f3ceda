"""Attention by a mask that may be new at every call."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from ..errors import BackendUnavailable, DTypeError, ShapeError, mismatch
from ..schedules.cuda_attention_gradients import MOST_WIDE_GRADIENT
from ..schedules.cuda_listed_rows import MOST_WIDE
from . import attention_ops
from .arguments import autocast, check_same_device, check_tensors, check_type
from .dispatch import differentiated
from .host import attention, sunk_attention
from .listed_mask import (
    ListedMask,
    check_mask,
    listed,
    planes_of,
    share_lists,
    shared_lists,
)

_ON_CUDA = (torch.float16, torch.bfloat16)
_TYPES = (*_ON_CUDA, torch.float32)
_UNKNOWN = "position_bias", "softcap"  # what layers of transformers may ask for, and we have not
_LEAVE = "leave attn_implementation as it is"
# Elements of keys from which on a single query gains more on the device than it takes of the host.
_MANY = 2**25


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | ListedMask,
    *,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale * q @ k.T) @ v`` over the keys that ``mask`` lets each query see.

    As ``torch.nn.functional.scaled_dot_product_attention`` with a boolean mask, of which any
    pattern may be new at every call: windows with keys that all see, packed documents, blocks,
    keys picked by a model. On CUDA every 64 queries gather the keys that any of them sees, so the
    work is that of live columns of 64 x 1; the list is made on the device, by one pass over the
    mask (PIT, SOSP'23, section 3). Without gradients, the 64 are those of several heads where these
    share keys and the mask: 8 queries of 8 heads, and only their keys. Gradients take lists of 64
    queries of one head, and of the queries that see every 64 keys. On CPUs, and for gradients of
    heads wider than 128, torch computes it of all keys.

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
    sinks = _checked_sinks(sinks, q)
    factor = _checked_scale(scale, q.shape[-1])
    if lists is None:
        check_mask(plain)
        plain = planes_of(plain, q.shape[:3], k.shape[2])
    else:
        lists.check(q, k.shape[2])
    if factor <= 0:  # kernels, torch's as well, look for the largest score before they scale
        q, factor = (-q, -factor) if factor else (q * 0, 1.0)
    if differentiated(q, k, v, sinks):
        return _differentiated(q, k, v, sinks, plain, lists, factor)
    if lists is None or lists.queries is None:
        out: torch.Tensor = attention_ops.masked_attention(q, k, v, sinks, plain, factor)
    else:
        out = attention_ops.listed_attention(q, k, v, sinks, *lists.queries, factor)
    return out


def _differentiated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: torch.Tensor,
    lists: ListedMask | None,
    scale: float,
) -> torch.Tensor:
    """`masked_attention` where gradients may be asked for."""
    if not (_has_gradients(q, v) and q.numel() and k.numel()):
        return attention(q, k, v, sinks, mask, scale)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    own = lists or listed(mask, shape, gradients=True, kv_heads=k.shape[1])
    if own.queries is None or own.keys is None:
        advice = "list_mask(mask, shape, gradients=True)"
        raise ShapeError(mismatch("mask", "lists for gradients", "lists without", advice))
    both = *own.queries[:4], *own.keys[:4], own.queries.planes
    out: torch.Tensor = attention_ops.told_attention(q, k, v, sinks, mask, *both, scale)[0]
    return out


def _has_gradients(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether lists serve gradients as well."""
    return q.is_cuda and max(q.shape[-1], v.shape[-1]) <= MOST_WIDE_GRADIENT


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    types = _ON_CUDA if q.is_cuda else _TYPES
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


def _checked_sinks(sinks: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Contiguous, as kernels read them."""
    if sinks is None:
        return None
    check_tensors({"sinks": sinks})
    check_same_device(q, {"sinks": sinks}, "q")
    if tuple(sinks.shape) != (q.shape[1],):
        raise ShapeError(mismatch("sinks", f"[{q.shape[1]}], one of a head", tuple(sinks.shape)))
    if sinks.dtype not in _TYPES:
        raise DTypeError(mismatch("sinks", f"one of {', '.join(map(str, _TYPES))}", sinks.dtype))
    return (sinks if sinks.dtype == q.dtype else sinks.float()).contiguous()


def _checked_scale(scale: Any, dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(dim)
    # `math.isfinite` knows neither symbols of compilers nor whole numbers beyond every float.
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not number or not abs(scale) <= sys.float_info.max:
        raise DTypeError(mismatch("scale", "a finite number or None", repr(scale)))
    return float(scale)


def register_attention(name: str = "pit_tvm") -> None:
    """Make `attention_forward` known to transformers, for ``model.set_attn_implementation(name)``
    and ``from_pretrained(..., attn_implementation=name)``.

    Layers that get one mask share its lists, where they are neither compiled nor captured. Where
    transformers has no attention by torch for a model, layers get masks of numbers, and its own.

    Raises
    ------
    BackendUnavailable
        transformers is missing, or has no interface of attention.
    """
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        advice = "pip install 'transformers>=5'"
        expected = "a transformers with an interface of attention"
        got = mismatch("register_attention", expected, str(error), advice)
        raise BackendUnavailable(got) from error
    ALL_ATTENTION_FUNCTIONS.register(name, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, _shared_mask)


def _shared_mask(*args: Any, **options: Any) -> torch.Tensor | None:
    """The mask of a model's layers, as transformers makes it for torch's attention; as numbers to
    add where it has none for a model, whose other layers may add them."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    mask: torch.Tensor | None
    config = options.get("config")
    name = type(config).__module__.replace("configuration_", "modeling_")
    if not _supports(name, "sdpa"):
        options["allow_is_bidirectional_skip"] = options["allow_is_causal_skip"] = False
        if not _supports(name, "flash_attn", "flex_attn"):  # which take no mask to add
            mask = eager_mask(*args, **options)
            return mask
    if getattr(config, "num_kv_shared_layers", 0) and options.get("q_length") != 1:
        # Gemma 4 asks later layers about its last tokens alone, whose keys only a mask tells: what
        # transformers does without one it does where it knows the name of the attention.
        options["allow_is_causal_skip"] = False
    mask = sdpa_mask(*args, **options)
    if mask is not None:
        share_lists(mask)
    return mask


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer of transformers: `masked_attention` where a boolean mask says what is
    seen by several queries, or by one of a great many keys, else transformers' own by
    ``scaled_dot_product_attention``, which also has dropout, biases, a flag for causal attention
    without a mask, and gradients where lists have none. With sinks (``s_aux=``, as of GPT-OSS) one
    query of any keys is enough, and all else is computed as transformers' eager attention has it.
    Of ``indices=`` (DeepSeek-V3.2), keys that a query picked by their places, it sees no others.

    Parameters and result are those of transformers' attention functions.

    Raises
    ------
    DTypeError
        The layer picks blocks of keys by their places, which neither computes, or has both sinks
        and a bias or capped scores; or it has no mask and does not say whether it is causal, in a
        model that transformers has no attention by torch for.
    """
    if kwargs.get("block_indices") is not None:
        expected = "one without blocks of keys picked by their places"
        raise DTypeError(mismatch("attention", expected, "block_indices=", _LEAVE))
    if (indices := kwargs.pop("indices", None)) is not None:
        attention_mask = _picked(attention_mask, indices, key.shape[2])
    given = query, key, value
    for name in ("s_aux", "sinks"):
        if kwargs.get(name) is not None:
            out = _sunk(module, *given, attention_mask, dropout, scaling, kwargs, name)
            return out.transpose(1, 2).contiguous(), None
    few = query.shape[2] == 1 and not (query.is_cuda and key.numel() >= _MANY)
    if attention_mask is None or few or not _takes(*given, attention_mask, dropout, kwargs):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        said = attention_mask is not None or hasattr(module, "is_causal") or "is_causal" in kwargs
        if not said and not _supports(type(module).__module__, "sdpa"):
            expected = "a mask, or a layer that says whether it is causal"
            raise DTypeError(mismatch("attention", expected, type(module).__name__, _LEAVE))
        options = {"dropout": dropout, "scaling": scaling, **kwargs}
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, *given, attention_mask, **options
        )
        return found
    seen = _shared_lists(*given, attention_mask)
    out = masked_attention(query, key, value, seen, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _shared_lists(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor | ListedMask:
    shape = (*q.shape[:3], k.shape[2])
    wants = differentiated(q, k, v, *others)
    return shared_lists(mask, shape, wants, kv_heads=k.shape[1])


def _picked(mask: torch.Tensor | None, indices: torch.Tensor, keys: int) -> torch.Tensor:
    """The mask, of the first ``keys``, without what a query [batch, queries, picks] did not pick,
    as transformers has it for attention by torch."""
    others = indices.new_ones((*indices.shape[:2], keys), dtype=torch.bool)
    others = others.scatter_(-1, indices.long(), False)[:, None]
    if mask is None:
        return ~others
    mask = mask[..., :keys]
    if mask.dtype is torch.bool:
        return mask & ~others
    return mask.masked_fill(others, torch.finfo(mask.dtype).min)


def _sunk(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scale: float | None,
    others: Mapping[str, Any],
    name: str,
) -> torch.Tensor:
    """`attention_forward` with the sinks of this name."""
    for beside in _UNKNOWN:
        if others.get(beside) is not None:
            expected, got = f"one without {beside}= beside {name}=", f"{beside}="
            raise DTypeError(mismatch("attention", expected, got, _LEAVE))
    sinks: torch.Tensor = others[name]
    if mask is None:
        causal = q.shape[2] > 1 and others.get("is_causal", getattr(module, "is_causal", True))
        mask = q.new_ones((q.shape[2] if causal else 1, k.shape[2]), dtype=torch.bool)
        mask = mask.tril(k.shape[2] - q.shape[2]) if causal else mask
    mask = mask[..., : k.shape[2]]
    if _takes(q, k, v, mask, dropout, others):
        seen = _shared_lists(q, k, v, mask, sinks)
        return masked_attention(q, k, v, seen, scale=scale, sinks=sinks)
    factor = _checked_scale(scale, q.shape[-1])
    return sunk_attention(q, k, v, sinks, mask, factor, dropout)


@cache
def _supports(name: str, *kinds: str) -> bool:
    """Whether transformers has attention of one of the kinds for models of the module of this name.
    Layers of those without attention by torch may not say whether they are causal, which it reads
    where there is no mask."""
    from transformers import PreTrainedModel

    named = vars(sys.modules.get(name, sys)).values()
    models = [one for one in named if isinstance(one, type) and issubclass(one, PreTrainedModel)]
    own = [one for one in models if one is not PreTrainedModel]
    return not own or any(getattr(one, f"_supports_{kind}") for one in own for kind in kinds)


def _takes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    dropout: float,
    others: Mapping[str, Any],
) -> bool:
    """Whether `attention_forward` computes this, and not transformers."""
    return (
        mask.dtype is torch.bool
        and not dropout
        and all(others.get(one) is None for one in _UNKNOWN)
        and (_has_gradients(q, v) or not differentiated(q, k, v))
        and q.dtype in (_ON_CUDA if q.is_cuda else _TYPES)
        and q.shape[0] == k.shape[0]  # torch repeats a single sequence
        and max(q.shape[-1], v.shape[-1]) <= MOST_WIDE
    )
