"""A work folder: what is remembered, what an interruption leaves, what is refused."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from pit_tvm.errors import DatabaseError, TuningError
from pit_tvm.tuning.features import decision_key
from pit_tvm.tuning.history import RECORDS, RUNNING, WORKLOADS, History, work_folder
from pit_tvm.tuning.tasks import workload_module
from tests.tuning.stand_in import SPACE, sample, task

TASK = task("avx2")
TARGET = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}


def load(folder: Path, of=TASK, target=None) -> History:
    return History.load(folder, workload_module(SPACE, of), Target(target or TARGET))


def candidates(count: int) -> list[ms.MeasureCandidate]:
    """Candidates with different decisions."""
    found = {}
    for seed in range(1, 100):
        sch = Schedule(workload_module(SPACE, TASK), seed=seed)
        sample(sch, TASK)
        args = ms.arg_info.ArgInfo.from_entry_func(sch.mod)
        found.setdefault(decision_key(sch.trace), ms.MeasureCandidate(sch, args))
    return list(found.values())[:count]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A folder with a slow, a fast and a failed candidate."""
    history = load(tmp_path)
    for candidate, secs in zip(candidates(3), ([3.0, 1.0, 2.0], [1.5], None), strict=True):
        history.commit(candidate, secs)
    return tmp_path


def test_measurements_are_known_when_the_folder_is_opened_again(filled: Path) -> None:
    history = load(filled)
    keys = [decision_key(candidate.sch.trace) for candidate in candidates(4)]
    results = [history.result(key) for key in keys]
    assert [float(secs) for secs in results[0].run_secs] == [3.0, 1.0, 2.0]
    assert [float(secs) for secs in results[1].run_secs] == [1.5]
    assert results[2].run_secs is None and results[2].error_msg
    assert results[3] is None
    assert [float(record.run_secs[0]) for record in history.succeeded()] == [1.5, 3.0]


def test_other_tasks_and_targets_are_kept_apart(filled: Path) -> None:
    assert load(filled, task("avx2", m=32)).known == {}
    assert load(filled, target={**TARGET, "num-cores": 1}).known == {}
    assert len(load(filled).known) == 3


@pytest.mark.parametrize("name", [WORKLOADS, RECORDS])
def test_half_written_last_line_is_dropped(filled: Path, name: str) -> None:
    path = filled / name
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:40])
    assert len(load(filled).known) == 3
    assert path.read_bytes() == whole


def test_torn_record_is_measured_again_and_the_others_stay(filled: Path) -> None:
    path = filled / RECORDS
    path.write_bytes(path.read_bytes()[:-20])
    history = load(filled)
    assert len(history.known) == 2
    history.commit(candidates(3)[2], [1.0])
    assert len(load(filled).known) == 3


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files get no larger than this, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("more", [0, 40])
def test_record_that_a_full_disk_tears_is_taken_back_and_refused(filled: Path, more: int) -> None:
    path = filled / RECORDS
    whole, history, candidate = path.read_bytes(), load(filled), candidates(4)[3]
    with room_for(len(whole) + more), pytest.raises(DatabaseError, match=f"work_dir: .*{path}"):
        history.commit(candidate, [1.0])
    assert path.read_bytes() == whole
    load(filled).commit(candidate, [1.0])
    assert len(load(filled).known) == 4


def test_workload_that_a_full_disk_tears_is_taken_back_and_refused(filled: Path) -> None:
    path, other = filled / WORKLOADS, task("avx2", m=32)
    whole = path.read_bytes()
    with room_for(len(whole) + 40), pytest.raises(DatabaseError, match=f"work_dir: .*{path}"):
        load(filled, other)
    assert path.read_bytes() == whole
    assert load(filled, other).known == {} and len(load(filled).known) == 3


@pytest.mark.parametrize("name", [WORKLOADS, RECORDS])
@pytest.mark.parametrize("line", [b"garbage", b'{"a": 1}', b"[1]"])
def test_corrupt_line_is_refused_with_path_and_number(filled: Path, name: str, line: bytes) -> None:
    path = filled / name
    path.write_bytes(path.read_bytes() + line + b"\n")
    number = len(path.read_bytes().splitlines())
    with pytest.raises(DatabaseError, match=f"{path}:{number}: "):
        load(filled)


@pytest.mark.parametrize("secs", [[-1.0], [0.0], [1.0, float("nan")], ["1.0"], 3])
def test_times_that_nothing_took_are_refused(filled: Path, secs: object) -> None:
    path = filled / RECORDS
    first, *others = path.read_text().splitlines(keepends=True)
    number, record = json.loads(first)
    record[1] = secs
    path.write_text("".join([*others, json.dumps([number, record]) + "\n"]))
    with pytest.raises(DatabaseError, match=f"{path}:3: no MetaSchedule record: (times|not) of"):
        load(filled)


@pytest.mark.parametrize("instructions", [0, 1])
def test_traces_that_lost_instructions_are_refused(filled: Path, instructions: int) -> None:
    path = filled / RECORDS
    number, record = json.loads(path.read_text().splitlines()[0])
    del record[0][0][instructions:]
    path.write_text(json.dumps([number, record]) + "\n")
    with pytest.raises(DatabaseError, match=f"{path}:1: .*a decision of an instruction"):
        load(filled)


def test_lines_that_nest_too_deep_are_refused(filled: Path) -> None:
    (filled / RECORDS).write_text("[" * 100_000 + "\n")
    with pytest.raises(DatabaseError, match=f"{RECORDS}:1: no MetaSchedule record"):
        load(filled)


def test_foreign_pairs_are_refused(tmp_path: Path) -> None:
    (tmp_path / WORKLOADS).write_text('["a", "b"]\n')
    (tmp_path / RECORDS).write_text("[1, [[[], []], [1.0]]]\n")
    with pytest.raises(DatabaseError, match="no MetaSchedule database"):
        load(tmp_path)


def test_candidate_that_ended_the_process_twice_is_not_allowed_again(tmp_path: Path) -> None:
    history = load(tmp_path)
    for attempts, expected in ((0, True), (1, True), (2, False)):
        (tmp_path / RUNNING).write_text(json.dumps({"key": attempts}))
        with history.running("key") as allowed:
            assert allowed is expected
            if allowed:
                left = json.loads((tmp_path / RUNNING).read_text())
                assert left == {"key": attempts + 1}


def test_mark_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    history = load(tmp_path)
    with room_for(4), pytest.raises(DatabaseError, match="work_dir: expected files that can be"):
        with history.running("key"):
            pass
    assert not list(tmp_path.glob(".*")) and not (tmp_path / RUNNING).exists()


def test_measurement_that_ends_leaves_no_mark(tmp_path: Path) -> None:
    history = load(tmp_path)
    with history.running("key"):
        pass
    with pytest.raises(RuntimeError), history.running("key"):
        raise RuntimeError
    assert not (tmp_path / RUNNING).exists()


@pytest.mark.parametrize("text", ["what", "[]", "3", '{"key": null}', '{"key": "b"}'])
def test_foreign_mark_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / RUNNING).write_text(text)
    with pytest.raises(DatabaseError, match=RUNNING), load(tmp_path).running("key"):
        pass


def test_work_folder_is_for_one_job_at_a_time(tmp_path: Path) -> None:
    with work_folder(tmp_path / "a" / "b") as folder:
        assert folder.is_dir()
        with pytest.raises(TuningError, match="no other job"), work_folder(folder):
            pass
    with work_folder(folder):
        pass


def test_work_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TuningError, match="work_dir"), work_folder(tmp_path / "file"):
        pass
