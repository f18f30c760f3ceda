"""What a search space writes down: sampled decisions and their task, on a block of a stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import s_tir

from pit_tvm.errors import TuningError, mismatch
from pit_tvm.structs import TileTask

TILE, TASK = "pit.tile", "pit.task"


def pick(sch: s_tir.Schedule, values: Sequence[int]) -> Any:
    """One of ``values``, each as probable as the others; recorded in the trace."""
    return sch.sample_categorical(list(values), [1.0 / len(values)] * len(values))


def note(sch: s_tir.Schedule, name: str, decisions: Sequence[Any], task: TileTask) -> None:
    """Annotate the block ``name`` with the decisions and the task."""
    block = sch.get_sblock(name)
    sch.annotate(block, TILE, list(decisions))
    sizes = (str(size) for size in (task.m, task.n, task.k, task.groups, task.share))
    sch.annotate(block, TASK, [task.family, task.isa, task.dtype, *sizes])


def noted(mod: tvm.IRModule, name: str) -> tuple[list[int], TileTask]:
    """The decisions and the task that the block ``name`` is annotated with.

    Raises
    ------
    TuningError
        It has none.
    """
    sch = s_tir.Schedule(mod)
    notes = dict(sch.get(sch.get_sblock(name)).annotations)
    if TILE not in notes or TASK not in notes:
        raise TuningError(mismatch("module", f"annotations {TILE} and {TASK}", sorted(notes)))
    family, isa, dtype, *sizes = (str(part) for part in notes[TASK])
    task = TileTask(family, isa, dtype, *(int(size) for size in sizes))
    return [int(value) for value in notes[TILE]], task
