"""Heights of GPU tiles that fit themselves to the count."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pit_tvm.selection.gpu_fit import HEIGHT_STEP, even_heights, filled_groups, fitting, group_sizes

TALL, WIDE, PLACES = 144, 256, 132


def fitted(live: int, n: int) -> float:
    return float(fitting([TALL], [WIDE], [PLACES]).heights(live, n)[0])


@pytest.mark.parametrize("live", [0, 1, 8, 100, 144, 145, 790, 5000])
def test_rows_are_split_evenly(live: int) -> None:
    bands = math.ceil(live / TALL)
    high = float(even_heights(live, bands))
    assert HEIGHT_STEP <= high <= TALL and high % HEIGHT_STEP == 0
    assert bands * high - live < max(bands, 1) * HEIGHT_STEP + HEIGHT_STEP


@pytest.mark.parametrize(
    ("live", "n", "high"),
    [
        (1000, 11008, 112),  # 9 x 43 tiles: 2.93 waves; 8 x 43 of 128 rows take 3 as well
        (16384, 3072, 136),  # 121 x 12: 11 waves
        (1024, 4096, 128),  # 8 x 16, one wave
    ],
)
def test_an_only_group_fills_its_waves(live: int, n: int, high: int) -> None:
    assert fitted(live, n) == high


@pytest.mark.parametrize("live", [0, 1, 7, 5000])
def test_heights_are_ones_that_tiles_can_have(live: int) -> None:
    high = fitted(live, 4096)
    assert HEIGHT_STEP <= high <= TALL and high % HEIGHT_STEP == 0


def test_kinds_of_tiles_do_not_mix() -> None:
    several = fitting([144, 64, 128], [256, 128, 64], [132, 66, 66]).heights(300, 4096)
    alone = [
        fitting([rows], [width], [places]).heights(300, 4096)[0]
        for rows, width, places in ((144, 256, 132), (64, 128, 66), (128, 64, 66))
    ]
    assert several.tolist() == alone


@pytest.mark.parametrize(
    ("live", "groups", "high"),
    [(8192, 64, 144), (8192, 64, 128), (500, 96, 64), (256, 16, 8), (64, 128, 8), (4, 32, 64)],
)
def test_bands_of_random_rows_are_those_of_drawn_ones(live: int, groups: int, high: int) -> None:
    rng = np.random.default_rng(1)
    drawn = [
        np.ceil(np.bincount(rng.integers(groups, size=live), minlength=groups) / high).sum()
        for _ in range(50)
    ]
    steps, times = group_sizes(live, groups, ())
    assert times.sum() == pytest.approx(filled_groups(live, groups)) and times.sum() <= groups
    assert (np.ceil(HEIGHT_STEP * steps / high) * times).sum() == pytest.approx(
        np.mean(drawn), rel=0.06
    )


def test_equal_groups_are_told_once() -> None:
    steps, times = group_sizes(100.0, 6, (64, 0, 9, 16, 64, 10))
    assert dict(zip(steps.tolist(), times.tolist(), strict=True)) == {2: 3.0, 8: 2.0}
    assert group_sizes(0.0, 3, (0, 0, 0))[0].size == 0


def test_an_only_group_has_all_rows() -> None:
    assert [a.tolist() for a in group_sizes(77.0, 1, ())] == [[10], [1.0]]
