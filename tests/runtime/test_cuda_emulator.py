"""The emulator itself: what it notices of broken kernels, and what it refuses."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pit_tvm.errors import BackendUnavailable
from pit_tvm.reference import ops as reference
from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.runtime.dlpack import Header
from pit_tvm.structs import Rows
from tests.api.running import assert_close, poison, random_array
from tests.runtime.cuda_emulation import OnDevice
from tests.runtime.emulated import WIDE, Machine


@pytest.fixture(scope="module")
def wide(machine: Machine) -> str:
    """Source of a kernel that gathers rows: vectors, three stages in flight."""
    dispatcher = machine.dispatcher(WIDE, "float32", "lhs", Rows())
    micro_tile = dispatcher.form.route.micro_tile
    return cuda_source(dispatcher.kernels._made(micro_tile, dispatcher.tile), pipelined=True)


def run_wide(machine: Machine, source: str, rng: np.random.Generator, device: int = 0) -> None:
    """A kernel like `wide` on all of 70 rows, against the truth."""
    lhs, rhs = random_array((70, 96), "float32", rng), random_array((64, 96), "float32", rng)
    ids, count = np.arange(128, dtype=np.int32)[None], np.array([70], np.int32)
    out = poison((70, 64), "float32")
    arrays = [OnDevice(array) for array in (lhs, rhs, ids, count, out)]
    for array in arrays:
        Header.from_address(array.value or 0).device_id = device
    machine.emulator.compile_source(source).mod["main"](*arrays)
    assert_close(out, reference.matmul(lhs, rhs, transpose_rhs=True))


@pytest.mark.parametrize(
    ("sound", "broken", "number", "seen"),
    [
        (r'asm volatile\("cp\.async\.wait_group[^\n]*', "", 0, "NaN in the result"),
        (r"__syncthreads\(\);", "", 1, "error .*, allowed"),  # before a stage is used again
        (r"__syncthreads\(\);", "if (threadIdx.x) __syncthreads();", 1, "not all threads reach"),
        (r"\*\(float4\*\)\(", "*(float4*)(1 + ", 1, "misaligned"),
        (r"acc_local_ptr\[15\] =", "acc_local_ptr[threadIdx.x + 15] =", 1, "outside an array"),
    ],
)
def test_a_broken_kernel_is_noticed(
    sound: str,
    broken: str,
    number: int,
    seen: str,
    machine: Machine,
    wide: str,
    rng: np.random.Generator,
) -> None:
    source, changed = re.subn(sound, broken, wide, count=number)
    assert changed
    with pytest.raises((AssertionError, RuntimeError), match=seen):
        run_wide(machine, source, rng)


def test_a_launcher_says_what_is_wrong_with_its_device(
    machine: Machine, wide: str, rng: np.random.Generator
) -> None:
    with pytest.raises(RuntimeError, match="a device that there is not"):
        run_wide(machine, wide, rng, device=1)
    run_wide(machine, wide, rng)


@pytest.mark.parametrize(
    ("unknown", "seen"),
    [
        ('asm volatile("barrier.cluster.wait;" ::: "memory");\n', "PTX that is known"),
        ("__shared__ float tile[32];\n", "dynamic shared memory"),
        ("auto lane = __shfl_sync(~0u, threadIdx.x, 0);\n", "__shfl_sync"),
    ],
)
def test_what_the_emulator_does_not_know_is_refused(
    unknown: str, seen: str, machine: Machine
) -> None:
    with pytest.raises(BackendUnavailable, match=seen):
        machine.emulator.compile_source(f"void kernel() {{\n{unknown}}}\n")
