"""The GPU's data and check: their kernels' source here, and what they find on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from pit_tvm.errors import BackendUnavailable, TuningError
from pit_tvm.runtime.cuda_build import kernel_source
from pit_tvm.schedules.hopper_space import GROUPS
from pit_tvm.structs import TileTask
from pit_tvm.tuning import runner
from pit_tvm.tuning.cuda_backend import CudaData, cuda_backend
from pit_tvm.tuning.cuda_kernels import LARGEST, check_module, profile_module
from pit_tvm.tuning.runner import cuda_session
from pit_tvm.tuning.tasks import WRONG, Example, load_space
from tests.tuning import cuda_checks

TASK = TileTask(GROUPS, "sm_90a", "float16", 6, 8, 8, 2)


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "half"), ("bfloat16", "nv_bfloat16")])
def test_check_kernels_use_no_tensor_cores(dtype: str, kind: str) -> None:
    source = kernel_source(check_module(dtype))
    assert "reference_kernel" in source and "compare_kernel" in source
    assert f"{kind}* __restrict__ lhs_ptr" in source and "float* __restrict__ exact_ptr" in source
    assert "wgmma" not in source and "cp.async" not in source


def test_profile_kernel_reads_16_bytes_at_once() -> None:
    source = kernel_source(profile_module())
    assert "*(float4*)(src_ptr" in source and "empty_kernel" in source


class Answer:
    """An array on no device."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def numpy(self) -> np.ndarray:
        return self.array


def data(deviation: float, peak: float) -> CudaData:
    """Data whose comparison finds a deviation in one lane of one row."""
    worst = np.zeros((7, 2, 32), np.float32)
    worst[3, 0, 5], worst[4, 1, 6] = deviation, peak
    kernels: dict[str, Any] = {"compare": lambda *arguments: None}
    return CudaData(TASK, kernels, [], None, None, None, None, Answer(worst))


def test_spaces_with_an_example_are_checked_against_it(tmp_path: Path) -> None:
    backend = cuda_backend(cuda_checks.toolchain(tmp_path), None)
    task = TileTask("rows-cuda", "sm_90a", "float32", 6, 8, 8)
    made = backend.make_data(load_space(task.family), task, np.random.default_rng())
    assert isinstance(made, Example) and made.expected.shape == (6, 8)


def test_deviation_counts_against_the_largest_element() -> None:
    data(0.019, 10.0).check([None])
    for deviation in (0.021, LARGEST):
        with pytest.raises(TuningError, match=WRONG):
            data(deviation, 10.0).check([None])


def test_session_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoGpu:
        exist = False

    monkeypatch.setattr(tvm, "cuda", lambda number: NoGpu)
    with pytest.raises(BackendUnavailable, match="target: expected a GPU"), cuda_session():
        pass


def test_session_watches_for_kernels_that_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        exist = True
        multi_processor_count = 132

    asked: list[object] = []
    monkeypatch.setattr(tvm, "cuda", lambda number: Gpu)
    monkeypatch.setattr(
        runner.faulthandler,
        "dump_traceback_later",
        lambda secs, exit: asked.append((secs, exit)),
    )
    monkeypatch.setattr(
        runner.faulthandler, "cancel_dump_traceback_later", lambda: asked.append("over")
    )
    with cuda_session() as session:
        assert session.threads == 132 and asked == [(runner.HANG_SECS, True)]
    assert asked[-1] == "over"


@pytest.mark.gpu
def test_reference_is_exact_and_every_fault_is_found(tmp_path: Path) -> None:
    if not tvm.cuda(0).exist:
        pytest.skip("no CUDA device")
    cuda_checks.whole_check(tmp_path)
