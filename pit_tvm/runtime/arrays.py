"""Arrays in and out without copies: numpy, torch on the CPU, and anything else with DLPack.

A compiled function takes numpy arrays and torch tensors directly (0.25 us each, less than an
explicit conversion first). What it does not take is given another view of the same memory here:
read-only numpy arrays, numpy's bfloat16, booleans read as bytes, and tensors that require a
gradient. numpy's bfloat16 is the type of the optional package ml_dtypes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime as tvm_runtime

from ..errors import DTypeError, ShapeError, mismatch
from ..memory import aligned_empty, numpy_dtype
from .dlpack import as_tvm, check_start, no_array
from .torch_arrays import address_of, check_memory, check_shape, check_strided, check_torch

NUMPY_DTYPES = {
    name: np.dtype(name)
    for name in (
        *("float16", "float32", "float64", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}


def kind(array: Any) -> str:
    """Library that ``array`` belongs to: "numpy", "torch" or "dlpack" for every other one.

    Raises
    ------
    DTypeError
        It is no array: it has no ``__dlpack__``.
    """
    if isinstance(array, np.ndarray):
        return "numpy"
    if is_torch(array):
        return "torch"
    if hasattr(array, "__dlpack__"):
        return "dlpack"
    raise no_array("array", array)


def is_torch(array: Any) -> bool:
    """Whether an array is a torch tensor."""
    torch = sys.modules.get("torch")  # absent: no torch tensor can exist
    return torch is not None and isinstance(array, torch.Tensor)


def shape_of(name: str, array: Any) -> tuple[int, ...]:
    """Shape of any array that `kind` knows; DTypeError names another thing, or a nested tensor."""
    try:
        shape = getattr(array, "shape", None)
    except RuntimeError:  # of a nested tensor
        if is_torch(array):
            check_memory(name, array)
        raise
    return shape if isinstance(shape, tuple) else tuple(as_tvm(name, array).shape)


def as_tensor(
    name: str, array: Any, *, dtype: str, shape: Sequence[int | None], writable: bool = False
) -> Any:
    """The checked ``array`` in the form that a compiled CPU function takes, sharing its memory.

    ``shape`` holds an extent per dimension, None for any. ``dtype`` "uint8" takes booleans too,
    as bytes 0 and 1. ``writable`` is for results.

    Raises
    ------
    DTypeError
        Another element type or byte order, another device, or no array at all.
    ShapeError
        Another rank or extent, not contiguous, not aligned to its elements, or not writable.
    """
    if isinstance(array, np.ndarray):
        _check_numpy(name, array, dtype, tuple(shape), writable)
        return _numpy_argument(array, dtype)
    if is_torch(array):
        return _torch_argument(name, array, dtype, tuple(shape), writable)
    return _dlpack_argument(name, array, dtype, tuple(shape), writable)


def check_unmasked(name: str, array: Any) -> None:
    """DTypeError if ``array`` is one of numpy's masked arrays, whose mask nothing would read."""
    if isinstance(array, np.ma.MaskedArray):
        advice = "pass .data and the mask apart"
        raise DTypeError(mismatch(name, "a plain array", "numpy.ma.MaskedArray", advice))


def check_overlap(name: str, out: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse a contiguous result ``out`` whose memory one of the contiguous inputs shares.

    Raises ShapeError, which names both arguments.
    """
    own = None if isinstance(out, np.ndarray) else _span(out)
    for other, array in inputs.items():
        if own is None and isinstance(array, np.ndarray):
            shared = np.may_share_memory(out, array)  # exact for contiguous arrays
        else:
            begin, end = own or _span(out)
            first, last = _span(array)
            shared = begin < last and first < end
        if shared:
            advice = "pass another array as the result"
            raise ShapeError(mismatch(name, "memory of its own", f"memory of {other}", advice))


def empty_like_kind(kind_of: Any, shape: Sequence[int], dtype: str) -> Any:
    """New uninitialised array of the library that ``kind_of`` belongs to, on the CPU.

    A DLPack object gives a TVM tensor. Memory begins at a cache line.

    Raises
    ------
    BackendUnavailable
        A numpy bfloat16 array without the package ml_dtypes.
    DTypeError
        New tensors have no memory where torch only traces.
    """
    library = kind(kind_of)
    if library == "numpy":
        return aligned_empty(shape, numpy_dtype(dtype))
    if library == "torch":
        return _empty_torch(shape, dtype)
    return _empty(tuple(shape), dtype)


def as_numpy(array: Any, name: str = "array") -> np.ndarray:
    """``array`` as a numpy array of the same memory.

    Raises
    ------
    DTypeError
        It is no array, not on the CPU, or of no type of numpy's; the message names it ``name``.
    ShapeError
        A tensor is not strided.
    BackendUnavailable
        As in `empty_like_kind`.
    """
    if isinstance(array, np.ndarray):
        return array
    if is_torch(array):
        try:
            found = array.numpy()  # asking first takes as long again
        except (RuntimeError, TypeError):
            return _torch_as_numpy(array, name)
        address_of(name, array)  # numpy makes memory of its own where there is none
        return found
    tensor = as_tvm(name, array)
    if tensor.dtype == "bfloat16":
        return np.from_dlpack(_retype(tensor, "uint16")).view(numpy_dtype("bfloat16"))
    try:
        return np.from_dlpack(tensor)
    except (BufferError, RuntimeError) as error:
        raise DTypeError(mismatch(name, "a type that numpy has", tensor.dtype)) from error


def as_torch(array: Any) -> Any:
    """``array`` as a torch tensor of the same memory, without gradient."""
    if is_torch(array):
        return array.detach() if array.requires_grad else array
    import torch

    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(as_tvm("array", array))
    if min(array.strides, default=0) < 0:  # along dimensions of one element, which torch refuses
        array = array.reshape(-1).reshape(array.shape)
    if array.flags.writeable and array.dtype.kind != "V":
        return torch.from_numpy(array)
    return torch.from_dlpack(_from_numpy(array))


# --------------------------------------------------------------------------------------------
# One library at a time


def _torch_as_numpy(array: Any, name: str) -> np.ndarray:
    """A tensor that torch itself does not turn into a numpy array: with a gradient, or bfloat16."""
    torch = sys.modules["torch"]
    check_memory(name, array)
    check_strided(name, array)
    address_of(name, array)
    plain = array.detach().resolve_neg()
    if plain.dtype is torch.bfloat16:
        return plain.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    try:
        return plain.numpy()
    except TypeError as error:
        raise DTypeError(mismatch(name, "a type that numpy has", plain.dtype)) from error


def _is_element(element: np.dtype[Any], dtype: str) -> bool:
    # bfloat16 is a type from outside numpy, of kind V; ml_dtypes is asked for only then.
    if dtype == "bfloat16":
        return element.kind == "V" and element == numpy_dtype("bfloat16")
    return element == NUMPY_DTYPES[dtype] or (dtype == "uint8" and element == np.bool_)


def _check_numpy(
    name: str, array: np.ndarray, dtype: str, shape: tuple[int | None, ...], writable: bool
) -> None:
    if not _is_element(array.dtype, dtype):
        advice = f"convert it with .astype('{dtype}')"
        raise DTypeError(mismatch(name, dtype, array.dtype, advice))
    if type(array) is not np.ndarray:
        check_unmasked(name, array)
    check_shape(name, array.shape, shape)
    flags = array.flags
    if not flags.c_contiguous:
        got = f"strides {array.strides} bytes"
        advice = "pass np.ascontiguousarray(...)"
        raise ShapeError(mismatch(name, "a contiguous array", got, advice))
    if not flags.aligned:
        raise ShapeError(mismatch(name, "aligned elements", "unaligned", "pass a copy"))
    if writable and not flags.writeable:
        raise ShapeError(mismatch(name, "a writable array", "a read-only one"))


def itemsize(dtype: str) -> int:
    """Bytes of one element of a type given by name."""
    return 2 if dtype == "bfloat16" else NUMPY_DTYPES[dtype].itemsize


def _numpy_argument(array: np.ndarray, dtype: str) -> Any:
    if array.size == 0:
        return _empty(array.shape, dtype)
    if dtype == "uint8" and array.dtype == np.bool_:
        array = array.view(np.uint8)
    return array if array.flags.writeable and dtype != "bfloat16" else _from_numpy(array)


def _torch_argument(
    name: str, array: Any, dtype: str, shape: tuple[int | None, ...], writable: bool
) -> Any:
    import torch

    check_torch(name, array, dtype, shape, writable)
    if array.numel() == 0:
        return _empty(tuple(array.shape), dtype)
    if dtype == "uint8" and array.dtype is torch.bool:
        array = array.view(torch.uint8)
    return array.detach() if array.requires_grad else array


def _dlpack_argument(
    name: str, array: Any, dtype: str, shape: tuple[int | None, ...], writable: bool
) -> Any:
    tensor = as_tvm(name, array)
    if dtype == "uint8" and tensor.dtype == "bool":
        tensor = _retype(tensor, dtype)
    if tensor.dtype != dtype:
        raise DTypeError(mismatch(name, dtype, tensor.dtype))
    check_shape(name, tensor.shape, shape)
    if not tensor.is_contiguous():
        got = f"strides {tensor.strides} elements"
        raise ShapeError(mismatch(name, "a contiguous tensor", got, "pass a copy"))
    check_start(name, tensor)
    if tensor.data_ptr() % itemsize(dtype):
        raise ShapeError(mismatch(name, "aligned elements", "unaligned", "pass a copy"))
    if writable and not isinstance(array, tvm_ffi.Tensor):
        # Only numpy reads DLPack's read-only flag; it has no bfloat16 to read it with.
        if dtype == "bfloat16" or not np.from_dlpack(array).flags.writeable:
            expected = "a numpy array, a torch tensor or a TVM tensor to write to"
            raise ShapeError(mismatch(name, expected, type(array).__name__))
    return _empty(tensor.shape, dtype) if 0 in tensor.shape else tensor


def _empty(shape: tuple[int, ...], dtype: str) -> Any:
    # Stands for empty arrays too: other libraries give those strides of zero, which compiled
    # functions refuse.
    return tvm_runtime.empty(shape, dtype)


def _empty_torch(shape: Sequence[int], dtype: str) -> Any:
    import torch

    made = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="cpu")
    if type(made) is not torch.Tensor:
        check_memory("out", made)
    if not made.data_ptr() and made.numel():  # of torch.func
        advice = "call outside of torch.func.functionalize and fake tensors"
        raise DTypeError(mismatch("out", "a new tensor with memory", "one without", advice))
    return made


def _retype(tensor: Any, dtype: str) -> Any:
    """The same memory read as another type of the same size."""
    return tensor._create_view(tensor.shape, dtype)


def _from_numpy(array: np.ndarray) -> tvm_ffi.Tensor:
    """A numpy array that DLPack's first version cannot express: read-only, or bfloat16."""
    bits = array.view(np.uint16) if _is_element(array.dtype, "bfloat16") else array
    tensor = tvm_ffi.from_dlpack(bits.__dlpack__(max_version=(1, 0)))
    return tensor if bits is array else _retype(tensor, "bfloat16")


def _span(array: Any) -> tuple[int, int]:
    """First byte and the one after the last of a contiguous array."""
    if is_torch(array):
        begin, size = array.data_ptr(), array.nbytes
    elif isinstance(array, np.ndarray):
        begin, size = array.ctypes.data, array.nbytes
    else:
        tensor = as_tvm("array", array)
        begin, size = tensor.data_ptr(), tensor.numel() * itemsize(str(tensor.dtype))
    return begin, begin + size
