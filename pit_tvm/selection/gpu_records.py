"""What records of a tile database say about one data type on a GPU."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

from ..structs import TileTask
from ..tile_db.record import TileRecord
from .gpu_measured import sizes_of

_ALIKE = {"float16": "bfloat16", "bfloat16": "float16"}


def times_for(
    records: Sequence[TileRecord], dtype: str, isa: str
) -> list[tuple[TileRecord, TileTask, float]]:
    """Records of tiles and libraries with their tasks and seconds, in ``dtype`` or standing for it.

    Both 16-bit types take the same instructions at the same rate, so what was measured in the other
    one alone counts too. Where a product was measured in both, its records of the other type are
    scaled by what the tiles that were measured twice say: the clocks of two runs differ.
    """
    same = [(r, r.task, r.secs) for r in records if r.task is not None and r.task.isa == isa]
    own = [entry for entry in same if entry[1].dtype == dtype]
    others = [entry for entry in same if entry[1].dtype == _ALIKE.get(dtype)]
    known = {(sizes_of(task), _subject(record)): secs for record, task, secs in own}
    twice: dict[Hashable, list[float]] = {}
    for record, task, secs in others:
        here = known.get((sizes_of(task), _subject(record)))
        if here is not None and record.tile is not None:
            twice.setdefault(sizes_of(task), []).append(math.log(here / secs))
    scale = {sizes: math.exp(sum(logs) / len(logs)) for sizes, logs in twice.items()}
    more = [
        (record, task, secs * scale.get(sizes_of(task), 1.0))
        for record, task, secs in others
        if (sizes_of(task), _subject(record)) not in known
    ]
    return [(record, replace(task, dtype=dtype), secs) for record, task, secs in own + more]


def _subject(record: TileRecord) -> Hashable:
    """What was measured, in whatever data type."""
    return record.note if record.tile is None else replace(record.tile, dtype="")
