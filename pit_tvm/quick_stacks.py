"""A shortcut through the standard library for TVM's script parser."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import threading
from collections.abc import Callable
from functools import cache
from types import FrameType, TracebackType
from typing import Any

Change = tuple[Any, str, Any]  # a module, the name of what it has, and what it has instead


class Replaced(contextlib.AbstractContextManager[None]):
    """Within this context modules have what ``changes`` gives instead of their own: as long as any
    thread is in it, which others may enter and leave meanwhile."""

    def __init__(self, changes: Callable[[], list[Change]]) -> None:
        self._changes, self._lock, self._inside = changes, threading.Lock(), 0
        self._before: list[Change] = []

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            changes = self._changes()
            self._before = [(module, name, getattr(module, name)) for module, name, _ in changes]
            _put(changes)

    def __exit__(self, *fault: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _put(self._before)


def _put(changes: list[Change]) -> None:
    for module, name, value in changes:
        setattr(module, name, value)


@cache
def quick_stacks() -> Replaced:
    """Within this context, ``inspect`` finds the source lines of a call stack in ``linecache``.

    TVM's script parser asks for the line of every frame, many times in one kernel; the standard
    library goes through all loaded modules for each, which takes most of the time that a kernel
    needs to be parsed. The answers are the same.
    """
    return Replaced(lambda: [(inspect, "getframeinfo", _frame_info_beside(inspect.getframeinfo))])


def _frame_info_beside(find: Callable[..., inspect.Traceback]) -> Callable[..., inspect.Traceback]:
    """As ``find``, ``inspect.getframeinfo``, which is asked for what is rare."""

    def frame_info(frame: FrameType | TracebackType, context: int = 1) -> inspect.Traceback:
        if context != 1 or not isinstance(frame, FrameType):
            return find(frame, context)
        name, line = frame.f_code.co_filename, frame.f_lineno
        lines = linecache.getlines(name, frame.f_globals)[line - 1 : line]
        index = 0 if lines else None
        return inspect.Traceback(name, line, frame.f_code.co_name, lines or None, index)

    return frame_info
