"""Records: JSON form, strict schema, derived numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from pit_tvm.errors import DatabaseError
from pit_tvm.tile_db.record import TileRecord, make_provenance, record_from_json
from pit_tvm.tile_db.store import read_records
from tests.tile_db.records import any_records, example_record


@settings(max_examples=60, deadline=None)
@given(any_records())
def test_json_gives_the_record_back(record: TileRecord) -> None:
    assert record_from_json(json.loads(json.dumps(record.to_json()))) == record


def test_secs_is_the_median_and_gflops_follows() -> None:
    record = replace(example_record(), run_secs=(9.0, 1e-3, 1e-6, 1e-3, 1e-6))
    assert record.secs == 1e-3
    assert record.gflops == pytest.approx(2e-9 * 64 * 32 * 16 / 1e-3)


def test_gflops_of_a_record_without_task_is_refused() -> None:
    profile = TileRecord("profile", example_record().provenance, profile=(("launch_us", 2.0),))
    with pytest.raises(DatabaseError, match="gflops"):
        _ = profile.gflops


def test_provenance_made_now_is_complete_and_valid() -> None:
    record = replace(example_record(), provenance=make_provenance("a-avx2", "x86-64-v3", 4))
    assert record_from_json(record.to_json()).provenance == record.provenance
    assert record.provenance.tvm.startswith("0.27")


def _drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        for name in path[:-1]:
            value = value[name]
        del value[path[-1]]

    return change


def _put(new: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        for name in path[:-1]:
            value = value[name]
        value[path[-1]] = new

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_drop("provenance"), "record.provenance"),
        (_drop("provenance", "arch"), "record.provenance.arch"),
        (_put("", "provenance", "arch"), "record.provenance.arch"),
        (_put("yesterday", "provenance", "date"), "record.provenance.date"),
        (_put(0, "provenance", "threads"), "record.provenance.threads"),
        (_put(-1, "provenance", "trials"), "record.provenance.trials"),
        (_put(None, "provenance"), "record.provenance"),
        (_drop("tile"), "record.tile"),
        (_drop("task"), "record.task"),
        (_put(0, "tile", "tile_m"), "record.tile.tile_m"),
        (_put(True, "tile", "tile_k"), "record.tile.tile_k"),
        (_put(1.5, "tile", "knobs", "reg_m"), "record.tile.knobs.reg_m"),
        (_put(2**31, "tile", "tile_m"), "record.tile.tile_m"),
        (_put(0, "tile", "knobs", "reg_m"), "record.tile.knobs.reg_m"),
        (_put(-4, "tile", "knobs", "stages"), "record.tile.knobs.stages"),
        (_put(10**30, "tile", "knobs", "reg_m"), "record.tile.knobs.reg_m"),
        (_put(-(10**30), "tile", "knobs", "any"), "record.tile.knobs.any"),
        (_put(10**400, "task", "m"), "record.task.m"),
        (_put([10**400], "run_secs"), r"record.run_secs\[0\]"),
        (_put(1, "tile", "surprise"), "record.tile.surprise"),
        (_put("64", "task", "m"), "record.task.m"),
        (_put([], "run_secs"), "record.run_secs"),
        (_put([0.0], "run_secs"), r"record.run_secs\[0\]"),
        (_put([float("nan")], "run_secs"), r"record.run_secs\[0\]"),
        (_put([float("inf")], "run_secs"), r"record.run_secs\[0\]"),
        (_put(2, "schema"), "record.schema"),
        (_put("tuned", "kind"), "record.kind"),
        (_put("library", "kind"), "record.tile"),
        (_put({"a": 1.0}, "profile"), "record.profile"),
        (_put([[1], 2], "trace"), "record.trace"),
        (_put("text", "trace"), "record.trace"),
        (_put(1, "surprise"), "record.surprise"),
    ],
)
def test_broken_field_is_refused_by_name(
    change: Callable[[dict[str, Any]], None], named: str
) -> None:
    value = example_record().to_json()
    change(value)
    with pytest.raises(DatabaseError, match=named):
        record_from_json(value)


@pytest.mark.parametrize("value", [None, 3, [], "text"])
def test_value_that_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(DatabaseError, match="a JSON object"):
        record_from_json(value)


def test_library_record_without_the_librarys_name_is_refused() -> None:
    record = example_record()
    with pytest.raises(DatabaseError, match="the library's name"):
        TileRecord("library", record.provenance, task=record.task, run_secs=(1.0,))


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    record = replace(example_record(), note="a\u2028b\x85c")
    text = json.dumps(record.to_json(), ensure_ascii=False)
    (tmp_path / "tiles.json").write_text(f"{text}\r\n{text}", encoding="utf-8", newline="")
    assert list(read_records(tmp_path / "tiles.json")) == [record, record]
