"""Rows of heads as kernels take them, which copy 16 bytes at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

from .cuda_view import CudaView

_PIECE = 8  # elements of 16 bits in 16 bytes
_FAR = 2**31 * _PIECE  # elements from the first row to the last: kernels count pieces in 32 bits


def fits(rows: Any, heads: int = 1) -> bool:
    """Whether rows consist of whole pieces, and begin where these do that kernels can count from
    the first of so many heads on."""
    *steps, last = rows.stride()
    *extents, width = rows.shape
    apart = width | rows.data_ptr() // 2
    for step, extent in zip(steps, extents, strict=True):
        if extent > 1:
            apart |= step
    far = (rows.shape[2] - 1) * rows.stride(2) + (heads - 1) * rows.stride(1) >= _FAR
    return bool(last == 1 and apart % _PIECE == 0 and not far)


def in_pieces(rows: Any, heads: int = 1) -> Any:
    """The rows, or a copy of them with zeros behind their columns, if they do not `fits`."""
    if fits(rows, heads):
        return rows
    width = rows.shape[-1]
    copy = rows.new_zeros((*rows.shape[:-1], width + -width % _PIECE))
    copy[..., :width] = rows
    return copy


def room_for(rows: Any, heads: int) -> Any:
    """Memory for rows of so many heads in whole pieces: ``rows`` itself where that can be."""
    batch, own, number, width = rows.shape
    if own == heads and fits(rows):
        return rows
    return rows.new_empty((batch, heads, number, width + -width % _PIECE))


def fill_from(rows: Any, made: Any) -> None:
    """Write what was made in `room_for` the rows, summed over heads that share one of theirs."""
    if made is rows:
        return
    batch, heads, number, width = rows.shape
    cut = made[..., :width]
    if made.shape[1] == heads:
        rows.copy_(cut)
    else:
        rows.copy_(cut.unflatten(1, (heads, -1)).sum(dim=2))


class HeadRows(NamedTuple):
    """Rows in one dimension, from the first element on; kernels find the others by ``steps``, the
    strides of sequences, heads and rows."""

    view: CudaView
    steps: tuple[int, int, int]


def handed(rows: Any, dtype: str) -> HeadRows:
    """Rows as kernels take them; they are kept by the caller."""
    view = CudaView(rows.data_ptr(), (rows.numel(),), dtype, rows.get_device())
    return HeadRows(view, rows.stride()[:3])
