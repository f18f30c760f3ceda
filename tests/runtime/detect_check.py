"""What the tests of detection share: the comparison with the reference, and operands."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from pit_tvm.reference.index import index_lists
from pit_tvm.runtime.detect import Detector
from pit_tvm.runtime.detect_workspace import Workspace
from pit_tvm.structs import Index, MicroTile, Rows, SparsitySpec

FLOATS = ("float16", "float32", "float64", "bfloat16", "uint16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "bool")
POISON = 85
GUARD = 256


class Guarded(Workspace):
    """Memory full of poison, with more poison around it that must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.around: list[np.ndarray] = []

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        memory = np.full(size + 2 * GUARD, POISON, np.uint8)
        self.around += [memory[:GUARD], memory[GUARD + size :]]
        return memory[GUARD : GUARD + size].view(dtype).reshape(shape)

    @property
    def intact(self) -> bool:
        """Whether nothing was written around the arrays."""
        return all((guard == POISON).all() for guard in self.around)


def check(
    detector: Detector,
    spec: SparsitySpec,
    value: Any,
    shape: tuple[int, ...],
    micro_tile: MicroTile,
    **options: Any,
) -> Index:
    """Detect, and compare with the reference: lists, counts, order, padding, memory around."""
    memory = Guarded()
    index = detector.detect(spec, value, shape, micro_tile, workspace=memory, **options)
    assert memory.intact
    expected = index_lists(spec, value, shape, micro_tile)
    rows = shape[micro_tile.dim]
    capacity = max(64, -(-rows // 64) * 64)
    assert index.ids.dtype == index.count.dtype == np.int32
    assert index.ids.shape == (*index.count.shape, capacity)
    assert index.count.size == len(expected)
    lists = index.ids.reshape(-1, capacity)
    for found, count, truth in zip(lists, index.count.reshape(-1), expected, strict=True):
        in_order = found[:count] if not isinstance(spec, Rows) else np.sort(found[:count])
        assert np.array_equal(in_order, truth)
        assert not found[count : count + 64].any()
    return index


def as_values(live: np.ndarray, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """An operand that is zero (of either sign) exactly where not ``live``; NaN counts as live."""
    if dtype in INTEGERS:
        return live.astype(dtype)
    sign = rng.choice(np.array([-1.0, 1.0]), live.shape)
    nan = np.where(rng.random(live.shape) < 0.3, np.nan, 0.5)
    element = np.dtype(ml_dtypes.bfloat16 if dtype in ("bfloat16", "uint16") else dtype)
    values = (np.where(live, nan, 0.0) * sign).astype(element)
    return values.view(np.uint16) if dtype == "uint16" else values
