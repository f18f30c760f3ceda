"""What the host knows of live counts: copies that arrive on their own, never waited for."""

from __future__ import annotations

from typing import Any

from .cuda_arrays import PinnedCopy, is_capturing

PERIOD = 16  # calls between two copies of one kind of call


class CountWatch:
    """Latest known counts of one kind of call. Threads may share it: a lost update costs nothing.

    A plan needs to know how much is live; the count is on the device. So now and then a count is
    copied to pinned memory beside the work, and a later call reads what has arrived. While a CUDA
    graph is captured nothing is copied: the graph keeps its plan.
    """

    def __init__(self) -> None:
        self._known: tuple[int, ...] | None = None
        self._copy: PinnedCopy | None = None
        self._pending = False
        self._calls = 0

    def counts(self) -> tuple[int, ...] | None:
        """Counts of an earlier call; None before any has arrived."""
        copy = self._copy
        if self._pending and copy is not None and not is_capturing() and copy.ready():
            self._known, self._pending = copy.values(), False
        return self._known

    def due(self) -> bool:
        """Whether this call, one more, should report its count."""
        number = self._calls
        self._calls = number + 1
        return number % PERIOD == 0 and not self._pending and not is_capturing()

    def report(self, count: Any) -> None:
        """Copy ``count``, a CUDA tensor [slots], beside the work of the current stream."""
        if self._copy is None:
            self._copy = PinnedCopy(count)
        self._copy.start(count)
        self._pending = True
