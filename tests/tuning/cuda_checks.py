"""What the GPU's data, check, builder and job must do; plain functions, so that a machine without
pytest can run them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tvm

from pit_tvm.errors import TuningError
from pit_tvm.runtime.cuda_build import compile_source, kernel_source
from pit_tvm.schedules import hopper_space
from pit_tvm.structs import TileTask
from pit_tvm.tuning.cuda_backend import CudaData, cuda_data
from pit_tvm.tuning.cuda_builder import Toolchain
from pit_tvm.tuning.cuda_kernels import check_module
from pit_tvm.tuning.tasks import WRONG

TASKS = (
    TileTask(hopper_space.ROWS, "sm_90a", "float16", 300, 520, 264),
    TileTask(hopper_space.GROUPS, "sm_90a", "bfloat16", 1000, 264, 200, 5),
    TileTask(hopper_space.GROUPS, "sm_90a", "bfloat16", 1000, 264, 200, 5, 3),
)


def toolchain(folder: Path) -> Toolchain:
    return Toolchain(kernel_source, compile_source, "sm_90a", folder)


def reference_is_exact(data: CudaData) -> None:
    """The GPU's float32 product against numpy's float64."""
    lhs, ids, count, rhs = (array.numpy() for array in data.inputs)
    exact = data.exact.numpy()
    for g, live in enumerate(count):
        wanted = (
            lhs[ids[g, :live] // data.task.share].astype(np.float64) @ rhs[g].astype(np.float64).T
        )
        assert np.abs(exact[g, :live] - wanted).max() < 1e-4 * np.abs(wanted).max()


def check_finds_every_fault(data: CudaData, kernel: Any, device: Any) -> None:
    """A right output passes; one wrong element, one missing and one too many do not."""
    arguments = data.arguments(device)
    kernel(*arguments)
    data.check(arguments)
    good = data.out.numpy().copy()
    slot = data.slot.numpy()
    live, dead = int(np.flatnonzero(slot >= 0)[-1]), int(np.flatnonzero(slot < 0)[0])
    scale = float(np.abs(good[slot >= 0].astype(np.float32)).max())
    for row, value in ((live, 0.1 * scale), (live, np.nan), (live, np.inf), (dead, 0.0)):
        bad = good.copy()
        bad[row, -1] = value if row == dead else bad[row, -1] + value
        data.out.copyfrom(bad)
        try:
            data.check([data.out])
        except TuningError as error:
            assert WRONG in str(error)
        else:
            raise AssertionError(f"row {row}, {value} was not found")


def whole_check(folder: Path) -> None:
    """Both of the above for both families, with a starting tile."""
    device, tools = tvm.cuda(0), toolchain(folder)
    for task in TASKS:
        kernels = tvm.runtime.load_module(str(tools.built(check_module(task.dtype))))
        data = cuda_data(task, np.random.default_rng(0), kernels, device)
        reference_is_exact(data)
        tile = next(
            tile
            for tile in hopper_space.starting_tiles("sm_90a", task.dtype)
            if tile.family == task.family
        )
        knobs = hopper_space.rows_tile(tile)
        path = tools.built(hopper_space.kernel_module(knobs, task.dtype, task.share))
        check_finds_every_fault(data, tvm.runtime.load_module(str(path))["main"], device)
