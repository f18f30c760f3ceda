"""Memory of what this thread records into a CUDA graph that launches a call again.

What a call allocates it gives back, for others to use; what a graph writes must stay its own. So
while a call is recorded whatever allocates asks here, and the graph keeps what it was given.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Recording:
    """One recording. ``stream``: of the call, whose work is recorded on another one; ``memory``:
    what the graph needs; ``size``: bytes of it that are nobody else's. One like that ``before``
    has the same memory."""

    def __init__(self, before: Recording | None) -> None:
        import torch

        self.stream = torch.cuda.current_stream()
        self.memory: list[Any] = []
        self.own: list[Any] = []  # of it what nobody else has
        self.size = self._number = 0
        self._left = [] if before is None else [*before.own]
        self._before = _allocations()

    def allocate(self, make: Callable[[], Any]) -> Any:
        """What ``make`` allocates, a tensor, for the stream of the call: when the graph gives it
        back the work of that stream before has been asked for."""
        import torch

        with torch.cuda.stream(self.stream):
            made = make()
        self._number += made.nbytes > 0
        made = self._like_before(made)
        self.memory.append(made)
        self.own.append(made)
        self.size += made.nbytes
        return made

    def _like_before(self, made: Any) -> Any:
        """What the recording before had of this shape and type, if anything is left, else this."""
        for place, each in enumerate(self._left):
            if (each.shape, each.dtype) == (made.shape, made.dtype):
                return self._left.pop(place)
        return made

    def is_complete(self, most: int) -> bool:
        """Whether nothing else was allocated meanwhile, and at most so many bytes."""
        made = _allocations() - self._before  # by other threads, too
        return made == self._number and self.size <= most


class _Here(threading.local):
    """This thread's recording, if there is one."""

    now: Recording | None = None


_here = _Here()


@contextlib.contextmanager
def recording(stream: int, before: Recording | None = None) -> Iterator[Recording]:
    """What this thread launches goes to ``stream``, which is being captured, as ``before``."""
    import torch

    _here.now = now = Recording(before)
    try:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            yield now
    finally:
        _here.now = None


def recorded() -> Recording | None:
    """This thread's recording, if there is one."""
    return _here.now


def _allocations() -> int:
    """How often torch has allocated memory of the current device, as far as it says."""
    import torch

    found: Any = torch.cuda.memory_stats_as_nested_dict()  # `memory_stats` sorts them all
    for name in ("allocation", "all", "allocated"):
        found = found.get(name, {})
    return int(found or 0)
