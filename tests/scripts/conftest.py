"""What tests of the scripts share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def kernel_cache(shared_kernels: None) -> None:
    """Kernels of these tests are built once, and not among the user's."""
