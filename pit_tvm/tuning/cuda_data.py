"""What GPU candidates are run on and checked against: random rows, and their product in float32.

The product is made once, on the GPU, by a kernel that shares nothing with the candidates; every
element of every candidate's output is compared with it, and every dead row must stay untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

from ..memory import numpy_dtype
from ..schedules.hopper_space import random_index, stored
from ..structs import TileTask
from .cuda_kernels import LANES, LARGEST
from .tasks import check_error, random_array, to_device, tolerance_of


@dataclass
class CudaData:
    """Arguments lhs, ids, count, rhs, out of one task on a GPU, and the check of ``out``."""

    task: TileTask
    kernels: Any
    inputs: list[Any]
    out: Any
    untouched: Any
    exact: Any
    slot: Any
    worst: Any

    def arguments(self, device: Any) -> list[Any]:
        """The arguments; ``out`` is poisoned with NaN, in place."""
        self.out.copyfrom(self.untouched)
        return [*self.inputs, self.out]

    def check(self, arguments: Sequence[Any]) -> None:
        """Compare the output; TuningError if a live element is wrong or a dead row was written."""
        self.kernels["compare"](arguments[-1], self.exact, self.slot, self.worst)
        deviation, peak = self.worst.numpy().max(axis=(0, 2))
        scale = float(peak) or 1.0
        error = float("inf") if deviation >= LARGEST else float(deviation) / scale
        check_error(error, tolerance_of(self.task.dtype))


def cuda_data(task: TileTask, rng: np.random.Generator, kernels: Any, device: Any) -> CudaData:
    """Random arguments of a task on a GPU; ``kernels`` is the loaded ``check_module``."""
    size = stored(task)
    ids, count = random_index(task, rng)
    rows = max(1, int(count.max()))
    slot = np.full(size.rows, -1, np.int32)
    for g in range(task.groups):
        slot[ids[g, : count[g]]] = g * rows + np.arange(count[g], dtype=np.int32)
    host = [
        random_array((size.sources, task.k), task.dtype, rng),
        ids,
        count,
        random_array((task.groups, task.n, task.k), task.dtype, rng),
    ]
    inputs = [to_device(array, device) for array in host]
    lhs, _, lives, rhs = inputs
    poisoned = np.full((size.rows, task.n), np.nan, numpy_dtype(task.dtype))
    untouched = to_device(poisoned, device)
    exact = tvm.runtime.empty((task.groups, rows, task.n), "float32", device)
    kernels["reference"](lhs, to_device(ids // task.share, device), lives, rhs, exact)
    return CudaData(
        task=task,
        kernels=kernels,
        inputs=inputs,
        out=tvm.runtime.empty((size.rows, task.n), task.dtype, device),
        untouched=untouched,
        exact=exact,
        slot=to_device(slot, device),
        worst=tvm.runtime.empty((size.rows, 2, LANES), "float32", device),
    )
