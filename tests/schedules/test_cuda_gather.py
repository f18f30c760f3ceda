"""Kernels that pack live columns and live rows, as CUDA source run on a CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pit_tvm.errors import DTypeError, ScheduleError
from pit_tvm.schedules.cuda_gather import gather_columns, gather_rows
from tests.runtime.cuda_emulation import Emulator, OnDevice
from tests.schedules.cuda_text import cuda_text

FAR = 2**30  # an id beyond every array: reading there ends the process


def listed(extent: int, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ids [1, capacity] and count [1] of some positions."""
    ids = np.full((1, -(-max(extent, 1) // 64) * 64), FAR, np.int32)
    ids[0, : len(live)] = live
    return ids, np.array([len(live)], np.int32)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))


def whole(live: int) -> int:
    """Live columns and the zeros behind them."""
    return max(-(-live // 64), 1) * 64


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("some", "turned"),
    [(False, False), (True, False), (True, True)],
    ids=["all-rows", "live-rows", "turned"],
)
def test_columns_are_packed_with_zeros_behind_them(
    dtype: str, some: bool, turned: bool, emulator: Emulator
) -> None:
    made = gather_columns(dtype, some, turned)
    kernel = emulator.compile_source(cuda_text(made)).mod["main"]
    rng = np.random.default_rng(some)
    for m, k, share in ((1, 1, 1.0), (70, 333, 0.4), (33, 200, 0.0), (40, 128, 1.0)):
        source = numbers(rng, (m, k), dtype)
        ids, count = listed(k, np.flatnonzero(rng.random(k) < share))
        rows, lives = listed(m, np.flatnonzero(rng.random(m) < (0.5 if some else 2.0)))
        packed = numbers(rng, (-(-m // 8) * 8, ids.shape[1]), dtype)
        expected = packed.copy()
        wide = whole(count[0])
        for row in rows[0, : lives[0]]:
            expected[row, :wide] = 0
            expected[row, : count[0]] = source[row, ids[0, : count[0]]]
        own = (rows, lives) if some else ()
        stored = np.ascontiguousarray(source.T) if turned else source
        kernel(*map(OnDevice, (stored, ids, count, *own, packed)))
        np.testing.assert_array_equal(packed, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_are_packed_with_zeros_behind_them(dtype: str, emulator: Emulator) -> None:
    kernel = emulator.compile_source(cuda_text(gather_rows(dtype))).mod["main"]
    rng = np.random.default_rng(7)
    for k, n, share in ((1, 1, 1.0), (150, 37, 0.5), (80, 1100, 0.0), (64, 64, 1.0)):
        source = numbers(rng, (k, n), dtype)
        ids, count = listed(k, np.flatnonzero(rng.random(k) < share))
        packed = numbers(rng, (ids.shape[1], -(-n // 8) * 8), dtype)
        expected = packed.copy()
        expected[: whole(count[0]), : n + n % 2] = 0
        expected[: count[0], :n] = source[ids[0, : count[0]]]
        kernel(*map(OnDevice, (source, ids, count, packed)))
        np.testing.assert_array_equal(packed, expected)


@pytest.mark.parametrize("make", [gather_columns, gather_rows])
def test_other_types_are_refused(make: object) -> None:
    with pytest.raises(DTypeError, match="dtype"):
        make("float32")  # type: ignore[operator]


def test_all_rows_of_a_turned_source_are_refused() -> None:
    with pytest.raises(ScheduleError, match="rows with turned"):
        gather_columns("float16", turned=True)
