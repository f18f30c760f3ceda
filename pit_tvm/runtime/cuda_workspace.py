"""Memory of indices on a CUDA device: new at every call, or used again by the next call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from ..remember import remember
from ..structs import Index
from .cuda_arrays import empty_of, is_capturing, is_rehearsed, stream_of
from .cuda_recording import recorded
from .cuda_view import CudaView, view_of
from .detect_plan import capacity_of


@dataclass(frozen=True)
class CudaIndex(Index):
    """An index whose lists are CUDA tensors.

    ``lines`` (slots, words), uint32: memory for a bit of each position, or, of a `BlockMask`, of
    each block. Detection along rows of bands of up to `MOST_BAND` fills it, and some others.
    """

    @cached_property
    def lines(self) -> Any:
        """Made when it is first asked for, and used again as the lists are."""
        return empty_of("uint32", self.ids, (self.ids.shape[0], self.ids.shape[1] // 32))

    @cached_property
    def bits(self) -> CudaView:
        """``lines`` for a kernel; holds as long as the index does."""
        return view_of(self.lines, "uint32")

    @cached_property
    def views(self) -> tuple[CudaView, CudaView]:
        """``ids`` and ``count`` for functions that take a tensor, too: these do not tell the
        stream. They hold as long as the index does."""
        return view_of(self.ids, "int32"), view_of(self.count, "int32")


def listed(index: Any, dead: CudaIndex | None) -> tuple[Any, ...]:
    """What kernels take of an index, whatever tells it, and of the ``dead`` positions if those are
    listed too."""
    views: tuple[Any, ...] = index.views
    return views if dead is None else (*views, *dead.views)


# take(like, role, slots, extent): lists of positions on an axis of ``extent``, on the device of
# ``like``; ``role`` tells two indices of one call apart.
Take = Callable[[Any, str, int, int], CudaIndex]

Made = TypeVar("Made")

_MOST = 64  # kept by one thread, where nobody says otherwise


def new_index(like: Any, role: str, slots: int, extent: int) -> CudaIndex:
    """A `Take` that gives new memory."""
    ids = empty_of("int32", like, (slots, capacity_of(extent)))
    return CudaIndex(ids, empty_of("int32", like, (slots,)))


class CudaWorkspace:
    """Index memory that each thread uses again in each stream.

    A stream does its work in order, so a call may overwrite what the call before it has read.
    While a CUDA graph is captured, or rehearsed, memory is new: it belongs to the graph. One that
    launches a call again uses the memory of that call. A thread keeps that of ``most`` sizes.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._memory, self._most = threading.local(), most

    def take(self, like: Any, role: str, slots: int, extent: int) -> CudaIndex:
        """A `Take`: what it gives holds until the same thread asks for the same again."""
        return self.keep(new_index, like, role, slots, extent)

    def keep(self, make: Callable[..., Made], like: Any, *size: object) -> Made:
        """``make(like, *size)``, memory on the device of ``like``, or what that gave before."""
        device, now = like.get_device(), recorded()
        stream = stream_of(device) if now is None else now.stream.cuda_stream
        # The default stream, 0, cannot be captured.
        if now is None and stream and is_capturing(device):
            return make(like, *size)
        try:
            known = self._memory.known
        except AttributeError:
            known = self._memory.known = {}
        key = (stream, device, *size)
        made: Made | None = known.get(key)
        if made is None:
            made = make(like, *size)
            if not is_rehearsed():
                remember(known, key, made, self._most)
        if now is not None:
            now.memory.append(made)
        return made
