"""Calls of several threads and streams, one after another."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch

from ..runtime.cuda_arrays import is_capturing


class InTurn:
    """``run``, whose calls share memory: one thread calls it at a time, and on another stream than
    the last call's what it launches waits for what that launched.

    While the stream is recorded it waits for nothing: a recorded wait would be for work outside
    the graph, which CUDA refuses.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run, self._lock = run, Lock()
        self._done = torch.cuda.Event()
        self._last: torch.cuda.Stream | None = None

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """What ``run`` gives."""
        with self._lock:
            if is_capturing():
                return self._run(*inputs)
            stream = torch.cuda.current_stream()
            if self._last is not None and self._last != stream:
                stream.wait_event(self._done)
            try:
                return self._run(*inputs)
            finally:
                self._done.record(stream)
                self._last = stream
