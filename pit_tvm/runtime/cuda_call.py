"""What calls with the same signature share on a GPU, and what their tensors' addresses decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..structs import Plan, Tile
from .bind import Layout
from .cuda_detect_ids import Find
from .cuda_view import CudaView
from .cuda_watch import CountWatch


class CudaPlace:
    """What the addresses of inputs and output decide.

    ``aligned``: all rows of operands and output begin at multiples of 16 bytes. ``rest``: what
    kernels take behind the index, as they take it: dense operand, bias, and the output unless the
    call makes it; made when they are first needed.
    """

    __slots__ = ("aligned", "rest")

    def __init__(self, aligned: bool) -> None:
        self.aligned = aligned
        self.rest: tuple[CudaView, ...] | None = None


class CudaCall:
    """Everything that the signature of a call decides, and what such calls have learnt.

    ``sizes``: bytes of every input and of the output, if it was passed. ``whole``: rows of all
    operands are whole pieces of 16 bytes. ``fresh``: the output is made by the call. ``empty``: it
    has no elements. ``places``: by the addresses of inputs and output. ``finds``: detection without
    and with the dead rows. ``plan``: the one for ``counts``, for that precision of float32
    (``tf32``), and where the host's time may decide or not (``hosted``). ``product``: the last
    tile's kernel.
    """

    def __init__(
        self, layout: Layout, device: int, sizes: tuple[int, ...], whole: bool, fresh: bool
    ) -> None:
        self.layout, self.device, self.sizes = layout, device, sizes
        self.whole, self.fresh, self.empty = whole, fresh, 0 in layout.output
        self.places: dict[tuple[int, ...], CudaPlace] = {}
        self.watch = CountWatch(device)
        self.finds: dict[bool, Find] = {}
        self.counts: tuple[int, ...] | None = None
        self.tf32 = self.hosted = False
        self.plan: Plan | None = None
        self.product: tuple[Tile | None, Callable[..., Any]] | None = None
