"""Traces through JSON: replay, and records of MetaSchedule."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from pit_tvm.errors import DatabaseError
from pit_tvm.tile_db.meta_json import (
    from_tuning_record,
    replay,
    trace_to_json,
)
from pit_tvm.tile_db.record import TileRecord, record_from_json
from pit_tvm.tuning.tasks import workload_module
from tests.tile_db.records import example_record
from tests.tuning.stand_in import SPACE, scheduled, task, tile_of

TARGET = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}
TASK = task("avx2")


def recorded(sch: Schedule, secs: float = 1e-3) -> TileRecord:
    provenance = example_record("any-avx2").provenance
    mod = workload_module(SPACE, TASK)
    args = ms.arg_info.ArgInfo.from_entry_func(mod)
    record = ms.database.TuningRecord(
        sch.trace, ms.database.Workload(mod), [secs, 2 * secs], Target(TARGET), args
    )
    return from_tuning_record(record, tile_of(sch, TASK), TASK, provenance)


@pytest.mark.parametrize("seed", range(1, 5))
def test_record_from_json_replays_to_an_equal_module(seed: int) -> None:
    sch = scheduled(seed)
    record = record_from_json(recorded(sch).to_json())
    again = replay(record, workload_module(SPACE, TASK))
    tvm.ir.assert_structural_equal(again.mod, sch.mod)
    assert trace_to_json(again.trace) == trace_to_json(sch.trace)
    instructions, _ = json.loads(record.trace)
    chances = [a[1] for name, _, a, _ in instructions if name == "SampleCategorical"]
    assert chances and all(each == [round(one, 4) for one in each] for each in chances)


def test_record_without_trace_cannot_be_replayed() -> None:
    with pytest.raises(DatabaseError, match="record.trace"):
        replay(replace(recorded(scheduled(1)), trace=""), workload_module(SPACE, TASK))


def test_trace_of_another_workload_is_refused() -> None:
    record = replace(recorded(scheduled(1)), trace='[[["GetSBlock",[],["gone","main"],["b0"]]],[]]')
    with pytest.raises(DatabaseError, match="record.trace"):
        replay(record, workload_module(SPACE, TASK))


def test_failed_candidate_is_no_tile() -> None:
    with pytest.raises(DatabaseError, match="record.run_secs"):
        recorded(scheduled(1), secs=1e10)
