"""Operators of torch that write to places along a dimension, or look for them, as comparisons.

Loops of TVM for these read and write wherever an index says, so that nothing could be proven of
them; here every place asks which index, or bound, is its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _own(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Which of the indices along ``dim``, here the last one, is that of each place of ``x``."""
    dim %= x.dim()
    places = torch.arange(x.shape[dim], device=x.device).reshape(-1, *[1] * (x.dim() - dim))
    return index.movedim(dim, -1).unsqueeze(dim) == places


def _fits(x: Tensor, dim: int, index: Tensor, *others: Tensor) -> bool:
    """Whether shapes are one but for an index's extent along ``dim``; torch admits smaller ones."""
    dim %= max(x.dim(), 1)
    shapes = [list(one.shape) for one in (x, index, *others)]
    if not x.dim() or any(len(shape) != x.dim() for shape in shapes):
        return False
    ours = [[*shape[:dim], *shape[dim + 1 :]] for shape in shapes]
    same = all(str(one) == str(ours[0]) for one in ours)
    return same and all(str(one.shape) == str(index.shape) for one in others)


def _scatter_number(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    if not _fits(x, dim, index):
        return NotImplemented
    return torch.where(_own(x, dim, index).any(-1), value, x).to(x.dtype)


def _scatter(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    """Of several for one place the last, as torch's on CPUs."""
    if not _fits(x, dim, index, src):
        return NotImplemented
    own = _own(x, dim, index)
    last = torch.where(own, torch.arange(index.shape[dim], device=x.device), -1).amax(-1)
    found = src.gather(dim, last.clamp(min=0))
    return torch.where(last >= 0, found, x)


def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    if not _fits(x, dim, index, src):
        return NotImplemented
    dim %= x.dim()
    given = torch.where(_own(x, dim, index), src.movedim(dim, -1).unsqueeze(dim), 0)
    return (x + given.sum(-1)).to(x.dtype)


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    if not x.dim():
        return NotImplemented
    extent = x.shape[dim]
    index = torch.where(index < 0, index + extent, index).reshape(-1)
    filled = (torch.arange(extent, device=x.device)[:, None] == index).any(-1)
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.where(filled.reshape(shape), value, x).to(x.dtype)


def _one_hot(index: Tensor, num_classes: int = -1) -> Any:
    if num_classes < 0:  # as many as the largest says
        return NotImplemented
    return (index.unsqueeze(-1) == torch.arange(num_classes, device=index.device)).long()


def _bucket(x: Tensor, bounds: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """How many bounds lie below, or at (``right``), each number; all of them below NaN."""
    x, bounds = x.unsqueeze(-1), bounds.unsqueeze(-2) if bounds.dim() > 1 else bounds
    before = ~(bounds > x if right else bounds >= x)
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _search(
    bounds: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:
    if sorter is not None:
        return NotImplemented
    return _bucket(x, bounds, out_int32=out_int32, right=right or side == "right")


def _unfold(x: Tensor, dim: int, size: int, step: int) -> Any:
    if not x.dim():
        return NotImplemented
    dim %= x.dim()
    first = torch.arange((x.shape[dim] - size) // step + 1, device=x.device) * step
    places = first[:, None] + torch.arange(size, device=x.device)
    return x[(slice(None),) * dim + (places,)].movedim(dim + 1, -1)


_ATEN = torch.ops.aten
BY_PLACES = {
    _ATEN.scatter.value: _scatter_number,
    _ATEN.scatter.src: _scatter,
    _ATEN.scatter_add.default: _scatter_add,
    _ATEN.index_fill.int_Scalar: _index_fill,
    _ATEN.index_fill.int_Tensor: _index_fill,
    _ATEN.one_hot.default: _one_hot,
    _ATEN.bucketize.Tensor: _bucket,
    _ATEN.searchsorted.Tensor: _search,
    _ATEN.unfold.default: _unfold,
}
