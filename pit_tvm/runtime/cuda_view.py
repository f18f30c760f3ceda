"""Memory on a GPU as compiled functions take it: a DLPack header, and nothing of torch.

To hand a torch tensor over takes the host half a microsecond, a view almost nothing. But it is from
the tensors that a compiled function learns the current stream: every call needs one of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import tvm_ffi

from .dlpack import Header

_WORDS = ctypes.sizeof(Header) // 8
_SHAPE = Header.shape.offset // 8
_CUDA = int(tvm_ffi.DLDeviceType.kDLCUDA)


class CudaView(ctypes.c_void_p):
    """Contiguous memory on a GPU as compiled functions take it, in another shape than its tensor's.

    It does not keep the memory: whoever passes it keeps the tensor. A view made by torch takes
    the host longer than half a launch.
    """

    def __init__(self, address: int, shape: Sequence[int], dtype: str, device: int) -> None:
        # The header word by word, its shape behind it: a structure's fields take twice as long.
        kind, count = _kind(dtype), len(shape)
        words = self._words = _array(_WORDS + count)(
            address, _CUDA | device << 32, count | kind << 32, 0, 0, 0, *shape
        )
        place = ctypes.addressof(words)
        words[_SHAPE] = place + 8 * _WORDS
        super().__init__(place)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of all dimensions."""
        return tuple(self._words[_WORDS:])


@lru_cache
def _kind(dtype: str) -> int:
    """The three fields of an element type in one number."""
    kind = tvm_ffi.dtype(dtype)
    return int(kind.type_code | kind.bits << 8 | kind.lanes << 16)


@lru_cache
def _array(words: int) -> Any:
    """The type of so many words."""
    return ctypes.c_int64 * words


def view_of(tensor: Any, dtype: str, shape: Sequence[int] | None = None) -> CudaView:
    """A tensor's memory; ``shape``: None for its own."""
    extents = tensor.shape if shape is None else shape
    return CudaView(tensor.data_ptr(), extents, dtype, tensor.get_device())
