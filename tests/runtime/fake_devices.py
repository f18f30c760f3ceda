"""Tensors of CUDA devices that there are not, for compiled functions that look at their headers.

They tell the current stream of their device as torch's tensors do: through DLPack's exchange of C
functions, of which tvm-ffi asks the first tensor among the arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from tvm_ffi import DLDeviceType

from pit_tvm.runtime.dlpack import Header

_STEP = 1 << 20  # bytes between tensors
#: Handles of the streams that are current, by device.
STREAMS: dict[int, int] = {}


class _Managed(ctypes.Structure):
    """``DLManagedTensorVersioned`` of the DLPack specification, version 1; nothing deletes it."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Header),
    )


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
def _export(array: Any, out: Any) -> int:
    out[0] = ctypes.addressof(array.managed)
    return 0


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def _stream(kind: int, device: int, out: Any) -> int:
    out[0] = STREAMS[device]
    return 0


class _Exchange(ctypes.Structure):
    """``DLPackExchangeAPI``."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("before", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("export", ctypes.c_void_p),
        ("adopt", ctypes.c_void_p),
        ("describe", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


_FUNCTIONS = [ctypes.cast(function, ctypes.c_void_p) for function in (_export, _stream)]
_EXCHANGE = _Exchange(major=1, minor=3, export=_FUNCTIONS[0], stream=_FUNCTIONS[1])
_NAME = b"dlpack_exchange_api"


def _capsule() -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p]
    make.argtypes.append(ctypes.c_void_p)
    return make(ctypes.addressof(_EXCHANGE), _NAME, None)


class OnDevice:
    """A tensor of 16-bit floats, number ``place`` on its device."""

    __dlpack_c_exchange_api__ = _capsule()

    def __init__(self, device: int, shape: Sequence[int], place: int) -> None:
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self.device, self.shape = device, tuple(shape)
        header = Header(
            data=((device + 1) << 40) + place * _STEP,
            device_type=DLDeviceType.kDLCUDA,
            device_id=device,
            ndim=len(shape),
            code=2,
            bits=16,
            lanes=1,
            shape=self._shape,
        )
        self.managed = _Managed(major=1, minor=0, tensor=header)

    def is_neg(self) -> bool:
        """As of most tensors."""
        return False

    def new_empty(self, shape: Sequence[int]) -> OnDevice:
        """Memory that is used again and again, as what is given back at once."""
        return OnDevice(self.device, shape, 0)
