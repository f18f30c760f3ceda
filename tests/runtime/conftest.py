"""What tests of detection, of operators whose kernels run on a CPU and of repeated calls share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pit_tvm.runtime.cuda_repeat import CudaRepeats
from pit_tvm.runtime.detect import Detector
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.target import resolve_target
from tests.runtime.cuda_emulation import Emulator
from tests.runtime.emulated import Machine


@pytest.fixture(scope="module")
def machine(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(emulator, KernelCache(tmp_path_factory.mktemp("kernels")), {})


@pytest.fixture(scope="module")
def detector() -> Detector:
    return Detector(resolve_target("llvm").tvm_target)


@pytest.fixture(scope="module")
def look(kernel_folder: Path) -> Any:
    """The compiled code of repeated calls: it takes tensors of any device."""
    unplanned: Any = None
    return CudaRepeats(KernelCache(kernel_folder), print, unplanned).look
