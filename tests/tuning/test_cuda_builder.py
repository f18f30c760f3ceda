"""Building GPU candidates: each kernel once, side by side, failures kept apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tvm
from tvm.s_tir import Schedule

from pit_tvm.errors import BackendUnavailable
from pit_tvm.tuning.cuda_builder import CudaBuilder, Toolchain, worker_pool
from pit_tvm.tuning.tasks import workload_module
from tests.tuning.stand_in import SPACE, sample, task

TASK = task("avx2")


class Bytes:
    """A library that is its source."""

    def __init__(self, text: str) -> None:
        self.text = text

    def export_library(self, file_name: str) -> None:
        Path(file_name).write_text(self.text)


def source(mod: tvm.IRModule, arch: str) -> str:
    assert arch == "sm_90a"
    return str(mod["main"].body)


def compile_slowly(text: str, arch: str) -> Bytes:
    return Bytes(f"{os.getpid()}\n{text}")


def refuse(text: str, arch: str) -> Bytes:
    raise RuntimeError("nvcc\nsays no")


def without_compiler(text: str, arch: str) -> Bytes:
    raise BackendUnavailable("no nvcc")


def on_a_full_disk(text: str, arch: str) -> Bytes:
    raise OSError("no space left")


def same(mod: tvm.IRModule) -> tvm.IRModule:
    return mod


def candidate(seed: int) -> tvm.IRModule:
    sch = Schedule(workload_module(SPACE, TASK), seed=seed)
    sample(sch, TASK)
    return sch.mod


@pytest.fixture
def tools(tmp_path: Path) -> Toolchain:
    return Toolchain(source, compile_slowly, "sm_90a", tmp_path / "kernels")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "artifacts"
    path.mkdir()
    yield path


def test_equal_candidates_are_compiled_once_and_each_gets_a_file(
    tools: Toolchain, folder: Path
) -> None:
    builder = CudaBuilder(same, folder, tools, None)
    paths = [builder.build(candidate(seed)) for seed in (1, 1, 2)]
    assert len(set(paths)) == 3 and all(folder in path.parents for path in paths)
    assert paths[0].read_text() == paths[1].read_text() != paths[2].read_text()
    assert len(list(tools.kernels.glob("*.so"))) == 2 == len(list(tools.kernels.iterdir()))


def test_another_job_finds_the_kernels(tools: Toolchain, folder: Path) -> None:
    CudaBuilder(same, folder, tools, None).warm([candidate(1)])
    (kernel,) = tools.kernels.iterdir()
    kernel.write_text("found")
    again = CudaBuilder(same, folder, replace(tools, compile=refuse), None)
    assert again.build(candidate(1)).read_text() == "found"


def test_processes_compile_side_by_side(tools: Toolchain, folder: Path) -> None:
    with worker_pool(2) as pool:
        builder = CudaBuilder(same, folder, replace(tools, workers=2), pool)
        builder.warm([candidate(seed) for seed in range(1, 5)])
        paths = [builder.build(candidate(seed)) for seed in range(1, 5)]
    makers = {path.read_text().partition("\n")[0] for path in paths}
    assert str(os.getpid()) not in makers


def test_candidate_that_does_not_compile_reports_why(tools: Toolchain, folder: Path) -> None:
    builder = CudaBuilder(same, folder, replace(tools, compile=refuse), None)
    assert builder.build(candidate(1)) == "RuntimeError: says no"
    assert not list(tools.kernels.glob("*.so"))


@pytest.mark.parametrize("workers", [1, 2])
def test_missing_compiler_ends_the_job(tools: Toolchain, folder: Path, workers: int) -> None:
    with worker_pool(workers) as pool, pytest.raises(BackendUnavailable, match="no nvcc"):
        CudaBuilder(same, folder, replace(tools, compile=without_compiler), pool).warm(
            [candidate(1)]
        )


@pytest.mark.parametrize("workers", [1, 2])
def test_full_disk_ends_the_job_and_is_no_failed_candidate(
    tools: Toolchain, folder: Path, workers: int
) -> None:
    full = replace(tools, compile=on_a_full_disk)
    with worker_pool(workers) as pool, pytest.raises(BackendUnavailable, match="no space left"):
        CudaBuilder(same, folder, full, pool).warm([candidate(1)])
