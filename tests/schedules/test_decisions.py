"""Decisions that search spaces write down: read back from shipped records, refused if missing."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import s_tir

from pit_tvm.errors import TuningError
from pit_tvm.schedules import cuda_contraction_space, hopper_space
from pit_tvm.structs import TileTask
from pit_tvm.tile_db.meta_json import replay
from pit_tvm.tile_db.store import TileStore

SPACES = {"float16": hopper_space, "float32": cuda_contraction_space}


@pytest.mark.parametrize("space", SPACES.values())
def test_shipped_records_replay_to_their_tiles(space: Any) -> None:
    store = TileStore.open(device="h200-sm_90a", isa="sm_90a")
    records = [record for family in space.FAMILIES for record in store.records(family)]
    assert {record.tile.family for record in records} == set(space.FAMILIES)
    searched = [record for record in records if record.tile.dtype != cuda_contraction_space.TF32]
    assert all(record.trace for record in searched)
    for record in searched[::5]:
        sch = replay(record, tvm.IRModule({"main": space.workload(record.task)}))
        assert space.tile_of(sch, record.task) == record.tile


@pytest.mark.parametrize("dtype", SPACES)
def test_module_without_decisions_is_refused(dtype: str) -> None:
    space = SPACES[dtype]
    task = TileTask(space.ROWS, "sm_90a", dtype, 64, 64, 64)
    with pytest.raises(TuningError, match=r"annotations pit\.tile and pit\.task"):
        space.lower(s_tir.Schedule(space.workload(task)).mod)
