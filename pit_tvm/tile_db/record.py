"""One measured fact of a tile database, and its JSON form, which is checked strictly."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ..errors import DatabaseError, mismatch
from ..structs import MOST_EXTENT, Tile, TileTask

SCHEMA = 1
KINDS = ("pit", "library", "profile")
# Knobs that count something; the others are switches, or distances that may be 0.
_COUNTS = frozenset(
    "cluster consumers most_groups raster reg_m reg_n sms stages store_cols".split()
)


@dataclass(frozen=True)
class Provenance:
    """Where, with what and when a record was measured. A record without it is refused."""

    device: str  # the record's folder, such as "xeon-avx512"
    arch: str  # -mcpu, or the sm version of a GPU
    threads: int  # of a CPU, or multiprocessors of a GPU
    tvm: str
    pit_tvm: str
    date: str  # ISO 8601
    trials: int  # how many candidates were measured to find this one; 0 if none were searched


@dataclass(frozen=True)
class TileRecord:
    """A measurement on one device.

    ``kind`` "pit": ``tile`` computes ``task`` in ``run_secs``; ``trace`` is MetaSchedule's JSON of
    its schedule. "library": the library named in ``note`` computes ``task``. "profile": constants
    of the device, name to value, in ``profile``.
    """

    kind: str
    provenance: Provenance
    tile: Tile | None = None
    task: TileTask | None = None
    run_secs: tuple[float, ...] = ()
    note: str = ""
    profile: tuple[tuple[str, float], ...] = ()
    trace: str = ""

    def __post_init__(self) -> None:
        _check_kind(self)

    @property
    def secs(self) -> float:
        """Median of the measured run times, in seconds."""
        return median(self.run_secs)

    @property
    def gflops(self) -> float:
        """Rate on the record's task, in 1e9 multiply and add operations per second."""
        if self.task is None:
            raise DatabaseError(mismatch("TileRecord.gflops", "a record with a task", self.kind))
        return 2e-9 * self.task.m * self.task.n * self.task.k / self.secs

    @property
    def key(self) -> tuple[object, ...]:
        """What a later measurement replaces: same kind, tile, task, library and device."""
        return (self.kind, self.tile, self.task, self.note, self.provenance.device)

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values; fields that its kind does not use are left out."""
        out: dict[str, Any] = {"schema": SCHEMA, "kind": self.kind}
        if self.tile is not None:
            out["tile"] = {**asdict(self.tile), "knobs": dict(self.tile.knobs)}
        if self.task is not None:
            out["task"] = asdict(self.task)
            for name in ("groups", "share"):
                if out["task"][name] == 1:
                    del out["task"][name]
            out["run_secs"] = list(self.run_secs)
        if self.note:
            out["note"] = self.note
        if self.profile:
            out["profile"] = dict(self.profile)
        out["provenance"] = asdict(self.provenance)
        if self.trace:
            out["trace"] = json.loads(self.trace)
        return out


def record_from_json(value: Any) -> TileRecord:
    """The record that ``TileRecord.to_json`` wrote.

    Raises
    ------
    DatabaseError
        A field is missing, unknown, of the wrong type or out of range.
    """
    fields = _fields(
        "record",
        value,
        required={"schema": _integer, "kind": _text, "provenance": _provenance},
        optional={
            "tile": _tile,
            "task": _task,
            "run_secs": _run_secs,
            "note": _text,
            "profile": _profile,
            "trace": _trace,
        },
    )
    if fields.pop("schema") != SCHEMA:
        raise DatabaseError(mismatch("record.schema", SCHEMA, value["schema"]))
    return TileRecord(**fields)


def make_provenance(device: str, arch: str, threads: int) -> Provenance:
    """Provenance of a measurement made now, with the versions that are installed."""
    from importlib.metadata import version

    from .. import __version__

    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    tvm = version("apache-tvm")
    return Provenance(device, arch, threads, tvm, __version__, now, trials=0)


# --------------------------------------------------------------------------------------------
# Checks

_Parser = Callable[[str, Any], Any]


def _check_kind(record: TileRecord) -> None:
    """Which fields belong to which kind."""
    if record.kind not in KINDS:
        raise DatabaseError(mismatch("record.kind", f"one of {KINDS}", repr(record.kind)))
    if not isinstance(record.provenance, Provenance):
        raise DatabaseError(mismatch("record.provenance", "a Provenance", record.provenance))
    measured = record.kind in ("pit", "library")
    wanted = {
        "tile": record.kind == "pit",
        "task": measured,
        "run_secs": measured,
        "profile": record.kind == "profile",
    }
    for name, needed in wanted.items():
        if bool(getattr(record, name)) != needed:
            state = ("none", "one") if not needed else ("one", "none")
            raise DatabaseError(mismatch(f"record.{name} of kind {record.kind}", *state))
    if record.kind == "library" and not record.note:
        raise DatabaseError(mismatch("record.note of kind library", "the library's name", "none"))
    if record.trace and record.kind != "pit":
        raise DatabaseError(mismatch(f"record.trace of kind {record.kind}", "none", "one"))


def _fields(
    where: str,
    value: Any,
    required: Mapping[str, _Parser],
    optional: Mapping[str, _Parser] | None = None,
) -> dict[str, Any]:
    """An object with exactly these keys, each value through its parser."""
    parsers = {**required, **(optional or {})}
    if not isinstance(value, dict):
        raise DatabaseError(mismatch(where, "a JSON object", type(value).__name__))
    for name in required:
        if name not in value:
            raise DatabaseError(mismatch(f"{where}.{name}", "a value", "none"))
    for name in value:
        if name not in parsers:
            raise DatabaseError(mismatch(f"{where}.{name}", "no such field", "one"))
    return {name: parsers[name](f"{where}.{name}", item) for name, item in value.items()}


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise DatabaseError(mismatch(where, "a string that is not empty", repr(value)))
    return value


def _integer(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise DatabaseError(mismatch(where, "an integer", repr(value)))
    if abs(value) > MOST_EXTENT:
        raise DatabaseError(mismatch(where, f"an integer of at most {MOST_EXTENT}", value))
    return value


def _natural(where: str, value: Any) -> int:
    if _integer(where, value) < 0:
        raise DatabaseError(mismatch(where, "an integer of at least 0", value))
    return int(value)


def _positive(where: str, value: Any) -> int:
    if _integer(where, value) < 1:
        raise DatabaseError(mismatch(where, "an integer of at least 1", value))
    return int(value)


def _seconds(where: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise DatabaseError(mismatch(where, "a finite number above 0", repr(value)))
    return float(value)


def _run_secs(where: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise DatabaseError(mismatch(where, "a list of seconds", repr(value)))
    return tuple(_seconds(f"{where}[{i}]", item) for i, item in enumerate(value))


def _date(where: str, value: Any) -> str:
    try:
        datetime.datetime.fromisoformat(_text(where, value))
    except ValueError as error:
        raise DatabaseError(mismatch(where, "an ISO 8601 date", repr(value))) from error
    return str(value)


def _table(where: str, value: Any, parse: _Parser) -> tuple[tuple[str, Any], ...]:
    """A JSON object of any keys, as pairs sorted by key."""
    if not isinstance(value, dict):
        raise DatabaseError(mismatch(where, "a JSON object", type(value).__name__))
    return tuple((name, parse(f"{where}.{name}", item)) for name, item in sorted(value.items()))


def _knobs(where: str, value: Any) -> tuple[tuple[str, int], ...]:
    knobs = _table(where, value, _integer)
    for name, knob in knobs:
        if name in _COUNTS:
            _positive(f"{where}.{name}", knob)
    return knobs


def _profile(where: str, value: Any) -> tuple[tuple[str, float], ...]:
    return _table(where, value, _seconds)


def _trace(where: str, value: Any) -> str:
    """A MetaSchedule trace is a pair of lists: instructions and decisions."""
    if not isinstance(value, list) or [type(part) for part in value] != [list, list]:
        raise DatabaseError(mismatch(where, "[instructions, decisions]", type(value).__name__))
    return json.dumps(value, separators=(",", ":"))


def _provenance(where: str, value: Any) -> Provenance:
    parsers: dict[str, _Parser] = {
        "device": _text,
        "arch": _text,
        "threads": _positive,
        "tvm": _text,
        "pit_tvm": _text,
        "date": _date,
        "trials": _natural,
    }
    return Provenance(**_fields(where, value, parsers))


def _tile(where: str, value: Any) -> Tile:
    sizes: dict[str, _Parser] = dict.fromkeys(("tile_m", "tile_n", "tile_k"), _positive)
    names: dict[str, _Parser] = dict.fromkeys(("family", "isa", "dtype"), _text)
    return Tile(**_fields(where, value, {**names, **sizes, "knobs": _knobs}))


def _task(where: str, value: Any) -> TileTask:
    sizes: dict[str, _Parser] = dict.fromkeys(("m", "n", "k"), _positive)
    names: dict[str, _Parser] = dict.fromkeys(("family", "isa", "dtype"), _text)
    more = dict.fromkeys(("groups", "share"), _positive)
    return TileTask(**_fields(where, value, {**names, **sizes}, more))
