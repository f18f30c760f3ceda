"""Operators of torch that write to places along a dimension, or look for them, as comparisons.

Loops of TVM for these read and write wherever an index says, so that nothing could be proven of
them; here every place asks which index, or bound, is its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def _own(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Which of the indices along ``dim``, here the last one, is that of each place of ``x``."""
    dim %= x.dim()
    places = torch.arange(x.shape[dim], device=x.device).reshape(-1, *[1] * (x.dim() - dim))
    return index.movedim(dim, -1).unsqueeze(dim) == places


def _fitted(x: Tensor, dim: int, index: Tensor, *others: Tensor) -> list[Tensor] | None:
    """An index, and tensors beside it that may be larger, with the extents of ``x`` but along
    ``dim``: where the index is smaller, -1 stands, which is no place. None where ranks differ, or
    an unknown number of places has no index."""
    if not x.dim() or any(one.dim() != x.dim() for one in (index, *others)):
        return None
    for at, extent in enumerate(index.shape):  # compared as text, which ties no two of them
        others = tuple(
            one if str(one.shape[at]) == str(extent) else one.narrow(at, 0, extent)
            for one in others
        )
    lacking: list[Any] = []
    for at in reversed(range(x.dim())):
        same = at == dim % x.dim() or str(x.shape[at]) == str(index.shape[at])
        lacking += [0, 0 if same else x.shape[at] - index.shape[at]]
    if not all(isinstance(number, int) for number in lacking):
        return None
    if not any(lacking):
        return [index, *others]
    pad = torch.nn.functional.pad
    return [pad(index, lacking, value=-1), *(pad(one, lacking) for one in others)]


def _scatter_number(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    fitted = _fitted(x, dim, index)
    if fitted is None:
        return NotImplemented
    return torch.where(_own(x, dim, *fitted).any(-1), value, x).to(x.dtype)


def _scatter(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    """Of several for one place the last, as torch's on CPUs."""
    fitted = _fitted(x, dim, index, src)
    if fitted is None:
        return NotImplemented
    index, src = fitted
    own = _own(x, dim, index)
    last = torch.where(own, torch.arange(index.shape[dim], device=x.device), -1).amax(-1)
    found = src.gather(dim, last.clamp(min=0))
    return torch.where(last >= 0, found, x)


def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    fitted = _fitted(x, dim, index, src)
    if fitted is None:
        return NotImplemented
    index, src = fitted
    dim %= x.dim()
    given = torch.where(_own(x, dim, index), src.movedim(dim, -1).unsqueeze(dim), 0)
    return (x + given.sum(-1)).to(x.dtype)


def _index_add(x: Tensor, dim: int, index: Tensor, src: Tensor, *, alpha: Any = 1) -> Any:
    if not x.dim():
        return NotImplemented
    shape = [1] * x.dim()
    shape[dim] = -1
    src = src if alpha == 1 else src * alpha
    return _scatter_add(x, dim, index.reshape(shape).expand_as(src), src)


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    if not x.dim():
        return NotImplemented
    extent = x.shape[dim]
    index = torch.where(index < 0, index + extent, index).reshape(-1)
    filled = (torch.arange(extent, device=x.device)[:, None] == index).any(-1)
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.where(filled.reshape(shape), value, x).to(x.dtype)


def _put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """``x[mask] = values``, the same wherever the mask says so."""
    (mask, *others), rest = indices, x.dim() - (indices[0].dim() if indices[0] is not None else 0)
    if accumulate or others or mask is None or mask.dtype != torch.bool or values.dim() > rest:
        return NotImplemented
    return torch.where(mask.reshape(*mask.shape, *[1] * rest), values, x).to(x.dtype)


def _assign(
    x: Tensor,
    src: Tensor,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> Any:
    """``x[start:end:step] = src`` along a dimension of any extent."""
    if str(src.shape) == str(x.shape):
        return src.to(x.dtype)
    extent = x.shape[dim]
    if isinstance(extent, int):
        if step != 1 or not all(isinstance(place, int | None) for place in (start, end)):
            return NotImplemented
        first, last, _ = slice(start, end).indices(extent)
        last = max(first, last)
        parts = x.narrow(dim, 0, first), src, x.narrow(dim, last, extent - last)
        return torch.cat([part.to(x.dtype) for part in parts if part.shape[dim]], dim)
    start = 0 if start is None else start
    start = start + extent if isinstance(start, int) and start < 0 else start
    after = torch.arange(extent, device=x.device) - start
    number = src.shape[dim]
    own = (after >= 0) & (after < number * step) & (after % step == 0)
    found = src.index_select(dim, (after // step).clamp(0, number - 1))
    return torch.where(own.reshape(-1, *[1] * (x.dim() - dim % x.dim() - 1)), found, x).to(x.dtype)


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
    return _windows(x, dim, size, step, 1) if x.dim() else NotImplemented


def _windows(x: Tensor, dim: int, size: int, step: int, apart: int) -> Tensor:
    """Windows of so many places ``apart`` along ``dim``, these last."""
    dim %= x.dim()
    number = (x.shape[dim] - apart * (size - 1) - 1) // step + 1
    first = torch.arange(number, device=x.device) * step
    places = first[:, None] + torch.arange(size, device=x.device) * apart
    return x[(slice(None),) * dim + (places,)].movedim(dim + 1, -1)


def _patches(
    x: Tensor, size: list[int], dilation: list[int], padding: list[int], stride: list[int]
) -> Tensor:
    """``[..., channels * size, number]`` of images ``[..., channels, height, width]``."""
    (high, wide), (down, right) = size, padding
    x = torch.nn.functional.pad(x, (right, right, down, down))
    x = _windows(x, -2, high, stride[0], dilation[0])
    x = _windows(x, -2, wide, stride[1], dilation[1])
    return x.movedim((-2, -1), (-4, -3)).flatten(-2).flatten(-4, -2)


def _kth(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest, NaN above all others, and its place."""
    if not x.dim():
        return NotImplemented
    found = [one.narrow(dim, k - 1, 1) for one in x.sort(dim)]
    return tuple(found if keepdim else [one.squeeze(dim) for one in found])


def _up_to(x: Tensor, dim: int, other: Any) -> tuple[Tensor, Tensor]:
    """For each place along ``dim``, along the last dimension: whether one is before it, or itself,
    and what stands there, ``other`` where not."""
    dim %= x.dim()
    places = torch.arange(x.shape[dim], device=x.device)
    before = places <= places.reshape(-1, *[1] * (x.dim() - dim))
    return before, torch.where(before, x.movedim(dim, -1).unsqueeze(dim), other)


def _running(name: str) -> Any:
    """The largest or smallest up to each place, NaN once there was any, and where it was last."""

    def found(x: Tensor, dim: int) -> Any:
        if not x.dim() or x.dtype == torch.bool:
            return NotImplemented
        if x.is_floating_point():
            least, most = -math.inf, math.inf
        else:
            least, most = torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max
        before, seen = _up_to(x, dim, least if name == "amax" else most)
        values = getattr(torch, name)(seen, -1)
        own = before & ((seen == values[..., None]) | seen.isnan())
        places = torch.arange(x.shape[dim], device=x.device)
        return values, torch.where(own, places, -1).amax(-1)

    return found


def _log_sums(x: Tensor, dim: int) -> Any:
    """The logarithms of the sums of exponentials up to each place."""
    if not x.dim():
        return NotImplemented
    return _up_to(x, dim, -math.inf)[1].logsumexp(-1)


_ATEN = torch.ops.aten
BY_PLACES = {
    _ATEN.scatter.value: _scatter_number,
    _ATEN.scatter.src: _scatter,
    _ATEN.scatter_add.default: _scatter_add,
    _ATEN.index_add.default: _index_add,
    _ATEN.kthvalue.default: _kth,
    _ATEN.cummax.default: _running("amax"),
    _ATEN.cummin.default: _running("amin"),
    _ATEN.logcumsumexp.default: _log_sums,
    _ATEN.index_fill.int_Scalar: _index_fill,
    _ATEN.index_fill.int_Tensor: _index_fill,
    _ATEN.index_put.default: _put,
    _ATEN.slice_scatter.default: _assign,
    _ATEN.one_hot.default: _one_hot,
    _ATEN.bucketize.Tensor: _bucket,
    _ATEN.searchsorted.Tensor: _search,
    _ATEN.unfold.default: _unfold,
    _ATEN.im2col.default: _patches,
}
