"""What the host knows of live counts: reports that arrive on their own, never waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cuda_arrays import PinnedCounts, is_capturing, keep_until_arrived

PERIOD = 16  # calls between two reports of one kind of call


class CountWatch:
    """Latest known counts of one kind of call, on one device. Threads may share it.

    A plan needs to know how much is live; the count is on the device. So now and then a kernel
    writes the count to pinned memory of the host, and a later call reads what has arrived. A block
    of memory is either idle or away, and only whoever takes it from its list may touch it: the
    lists' own steps are atomic. While a CUDA graph is captured nothing is reported: the graph
    keeps its plan.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._known: tuple[int, ...] | None = None
        self._idle: list[PinnedCounts] = []
        self._away: list[PinnedCounts] = []  # a kernel will write, or has written, to these
        self._calls = self._due = 0

    def __del__(self) -> None:
        keep_until_arrived(self._away)

    def counts(self) -> tuple[int, ...] | None:
        """Counts of an earlier call; None before any has arrived."""
        if self._away:
            self._read()
        return self._known

    @property
    def waits(self) -> bool:
        """Whether a report is on its way."""
        return bool(self._away)

    def due(self) -> bool:
        """Whether this call, one more, should report its count."""
        number = self._calls
        self._calls = number + 1
        return number >= self._due and not self._away and not is_capturing(self._device)

    def pass_by(self) -> None:
        """Count one more call, which reports nothing."""
        self._calls += 1

    def report(self, count: Any, write: Callable[[Any, int], None]) -> None:
        """Report ``count``, a CUDA tensor [slots], int32, by ``write(count, address)``: a launch
        on the current stream that writes the elements to the host's memory there."""
        try:
            memory = self._idle.pop()
        except IndexError:
            memory = PinnedCounts(count.shape[0])
        memory.expect()
        write(count, memory.address)
        self._away.append(memory)
        self._due = self._calls - 1 + PERIOD

    def _read(self) -> None:
        """Take what has arrived."""
        try:
            memory = self._away.pop()
        except IndexError:  # another thread looks at it
            return
        values = memory.values()
        if values is None:
            self._away.append(memory)
            return
        self._idle.append(memory)
        if values != self._known:
            self._known = values
