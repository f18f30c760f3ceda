"""Rows of heads as kernels take them, which copy 16 bytes at a time."""

from __future__ import annotations

from typing import Any

from . import cuda_arrays
from .cuda_view import CudaView

_PIECE = 8  # elements of 16 bits in 16 bytes


def fits(rows: Any) -> bool:
    """Whether rows consist of whole pieces, and begin where these do."""
    *steps, last = rows.stride()
    *extents, width = rows.shape
    places = [step for step, extent in zip(steps, extents, strict=True) if extent > 1]
    return (
        last == 1 and rows.data_ptr() % 16 == 0 and not any(at % _PIECE for at in (width, *places))
    )


def in_pieces(rows: Any) -> Any:
    """The rows, or a copy of them with zeros behind their columns."""
    if fits(rows):
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


def flat(rows: Any) -> CudaView:
    """All that lies between the first element and the last one."""
    steps = zip(rows.shape, rows.stride(), strict=True)
    last = sum((extent - 1) * step for extent, step in steps)
    return CudaView(rows.data_ptr(), (last + 1,), cuda_arrays.dtype_name(rows), rows.get_device())


def steps_of(*arrays: Any) -> tuple[int, ...]:
    """The strides of all dimensions of arrays but their last ones."""
    return tuple(step for one in arrays for step in one.stride()[:-1])
