"""One kernel folder for the whole session, so that every kernel is compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pit_tvm.runtime import launch


@pytest.fixture(autouse=True)
def shared_kernels(kernel_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator of these tests keeps its kernels in the session's folder, and none checks.

    Products use all threads, however small they are here.
    """
    monkeypatch.setenv("PIT_TVM_CACHE", str(kernel_folder))
    monkeypatch.setattr(launch, "ALONE_US", 0.0)
    monkeypatch.delenv("PIT_TVM_CHECK", raising=False)
