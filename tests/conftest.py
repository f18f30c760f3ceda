"""Fixtures that many tests share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest


@pytest.fixture
def poisoned() -> Callable[..., np.ndarray]:
    """Makes outputs that show what was not written: ``poisoned(shape, dtype)``.

    Floating-point elements are NaN; integers are 85, a value no test expects by chance.
    """

    def make(shape: tuple[int, ...], dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
        fill = 85 if np.issubdtype(dtype, np.integer) else np.nan
        return np.full(shape, fill, dtype)

    return make
