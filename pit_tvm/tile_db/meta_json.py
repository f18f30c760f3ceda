"""The one bridge between MetaSchedule's JSON and the records of a tile database."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DatabaseError, mismatch
from ..structs import Tile, TileTask
from .record import Provenance, TileRecord

# A run time that MetaSchedule's own database keeps for a candidate that failed is above this.
FAILED_SECS = 1e9
_CHOICE = "SampleCategorical"  # of alternatives, each with its chance
_DIGITS = 4

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule, Trace
    from tvm.s_tir.meta_schedule.database import TuningRecord


def trace_to_json(trace: Trace) -> str:
    """A trace as one line of JSON: ``[instructions, decisions]``; how likely choices are, which
    replaying does not look at, is rounded."""
    instructions, decisions = json.loads(json.dumps(trace.as_json(), default=_plain))
    for name, _, attributes, _ in instructions:
        if name == _CHOICE:
            attributes[1] = [round(chance, _DIGITS) for chance in attributes[1]]
    return json.dumps([instructions, decisions], separators=(",", ":"))


def from_tuning_record(
    record: TuningRecord, tile: Tile, task: TileTask, provenance: Provenance
) -> TileRecord:
    """A MetaSchedule record as a record of a tile database, with its trace.

    Raises
    ------
    DatabaseError
        The record holds no run time, or that of a candidate that failed.
    """
    secs = tuple(float(value) for value in record.run_secs or ())
    if not secs or max(secs) >= FAILED_SECS:
        raise DatabaseError(mismatch("record.run_secs", "seconds of a candidate that ran", secs))
    trace = trace_to_json(record.trace)
    return TileRecord("pit", provenance, tile=tile, task=task, run_secs=secs, trace=trace)


def replay(record: TileRecord, mod: IRModule) -> Schedule:
    """Apply a record's trace to its unscheduled module.

    Raises
    ------
    DatabaseError
        The record holds no trace, or its trace does not fit the module.
    """
    from tvm.s_tir import Schedule, Trace

    if not record.trace:
        raise DatabaseError(mismatch("record.trace", "MetaSchedule's trace", "none"))
    schedule = Schedule(mod)
    try:
        Trace.apply_json_to_schedule(json.loads(record.trace), schedule)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise DatabaseError(
            mismatch("record.trace", "instructions that fit the module", reason)
        ) from error
    return schedule


def _plain(value: Any) -> Any:
    """TVM's containers and constants as what json writes."""
    if hasattr(value, "value"):
        return value.value
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, Sequence):
        return list(value)
    raise DatabaseError(mismatch("trace", "JSON values", type(value).__name__))
