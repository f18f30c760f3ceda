"""What the host knows of live counts: copies that arrive on their own, never waited for."""

from __future__ import annotations

from typing import Any

from .cuda_arrays import PinnedCopy, is_capturing

PERIOD = 16  # calls between two copies of one kind of call


class CountWatch:
    """Latest known counts of each kind of call. Threads may share it: a lost update costs nothing.

    A plan needs to know how much is live; the count is on the device. So now and then a count is
    copied to pinned memory beside the work, and a later call reads what has arrived. While a CUDA
    graph is captured nothing is copied: the graph keeps its plan.
    """

    def __init__(self) -> None:
        self._known: dict[object, tuple[int, ...]] = {}
        self._pending: dict[object, PinnedCopy] = {}
        self._calls: dict[object, int] = {}

    def counts(self, key: object) -> tuple[int, ...] | None:
        """Counts of an earlier call of this kind; None before any has arrived."""
        pending = self._pending.get(key)
        if pending is not None and not is_capturing() and pending.ready():
            self._known[key] = pending.values()
            self._pending.pop(key, None)
        return self._known.get(key)

    def due(self, key: object) -> bool:
        """Whether this call of its kind, one more, should report its count."""
        number = self._calls.get(key, 0)
        self._calls[key] = number + 1
        return number % PERIOD == 0 and key not in self._pending and not is_capturing()

    def report(self, key: object, count: Any) -> None:
        """Copy ``count``, a CUDA tensor [slots], beside the work of the current stream."""
        self._pending[key] = PinnedCopy(count)
