"""Contractions on tensor cores (mma.sync): their text for a GPU, and what it does, on the CPU."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pit_tvm import op
from pit_tvm.runtime.cuda_build import compile_source, cuda_source
from pit_tvm.runtime.program import analyse
from pit_tvm.schedules import cuda_contraction
from pit_tvm.structs import Groups, Mask, Rows, Tile
from pit_tvm.transform.pipeline import lower
from tests.schedules.cuda_on_cpu import kernel_on_cpu

DEAD = 2**30  # an id far beyond every array
# Of the largest result, products of 16 bits rounded once; of tf32, ten bits of every factor.
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 3e-3}


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


def linear(dtype: str, stages: int = 3, arch: str = "sm_80") -> str:
    tensors = op.linear(None, 120, 160, dtype=dtype, bias=True, activation="relu")
    return source_of(tensors, {"lhs": Rows()}, dtype, stages, arch)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))


def assert_close(got: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    error = np.abs(got.astype(np.float64) - expected).max(initial=0)
    assert error <= TOLERANCE[dtype] * np.abs(expected).max(initial=1)


def check_rows(source: str, dtype: str, n: int, folder: Path, k_major: bool) -> None:
    """Results of the live rows, and nothing in the others."""
    rng, rows, depth = np.random.default_rng(), 150, 160
    run = kernel_on_cpu(source, folder)
    lhs = numbers(rng, (rows, depth), dtype)
    rhs = numbers(rng, (n, depth) if k_major else (depth, n), dtype)
    bias = numbers(rng, (n,), dtype)
    live = rng.permutation(rows)[: rng.integers(60, rows)]
    ids = np.full((1, rows), DEAD, np.int32)
    ids[0, : len(live)] = live
    arrays = {"lhs": lhs, "rhs": rhs, "bias": bias, "ids": ids}
    arrays["count"] = np.array([len(live)], np.int32)
    expected = lhs.astype(np.float64) @ (rhs.T if k_major else rhs).astype(np.float64)
    if k_major:
        expected = np.maximum(expected + bias.astype(np.float64), 0)
    for late in (False, True):
        out = np.full((rows, n), np.nan, lhs.dtype)
        run((3, -(-n // 64), 1), late=late, out=out, capacity=rows, m=rows, **arrays)
        assert_close(out[live], expected[live], dtype)
        assert np.isnan(np.delete(out, live, axis=0)).all()


@pytest.mark.parametrize(("dtype", "stages"), [("float16", 3), ("float32", 1)])
def test_gathered_rows_by_rows_of_weights(dtype: str, stages: int, tmp_path: Path):
    check_rows(linear(dtype, stages), dtype, 120, tmp_path, k_major=True)


def test_gathered_rows_by_columns_of_weights(tmp_path: Path):
    source = source_of(op.matmul(None, 121, 160, dtype="float16"), {"lhs": Rows()}, "float16")
    check_rows(source, "float16", 121, tmp_path, k_major=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gathered_steps_of_the_reduction(dtype: str, tmp_path: Path):
    rng, size, depth = np.random.default_rng(), 128, 100
    tensors = op.matmul(size, size, depth, dtype=dtype, transpose_lhs=True)
    run = kernel_on_cpu(source_of(tensors, {"lhs": Mask(1, 64)}, dtype), tmp_path)
    mask = rng.random((depth, 2)) < 0.5
    mask[:, 1] = False
    lhs, rhs = (numbers(rng, (depth, size), dtype) for _ in range(2))
    lhs[~mask.repeat(64, axis=1)] = 0
    ids, count = np.full((2, depth), DEAD, np.int32), mask.sum(axis=0).astype(np.int32)
    ids[0, : count[0]] = rng.permutation(np.flatnonzero(mask[:, 0]))
    expected = lhs.astype(np.float64).T @ rhs.astype(np.float64)
    for late in (False, True):
        out = np.full((size, size), np.nan, lhs.dtype)
        values = {"lhs": lhs, "rhs": rhs, "ids": ids, "count": count, "out": out}
        run((2, 2, 1), late=late, capacity=depth, m=size, **values)
        assert_close(out, expected, dtype)


def test_rows_of_groups(tmp_path: Path):
    rng, rows, n, depth = np.random.default_rng(), 170, 96, 96
    tensors = op.grouped_matmul(None, n, depth, 3, dtype="float16")
    run = kernel_on_cpu(source_of(tensors, {"lhs": Groups(3)}, "float16"), tmp_path)
    lhs, rhs = numbers(rng, (rows, depth), "float16"), numbers(rng, (3, depth, n), "float16")
    group, ids = rng.integers(0, 2, rows) * 2, np.full((3, rows), DEAD, np.int32)
    count = np.bincount(group, minlength=3).astype(np.int32)
    for at, live in enumerate(count):
        ids[at, :live] = rng.permutation(np.flatnonzero(group == at))
    out = np.full((rows, n), np.nan, np.float16)
    values = {"lhs": lhs, "rhs": rhs, "ids": ids, "count": count, "out": out}
    run((3, 6, 1), late=True, capacity=rows, **values)
    products = lhs.astype(np.float64)[:, None] @ rhs.astype(np.float64)[group]
    assert_close(out, products[:, 0], "float16")


def test_gathered_columns_of_the_other_operand(tmp_path: Path):
    rng, rows, n, depth = np.random.default_rng(), 100, 96, 96
    tensors = op.matmul(None, n, depth, dtype="float16")
    run = kernel_on_cpu(source_of(tensors, {"rhs": Rows(1)}, "float16"), tmp_path)
    lhs, rhs = numbers(rng, (rows, depth), "float16"), numbers(rng, (depth, n), "float16")
    live, ids = rng.permutation(n)[:50], np.full((1, n), DEAD, np.int32)
    ids[0, :50] = live
    out = np.full((rows, n), np.nan, np.float16)
    count = np.array([50], np.int32)
    values = {"lhs": lhs, "rhs": rhs, "ids": ids, "count": count, "out": out}
    run((2, 2, 1), late=False, capacity=n, m=rows, **values)
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
    once = ["wait_group", "__syncthreads", "ldmatrix"]
    assert firsts == [*once, "cp_async_legacy", "mma_sync", "cp_async_legacy", "commit", "mma_sync"]


def test_guarded_copies_do_not_branch_and_nvcc_takes_them():
    source = linear("float16", arch="sm_90a")
    assert "selp.u32 n, %2, 0, p;" in source and "@!p st.shared" not in source
    assert compile_source(source, "sm_90a").source == source
