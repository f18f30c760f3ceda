"""The kernel that turns live columns of bands: its CUDA source, and what it does, run on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.errors import DTypeError, ScheduleError
from pit_tvm.schedules.cuda_turn_live import turn_live_kernel
from tests.runtime.cuda_emulation import Emulator, OnDevice
from tests.schedules.cuda_text import cuda_text
from tests.schedules.sparse import random
from tests.schedules.test_cuda_turn import words

SIZES = ((8, 8), (32, 264), (72, 200), (136, 56), (60, 40))


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "half"), ("bfloat16", "nv_bfloat16")])
def test_a_warp_moves_16_bytes_at_a_time(dtype: str, kind: str) -> None:
    body = cuda_text(turn_live_kernel(dtype, 32)).split("__global__")[-1]
    assert f"{kind}* __restrict__ turned_ptr" in body
    # Four chunks of rows of a lane, and four of columns of a warp.
    assert body.count("cp_async_cg") == 4 == body.count("st_vec_global_v4")
    assert body.count("ldmatrix_sync") == 4 and "__syncthreads" not in body


def test_wider_elements_are_fewer_at_once() -> None:
    body = cuda_text(turn_live_kernel("float32", 64)).split("__global__")[-1]
    assert body.count("cp_async_cg") == 8 == body.count("*(float4*)(turned_ptr")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("band", "grain"), [(32, 1), (64, 3), (128, 1)])
def test_live_columns_of_bands_become_rows(
    dtype: str, band: int, grain: int, emulator: Emulator
) -> None:
    kernel = emulator.compile_source(cuda_text(turn_live_kernel(dtype, band))).mod["main"]
    rng = np.random.default_rng(band)
    for high, wide in SIZES:
        for share in (0.0, 0.1, 1.0):
            room = -(-high // 8) * 8
            source, turned = (random(rng, s, dtype) for s in ((high, wide), (wide + 1, room)))
            blocks = rng.random((-(-high // band), -(-wide // grain))) < share
            lives = blocks.repeat(grain, axis=1)[:, :wide].repeat(band, axis=0)[:high]
            source[~lives] = np.nan  # what is read beside live elements
            want = turned.copy()
            want[:wide, :high] = np.where(lives.T, source.T, turned[:wide, :high])
            kernel(OnDevice(source), OnDevice(words(blocks)), grain, OnDevice(turned))
            np.testing.assert_array_equal(turned[:, :high], want[:, :high])


def test_other_types_and_bands_are_refused() -> None:
    with pytest.raises(DTypeError, match="dtype"):
        turn_live_kernel("int8", 32)
    with pytest.raises(ScheduleError, match="multiple of 32"):
        turn_live_kernel("float16", 48)
