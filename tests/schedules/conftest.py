"""What tests of kernels that run on a CPU share."""

from __future__ import annotations

import pytest

from tests.runtime.cuda_emulation import Emulator, missing


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    reason = missing()
    if reason:
        pytest.skip(reason=reason)
    return Emulator(tmp_path_factory.mktemp("emulated"))
