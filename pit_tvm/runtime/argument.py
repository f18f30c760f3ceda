"""One argument of compiled CPU functions, with what its checks need looked up once."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .arrays import NUMPY_DTYPES, as_tensor, itemsize


class Argument:
    """What the array at one place of a call must be: its name, element type and shape.

    `take` does what `as_tensor` does, by a short form of its checks where that is enough.
    """

    __slots__ = ("_of_torch", "_size", "_type", "dtype", "filled", "name", "shape", "writable")

    def __init__(
        self, name: str, dtype: str, shape: tuple[int, ...], *, writable: bool = False
    ) -> None:
        self.name, self.dtype, self.shape, self.writable = name, dtype, shape, writable
        self.filled, self._size = 0 not in shape, itemsize(dtype)
        self._type = NUMPY_DTYPES.get(dtype)
        torch = sys.modules.get("torch")  # absent: no torch tensor can exist yet
        self._of_torch: tuple[Any, ...] = (None, None, None)
        if torch is not None:
            self._of_torch = (torch.Tensor, getattr(torch, dtype, None), torch.strided)

    def take(self, array: Any) -> Any:
        """The checked ``array`` in the form that a compiled function takes; see `as_tensor`."""
        if self.is_plain(array):
            return array
        shape, writable = self.shape, self.writable
        return as_tensor(self.name, array, dtype=self.dtype, shape=shape, writable=writable)

    def is_plain(self, array: Any) -> bool:
        """Whether ``array`` is right, and a compiled function takes it as it is: for arrays of the
        plainest kind only, which nearly all are."""
        kind = type(array)
        if kind is np.ndarray:
            return (
                array.dtype is self._type
                and array.shape == self.shape
                and array.flags.carray
                and self.filled
            )
        tensor, dtype, strided = self._of_torch
        return (
            kind is tensor
            and array.dtype is dtype
            and array.layout is strided
            and array.is_cpu
            and array.shape == self.shape
            and self.filled
            and array.is_contiguous()
            and not array.requires_grad
            and not array.data_ptr() % self._size
        )
