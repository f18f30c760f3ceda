"""Masks whose lists are made once, for the attention of many layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import DTypeError, ShapeError, mismatch
from ..runtime.cuda_listed_mask import Lists, Tiled, tiled_shape
from . import attention_ops
from .arguments import check_tensors


@cache
def _shared() -> WeakTensorKeyDictionary:
    """What `shared_lists` made of each tensor, which goes with it, and not to its copies."""
    return WeakTensorKeyDictionary()


class ListedMask(NamedTuple):
    """What `list_mask` gives: for `pit_tvm.torch.masked_attention` in place of the mask.

    ``mask`` bool [batch or 1, heads or 1, queries or 1, keys] is that of ``shape`` [batch, heads,
    queries, keys], at its ``version``; ``queries`` and ``keys`` are lists of what they see and of
    what sees them, None on CPUs, which take the mask.
    """

    mask: torch.Tensor
    shape: tuple[int, int, int, int]
    version: int
    queries: Lists | None
    keys: Lists | None

    def check(self, q: torch.Tensor, keys: int) -> None:
        """ShapeError if it is of other queries or keys, or the mask has changed; DTypeError if it
        is on another device."""
        given = (*q.shape[:3], keys)
        if given != self.shape:
            raise ShapeError(mismatch("mask", f"one listed for {list(self.shape)}", list(given)))
        if self.mask.device != q.device:
            expected = f"the device of q, {q.device}"
            raise DTypeError(mismatch("mask", expected, self.mask.device))
        if min(now := _version(self.mask), self.version) >= 0 and now != self.version:
            expected, advice = "the mask as it was listed", "call list_mask again"
            got = "one that was changed since, or a copy"
            raise ShapeError(mismatch("mask", expected, got, advice))


def list_mask(
    mask: torch.Tensor,
    shape: Sequence[int],
    *,
    gradients: bool | None = None,
    kv_heads: int | None = None,
) -> ListedMask:
    """Make the lists of a mask, for all calls of `pit_tvm.torch.masked_attention` that share it.

    Parameters
    ----------
    mask
        bool, of a shape that broadcasts to ``shape``: True where a query sees a key. It may not be
        changed while the lists are in use.
    shape
        ``(batch, heads, queries, keys)``.
    gradients
        Whether calls want gradients: lists of the queries that see keys are made as well. None:
        if gradients are enabled now.
    kv_heads
        Heads of keys, if they are fewer: without gradients, lists are made for heads that share
        keys, and fit calls in which so many do.

    Raises
    ------
    ShapeError, DTypeError
        An argument does not fit.
    """
    check_tensors({"mask": mask})
    check_mask(mask)
    batch, heads, queries, keys = _checked_shape(shape)
    seen = planes_of(mask, (batch, heads, queries), keys)
    wants = torch.is_grad_enabled() if gradients is None else gradients
    shared = heads if kv_heads is None else kv_heads
    divides = _is_extent(shared) and (heads % shared == 0 if shared else heads == 0)
    if kv_heads is not None and not divides:
        raise ShapeError(mismatch("kv_heads", f"a divisor of {heads}", repr(kv_heads)))
    return listed(seen, (batch, heads, queries, keys), wants, shared)


def listed(
    planes: torch.Tensor, shape: tuple[int, int, int, int], gradients: bool, kv_heads: int
) -> ListedMask:
    """`list_mask` of `planes_of` a mask."""
    *own, keys = shape
    number = planes.shape[0], planes.shape[1]
    found, across = None, None
    if planes.is_cuda:
        # Kernels of gradients take heads as they are.
        tiled = Tiled(*own) if gradients else tiled_shape(shape, kv_heads, planes.shape[:3])
        ids, bits, order, work, lines = attention_ops.list_mask(planes, tiled)
        found = Lists(ids, bits, order, work, (*number, planes.shape[2], tiled.shared))
        if gradients:
            ids, bits, order, work = attention_ops.list_keys(lines, number, own, keys)
            across = Lists(ids, bits, order, work, (*number, keys, 1))
    return ListedMask(planes, shape, _version(planes), found, across)


def share_lists(mask: torch.Tensor) -> None:
    """Let calls of `shared_lists` of this tensor, which nobody changes, share what they make."""
    if not _is_traced(mask):
        _shared()[mask] = {}


def shared_lists(
    mask: torch.Tensor, shape: tuple[int, int, int, int], gradients: bool, kv_heads: int
) -> torch.Tensor | ListedMask:
    """The lists of a mask's first keys, if calls share them; else these as they are. As `listed`.

    A graph that is captured holds what makes its own lists: it may be replayed with other masks.
    """
    seen = mask[..., : shape[3]]
    if _is_traced(mask) or mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return seen
    shared: dict[Any, Any] | None = _shared().get(mask)
    if shared is None:
        return seen
    planes, key = planes_of(seen, shape[:3], shape[3]), (shape, gradients, kv_heads)
    if key not in shared or shared[key][0] != _version(mask):
        # Without the planes: a view keeps its tensor, which would never go.
        shared[key] = listed(planes, shape, gradients, kv_heads)[2:]
    return ListedMask(planes, shape, *shared[key])


def _is_traced(mask: torch.Tensor) -> bool:
    """Whether compilers or tracers look at calls, each by itself, or the mask stands for others."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return traced or type(mask) is not torch.Tensor


def check_mask(mask: torch.Tensor) -> None:
    """DTypeError if it is not boolean."""
    if mask.dtype is not torch.bool:
        advice = "True where a query sees a key: convert it with mask > -1, mask != 0 or alike"
        raise DTypeError(mismatch("mask", "bool", mask.dtype, advice))


def planes_of(mask: torch.Tensor, shape: Sequence[int], keys: int) -> torch.Tensor:
    """The mask as [batch or 1, heads or 1, queries or 1, keys], of which nothing is repeated that
    it repeats, for sequences, heads and queries, ``shape``; ShapeError if it does not fit."""
    wanted = (*shape, keys)
    fits = mask.dim() <= 4 and all(
        have in (1, want)
        for have, want in zip(reversed(mask.shape), reversed(wanted), strict=False)
    )
    if not fits:
        expected = f"a shape that broadcasts to {list(wanted)}"
        raise ShapeError(mismatch("mask", expected, tuple(mask.shape)))
    planes = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    for at in range(3):  # what `expand` repeats
        if planes.stride(at) == 0 and planes.shape[at] > 1:
            planes = planes.narrow(at, 0, 1)
    return planes if planes.shape[3] == keys else planes.expand(*planes.shape[:3], keys)


def _checked_shape(shape: Sequence[int]) -> tuple[int, int, int, int]:
    extents = tuple(shape) if isinstance(shape, (tuple, list)) else ()
    if len(extents) != 4 or not all(map(_is_extent, extents)):
        raise ShapeError(mismatch("shape", "(batch, heads, queries, keys)", shape))
    return extents


def _is_extent(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and value >= 0


def _version(mask: torch.Tensor) -> int:
    """How often the mask has been changed; -1 where torch does not tell."""
    if torch.compiler.is_compiling() or mask.is_inference():
        return -1
    return mask._version
