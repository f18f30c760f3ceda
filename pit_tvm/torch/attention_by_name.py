"""Attention by masks for models of transformers, by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from ..errors import BackendUnavailable, DTypeError, mismatch
from ..schedules.cuda_listed_rows import MOST_WIDE
from .attention import (
    ON_CUDA,
    TYPES,
    checked_scale,
    checked_sinks,
    checked_softcap,
    has_gradients,
    masked_attention,
)
from .dispatch import differentiated
from .host import scored_attention
from .listed_mask import ListedMask, share_lists, shared_lists

_LEAVE = "leave attn_implementation as it is"
# Elements of keys from which on a single query gains more on the device than it takes of the host.
_MANY = 2**25


def register_attention(name: str = "pit_tvm") -> None:
    """Make `attention_forward` known to transformers, for ``model.set_attn_implementation(name)``
    and ``from_pretrained(..., attn_implementation=name)``.

    Layers that get one mask share its lists, where they are neither compiled nor captured. Where
    transformers has eager attention alone for a model, layers get masks of numbers to add, and are
    computed as there.

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
    """The mask of a model's layers, as transformers makes it for torch's attention, of all layers
    where that is not enough; as numbers to add where layers may add them."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    mask: torch.Tensor | None
    config = options.get("config")
    name = type(config).__module__.replace("configuration_", "modeling_")
    by_torch = _supports(name, "sdpa")
    if not by_torch or getattr(config, "attn_logit_softcapping", None) is not None:
        options["allow_is_bidirectional_skip"] = options["allow_is_causal_skip"] = False
    if not by_torch and not _supports(name, "flash_attn", "flex_attn"):  # take no mask to add
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
    without a mask, and gradients where lists have none. With sinks (``s_aux=``, as of GPT-OSS) or
    capped scores (``softcap=``, as of Gemma 2) one query of any keys is enough, and all else is
    computed as transformers' eager attention has it. A query that picked keys by their places
    (``indices=``, as of DeepSeek-V3.2) or those of blocks (``block_indices=``, MiniMax-M3) sees no
    others.

    Parameters and result are those of transformers' attention functions.

    Raises
    ------
    DTypeError, ShapeError
        The layer has sinks that are not one of each head, or a bias beside sinks or capped scores;
        or it has no mask and does not say whether it is causal, in a model that transformers has no
        attention by torch for.
    """
    given = query, key, value
    picked = _picked(query, key.shape[2], module, kwargs)
    if picked is not None:
        mask = _mask(module, query, key, attention_mask, kwargs)
        if mask.dtype is torch.bool:
            attention_mask = mask & picked
        else:
            attention_mask = mask.masked_fill(~picked, torch.finfo(mask.dtype).min)
    named = (kwargs.get(name) for name in ("s_aux", "sinks"))
    sinks = next((one for one in named if one is not None), None)
    if sinks is not None or kwargs.get("softcap") is not None:
        out = _scored(module, given, attention_mask, dropout, scaling, sinks, kwargs)
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *others: Any
) -> torch.Tensor | ListedMask:
    shape = (*q.shape[:3], k.shape[2])
    wants = differentiated(q, k, v, *others)
    return shared_lists(mask, shape, wants, kv_heads=k.shape[1])


def _picked(
    q: torch.Tensor, keys: int, module: torch.nn.Module, others: dict[str, Any]
) -> torch.Tensor | None:
    """Which keys queries have picked by their places or those of blocks, -1 for none, bool [batch,
    1 or heads, queries, keys], if they do; what says so is taken from the others."""
    indices, blocks = others.pop("indices", None), others.pop("block_indices", None)
    if indices is not None:
        return _at(indices, keys)[:, None]
    if blocks is None:
        return None
    size: int = module.indexer.block_size  # type: ignore[assignment, union-attr]
    seen = _at(blocks, -(-keys // size)).repeat_interleave(size, dim=-1)[..., :keys]
    return seen.repeat_interleave(q.shape[1] // blocks.shape[1], dim=1)


def _at(places: torch.Tensor, extent: int) -> torch.Tensor:
    """bool [.., extent]: True at ``places`` [.., any]."""
    made = places.new_zeros((*places.shape[:-1], extent + 1), dtype=torch.bool)
    there = places.where(places >= 0, extent).long()
    return made.scatter_(-1, there, True)[..., :extent]


def _mask(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    others: Mapping[str, Any],
) -> torch.Tensor:
    """The mask of the layer's keys, made if a flag says what is seen."""
    queries, keys = q.shape[2], k.shape[2]
    if mask is not None:
        return mask[..., :keys]
    if queries > 1 and others.get("is_causal", getattr(module, "is_causal", True)):
        # From the first key on, as transformers has it: later ones are of a cache to be filled.
        return q.new_ones((queries, keys), dtype=torch.bool).tril()
    return q.new_ones((1, keys), dtype=torch.bool)


def _scored(
    module: torch.nn.Module,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    dropout: float,
    scale: float | None,
    sinks: torch.Tensor | None,
    others: Mapping[str, Any],
) -> torch.Tensor:
    """`attention_forward` with sinks or capped scores, which torch's has not."""
    q, k, v = given
    if others.get("position_bias") is not None:
        expected = "one without position_bias= beside sinks or a softcap"
        raise DTypeError(mismatch("attention", expected, "position_bias=", _LEAVE))
    mask, cap = _mask(module, q, k, mask, others), others.get("softcap")
    if _takes(q, k, v, mask, dropout, others):
        seen = _shared_lists(q, k, v, mask, sinks)
        return masked_attention(q, k, v, seen, scale=scale, sinks=sinks, softcap=cap)
    numbers = checked_scale(scale, q.shape[-1]), checked_softcap(cap)
    return scored_attention(q, k, v, checked_sinks(sinks, q), mask, *numbers, dropout)


@torch.compiler.assume_constant_result  # torch.compile would trace all that the module names
def _supports(name: str, *kinds: str) -> bool:
    """Whether transformers has attention of one of the kinds for models of the module of this name.
    Layers of those without attention by torch may not say whether they are causal, which it reads
    where there is no mask."""
    return _has_attention(name, kinds)


@cache
def _has_attention(name: str, kinds: tuple[str, ...]) -> bool:
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
        and others.get("position_bias") is None
        and (has_gradients(q, v) or not differentiated(q, k, v))
        and q.dtype in (ON_CUDA if q.is_cuda else TYPES)
        and q.shape[0] == k.shape[0]  # torch repeats a single sequence
        and max(q.shape[-1], v.shape[-1]) <= MOST_WIDE
    )
