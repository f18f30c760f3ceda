"""The store: which folder is read, questions, atomic appending, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pit_tvm.errors import DatabaseError
from pit_tvm.tile_db import store as store_module
from pit_tvm.tile_db.record import TileRecord
from pit_tvm.tile_db.store import FILE_NAME, TileStore, read_records
from tests.tile_db.records import any_records, constants_of, example_record

PROFILE = TileRecord("profile", example_record().provenance, profile=(("launch_us", 2.0),))


def library(name: str) -> TileRecord:
    tuned = example_record()
    return TileRecord("library", tuned.provenance, task=tuned.task, run_secs=(1.0,), note=name)


@settings(max_examples=20, deadline=None)
@given(records=st.lists(any_records(), max_size=6))
def test_appended_records_come_back_deduplicated(
    tmp_path_factory: pytest.TempPathFactory, records: list[TileRecord]
) -> None:
    root = tmp_path_factory.mktemp("db")
    TileStore.open(root).append(records)
    for device in {record.provenance.device for record in records}:
        mine = [record for record in records if record.provenance.device == device]
        expected = {record.key: record for record in mine}
        assert TileStore.open(root, device=device).all() == tuple(expected.values())


def test_later_measurement_replaces_the_earlier_one(tmp_path: Path) -> None:
    store = TileStore.open(tmp_path, device="xeon-avx512")
    store.append([example_record(secs=1.0), example_record(secs=3.0, tile_m=16)])
    assert [record.secs for record in store.records()] == [1.0, 3.0]
    store.append([example_record(secs=2.0)])
    assert [record.secs for record in store.records()] == [2.0, 3.0]


def test_exact_device_is_preferred_to_one_of_the_same_isa(tmp_path: Path) -> None:
    root = TileStore.open(tmp_path)
    root.append([example_record("b-avx512"), example_record("a-avx512"), example_record("c-avx2")])
    assert root.folders() == ("a-avx512", "b-avx512", "c-avx2")

    def read(device: str, isa: str) -> tuple[str, ...]:
        return TileStore.open(tmp_path, device=device, isa=isa).used

    assert read("b-avx512", "avx512") == ("b-avx512",)
    assert read("unknown-avx512", "avx512") == ("a-avx512",)
    assert read("unknown-avx2", "avx2") == ("c-avx2",)
    assert read("unknown-generic", "generic") == ()
    assert read("unknown-generic", "") == ()


def measured(device: str, family: str = "contraction", dtype: str = "float32") -> TileRecord:
    """A tile of a family in a type."""
    record = example_record(device)
    assert record.tile is not None and record.task is not None
    tile, task = (replace(of, family=family, dtype=dtype) for of in (record.tile, record.task))
    return replace(record, tile=tile, task=task)


def of_device(record: TileRecord, device: str) -> TileRecord:
    return replace(record, provenance=replace(record.provenance, device=device))


def test_what_a_device_lacks_comes_from_others_of_its_isa(tmp_path: Path) -> None:
    """Of the first that has any record of the family in the type, or of the library in it."""
    own, a, b = "z-avx512", "a-avx512", "b-avx512"
    mine = [measured(own), of_device(library("numpy"), own)]
    of_a = [measured(a), measured(a, "other"), of_device(library("numpy"), a)]
    of_b = [measured(b, "other"), measured(b, "other", "int8"), of_device(library("torch"), b)]
    TileStore.open(tmp_path).append([*mine, *of_a, *of_b, measured("c-avx2", "other", "int8")])
    store = TileStore.open(tmp_path, device=own, isa="avx512")
    assert set(store.all()) == {*mine, of_a[1], of_b[1], of_b[2]}
    assert store.used == (own, a, b)
    assert set(TileStore.open(tmp_path, device=own).all()) == set(mine)
    assert set(TileStore.open(tmp_path / own, isa="avx512").all()) == set(mine)
    unknown = TileStore.open(tmp_path, device="y-avx512", isa="avx512")
    assert set(unknown.all()) == {*of_a, of_b[1], of_b[2]}
    store.append([measured(own, "other")])
    assert store.used == (own, b) and of_a[1] not in store.all()


def test_constants_of_the_device_itself_come_first(tmp_path: Path) -> None:
    def constants(device: str, **of_it: float) -> TileRecord:
        return replace(of_device(PROFILE, device), profile=tuple(of_it.items()))

    TileStore.open(tmp_path).append(
        [
            constants("b-avx512", launch_us=2.0),
            constants("a-avx512", launch_us=3.0, store_gbps=4.0),
            constants("c-avx512", store_gbps=5.0, detect_gbps=6.0),
        ]
    )
    store = TileStore.open(tmp_path, device="b-avx512", isa="avx512")
    assert constants_of(store) == {"launch_us": 2.0, "store_gbps": 4.0, "detect_gbps": 6.0}


# --------------------------------------------------------------------------------------------
# Over the shipped records


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of the one that is shipped."""
    (tmp_path / "shipped").mkdir()
    monkeypatch.setattr(store_module, "tuning_logs_dir", lambda: tmp_path / "shipped")
    return tmp_path / "shipped"


def product(record: TileRecord, m: int) -> TileRecord:
    assert record.task is not None
    return replace(record, task=replace(record.task, m=m))


def test_what_a_database_measured_counts_alone_and_the_rest_is_shipped(
    tmp_path: Path, shipped: Path
) -> None:
    """By product, however fast the shipped records of it are."""
    device, fast = "xeon-avx512", library("numpy")
    slow, torch = replace(fast, run_secs=(2.0,)), library("torch")
    both = [example_record(secs=1e-6, tile_m=8), fast, torch]
    only_shipped = [product(example_record(), 7), measured(device, "other")]
    TileStore.open(shipped).append([*both, *only_shipped])
    own = [example_record(), product(example_record(), 9), slow]
    TileStore.create(tmp_path / "db").append(own)
    store = TileStore.over_shipped(tmp_path / "db", device=device, isa="avx512")
    assert set(store.all()) == {*own, *only_shipped, torch}
    assert own[0].task is not None and store.best(own[0].task) == own[0]
    assert store.used == (device,)
    assert store.used_folders == (tmp_path / "db" / device, shipped / device)
    assert set(TileStore.open(tmp_path / "db", device=device).all()) == set(own)


def test_the_device_is_asked_before_others_and_a_database_before_the_shipped_one(
    tmp_path: Path, shipped: Path
) -> None:
    own, a, z = "m-avx512", "a-avx512", "z-avx512"
    families = ("own", "near", "far")
    TileStore.open(shipped).append([measured(own, "own")])
    TileStore.open(shipped).append([measured(a, family) for family in families])
    TileStore.create(tmp_path / "db").append([measured(z, family) for family in families[:2]])
    store = TileStore.over_shipped(tmp_path / "db", device=own, isa="avx512")
    assert store.all() == (measured(a, "far"), measured(z, "near"), measured(own, "own"))
    assert store.used == (own, z, a)


def test_constants_of_a_database_come_before_shipped_ones(tmp_path: Path, shipped: Path) -> None:
    def constants(**of_it: float) -> TileRecord:
        return replace(PROFILE, profile=tuple(of_it.items()))

    TileStore.open(shipped).append([constants(launch_us=1.0, store_gbps=2.0)])
    TileStore.create(tmp_path / "db").append([constants(launch_us=3.0)])
    store = TileStore.over_shipped(tmp_path / "db", device="xeon-avx512")
    assert constants_of(store) == {"launch_us": 3.0, "store_gbps": 2.0}


def test_records_are_added_to_the_database_alone(tmp_path: Path, shipped: Path) -> None:
    TileStore.open(shipped).append([example_record()])
    (tmp_path / "db").mkdir()
    store = TileStore.over_shipped(tmp_path / "db", device="xeon-avx512")
    assert store.records() == (example_record(),)
    store.append([product(example_record(), 7)])
    assert set(store.records()) == {example_record(), product(example_record(), 7)}
    assert TileStore.open(shipped, device="xeon-avx512").records() == (example_record(),)


def test_what_is_of_one_device_a_store_or_the_shipped_folder_has_nothing_beneath(
    tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TileStore.open(shipped).append([product(example_record(), 7)])
    TileStore.create(tmp_path / "db").append([example_record()])
    folder, alone = tmp_path / "db" / "xeon-avx512", TileStore.open(tmp_path / "db")
    monkeypatch.chdir(folder)
    for path in (folder, str(folder / FILE_NAME), ".", FILE_NAME):
        store = TileStore.over_shipped(path, device="xeon-avx512", isa="avx512")
        assert store.records() == (example_record(),)
    assert TileStore.over_shipped(alone) is alone
    for none in (None, shipped, shipped / ".." / "shipped"):
        assert len(TileStore.over_shipped(none, device="xeon-avx512").roots) == 1


def test_a_database_stays_where_it_was_named(
    tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TileStore.create(tmp_path / "db").append([example_record()])
    monkeypatch.chdir(tmp_path)
    store = TileStore.over_shipped("db", device="xeon-avx512")
    monkeypatch.chdir(tmp_path / "db")  # before a first question
    assert store.records() == (example_record(),) and len(store.roots) == 2


def test_a_database_needs_no_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise DatabaseError("tuning_logs: expected a folder")

    monkeypatch.setattr(store_module, "tuning_logs_dir", missing)
    TileStore.open(tmp_path).append([example_record()])
    assert TileStore.over_shipped(tmp_path, device="xeon-avx512").records() == (example_record(),)
    with pytest.raises(DatabaseError, match="tuning_logs"):
        TileStore.over_shipped(None)


# --------------------------------------------------------------------------------------------


def test_device_without_records_answers_with_nothing(tmp_path: Path) -> None:
    store = TileStore.open(tmp_path, device="xeon-avx512", isa="avx512")
    assert store.used == ()
    assert store.all() == store.records() == ()
    task = example_record().task
    assert task is not None and store.best(task) is None


def test_device_folder_and_file_can_be_named(tmp_path: Path) -> None:
    TileStore.open(tmp_path).append([example_record()])
    folder = tmp_path / "xeon-avx512"
    for path in (folder, folder / FILE_NAME, str(folder)):
        assert TileStore.open(path, device="other", isa="avx2").records() == (example_record(),)


def test_questions_select_by_kind_and_properties(tmp_path: Path) -> None:
    slow, fast = example_record(secs=2.0), example_record(secs=1.0, tile_m=8)
    store = TileStore.open(tmp_path, device="xeon-avx512")
    store.append([slow, fast, library("numpy"), PROFILE])
    assert store.records() == store.records("contraction") == (slow, fast)
    assert store.records("other") == ()
    assert slow.task is not None
    assert store.best(slow.task) == fast
    assert store.best(replace(slow.task, m=65)) is None


def test_nothing_is_read_before_the_first_question(tmp_path: Path) -> None:
    TileStore.open(tmp_path).append([example_record()])
    store = TileStore.open(tmp_path, device="xeon-avx512")
    (tmp_path / "xeon-avx512" / FILE_NAME).write_text("broken\n")
    with pytest.raises(DatabaseError):
        store.records()


def test_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="database: expected a path that exists"):
        TileStore.open(tmp_path / "absent")
    with pytest.raises(DatabaseError, match="^database: expected a path, got ''"):
        TileStore.open("")


def test_a_folder_in_place_of_the_records_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "xeon-avx512"
    (own / "tiles.json").mkdir(parents=True)
    for path, isa in ((own, ""), (own / "tiles.json", ""), (tmp_path, ""), (tmp_path, "avx512")):
        with pytest.raises(DatabaseError, match="tiles.json that is a file, got .*tiles.json$"):
            TileStore.open(path, device="" if isa else own.name, isa=isa).all()


def test_create_makes_the_folder(tmp_path: Path) -> None:
    store = TileStore.create(tmp_path / "a" / "b", device="xeon-avx512")
    store.append([example_record()])
    assert len(store.records()) == 1


def test_create_over_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError, match="a folder that can be made"):
        TileStore.create(tmp_path / "file")


def test_file_of_another_name_is_refused(tmp_path: Path) -> None:
    TileStore.open(tmp_path).append([example_record()])
    notes = tmp_path / "xeon-avx512" / "notes.txt"
    notes.write_text("hello")
    with pytest.raises(DatabaseError, match="a folder or tiles.json"):
        TileStore.open(notes)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "Expecting value"),
        ("[1, 2]", "a JSON object"),
        ("{}", "record.schema"),
        ("", "Expecting value"),
        ("9" * 5000, "limit"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_corrupt_line_is_refused_with_path_and_number(
    tmp_path: Path, line: str, reason: str
) -> None:
    path = tmp_path / "xeon-avx512" / FILE_NAME
    TileStore.open(tmp_path).append([example_record()])
    good = path.read_text()
    path.write_text(f"{good}{line}\n{good}")
    with pytest.raises(DatabaseError, match=f"{path}:2: .*{reason}"):
        list(read_records(path))


def test_tile_without_provenance_is_refused_with_path_and_number(tmp_path: Path) -> None:
    path = tmp_path / "xeon-avx512" / FILE_NAME
    path.parent.mkdir()
    value = example_record().to_json()
    del value["provenance"]["arch"]
    path.write_text(json.dumps(value) + "\n")
    with pytest.raises(DatabaseError, match=f"{path}:1: .*provenance.arch"):
        TileStore.open(tmp_path, device="xeon-avx512").records()


def test_binary_file_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "xeon-avx512" / FILE_NAME
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatabaseError, match=f"{path}:1: cannot be read"):
        TileStore.open(tmp_path, device="xeon-avx512").records()


def test_appending_to_a_corrupt_file_leaves_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "xeon-avx512" / FILE_NAME
    path.parent.mkdir()
    path.write_text("broken\n")
    with pytest.raises(DatabaseError, match=f"{path}:1"):
        TileStore.open(tmp_path).append([example_record()])
    assert path.read_text() == "broken\n"
    assert list(path.parent.iterdir()) == [path]


def test_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TileStore.open(tmp_path, device="xeon-avx512")
    store.append([example_record()])

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(store_module.os, "replace", fail)
    with pytest.raises(DatabaseError, match="disk full"):
        store.append([example_record(tile_m=8)])
    assert list((tmp_path / "xeon-avx512").iterdir()) == [tmp_path / "xeon-avx512" / FILE_NAME]
    assert store.records() == (example_record(),)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_get_the_mode_that_the_umask_leaves(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        TileStore.open(tmp_path).append([example_record()])
    finally:
        os.umask(before)
    path = tmp_path / "xeon-avx512" / FILE_NAME
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("device", ["", ".", "..", "a/b", "../up"])
def test_device_that_is_no_folder_name_is_refused(tmp_path: Path, device: str) -> None:
    record = replace(
        example_record(), provenance=replace(example_record().provenance, device=device)
    )
    with pytest.raises(DatabaseError, match="provenance.device"):
        TileStore.open(tmp_path).append([record])
    assert list(tmp_path.iterdir()) == []


def append_many(root: Path, first: int) -> None:
    for tile_m in range(first, first + 10):
        TileStore.open(root).append([example_record(tile_m=tile_m)])


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    context = get_context("spawn")
    workers = [context.Process(target=append_many, args=(tmp_path, 1 + 10 * i)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    records = TileStore.open(tmp_path, device="xeon-avx512").records()
    assert sorted(record.tile.tile_m for record in records if record.tile) == list(range(1, 21))


def test_reading_imports_neither_tvm_nor_torch(tmp_path: Path) -> None:
    TileStore.open(tmp_path).append([example_record()])
    code = (
        "import sys; from pit_tvm.tile_db.store import TileStore\n"
        f"assert len(TileStore.open({str(tmp_path)!r}, isa='avx512').records()) == 1\n"
        "assert not {'tvm', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
