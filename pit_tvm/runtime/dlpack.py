"""Arrays of which DLPack alone tells what they are, as TVM tensors of the same memory."""

from __future__ import annotations

import ctypes
from typing import Any

import tvm_ffi

from ..errors import DTypeError, ShapeError, mismatch


class Header(ctypes.Structure):
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


_CPU = (int(tvm_ffi.DLDeviceType.kDLCPU), 0)
_NAME = b"dltensor"  # of capsules
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def as_tvm(name: str, array: Any) -> tvm_ffi.Tensor:
    """Any array with ``__dlpack__`` as a TVM tensor of the same memory.

    Raises
    ------
    DTypeError
        It has none, is not on the CPU or without memory, or its library does not give it.
    ShapeError
        An extent is negative.
    """
    if not hasattr(array, "__dlpack__"):
        raise no_array(name, array)
    _check_device(name, array.__dlpack_device__())
    tensor = array if isinstance(array, tvm_ffi.Tensor) else _import(name, array)
    # What a library exports may be another thing than it says.
    _check_device(name, tensor.__dlpack_device__())
    if min(tensor.shape, default=0) < 0:
        raise ShapeError(mismatch(name, "extents of at least 0", f"shape {list(tensor.shape)}"))
    if tensor.numel() and not _field(tensor, "data"):
        raise DTypeError(mismatch(name, "elements in memory", "a null pointer"))
    return tensor


def check_start(name: str, tensor: tvm_ffi.Tensor) -> None:
    """ShapeError if there are elements and they begin behind the address that compiled functions
    read from."""
    offset = _field(tensor, "byte_offset")
    if offset and tensor.numel():
        expected = "elements from the start of its memory"
        raise ShapeError(mismatch(name, expected, f"byte_offset {offset}", "pass a copy"))


def no_array(name: str, array: Any) -> DTypeError:
    """The error of what has no ``__dlpack__``."""
    expected = "a numpy array, a torch tensor or an object with __dlpack__"
    advice = "np.asarray(...) makes one of a list"
    return DTypeError(mismatch(name, expected, type(array).__name__, advice))


def _check_device(name: str, device: tuple[int, int]) -> None:
    if tuple(device) != _CPU:
        raise DTypeError(mismatch(name, "an array on the CPU", f"DLPack device {device}"))


def _import(name: str, array: Any) -> tvm_ffi.Tensor:
    try:
        try:
            return tvm_ffi.from_dlpack(array)
        except BufferError:  # read-only memory: only later versions of DLPack say so
            return tvm_ffi.from_dlpack(array.__dlpack__(max_version=(1, 0)))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # of its library
        got = f"{type(error).__name__}: {error}"
        raise DTypeError(mismatch(name, "an array that __dlpack__ exports", got)) from error


def _field(tensor: tvm_ffi.Tensor, field: str) -> int:
    """A number in a tensor's header, which TVM does not tell."""
    capsule = tensor.__dlpack__()  # keeps the header
    return getattr(Header.from_address(_pointer_of(capsule, _NAME)), field) or 0
