"""The index of a padded batch against a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pit_tvm.runtime.live_tokens import live_tokens


def reference(mask: np.ndarray) -> list[list[Any]]:
    """Row, position and sequence of live tokens, starts of sequences, and each token's place."""
    row, position, sequence, starts = [], [], [], [0]
    place = [[-1] * mask.shape[1] for _ in mask]
    for i, line in enumerate(mask):
        for j, alive in enumerate(line):
            if alive:
                place[i][j] = len(row)
                row.append(i * mask.shape[1] + j)
                position.append(j)
                sequence.append(i)
        starts.append(len(row))
    return [row, position, sequence, starts, place]


def check(mask: np.ndarray) -> None:
    shapes = [(int(np.sum(mask != 0)),)] * 3 + [(len(mask) + 1,), mask.shape]
    found = live_tokens(mask)
    for part, expected, shape in zip(found, reference(mask), shapes, strict=True):
        assert part.dtype == np.int32 and part.shape == shape
        np.testing.assert_array_equal(part, np.array(expected, np.int32).reshape(shape))


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32", "bool"])
@pytest.mark.parametrize(
    "mask",
    [
        [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
        [[0, 0, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]],
        [[1, 0, 1, 0], [0, 1, 0, 0], [0, 1, 1, 0]],
        [[0, 0, 0], [1, 1, 0], [0, 0, 0]],
        [[0, 0], [0, 0]],
        [[1]],
    ],
    ids=["right", "left", "holes", "empty sequences", "nothing live", "one"],
)
def test_patterns_of_padding(mask: list[list[int]], dtype: str) -> None:
    check(np.array(mask, dtype))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_planes_without_tokens(shape: tuple[int, int]) -> None:
    check(np.zeros(shape, np.int64))


def test_masks_of_torch() -> None:
    row, *_ = live_tokens(torch.tensor([[0, 1], [1, 1]]))
    assert row.tolist() == [1, 2, 3]


def test_masks_of_bfloat16() -> None:
    row, *_ = live_tokens(torch.tensor([[0, 1], [1, 1]], dtype=torch.bfloat16))
    assert row.tolist() == [1, 2, 3]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 5), st.integers(0, 9), st.floats(0, 1), st.integers(0, 2**16))
def test_any_mask(batch: int, tokens: int, fill: float, seed: int) -> None:
    check((np.random.default_rng(seed).uniform(size=(batch, tokens)) < fill).astype(np.int64))
