"""Memory for arrays: aligned, and where it pays on large pages; and what it holds."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import BackendUnavailable, mismatch

ALIGNMENT = 128  # two cache lines, which the hardware fetches together
LARGE_PAGE = 2 << 20


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's type of that name. bfloat16 is the type of the optional package ml_dtypes;
    BackendUnavailable if that is missing."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        advice = "install ml_dtypes, or pass torch tensors"
        text = mismatch("bfloat16", "the package ml_dtypes for numpy arrays", "none", advice)
        raise BackendUnavailable(text) from error
    return np.dtype(bfloat16)


def aligned_empty(
    shape: Sequence[int], dtype: npt.DTypeLike, *, lasting: bool = False
) -> npt.NDArray[Any]:
    """An uninitialised array that begins at a cache line.

    With ``lasting`` and from 4 MiB on it asks for large pages where the system has them: a kernel
    that gathers rows from all over an operand otherwise waits for page tables more than for data.
    Mapping them takes milliseconds, so this is for what lives longer than a call.
    """
    element = np.dtype(dtype)
    size = math.prod(shape) * element.itemsize
    large = lasting and size >= 2 * LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    alignment = LARGE_PAGE if large else ALIGNMENT
    raw = _on_large_pages(size + alignment) if large else np.empty(size + alignment, np.uint8)
    # numpy's own ways to an address take 2 us more.
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(raw.data)) % alignment
    return np.ndarray(tuple(shape), element, raw, begin)


def _on_large_pages(size: int) -> npt.NDArray[np.uint8]:
    """Anonymous memory; the array keeps it mapped."""
    memory = mmap.mmap(-1, size)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them: small pages are as right
        pass
    return np.frombuffer(memory, np.uint8)
