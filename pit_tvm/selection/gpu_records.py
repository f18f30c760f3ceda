"""Which records of a tile database speak for one data type on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from ..structs import TileTask
from ..tile_db.record import TileRecord

_ALIKE = {"float16": "bfloat16", "bfloat16": "float16"}


def records_for(
    records: Sequence[TileRecord], dtype: str, isa: str
) -> list[tuple[TileRecord, TileTask]]:
    """Records of tiles and libraries with their tasks, in ``dtype`` or standing for it.

    Both 16-bit types take the same instructions at the same rate: a task that was measured in the
    other one alone counts too.
    """
    same = [(r, r.task) for r in records if r.task is not None and r.task.isa == isa]
    own = [(record, task) for record, task in same if task.dtype == dtype]
    known = {_subject(record, task) for record, task in own}
    others = [(record, task) for record, task in same if task.dtype == _ALIKE.get(dtype)]
    return own + [pair for pair in others if _subject(*pair) not in known]


def _subject(record: TileRecord, task: TileTask) -> tuple[object, ...]:
    """What a record says something about, in whatever data type."""
    return record.tile is None, task.m, task.n, task.k, task.groups
