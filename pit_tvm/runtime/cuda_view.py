"""Memory on a GPU as compiled functions take it: a DLPack header, and nothing of torch.

To hand a torch tensor over takes the host half a microsecond, a view almost nothing. But it is from
the tensors that a compiled function learns the current stream: every call needs one of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import tvm_ffi


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

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of all dimensions."""
        return tuple(self._shape)


def view_of(tensor: Any, dtype: str, shape: Sequence[int] | None = None) -> CudaView:
    """A tensor's memory; ``shape``: None for its own."""
    extents = tensor.shape if shape is None else shape
    return CudaView(tensor.data_ptr(), extents, dtype, tensor.get_device())
