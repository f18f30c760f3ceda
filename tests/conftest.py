"""Fixtures that many tests share, and a shortcut through the standard library."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from types import FrameType, TracebackType

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


def pytest_configure(config: pytest.Config) -> None:
    """Let TVM's script parser read its call stack quickly.

    It asks for the source line of every frame, many times in one kernel, and pytest's stack is
    deep; the standard library goes through all loaded modules for each. This took most of the
    time of every test that emits a kernel.
    """
    find = inspect.getframeinfo

    def frame_info(frame: FrameType | TracebackType, context: int = 1) -> inspect.Traceback:
        if context != 1 or not isinstance(frame, FrameType):
            return find(frame, context)
        name, line = frame.f_code.co_filename, frame.f_lineno
        lines = linecache.getlines(name, frame.f_globals)[line - 1 : line]
        index = 0 if lines else None
        return inspect.Traceback(name, line, frame.f_code.co_name, lines or None, index)

    patch = pytest.MonkeyPatch()
    patch.setattr(inspect, "getframeinfo", frame_info)
    config.add_cleanup(patch.undo)
