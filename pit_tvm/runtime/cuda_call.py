"""What calls with the same signature share on a GPU, and what their tensors' addresses decide."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi

from ..structs import Plan, Tile
from .bind import Layout
from .cuda_detect_ids import Find
from .cuda_watch import CountWatch


class _Header(ctypes.Structure):
    """``DLTensor`` of the DLPack specification, version 1."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),  # none: contiguous
        ("byte_offset", ctypes.c_uint64),
    )


class CudaView(ctypes.c_void_p):
    """Contiguous memory on a GPU as compiled functions take it, in another shape than its tensor's.

    It does not keep the memory: whoever passes it keeps the tensor. A view made by torch takes
    the host longer than half a launch.
    """

    def __init__(self, address: int, shape: Sequence[int], dtype: str, device: int) -> None:
        kind = tvm_ffi.dtype(dtype)
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._header = _Header(
            data=address,
            device_type=tvm_ffi.DLDeviceType.kDLCUDA,
            device_id=device,
            ndim=len(shape),
            code=kind.type_code,
            bits=kind.bits,
            lanes=kind.lanes,
            shape=self._shape,
        )
        super().__init__(ctypes.addressof(self._header))


class CudaPlace:
    """What the addresses of inputs and output decide.

    ``aligned``: all rows of operands and output begin at multiples of 16 bytes. ``weights``: the
    dense operand and the bias in the shapes that kernels take; made when they are first needed.
    """

    __slots__ = ("aligned", "weights")

    def __init__(self, aligned: bool) -> None:
        self.aligned = aligned
        self.weights: tuple[CudaView, ...] | None = None


class CudaCall:
    """Everything that the signature of a call decides, and what such calls have learnt.

    ``sizes``: bytes of every input and of the output, if it was passed. ``whole``: rows of all
    operands are whole pieces of 16 bytes. ``fresh``: the output is made by the call. ``empty``: it
    has no elements. ``places``: by the addresses of inputs and output. ``finds``: detection without
    and with the dead rows. ``plan``: the one for ``counts``. ``product``: the last tile's kernel.
    """

    def __init__(
        self, layout: Layout, device: int, sizes: tuple[int, ...], whole: bool, fresh: bool
    ) -> None:
        self.layout, self.device, self.sizes = layout, device, sizes
        self.whole, self.fresh, self.empty = whole, fresh, 0 in layout.output
        self.places: dict[tuple[int, ...], CudaPlace] = {}
        self.watch = CountWatch()
        self.finds: dict[bool, Find] = {}
        self.counts: tuple[int, ...] | None = None
        self.plan: Plan | None = None
        self.product: tuple[Tile | None, Callable[..., Any]] | None = None
