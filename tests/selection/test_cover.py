"""Densities read from samples, and their buckets, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pit_tvm.errors import ShapeError
from pit_tvm.reference.index import covered_density
from pit_tvm.selection.cover import BUCKET_STEP, EMPTY_BUCKET, SAMPLE_EXTENTS, bucket, reading

DENSITIES = st.floats(0.0, 1.0)


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-12, 1.0))
def test_bucket_is_within_half_a_step_of_its_density(density: float) -> None:
    ratio = BUCKET_STEP ** -bucket(density) / density
    assert BUCKET_STEP**-0.51 <= ratio <= BUCKET_STEP**0.51


@settings(max_examples=50, deadline=None)
@given(DENSITIES, DENSITIES)
def test_buckets_grow_as_densities_fall(one: float, other: float) -> None:
    if one < other:
        assert bucket(one) >= bucket(other)


def test_empty_and_full_patterns_have_buckets_of_their_own() -> None:
    assert bucket(0.0) == EMPTY_BUCKET
    assert bucket(1.0) == 0


def test_sampled_densities_are_read_unchanged() -> None:
    values = np.linspace(0.1, 0.9, len(SAMPLE_EXTENTS)).tolist()
    assert [reading(e)(values) for e in SAMPLE_EXTENTS] == values


@pytest.mark.parametrize("extents", [(4, 1), (6, 16), (24, 32), (1, 256), (128, 1), (128, 128)])
def test_estimate_between_samples_is_near_the_truth(extents: tuple[int, int]) -> None:
    def truth(extents: tuple[int, int]) -> float:
        """Of elements that are live independently."""
        return 1 - (1 - 0.002) ** (extents[0] * extents[1])

    found = reading(extents)([truth(e) for e in SAMPLE_EXTENTS])
    assert found == pytest.approx(truth(extents), rel=0.25)


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
    found = reading((a, b))(samples)
    pairs = list(zip(SAMPLE_EXTENTS, samples, strict=True))
    least = max((d for (x, y), d in pairs if x <= a and y <= b), default=0.0)
    most = min((d for (x, y), d in pairs if x >= a and y >= b), default=1.0)
    assert least - 1e-12 <= found <= most + 1e-12


def test_whole_dimensions_have_no_estimate() -> None:
    with pytest.raises(ShapeError, match="extents"):
        reading((0, 1))
