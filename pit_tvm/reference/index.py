"""The slow truth of detection: which elements of a pattern are live, and which micro-tiles."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import AxisError, ShapeError, mismatch
from ..structs import (
    BitMask,
    BlockMask,
    Groups,
    Lengths,
    Mask,
    MicroTile,
    Rows,
    SparsitySpec,
    Values,
)

Ids = npt.NDArray[np.int64]


def dense_mask(spec: SparsitySpec, value: Any, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """The pattern as a bool array of the operand's ``shape``; for all groups together.

    ``value`` is what the specification says of the argument at the call; for `Values` also
    uint16, the bits of a 16-bit floating-point type. AxisError if the specification is of no
    known kind.
    """
    array = np.asarray(value)
    if isinstance(spec, Mask):
        return array.reshape(shape) != 0
    if isinstance(spec, BitMask):
        bits = np.unpackbits(array, axis=-1, bitorder="little")
        return bits[..., : shape[-1]].reshape(shape) != 0
    if isinstance(spec, BlockMask):
        for axis, (size, extent) in enumerate(zip(shape, spec.extents, strict=True)):
            array = np.take(array, np.arange(size) // extent, axis=axis)
        return array != 0
    if isinstance(spec, Values):
        if array.dtype == np.uint16:
            return (array & 0x7FFF).reshape(shape) != 0
        return array.reshape(shape) != 0
    if isinstance(spec, (Rows, Lengths, Groups)):
        live = np.zeros(shape[spec.dim], np.bool_)
        for ids in _slices(spec, array, shape[spec.dim]):
            live[ids] = True
        along = [1] * len(shape)
        along[spec.dim] = -1
        return np.broadcast_to(live.reshape(along), shape).copy()
    raise AxisError(mismatch("spec", "a sparsity specification", spec))


def live_micro_tiles(mask: npt.NDArray[np.bool_], micro_tile: MicroTile) -> list[Ids]:
    """Positions on the PIT axis of the live micro-tiles of every slot, ascending.

    Slots come in row-major order of the dimensions whose extent is neither that of the PIT
    dimension nor 0. A micro-tile is live if any of its elements is; those at the edge are cut
    off. ShapeError if the numbers of dimensions differ.
    """
    _check_rank(mask.shape, micro_tile)
    ranges = []
    for dim, (size, extent) in enumerate(zip(mask.shape, micro_tile.extents, strict=True)):
        if dim == micro_tile.dim or extent == 0:
            ranges.append([slice(None)])
        else:
            ranges.append([slice(at, at + extent) for at in range(0, size, extent)])
    others = tuple(d for d in range(mask.ndim) if d != micro_tile.dim)
    return [np.flatnonzero(mask[box].any(axis=others)) for box in itertools.product(*ranges)]


def index_lists(
    spec: SparsitySpec, value: Any, shape: tuple[int, ...], micro_tile: MicroTile
) -> list[Ids]:
    """The lists that detection must find, ascending, one per slot; for `Groups` one per group."""
    if isinstance(spec, Groups):
        return _slices(spec, np.asarray(value), shape[spec.dim])
    _check_rank(shape, micro_tile)
    if isinstance(spec, (Rows, Lengths)):  # whole slices: one element tells of all others
        kept, extents = (spec.dim, micro_tile.dim), micro_tile.extents
        shape = tuple(n if d in kept or extents[d] else min(n, 1) for d, n in enumerate(shape))
    return live_micro_tiles(dense_mask(spec, value, shape), micro_tile)


def _check_rank(shape: tuple[int, ...], micro_tile: MicroTile) -> None:
    if len(shape) != len(micro_tile.extents):
        raise ShapeError(mismatch("micro_tile", f"{len(shape)} extents", micro_tile.extents))


def covered_density(mask: npt.NDArray[np.bool_], extents: tuple[int, ...]) -> float:
    """Share of the micro-tiles of ``extents`` that are live, all dimensions counted; 0 if none."""
    live = total = 0
    ranges = [range(0, size, e) for size, e in zip(mask.shape, extents, strict=True)]
    for corner in itertools.product(*ranges):
        box = tuple(slice(at, at + e) for at, e in zip(corner, extents, strict=True))
        live += bool(mask[box].any())
        total += 1
    return live / total if total else 0.0


def _slices(spec: SparsitySpec, value: npt.NDArray[Any], rows: int) -> list[Ids]:
    """Ids of the slices that exist, ascending, one list per slot."""
    if isinstance(spec, Rows):
        return [np.sort(value.astype(np.int64))]
    if isinstance(spec, Groups):
        return [np.flatnonzero(value == group) for group in range(spec.num_groups)]
    lengths = value.astype(np.int64)
    if isinstance(spec, Lengths) and spec.cumulative:
        lengths = np.diff(lengths)
    padded = rows // len(lengths) if len(lengths) else 0
    spans = [np.arange(n) + i * padded for i, n in enumerate(lengths)]
    return [np.concatenate(spans) if spans else np.zeros(0, np.int64)]
