"""Sampled covered densities against the whole mask."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st

from pit_tvm.errors import AxisError, DTypeError, ShapeError
from pit_tvm.reference.index import covered_density, dense_mask
from pit_tvm.runtime.detect import Detector
from pit_tvm.runtime.detect_sample import MOST_LINES, ROWS, WINDOWS, Lines, plan_sample
from pit_tvm.runtime.detect_view import Elements
from pit_tvm.selection.cover import SAMPLE_EXTENTS, bucket
from pit_tvm.structs import BitMask, BlockMask, Mask, Rows, SparsitySpec, Values


def exact(mask: np.ndarray) -> list[float]:
    """Covered densities of the whole mask in its last two dimensions."""
    matrices = mask.reshape(-1, *((1, *mask.shape)[-2:]))
    return [covered_density(matrices, (1, a, b)) for a, b in SAMPLE_EXTENTS]


def some_rows(live: np.ndarray, row: int) -> np.ndarray:
    """What is read of whole lines."""
    step = max(1, live.shape[row] // ROWS)
    return live.take(range(step // 2, live.shape[row], step), axis=row)


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
    shape = tuple(int(n) for n in rng.integers(1, [3, 3, 128, 192][-rank:]))
    spec, value = passed(kind, shape, rng)
    row, beside = rng.permutation(rank)[:2] if rank > 1 else (0, 0)
    lines = Lines(row, beside, bool(rng.integers(2))) if rank > 1 else None
    sample = detector.sampling(spec, shape, lines).take(value)
    *found, crossed, live = sample.densities
    assert found == pytest.approx(exact(dense_mask(spec, value, shape)))
    assert sample.key == bytes(map(bucket, sample.densities))
    read = some_rows(value != 0, row)
    for density, asked, along in ((live, lines, beside), (crossed, lines and lines.crossed, row)):
        known = read.any(axis=along)
        if not asked:
            assert density == 1
        elif known.size <= MOST_LINES:
            assert density == pytest.approx(known.mean())


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
    samples = detector.sampling(spec, live.shape)
    first = samples.take(value).densities
    assert np.array_equal(first, samples.take(value).densities)
    at = [SAMPLE_EXTENTS.index(e) for e in ((1, 1), (32, 1), (64, 1), (1, 32))]
    truth = [0.1, 0.1, 1 - 0.9**2, 1 - 0.9**32]
    assert first[at] == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("shape", [(4096, 4096), (64, 10_000), (10_000, 64), (5, 3, 300, 200)])
def test_windows_are_distinct_inside_and_spread_over_rows_and_columns(
    shape: tuple[int, ...],
) -> None:
    where = plan_sample(shape, Elements(8, 0xFF)).where
    assert len({tuple(row) for row in where.tolist()}) == WINDOWS
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
    ("spec", "value", "shape", "error", "text"),
    [
        (Rows(), [0], (8, 8), AxisError, "spec"),
        (Mask(), np.ones((8, 8)), (8, 8), DTypeError, "bool or uint8"),
        (Mask(), np.ones((8, 7), np.bool_), (8, 8), ShapeError, r"\(8, 8\)"),
        (Mask(), np.ones((8, 16), np.bool_)[:, ::2], (8, 8), ShapeError, "contiguous"),
        (Mask(), np.ones((), np.bool_), (), ShapeError, "shape"),
    ],
)
def test_bad_sample_is_refused_by_name(
    detector: Detector,
    spec: SparsitySpec,
    value: Any,
    shape: tuple[int, ...],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        detector.sampling(spec, shape).take(value)


def forms(live: np.ndarray) -> list[Any]:
    """A mask as arrays that the kernel takes as they are, and as others."""
    read_only = live.copy()
    read_only.flags.writeable = False
    tensor = torch.from_numpy(live)
    return [
        live,
        tensor,
        tvm_ffi.from_dlpack(tensor),
        live.view(np.uint8),
        read_only,
        live.tolist(),
    ]


def test_arrays_of_every_library_are_sampled_alike_in_any_order(detector: Detector) -> None:
    rng = np.random.default_rng()
    samples = detector.sampling(Mask(), (70, 90), Lines(0, 1))
    for place in rng.integers(0, 6, 30):
        live = rng.random((70, 90)) < rng.choice([0.0, 0.01, 0.3])
        live[rng.integers(70, size=30)] = False
        found = samples.take(forms(live)[place])
        assert found.densities[0] == pytest.approx(live.mean())
        assert found.densities[-1] == pytest.approx(some_rows(live, 0).any(axis=1).mean())


WRONG = {
    "shape": (np.ones((8, 7), np.bool_), ShapeError),
    "as long": (np.ones((4, 16), np.bool_), ShapeError),
    "flat": (torch.ones(64, dtype=torch.bool), ShapeError),
    "turned": (torch.ones(8, 16, dtype=torch.bool)[:, ::2], ShapeError),
    "type": (torch.ones(8, 8), DTypeError),
    "signed": (np.ones((8, 8), np.int8), DTypeError),
    "device": (torch.ones(8, 8, dtype=torch.bool, device="meta"), DTypeError),
    "nothing": (None, DTypeError),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_array_after_a_good_one_is_refused_too(detector: Detector, name: str) -> None:
    samples = detector.sampling(Mask(), (8, 8))
    value, error = WRONG[name]
    for good in (np.eye(8, dtype=np.bool_), torch.eye(8, dtype=torch.bool)):
        samples.take(good)
        with pytest.raises(error):
            samples.take(value)
        assert samples.take(good).densities[0] == 1 / 8


def test_offset_views_and_operands_of_many_dimensions_are_sampled(detector: Detector) -> None:
    rng = np.random.default_rng()
    memory = torch.from_numpy(rng.random(3 + 2 * 90 * 70) < 0.2)
    part = memory[3 : 3 + 90 * 70].view(90, 70)
    samples = detector.sampling(Mask(), (90, 70))
    many = detector.sampling(Mask(), (1, 1, 1, 1, 1, 90, 70))
    for _ in range(2):
        assert samples.take(part).densities[0] == pytest.approx(part.float().mean())
        assert np.array_equal(many.take(part[(None,) * 5]).live, samples.take(part).live)


def test_threads_share_a_sampling(detector: Detector) -> None:
    samples, wrong = detector.sampling(Mask(), (64, 64)), []

    def sample(number: int) -> None:
        live = np.zeros((64, 64), np.bool_)
        live[:number] = True
        for turn in range(200):
            taken = samples.take(torch.from_numpy(live) if turn % 2 else live)
            if taken.densities[0] != number / 64:
                wrong.append(number)

    threads = [threading.Thread(target=sample, args=(number,)) for number in (8, 16, 32, 64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
