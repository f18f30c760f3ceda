"""The exceptions that pit-tvm raises, all children of :class:`PitError`.

Every message names the argument, what was expected, what was got and what to do about it.
"""

from __future__ import annotations


class PitError(Exception):
    """Base of every error that pit-tvm raises on purpose."""


class ShapeError(PitError, ValueError):
    """An array, mask, index or micro-tile has the wrong rank, extent, strides or range."""


class DTypeError(PitError, TypeError):
    """An array has an element type that the argument does not take."""


class AxisError(PitError, ValueError):
    """An axis is not permutation invariant, or a pattern cannot be used on it."""


class PatternError(PitError, ValueError):
    """The operand's values contradict the pattern that was passed (PIT_TVM_CHECK=1 only)."""


class ScheduleError(PitError, ValueError):
    """A schedule primitive was called where its preconditions do not hold."""


class TileNotFound(PitError, LookupError):
    """The tile database holds no tile for an operator, data type and target."""


class DatabaseError(PitError, ValueError):
    """A tile database is missing, corrupt, or written by something else."""


class SavedModelError(PitError, ValueError):
    """A file of a compiled model is missing, damaged, or was written by something else."""


class UnsupportedModel(PitError, ValueError):
    """A model cannot be exported from torch, or holds what has no form in Relax."""


class UnsupportedTarget(PitError, ValueError):
    """The target names a device or instruction set that no tile family covers."""


class BackendUnavailable(PitError, RuntimeError):
    """A library, compiler or device that the call needs is not on this machine."""


class TuningError(PitError, RuntimeError):
    """A tuning job could not build, run or record any tile."""


def mismatch(argument: str, expected: object, got: object, advice: str = "") -> str:
    """Text of the one form that all argument errors share."""
    text = f"{argument}: expected {expected}, got {got}"
    return f"{text}; {advice}" if advice else text
