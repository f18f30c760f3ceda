"""Checks of what patterns promise, which cost a pass over the data: for users who ask for them."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from ..errors import PatternError, ShapeError, mismatch
from ..reference.index import dense_mask
from .program import Program


def asked_for() -> bool:
    """Whether the environment has ``PIT_TVM_CHECK=1``: read when an operator is compiled.

    ShapeError for what says neither yes nor no: a check that was asked for would not be made.
    """
    value = os.environ.get("PIT_TVM_CHECK", "")
    if value not in ("", "0", "1"):
        raise ShapeError(mismatch("PIT_TVM_CHECK", "1, 0 or nothing", repr(value)))
    return value == "1"


def zeros_asked_for(program: Program) -> bool:
    """Whether to check that a program's sparse operand is zero outside its pattern."""
    return asked_for() and program.zero_outside and not program.mask


def check_zeros(
    program: Program, operand: npt.NDArray[np.generic], pattern: npt.NDArray[np.generic]
) -> None:
    """Refuse a sparse operand that is not zero outside its pattern.

    Raises
    ------
    PatternError
        With the number of values that should be zero.
    """
    wrong = np.count_nonzero(operand[~dense_mask(program.spec, pattern, operand.shape)])
    if wrong:
        what = f"{program.operand} outside its pattern"
        raise PatternError(mismatch(what, "zeros", f"{wrong} other values"))
