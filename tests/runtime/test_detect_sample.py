"""Sampled covered densities against the whole mask."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pit_tvm.errors import AxisError, DTypeError, ShapeError
from pit_tvm.reference.index import covered_density, dense_mask
from pit_tvm.runtime.detect import Detector
from pit_tvm.runtime.detect_sample import plan_sample
from pit_tvm.runtime.detect_view import Elements
from pit_tvm.selection.cover import SAMPLE_EXTENTS
from pit_tvm.structs import BitMask, BlockMask, Mask, Rows, SparsitySpec, Values
from pit_tvm.target import resolve_target


@pytest.fixture(scope="module")
def detector() -> Detector:
    return Detector(resolve_target("llvm").tvm_target)


def exact(mask: np.ndarray) -> list[float]:
    """Covered densities of the whole mask in its last two dimensions."""
    matrices = mask.reshape(-1, *((1, *mask.shape)[-2:]))
    return [covered_density(matrices, (1, a, b)) for a, b in SAMPLE_EXTENTS]


def passed(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[SparsitySpec, Any]:
    """A random pattern of a kind as the user passes it."""
    live = rng.random(shape) < rng.choice([0.0, 0.004, 0.1, 1.0])
    if kind == "bits":
        return BitMask(), np.packbits(live, axis=-1, bitorder="little")
    if kind == "values":
        values = np.where(live, np.nan, -0.0)
        return Values(), values.astype(rng.choice([np.float32, ml_dtypes.bfloat16, np.float64]))
    if kind == "blocks":
        grains = [int(g) for g in rng.choice([1, 2, 3, 24, 64, 100], len(shape))]
        blocks = tuple(-(-n // g) for n, g in zip(shape, grains, strict=True))
        return BlockMask(*grains), rng.random(blocks) < 0.2
    return Mask(), live


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["mask", "bits", "values", "blocks"]),
    rank=st.integers(1, 4),
)
def test_few_windows_are_all_read_and_the_densities_exact(
    detector: Detector, seed: int, kind: str, rank: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, [3, 3, 150, 200][-rank:]))
    spec, value = passed(kind, shape, rng)
    found = detector.sample(spec, value, shape, windows=64)
    assert found == pytest.approx(exact(dense_mask(spec, value, shape)))


@pytest.mark.parametrize("kind", ["mask", "bits", "values", "blocks"])
def test_many_windows_are_sampled_near_the_truth_and_always_the_same(
    detector: Detector, kind: str
) -> None:
    rng = np.random.default_rng(1)
    live = (rng.random((48, 2048)) < 0.1).repeat(32, 0)
    spec, value = {
        "mask": lambda: (Mask(), live),
        "bits": lambda: (BitMask(), np.packbits(live, axis=-1, bitorder="little")),
        "values": lambda: (Values(), live.astype(np.float32)),
        "blocks": lambda: (BlockMask(32, 1), live[::32].copy()),
    }[kind]()
    first = detector.sample(spec, value, live.shape)
    assert np.array_equal(first, detector.sample(spec, value, live.shape))
    at = [SAMPLE_EXTENTS.index(e) for e in ((1, 1), (32, 1), (64, 1), (1, 32))]
    truth = [0.1, 0.1, 1 - 0.9**2, 1 - 0.9**32]
    assert first[at] == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("shape", [(4096, 4096), (64, 10_000), (10_000, 64), (5, 3, 300, 200)])
def test_windows_are_distinct_inside_and_spread_over_rows_and_columns(
    shape: tuple[int, ...],
) -> None:
    where = plan_sample(shape, Elements(8, 0xFF), 32).where
    assert len({tuple(row) for row in where.tolist()}) == 32
    matrix, row, column, height, width = where.T
    assert (row + height <= shape[-2]).all() and (column + width <= shape[-1]).all()
    assert (row % 64 == 0).all() and (column % 64 == 0).all()
    places = matrix // (shape[-2] * shape[-1]) * shape[-2] + row
    total = int(np.prod(shape[:-1]))
    for place, size in ((places, total), (column, shape[-1])):
        if size > 32 * 64:
            halves = np.count_nonzero(place < size // 2)
            assert 12 <= halves <= 20


@pytest.mark.parametrize(
    ("spec", "value", "shape", "options", "error", "text"),
    [
        (Rows(), [0], (8, 8), {}, AxisError, "spec"),
        (Mask(), np.ones((8, 8)), (8, 8), {}, DTypeError, "bool or uint8"),
        (Mask(), np.ones((8, 7), np.bool_), (8, 8), {}, ShapeError, r"\(8, 8\)"),
        (Mask(), np.ones((8, 16), np.bool_)[:, ::2], (8, 8), {}, ShapeError, "contiguous"),
        (Mask(), np.ones((8, 8), np.bool_), (8, 8), {"windows": 0}, ShapeError, "windows"),
        (Mask(), np.ones((), np.bool_), (), {}, ShapeError, "shape"),
    ],
)
def test_bad_sample_is_refused_by_name(
    detector: Detector,
    spec: SparsitySpec,
    value: Any,
    shape: tuple[int, ...],
    options: dict[str, int],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        detector.sample(spec, value, shape, **options)
