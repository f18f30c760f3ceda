"""A shortcut through the standard library for TVM's script parser."""

from __future__ import annotations

import contextlib
import inspect
import linecache
from collections.abc import Iterator
from types import FrameType, TracebackType


@contextlib.contextmanager
def quick_stacks() -> Iterator[None]:
    """Within this context, ``inspect`` finds the source lines of a call stack in ``linecache``.

    TVM's script parser asks for the line of every frame, many times in one kernel; the standard
    library goes through all loaded modules for each, which takes most of the time that a kernel
    needs to be parsed. The answers are the same.
    """
    find = inspect.getframeinfo

    def frame_info(frame: FrameType | TracebackType, context: int = 1) -> inspect.Traceback:
        if context != 1 or not isinstance(frame, FrameType):
            return find(frame, context)
        name, line = frame.f_code.co_filename, frame.f_lineno
        lines = linecache.getlines(name, frame.f_globals)[line - 1 : line]
        index = 0 if lines else None
        return inspect.Traceback(name, line, frame.f_code.co_name, lines or None, index)

    inspect.getframeinfo = frame_info
    try:
        yield
    finally:
        inspect.getframeinfo = find
