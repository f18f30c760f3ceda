"""The kernel that packs live columns of both operands, as CUDA source run on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.errors import DTypeError, ScheduleError
from pit_tvm.schedules.cuda_gather import gather_both
from tests.runtime.cuda_emulation import Emulator, OnDevice
from tests.schedules.cuda_text import cuda_text
from tests.schedules.sparse import random

FAR = 2**30  # an id beyond every array: reading there ends the process


def listed(extent: int, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ids [1, capacity] and count [1] of some positions."""
    ids = np.full((1, -(-max(extent, 1) // 64) * 64), FAR, np.int32)
    ids[0, : len(live)] = live
    return ids, np.array([len(live)], np.int32)


def whole(live: int) -> int:
    """Live columns and the zeros behind them."""
    return max(-(-live // 64), 1) * 64


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("dtype", "layout"), [("float16", "kn"), ("bfloat16", "nk"), ("bfloat16", "kn")]
)
def test_live_columns_are_packed_with_zeros_behind_them(
    dtype: str, layout: str, turned: bool, emulator: Emulator
) -> None:
    made = gather_both(dtype, layout, turned)
    kernel = emulator.compile_source(cuda_text(made)).mod["main"]
    rng = np.random.default_rng(turned)
    for m, n, k, share in (
        (1, 1, 1, 1.0),
        (70, 37, 333, 0.4),
        (33, 1100, 80, 0.0),
        (9, 64, 64, 1.0),
    ):
        source = random(rng, (m, k), dtype)
        dense = random(rng, (k, n) if layout == "kn" else (n, k), dtype)
        ids, count = listed(k, np.flatnonzero(rng.random(k) < share))
        rows, lives = listed(m, np.flatnonzero(rng.random(m) < 0.5))
        high, wide, live = -(-m // 8) * 8, -(-n // 8) * 8, ids[0, : count[0]]
        packed = random(rng, (high, ids.shape[1]), dtype)
        beside = random(
            rng, (ids.shape[1], wide) if layout == "kn" else (wide, ids.shape[1]), dtype
        )
        want, want_beside, deep = packed.copy(), beside.copy(), whole(count[0])
        for row in rows[0, : lives[0]]:
            want[row, :deep] = 0
            want[row, : count[0]] = source[row, live]
        if layout == "kn":
            want_beside[:deep, : n + n % 2] = 0
            want_beside[: count[0], :n] = dense[live]
        else:
            want_beside[:n, :deep] = 0
            want_beside[:n, : count[0]] = dense[:, live]
        stored = np.ascontiguousarray(source.T) if turned else source
        kernel(*map(OnDevice, (stored, rows, lives, ids, count, dense, packed, beside)))
        np.testing.assert_array_equal(packed, want)
        np.testing.assert_array_equal(beside, want_beside)


def test_other_types_are_refused() -> None:
    with pytest.raises(DTypeError, match="dtype"):
        gather_both("float32", "kn")


def test_other_layouts_are_refused() -> None:
    with pytest.raises(ScheduleError, match="layout kn or nk"):
        gather_both("float16", "km")
