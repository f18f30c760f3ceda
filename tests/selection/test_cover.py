"""Cover statistics against the definition, sampling and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pit_tvm.errors import ShapeError
from pit_tvm.reference.index import covered_density, live_micro_tiles
from pit_tvm.selection.cover import (
    EMPTY_BUCKET,
    SAMPLE_EXTENTS,
    WINDOW_EXTENTS,
    Cover,
    block_density,
    bucket,
    bucket_density,
    index_density,
    window_densities,
)
from pit_tvm.structs import MicroTile

DENSITIES = st.floats(0.0, 1.0)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), density=st.sampled_from([0.0, 0.001, 0.05, 1.0]))
def test_window_densities_are_the_shares_of_live_micro_tiles(seed: int, density: float) -> None:
    windows = np.random.default_rng(seed).random((2, 64, 64)) < density
    table = window_densities(windows)
    for (i, a), (j, b) in itertools.product(enumerate(WINDOW_EXTENTS), repeat=2):
        assert table[i, j] == pytest.approx(covered_density(windows, (1, a, b)))


def test_no_windows_cover_nothing() -> None:
    assert not window_densities(np.zeros((0, 64, 64), np.bool_)).any()


@pytest.mark.parametrize("shape", [(64, 64), (2, 64, 32), (2, 32, 64)])
def test_windows_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="windows"):
        window_densities(np.zeros(shape, np.bool_))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 90), columns=st.integers(1, 90))
def test_index_density_is_the_covered_density(seed: int, rows: int, columns: int) -> None:
    mask = np.random.default_rng(seed).random((rows, columns)) < 0.05
    lists = live_micro_tiles(mask, MicroTile("lhs", "k", 1, (8, 1)))
    count = np.array([len(ids) for ids in lists], np.int32)
    assert index_density(count, columns) == pytest.approx(covered_density(mask, (8, 1)))


def test_index_without_positions_has_density_zero() -> None:
    assert index_density(np.zeros(4, np.int32), 0) == 0.0


@pytest.mark.parametrize(
    ("extents", "blocks"),
    [((32, 1), (32, 1)), ((1, 64), (32, 64)), ((6, 4), (2, 8)), ((3, 5), (2, 1)), ((5, 7), (4, 4))],
)
def test_block_density_agrees_with_simulation(
    extents: tuple[int, int], blocks: tuple[int, int]
) -> None:
    rng = np.random.default_rng(3)
    density = 0.1
    flags = rng.random((240, 240)) < density
    mask = flags.repeat(blocks[0], 0).repeat(blocks[1], 1)
    rows, columns = (side - side % e for side, e in zip(mask.shape, extents, strict=True))
    boxes = mask[:rows, :columns].reshape(rows // extents[0], extents[0], -1, extents[1])
    simulated = boxes.any(axis=(1, 3)).mean()
    # the formula raises to the mean number of blocks, not the mean of powers
    assert block_density(extents, blocks, density) == pytest.approx(simulated, rel=0.05)


def test_block_density_of_a_whole_dimension_counts_its_blocks() -> None:
    found = block_density((1, 0), (1, 10), 0.5, shape=(7, 25))
    assert found == pytest.approx(1 - 0.5**3)


@pytest.mark.parametrize(
    ("extents", "blocks", "shape"),
    [
        ((1, 0), (1, 1), None),
        ((1, -1), (1, 1), (2, 2)),
        ((1, 1), (1, 0), None),
        ((1,), (1, 1), None),
    ],
)
def test_block_density_refuses_bad_extents(
    extents: tuple[int, ...], blocks: tuple[int, ...], shape: tuple[int, ...] | None
) -> None:
    with pytest.raises(ShapeError, match="blocks"):
        block_density(extents, blocks, 0.5, shape)


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-12, 1.0))
def test_bucket_is_within_half_a_step_of_its_density(density: float) -> None:
    ratio = bucket_density(bucket(density)) / density
    assert 1.12**-0.51 <= ratio <= 1.12**0.51


@settings(max_examples=50, deadline=None)
@given(DENSITIES, DENSITIES)
def test_buckets_grow_as_densities_fall(one: float, other: float) -> None:
    if one < other:
        assert bucket(one) >= bucket(other)


def test_empty_and_full_patterns_have_buckets_of_their_own() -> None:
    assert bucket(0.0) == EMPTY_BUCKET
    assert bucket_density(EMPTY_BUCKET) == 0.0
    assert bucket(1.0) == 0
    assert bucket_density(0) == 1.0


def test_cover_gives_sampled_densities_unchanged() -> None:
    values = np.linspace(0.1, 0.9, len(SAMPLE_EXTENTS))
    cover = Cover.from_samples(values)
    assert [cover.density(e) for e in SAMPLE_EXTENTS] == pytest.approx(values.tolist())
    assert cover.buckets == tuple(bucket(v) for v in values)


def test_cover_needs_one_density_for_each_extent() -> None:
    with pytest.raises(ValueError):
        Cover.from_samples([0.5])


def test_cover_of_windows_holds_the_whole_table() -> None:
    windows = np.random.default_rng(5).random((3, 64, 64)) < 0.01
    cover = Cover.from_windows(windows)
    assert cover.density((16, 8)) == pytest.approx(covered_density(windows, (1, 16, 8)))


@pytest.mark.parametrize("extents", [(4, 1), (6, 16), (24, 32), (1, 256), (128, 1), (128, 128)])
def test_estimate_between_samples_is_near_the_truth(extents: tuple[int, int]) -> None:
    cover = Cover.from_blocks((1, 1), 0.002)
    truth = block_density(extents, (1, 1), 0.002)
    assert cover.density(extents) == pytest.approx(truth, rel=0.25)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    a=st.integers(1, 200),
    b=st.integers(1, 200),
    density=st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]),
)
def test_estimate_lies_between_the_samples_inside_and_around(
    seed: int, a: int, b: int, density: float
) -> None:
    windows = np.random.default_rng(seed).random((2, 64, 64)) < density
    samples = [covered_density(windows, (1, *e)) for e in SAMPLE_EXTENTS]
    found = Cover.from_samples(samples).density((a, b))
    pairs = list(zip(SAMPLE_EXTENTS, samples, strict=True))
    least = max((d for (x, y), d in pairs if x <= a and y <= b), default=0.0)
    most = min((d for (x, y), d in pairs if x >= a and y >= b), default=1.0)
    assert least - 1e-12 <= found <= most + 1e-12


def test_whole_dimensions_have_no_estimate() -> None:
    with pytest.raises(ShapeError, match="extents"):
        Cover.from_blocks((1, 1), 0.1).density((0, 1))
