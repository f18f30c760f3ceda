"""Kernels that turn a matrix: their CUDA source, and what it does, run on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.errors import DTypeError
from pit_tvm.schedules.cuda_turn import turn_kernel, turn_rows_kernel
from tests.runtime.cuda_emulation import Emulator, OnDevice
from tests.schedules.cuda_text import cuda_text
from tests.schedules.sparse import random

SIZES = ((8, 8), (64, 64), (72, 200), (136, 56))


def words(lives: np.ndarray) -> np.ndarray:
    """Bits [lines, n] as uint32 [lines, words], the lowest first."""
    lines, n = lives.shape
    wide = np.zeros((lines, -(-n // 32) * 32), bool)
    wide[:, :n] = lives
    return np.packbits(wide, axis=1, bitorder="little").view(np.uint32)


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "half"), ("bfloat16", "nv_bfloat16")])
def test_matrices_are_read_and_written_in_pieces_of_16_bytes(dtype: str, kind: str) -> None:
    body = cuda_text(turn_kernel(dtype)).split("__global__")[-1]
    assert f"{kind}* __restrict__ turned_ptr" in body
    # Two pieces a thread of both tiles, each of eight elements, which eight lanes turn together.
    assert body.count("st_vec_global_v4") == 4 == body.count("ldmatrix_sync")
    assert body.count("cp_async_cg") == 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_become_columns(dtype: str, emulator: Emulator) -> None:
    kernel = emulator.compile_source(cuda_text(turn_kernel(dtype))).mod["main"]
    rng = np.random.default_rng(1)
    for k, m in SIZES:
        source, turned = random(rng, (k, m), dtype), random(rng, (m, k), dtype)
        kernel(*map(OnDevice, (source, turned)))
        np.testing.assert_array_equal(turned, source.T)


@pytest.mark.parametrize(("dtype", "bias"), [("float16", False), ("bfloat16", True)])
@pytest.mark.parametrize("lines", [0, 1, 40])
def test_dead_rows_become_what_their_bias_is(
    dtype: str, bias: bool, lines: int, emulator: Emulator
) -> None:
    kernel = emulator.compile_source(cuda_text(turn_rows_kernel(dtype, bias))).mod["main"]
    rng = np.random.default_rng(lines)
    for k, m in SIZES:
        known = k - 3  # biases: rows behind them have none
        source, turned = random(rng, (k, m), dtype), random(rng, (m, k), dtype)
        lives = rng.random((lines, k)) < 1 / max(lines, 1)
        alive = lives.any(axis=0)
        source[~alive] = np.nan
        dead = random(rng, (known,), dtype)
        want = source.T.copy()
        want[:, ~alive] = 0
        if bias:
            want[:, :known] = np.where(alive[:known], source.T[:, :known], dead)
        kernel(*map(OnDevice, (source, words(lives), *([dead] if bias else []), turned)))
        np.testing.assert_array_equal(turned, want)


def test_biases_are_activated() -> None:
    assert "pit_silu(" in cuda_text(turn_rows_kernel("float16", True, "silu"))


def test_wider_elements_are_fewer_at_once() -> None:
    body = cuda_text(turn_kernel("float32")).split("__global__")[-1]
    # What a lane writes are four elements of four rows.
    assert body.count("*(float4*)(turned_ptr") == 4 == body.count("cp_async_cg")


def test_other_types_are_refused() -> None:
    with pytest.raises(DTypeError, match="dtype"):
        turn_kernel("int8")
    with pytest.raises(DTypeError, match="dtype"):
        turn_rows_kernel("float32")
