"""Builds candidates in this process.

MetaSchedule's LocalBuilder starts workers that each import all tensor intrinsics first, which
takes longer than its own time limit.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

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


@derived_object
class TileBuilder(ms.builder.PyBuilder):
    """Lowers with ``lower``, compiles, and writes a library into ``folder``.

    ``suffix`` is ".so", linked here, or ".tar", linked by the machine that runs it. Whoever runs
    the artifact deletes it. ``lost``: why no library could be written or linked, which says nothing
    about the candidate; errors do not cross MetaSchedule with their types, so it is kept here.
    """

    def __init__(self, lower: Lower, folder: Path, suffix: str = ".so") -> None:
        super().__init__()
        self.lower = lower
        self.folder = folder
        self.suffix = suffix
        self.lost: BackendUnavailable | None = None

    def warm(self, build_inputs: list[ms.builder.BuilderInput]) -> None:
        """Nothing: this builder compiles a candidate when it is asked for."""

    def build(self, build_inputs: list[ms.builder.BuilderInput]) -> list[ms.builder.BuilderResult]:
        return [self._build(item) for item in build_inputs]

    def _build(self, item: ms.builder.BuilderInput) -> ms.builder.BuilderResult:
        try:
            with item.target:
                lowered = self.lower(item.mod)
            built = tvm.compile(lowered, target=item.target)
        except CANDIDATE_ERRORS as error:
            return ms.builder.BuilderResult(None, error_text(error))
        try:
            path = self._new_path()
            check_room()
            built.export_library(str(path))
        except CANDIDATE_ERRORS as error:  # no compiler, a full disk
            text = mismatch("work_dir", "candidates written and linked there", error_text(error))
            self.lost = BackendUnavailable(text)
            return ms.builder.BuilderResult(None, text)
        return ms.builder.BuilderResult(str(path), None)

    def _new_path(self) -> Path:
        """A name never used before: of a library that is still loaded under the same name, the
        loader would hand out the old code."""
        handle, name = tempfile.mkstemp(prefix="candidate-", suffix=self.suffix, dir=self.folder)
        os.close(handle)
        return Path(name)
