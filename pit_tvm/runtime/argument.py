"""One argument of compiled CPU functions, and the array that tells a pattern."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import DTypeError, ShapeError, mismatch
from .arrays import NUMPY_DTYPES, as_numpy, as_tensor, check_unmasked

MOST_ELEMENTS = 2**31  # of one array: kernels count them in 32 bits


@dataclass(frozen=True)
class Argument:
    """What the array at one place of a call must be: its name, element type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    writable: bool = False

    @cached_property
    def filled(self) -> bool:
        """Whether it has any elements."""
        return 0 not in self.shape

    def take(self, array: Any) -> Any:
        """The checked ``array`` in the form that a compiled function takes; see `as_tensor`."""
        shape, writable = self.shape, self.writable
        return as_tensor(self.name, array, dtype=self.dtype, shape=shape, writable=writable)


def uneven(name: str, rows: int, sequences: int, cumulative: bool) -> ShapeError:
    """The error of lengths, or cu_seqlens, of another number of sequences than ``rows`` hold."""
    expected = f"a number of sequences that divides {rows} rows"
    advice = "" if cumulative else "cu_seqlens want cu_seqlens= or Lengths(cumulative=True)"
    return ShapeError(mismatch(name, expected, f"{max(sequences, 0)} sequences", advice))


def told_groups(groups: int) -> str:
    """What the ids of ``groups`` groups may be."""
    return f"ids from -1 (none) to {groups - 1}" if groups else "ids of -1 (none), of no groups"


def check_number(name: str, shape: Sequence[int]) -> None:
    """Refuse an array of a ``shape`` that kernels cannot count; ShapeError names it."""
    if math.prod(shape) >= MOST_ELEMENTS:
        expected = f"fewer than {MOST_ELEMENTS} elements"
        raise ShapeError(mismatch(name, expected, f"shape {list(shape)}"))


def check_type(name: str, dtype: str) -> None:
    """Refuse elements of a type that no array on a CPU has; DTypeError names it."""
    types = ("bfloat16", *NUMPY_DTYPES)
    if dtype not in types:
        raise DTypeError(mismatch(name, f"elements of {', '.join(types)}", dtype))


def pattern_array(sparsity: Any) -> np.ndarray:
    """What the caller passed for the pattern, as a numpy array of the same memory.

    Raises
    ------
    DTypeError, ShapeError
        It is no array, a masked one, not on the CPU, or a ragged list.
    """
    if type(sparsity) is np.ndarray:
        return sparsity
    if isinstance(sparsity, (list, tuple)):
        try:
            array = np.asarray(sparsity)
        except ValueError as error:
            raise ShapeError(mismatch("sparsity", "a rectangular list", "a ragged one")) from error
        return array if array.size else array.astype(np.int64)
    check_unmasked("sparsity", sparsity)
    array = as_numpy(sparsity, "sparsity")
    # Subclasses read themselves otherwise: a numpy.matrix never has one dimension.
    return array if type(array) is np.ndarray else array.view(np.ndarray)
