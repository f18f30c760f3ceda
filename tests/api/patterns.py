"""Patterns for every kind of specification: which elements are live, and the array that says so."""

from __future__ import annotations

from typing import Any

import numpy as np

from pit_tvm.reference.index import dense_mask
from pit_tvm.structs import BitMask, BlockMask, Lengths, Rows, SparsitySpec, Values

PATTERNS = ("empty", "full", "one live", "random")


def live_blocks(pattern: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Bool array of ``shape`` with one of `PATTERNS`."""
    if pattern == "random":
        return rng.random(shape) < rng.uniform(0.05, 0.7)
    live = np.full(shape, pattern == "full")
    if pattern == "one live":
        live[tuple(rng.integers(size) for size in shape)] = True
    return live


def zero_pattern(
    spec: SparsitySpec, pattern: str, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[np.ndarray, Any]:
    """Live elements of an operand of ``shape``, and what the call passes for a zero pattern."""
    extents = getattr(spec, "extents", ()) or (1,) * len(shape)
    counts = tuple(-(-size // extent) for size, extent in zip(shape, extents, strict=True))
    blocks = live_blocks(pattern, counts, rng)
    mask = dense_mask(BlockMask(*extents), blocks, shape)
    if isinstance(spec, BlockMask):
        return mask, blocks
    if isinstance(spec, BitMask):
        return mask, np.packbits(mask, axis=-1, bitorder="little")
    return mask, None if isinstance(spec, Values) else mask


def slice_pattern(
    spec: SparsitySpec, pattern: str, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Which of ``size`` slices exist, and the ids or lengths that the call passes."""
    if isinstance(spec, Lengths):
        return _lengths(spec, pattern, size, rng)
    live = live_blocks(pattern, (size,), rng)
    assert isinstance(spec, Rows)
    ids = rng.permutation(np.flatnonzero(live))
    return live, ids.astype(rng.choice(["int32", "int64"]))


def _lengths(
    spec: Lengths, pattern: str, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of ``size // batch`` padded slices; ``size`` is a prime or a batch of them."""
    batch = next((b for b in (5, 3, 2) if size % b == 0), 1)
    padded = size // batch
    lengths = np.full(batch, padded if pattern == "full" else 0)
    if pattern == "one live":
        lengths[rng.integers(batch)] = 1
    elif pattern == "random":
        lengths = rng.integers(0, padded + 1, batch)
    live = (np.arange(padded) < lengths[:, None]).ravel()
    told = np.concatenate([[0], np.cumsum(lengths)]) if spec.cumulative else lengths
    return live, told.astype(rng.choice(["int32", "int64"]))
