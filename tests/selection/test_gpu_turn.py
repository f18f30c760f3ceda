"""What turning costs, against what it took on an H200."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pit_tvm.selection.gpu_turn import live_us, whole_us

TIMES = Path(__file__).parents[2] / "tuning_logs/h200-sm_90a/turn.json"
ITEM = {"float16": 2, "float32": 4}


@pytest.fixture(scope="module")
def rows() -> Any:
    return json.loads(TIMES.read_text())["rows"]


@pytest.mark.parametrize("dtype", list(ITEM))
def test_whole_matrices_take_what_they_took(dtype: str, rows: Any) -> None:
    for row in rows:
        assert whole_us(ITEM[dtype] * np.prod(row["shape"])) == pytest.approx(
            row["us"][dtype], rel=0.2
        )


@pytest.mark.parametrize("dtype", list(ITEM))
def test_live_columns_take_what_they_took(dtype: str, rows: Any) -> None:
    off = []
    for row in rows:
        for share in (0.01, 0.1, 0.5):
            name = f"{dtype}, live columns of bands of 32 rows, {share:.0%} live"
            us = live_us(ITEM[dtype] * np.prod(row["shape"]), share, ITEM[dtype])
            off.append(us / row["us"][name] - 1)
    assert np.median(np.abs(off)) < 0.12 and np.max(np.abs(off)) < 0.35


def test_what_lives_together_is_read_alone() -> None:
    size = 4.0 * 4096 * 4096
    apart, beside = (live_us(size, 0.05, 4, near) for near in (1, 64))
    assert 2.5 < beside < apart < live_us(size, 1.0, 4)
    parts = np.array([0.0, 0.1])  # as much as the mean of each
    assert live_us(size, parts, 4) == pytest.approx((2.5 + live_us(size, 0.1, 4)) / 2)
    assert whole_us(size, 1.0) < whole_us(size)
