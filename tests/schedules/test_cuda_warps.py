"""Contractions on tensor cores (mma.sync): their text for a GPU, and what it does, on the CPU."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from pit_tvm import op
from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.runtime.program import analyse
from pit_tvm.schedules import cuda_contraction
from pit_tvm.structs import Groups, Mask, Rows, Tile
from pit_tvm.transform.pipeline import lower
from tests.runtime.cuda_emulation import Emulator, OnDevice
from tests.schedules.sparse import random

DEAD = 2**30  # an id far beyond every array
# Of the largest result, products of 16 bits rounded once; of tf32, ten bits of every factor.
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 3e-3}


def run(emulator: Emulator, source: str, *arrays: np.ndarray) -> None:
    """One launch of the kernel of ``source``."""
    emulator.compile_source(source).mod["main"](*map(OnDevice, arrays))


def source_of(tensors: Any, sparse: Any, dtype: str, stages: int = 3, arch: str = "sm_80") -> str:
    """The CUDA text of a 64 x 64 tile of two by two warps."""
    program = analyse(tensors, sparse)
    knobs = (("mma", 1), ("reg_m", 4), ("reg_n", 8), ("stages", stages))
    depth = 16 if dtype == "float32" else 32
    tile = Tile("cuda-contraction", arch, dtype, 64, 64, depth, knobs)
    micro_tile = program.routes[0].micro_tile
    sch = cuda_contraction.scheduled(
        program.func, program.contraction, tile, micro_tile, program.num_groups
    )
    return cuda_source(lower(sch.mod), arch, pipelined=True)


def linear(dtype: str, stages: int = 3, arch: str = "sm_80", depth: int = 160) -> str:
    tensors = op.linear(None, 120, depth, dtype=dtype, bias=True, activation="relu")
    return source_of(tensors, {"lhs": Rows()}, dtype, stages, arch)


def assert_close(got: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    error = np.abs(got.astype(np.float64) - expected).max(initial=0)
    assert error <= TOLERANCE[dtype] * np.abs(expected).max(initial=1)


def check_rows(
    emulator: Emulator, source: str, dtype: str, n: int, k_major: bool, depth: int = 160
) -> None:
    """Results of the live rows, and nothing in the others."""
    rng, rows = np.random.default_rng(), 150
    lhs = random(rng, (rows, depth), dtype)
    rhs = random(rng, (n, depth) if k_major else (depth, n), dtype)
    bias = [random(rng, (n,), dtype)] if k_major else []
    live = rng.permutation(rows)[: rng.integers(60, rows)]
    ids = np.full((1, rows), DEAD, np.int32)
    ids[0, : len(live)] = live
    count = np.array([len(live)], np.int32)
    expected = lhs.astype(np.float64) @ (rhs.T if k_major else rhs).astype(np.float64)
    if k_major:
        expected = np.maximum(expected + bias[0].astype(np.float64), 0)
    out = np.full((rows, n), np.nan, lhs.dtype)
    run(emulator, source, lhs, rhs, *bias, ids, count, out)
    assert_close(out[live], expected[live], dtype)
    assert np.isnan(np.delete(out, live, axis=0)).all()


@pytest.mark.parametrize(("dtype", "stages"), [("float16", 3), ("float32", 1), ("float32", 3)])
def test_gathered_rows_by_rows_of_weights(dtype: str, stages: int, emulator: Emulator):
    check_rows(emulator, linear(dtype, stages), dtype, 120, k_major=True)


@pytest.mark.parametrize(("dtype", "step"), [("float16", 32), ("float32", 16)])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_pipelines_longer_than_the_depth(
    steps: int, stages: int, dtype: str, step: int, emulator: Emulator
):
    source = linear(dtype, stages, depth=step * steps)
    check_rows(emulator, source, dtype, 120, k_major=True, depth=step * steps)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gathered_rows_by_columns_of_weights(dtype: str, emulator: Emulator):
    tensors = op.matmul(None, 121, 160, dtype=dtype)
    source = source_of(tensors, {"lhs": Rows()}, dtype, stages=2)
    check_rows(emulator, source, dtype, 121, k_major=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gathered_steps_of_the_reduction(dtype: str, emulator: Emulator):
    rng, size, depth = np.random.default_rng(), 128, 100
    tensors = op.matmul(size, size, depth, dtype=dtype, transpose_lhs=True)
    source = source_of(tensors, {"lhs": Mask(1, 64)}, dtype)
    mask = rng.random((depth, 2)) < 0.5
    mask[:, 1] = False
    lhs, rhs = (random(rng, (depth, size), dtype) for _ in range(2))
    lhs[~mask.repeat(64, axis=1)] = 0
    ids, count = np.full((2, depth), DEAD, np.int32), mask.sum(axis=0).astype(np.int32)
    ids[0, : count[0]] = rng.permutation(np.flatnonzero(mask[:, 0]))
    expected = lhs.astype(np.float64).T @ rhs.astype(np.float64)
    out = np.full((size, size), np.nan, lhs.dtype)
    run(emulator, source, lhs, rhs, ids, count, out)
    assert_close(out, expected, dtype)


def test_rows_of_groups(emulator: Emulator):
    rng, rows, n, depth = np.random.default_rng(), 170, 96, 96
    tensors = op.grouped_matmul(None, n, depth, 3, dtype="float16")
    source = source_of(tensors, {"lhs": Groups(3)}, "float16")
    lhs, rhs = random(rng, (rows, depth), "float16"), random(rng, (3, depth, n), "float16")
    group, ids = rng.integers(0, 2, rows) * 2, np.full((3, rows), DEAD, np.int32)
    count = np.bincount(group, minlength=3).astype(np.int32)
    for at, live in enumerate(count):
        ids[at, :live] = rng.permutation(np.flatnonzero(group == at))
    out = np.full((rows, n), np.nan, np.float16)
    run(emulator, source, lhs, rhs, ids, count, out)
    products = lhs.astype(np.float64)[:, None] @ rhs.astype(np.float64)[group]
    assert_close(out, products[:, 0], "float16")


def test_gathered_columns_of_the_other_operand(emulator: Emulator):
    rng, rows, n, depth = np.random.default_rng(), 100, 96, 96
    tensors = op.matmul(None, n, depth, dtype="float16")
    source = source_of(tensors, {"rhs": Rows(1)}, "float16")
    lhs, rhs = random(rng, (rows, depth), "float16"), random(rng, (depth, n), "float16")
    live, ids = rng.permutation(n)[:50], np.full((1, n), DEAD, np.int32)
    ids[0, :50] = live
    out = np.full((rows, n), np.nan, np.float16)
    count = np.array([50], np.int32)
    run(emulator, source, lhs, rhs, ids, count, out)
    assert_close(
        out[:, live], (lhs.astype(np.float64) @ rhs.astype(np.float64))[:, live], "float16"
    )
    assert np.isnan(np.delete(out, live, axis=1)).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_copies_are_spread_and_one_barrier_does_for_an_iteration(arch: str):
    source = linear("bfloat16", arch=arch)
    loop = source[source.index("for (int k_t = 0") :]
    loop = loop[: loop.index("\n  }")]
    calls = re.findall(r"(wait_group|__syncthreads|ldmatrix|cp_async_legacy|commit|mma_sync)", loop)
    firsts = [calls[0], *(b for a, b in itertools.pairwise(calls) if a != b)]
    copies = ["cp_async_legacy", "commit"]
    turn = ["wait_group", "__syncthreads", "ldmatrix", "mma_sync"]  # beside the tile before it
    assert firsts == ["ldmatrix", *copies, "mma_sync", *turn]


def test_guarded_copies_do_not_branch():
    source = linear("float16", arch="sm_90a")
    assert "selp.u32 n, %2, 0, p;" in source and "@!p st.shared" not in source
