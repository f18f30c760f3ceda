"""What the host knows of live counts: copies that arrive on their own, never waited for."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from .cuda_arrays import PinnedCopy, is_capturing

PERIOD = 16  # calls between two copies of one kind of call
PAUSE_S = 1e-3  # at least between two: one takes the host as long as several calls
PATIENCE = 8  # calls at most between two looks at a copy that is on its way


class CountWatch:
    """Latest known counts of one kind of call. Threads may share it: a lost update costs nothing.

    A plan needs to know how much is live; the count is on the device. So now and then a count is
    copied to pinned memory beside the work, and a later call reads what has arrived. While a CUDA
    graph is captured nothing is copied: the graph keeps its plan.
    """

    def __init__(self) -> None:
        self._known: tuple[int, ...] | None = None
        self._copy: PinnedCopy | None = None
        self._calls = self._due = 0
        self._last = -PAUSE_S  # when the last one began
        # While a copy is on its way: the call that looks for it next, and how many it then waits.
        self._look = self._wait = 0

    def counts(self) -> tuple[int, ...] | None:
        """Counts of an earlier call; None before any has arrived."""
        if self._wait and self._calls >= self._look:
            self._read()
        return self._known

    def due(self) -> bool:
        """Whether this call, one more, should report its count."""
        number = self._calls
        self._calls = number + 1
        if number < self._due or self._wait or perf_counter() - self._last < PAUSE_S:
            return False
        return not is_capturing()

    def report(self, count: Any) -> None:
        """Copy ``count``, a CUDA tensor [slots], beside the work of the current stream."""
        if self._copy is None:
            self._copy = PinnedCopy(count)
        self._copy.start(count)
        self._look, self._wait = self._calls, 1
        self._due, self._last = self._calls - 1 + PERIOD, perf_counter()

    def _read(self) -> None:
        """Take what has arrived; to ask takes the host a microsecond, so it asks seldom."""
        copy = self._copy
        if copy is None or is_capturing():
            return
        if copy.ready():
            self._known, self._wait = copy.values(), 0
        else:
            self._look = self._calls + self._wait
            self._wait = min(2 * self._wait, PATIENCE)
