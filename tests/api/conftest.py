"""What tests of operators share."""

from __future__ import annotations

import pytest

from pit_tvm.runtime import launch


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator of these tests checks, and products use all threads, however small they are."""
    monkeypatch.setattr(launch, "ALONE_US", 0.0)
    monkeypatch.delenv("PIT_TVM_CHECK", raising=False)
