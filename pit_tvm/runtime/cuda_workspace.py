"""Memory of indices on a CUDA device: new at every call, or used again by the next call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..remember import remember
from ..structs import Index
from .cuda_arrays import empty_int32, is_capturing, stream_of
from .cuda_detect_plan import capacity_of

# take(like, role, slots, extent): lists of positions on an axis of ``extent``, on the device of
# ``like``; ``role`` tells two indices of one call apart.
Take = Callable[[Any, str, int, int], Index]

_MOST = 64  # kept by one thread


def new_index(like: Any, role: str, slots: int, extent: int) -> Index:
    """A `Take` that gives new memory."""
    ids = empty_int32(like, (slots, capacity_of(extent)))
    return Index(ids, empty_int32(like, (slots,)))


class CudaWorkspace:
    """Index memory that each thread uses again in each stream.

    A stream does its work in order, so a call may overwrite what the call before it has read.
    While a CUDA graph is captured memory is new: it belongs to the graph.
    """

    def __init__(self) -> None:
        self._memory = threading.local()

    def take(self, like: Any, role: str, slots: int, extent: int) -> Index:
        """A `Take`: what it gives holds until the same thread asks for the same again."""
        device = like.get_device()
        stream = stream_of(device)
        if stream and is_capturing():  # the default stream, 0, cannot be captured
            return new_index(like, role, slots, extent)
        try:
            known = self._memory.known
        except AttributeError:
            known = self._memory.known = {}
        key = (stream, device, role, slots, extent)
        index = known.get(key)
        if index is None:
            index = remember(known, key, new_index(like, role, slots, extent), _MOST)
        return index
