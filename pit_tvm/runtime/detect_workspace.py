"""Memory of detection: arrays that are used again, and flat views that compiled code takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import tvm_ffi

from ..errors import ShapeError, mismatch
from ..memory import aligned_empty

Array = npt.NDArray[Any]
Take = Callable[..., Array]
Made = TypeVar("Made")


class Workspace:
    """Arrays that one thread uses again and again; they grow by doubling and never shrink.

    Not thread-safe: one workspace per thread.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}
        self._views: dict[str, Array] = {}
        self._kept: tuple[object, Any] = (None, None)

    def take(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """The uninitialised array called ``name``; it aliases what was taken under that name."""
        view = self._views.get(name)
        if view is not None and view.shape == shape and view.dtype == dtype:
            return view
        element = np.dtype(dtype)
        size = math.prod(shape) * element.itemsize
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < size:
            grown = 0 if memory is None else 2 * memory.nbytes
            memory = self._memory[name] = aligned_empty((max(size, grown),), np.uint8, lasting=True)
        view = self._views[name] = memory[:size].view(element).reshape(shape)
        return view

    def keep(self, owner: object, make: Callable[[Take], Made]) -> Made:
        """What ``make(self.take)`` gave when ``owner`` was the last to ask, else gives now."""
        last, kept = self._kept
        if last is not owner:
            kept = make(self.take)
            self._kept = owner, kept
        return kept  # type: ignore[no-any-return]


def fresh(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """`Workspace.take` without a workspace: a new array at every call."""
    return np.empty(shape, dtype)


def flat_view(argument: str, array: Array, element: npt.DTypeLike) -> Any:
    """``array`` as a vector of ``element``, in a form that compiled code takes, without a copy.

    Read-only memory is passed as it is (the kernels only read it); unaligned elements are copied.

    Raises
    ------
    ShapeError
        The array is not C-contiguous.
    """
    flags = array.flags
    if not flags.c_contiguous:
        got = f"strides {array.strides} bytes"
        advice = "pass numpy.ascontiguousarray of it"
        raise ShapeError(mismatch(argument, "a C-contiguous array", got, advice))
    if not flags.aligned:
        array = array.copy()
    vector = array.view(element).reshape(-1)
    if vector.flags.writeable:
        return vector
    # numpy exports read-only memory only to version 1 of DLPack, which can say so
    return tvm_ffi.from_dlpack(vector.__dlpack__(max_version=(1, 0)))
