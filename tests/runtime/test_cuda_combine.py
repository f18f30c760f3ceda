"""Sums of choices by the weights of their own type: what the kernel computes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.runtime.cuda_modules import named_module
from pit_tvm.schedules.hopper_combine import combine_rows
from tests.runtime.cuda_emulation import Emulator, OnDevice

KINDS: dict[str, Any] = {"float32": np.float32, "float16": np.float16}
KINDS["bfloat16"] = ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("factors", KINDS)
def test_rows_are_summed_by_their_weights(
    emulator: Emulator, dtype: str, factors: str, rng: np.random.Generator
) -> None:
    tokens, choices, n, groups = 5, 3, 264, 4
    kernel = named_module({"main": combine_rows(dtype, factors=factors, ids="int64")})
    run = emulator.compile_source(cuda_source(kernel, tirx=True)).mod["main"]
    rows = rng.standard_normal((tokens, choices, n)).astype(KINDS[dtype])
    weights = rng.random((tokens, choices)).astype(KINDS[factors])
    ids = rng.integers(-1, groups + 1, (tokens, choices))
    dead = (ids < 0) | (ids >= groups)
    rows[dead] = np.nan  # not read
    out = np.full((tokens, n), np.nan, KINDS[dtype])
    run(*map(OnDevice, (rows, weights, ids)), groups, OnDevice(out))
    live = np.where(dead[..., None], 0.0, rows.astype(np.float64))
    want = (live * weights.astype(np.float64)[..., None]).sum(1)
    apart = np.abs(out.astype(np.float64) - want).max() / np.abs(want).max()
    assert apart < (1e-3 if dtype == "float16" else 8e-3)
