"""Gated rows and their gradients: what the kernels compute."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pit_tvm.gates import PLAIN, Gate
from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.runtime.cuda_modules import named_module
from pit_tvm.schedules.hopper_gate import gate_rows
from tests.runtime.cuda_emulation import Emulator, OnDevice

torch = pytest.importorskip("torch")

NUMBER, WIDTH = 7, 264


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("dtype", "act", "gate"),
    [
        ("float16", "silu", PLAIN),
        ("bfloat16", "gelu", Gate(1.0)),
        ("float16", "silu", Gate(1.0, 1.702, 1.0, interleaved=True)),
        ("bfloat16", "gelu_tanh", Gate(offset=-0.5, interleaved=True)),
    ],
)
def test_rows_are_gated_as_in_float64(
    emulator: Emulator,
    dtype: str,
    act: str,
    gate: Gate,
    backward: bool,
    rng: np.random.Generator,
) -> None:
    from pit_tvm.torch import host

    kind: Any = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    rows = rng.standard_normal((NUMBER, 2 * WIDTH)).astype(kind)
    rows[0, :4] = [1.0, -1.0, np.nan, 2.0]  # at the limits, and beyond
    down = rng.standard_normal((NUMBER, WIDTH)).astype(kind)
    kernel = named_module({"main": gate_rows(dtype, act, gate, backward=backward)})
    run = emulator.compile_source(cuda_source(kernel, tirx=True)).mod["main"]
    out = np.full_like(rows if backward else down, 7.0)
    run(*map(OnDevice, (rows, down, out) if backward else (rows, out)))
    exact, given = (torch.from_numpy(each.astype(np.float64)) for each in (rows, down))
    if backward:
        want = host.gate_gradient(exact, given, act, gate).numpy()
    else:
        want = host.gate_halves(exact, act, gate).numpy()
    found = out.astype(np.float64)
    assert np.array_equal(np.isnan(found), np.isnan(want))
    apart = np.nan_to_num(found - want)
    assert np.linalg.norm(apart) < (1e-3 if dtype == "float16" else 6e-3) * np.linalg.norm(
        np.nan_to_num(want)
    )
