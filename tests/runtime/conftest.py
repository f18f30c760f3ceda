"""What tests of operators whose kernels run on a CPU share."""

from __future__ import annotations

import pytest

from pit_tvm.runtime.kernel_cache import KernelCache
from tests.runtime.cuda_emulation import Emulator, missing
from tests.runtime.emulated import Machine


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    reason = missing()
    if reason:
        pytest.skip(reason=reason)
    folder = tmp_path_factory.mktemp("emulated")
    return Machine(Emulator(folder), KernelCache(folder / "kernels"), {})
