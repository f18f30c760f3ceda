"""Which records speak for a data type, and which of the other 16-bit type stand for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pit_tvm.selection.gpu_records import times_for
from pit_tvm.structs import Tile, TileTask
from pit_tvm.tile_db.record import Provenance, TileRecord

PROVENANCE = Provenance("h200-sm_90a", "sm_90a", 132, "0.27", "0.1", "2026-11-21", 16)
TASK = TileTask("rows", "sm_90a", "float16", 1000, 4096, 4096)
OTHER = replace(TASK, m=64)
TILE = Tile("rows", "sm_90a", "float16", 128, 256, 64, (("cluster", 1),))
WIDER = replace(TILE, tile_n=192)


def pit(tile: Tile, task: TileTask, dtype: str = "float16", secs: float = 1e-4) -> TileRecord:
    tile, task = replace(tile, dtype=dtype), replace(task, dtype=dtype)
    return TileRecord("pit", PROVENANCE, tile, task, (secs,))


def library(task: TileTask, dtype: str = "float16") -> TileRecord:
    return TileRecord(
        "library", PROVENANCE, task=replace(task, dtype=dtype), run_secs=(1e-4,), note="torch"
    )


def found(records: list[TileRecord], dtype: str = "bfloat16") -> list[TileRecord]:
    return [record for record, _, _ in times_for(records, dtype, "sm_90a")]


def test_without_records_of_its_own_all_of_the_other_type_stand_for_a_type() -> None:
    records = [pit(TILE, TASK), pit(WIDER, OTHER), library(TASK)]
    assert found(records) == records


def test_a_tile_measured_in_the_type_itself_needs_no_other() -> None:
    own = pit(TILE, TASK, "bfloat16")
    assert found([pit(TILE, TASK), own]) == [own]


def test_tasks_and_tiles_of_the_other_type_alone_count_too() -> None:
    own = pit(TILE, TASK, "bfloat16")
    others = [pit(WIDER, TASK), pit(TILE, OTHER), pit(WIDER, OTHER)]
    times = times_for([own, *others], "bfloat16", "sm_90a")
    assert [record for record, _, _ in times] == [own, *others]
    assert {task.dtype for _, task, _ in times} == {"bfloat16"}


def test_the_other_types_times_are_scaled_by_what_was_measured_in_both() -> None:
    own = pit(TILE, TASK, "bfloat16", 0.9e-4)
    others = [pit(TILE, TASK), pit(WIDER, TASK, secs=2e-4), library(TASK), pit(WIDER, OTHER)]
    secs = {id(record): s for record, _, s in times_for([own, *others], "bfloat16", "sm_90a")}
    assert [secs.get(id(r)) for r in (own, *others)] == [
        0.9e-4,
        None,
        pytest.approx(1.8e-4),
        pytest.approx(0.9e-4),
        1e-4,
    ]


def test_libraries_stand_by_themselves() -> None:
    own = pit(TILE, TASK, "bfloat16")
    groups = pit(replace(TILE, family="groups"), replace(TASK, family="groups", groups=8))
    records = [own, library(TASK), groups]
    assert found(records) == records


def test_other_types_and_other_chips_do_not_count() -> None:
    records = [pit(TILE, TASK), pit(TILE, replace(TASK, isa="sm_80"))]
    assert found(records, "float32") == []
    assert found(records, "float16") == [records[0]]
