"""Builds candidates in this process.

MetaSchedule's LocalBuilder starts workers that each import all tensor intrinsics first, which
takes longer than its own time limit.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import tvm
from tvm.target import Target

from ..errors import BackendUnavailable, mismatch
from ..files import check_room

Lower = Callable[[tvm.IRModule], tvm.IRModule]

# What TVM raises for a candidate that cannot be lowered, compiled or run.
CANDIDATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def error_text(error: Exception) -> str:
    """Kind and last line of an error: TVM's messages hold a whole backtrace."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


class TileBuilder:
    """Lowers with ``lower``, compiles for ``target``, and writes a library into ``folder``.

    ``suffix`` is ".so", linked here, or ".tar", linked by the machine that runs it. Whoever runs
    the artifact deletes it.
    """

    def __init__(self, lower: Lower, target: Target, folder: Path, suffix: str = ".so") -> None:
        self.lower = lower
        self.target = target
        self.folder = folder
        self.suffix = suffix

    def warm(self, mods: Sequence[tvm.IRModule]) -> None:
        """Nothing: this builder compiles a candidate when it is asked for."""

    def build(self, mod: tvm.IRModule) -> Path | str:
        """The library, or what is wrong with the candidate.

        Raises
        ------
        BackendUnavailable
            No library could be written or linked, which says nothing about the candidate.
        """
        try:
            with self.target:
                lowered = self.lower(mod)
            built = tvm.compile(lowered, target=self.target)
        except CANDIDATE_ERRORS as error:
            return error_text(error)
        try:
            path = self._new_path()
            check_room()
            built.export_library(str(path))
        except CANDIDATE_ERRORS as error:  # no compiler, a full disk
            text = mismatch("work_dir", "candidates written and linked there", error_text(error))
            raise BackendUnavailable(text) from error
        return path

    def _new_path(self) -> Path:
        """A name never used before: of a library that is still loaded under the same name, the
        loader would hand out the old code."""
        handle, name = tempfile.mkstemp(prefix="candidate-", suffix=self.suffix, dir=self.folder)
        os.close(handle)
        return Path(name)
