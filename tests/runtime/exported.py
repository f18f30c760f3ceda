"""Arrays that DLPack describes, rightly or not."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import tvm_ffi
from tvm_ffi import DLDeviceType

from pit_tvm.runtime.dlpack import Header

_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """``DLManagedTensor`` of the DLPack specification."""

    _fields_ = (("tensor", Header), ("manager", ctypes.c_void_p), ("deleter", _Deleter))


def _delete(managed: Any) -> None:
    """Nothing: `_HEADERS` holds it."""


_DELETER = _Deleter(_delete)
_HEADERS: list[Any] = []  # and what they point to
_capsule_of = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class Exported:
    """The memory of a numpy array, as a header of DLPack that says ``fields`` instead.

    ``at``: device that it says it is on before it is asked for its memory.
    """

    def __init__(self, array: np.ndarray, at: tuple[int, int] = (1, 0), **fields: Any) -> None:
        self.array, self.at, self.fields = array, at, fields

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.at

    def __dlpack__(self, **_: Any) -> Any:
        assert self.at == (1, 0), "memory of another device must not be asked for"
        kind = tvm_ffi.dtype(self.array.dtype.name)
        values: dict[str, Any] = {
            "data": self.array.ctypes.data,
            "device_type": DLDeviceType.kDLCPU,
            "ndim": self.array.ndim,
            "code": kind.type_code,
            "bits": kind.bits,
            "lanes": 1,
            "shape": self.array.shape,
            "strides": [n // self.array.itemsize for n in self.array.strides],
        } | self.fields
        shape, strides = (_longs(values[name]) for name in ("shape", "strides"))
        values |= {"shape": shape, "strides": ctypes.cast(strides, ctypes.c_void_p)}
        managed = _Managed(Header(**values), None, _DELETER)
        _HEADERS.append((managed, shape, strides, self.array))
        return _capsule_of(ctypes.addressof(managed), b"dltensor", None)


def _longs(numbers: Any) -> Any:
    return None if numbers is None else (ctypes.c_int64 * len(numbers))(*numbers)
