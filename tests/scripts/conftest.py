"""What tests of the scripts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def kernel_cache(kernel_folder: Path) -> Iterator[None]:
    """Kernels of these tests are built once, and not among the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIT_TVM_CACHE", str(kernel_folder))
        yield
