"""Whole jobs on the stand-in space: results, resuming, interruption, refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import tirx

from pit_tvm.errors import BackendUnavailable, TuningError, UnsupportedTarget
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.meta_json import replay
from pit_tvm.tile_db.store import FILE_NAME, TileStore
from pit_tvm.tuning.features import tile_annotation
from pit_tvm.tuning.history import RUNNING
from pit_tvm.tuning.job import TuneJob, TuneResult
from pit_tvm.tuning.runner import Repeats
from pit_tvm.tuning.task_run import Settings
from pit_tvm.tuning.tasks import Space, workload_module
from tests.tile_db.records import constants_of, libraries
from tests.tuning.stand_in import FAMILY, SPACE, sample_few, space_with, task, tile_of

HOST = resolve_target("llvm")
TASK = task(HOST.isa)
QUICK = Repeats(repeat=1, min_repeat_ms=0)


def make_job(root: Path, trials: int, space: Space = SPACE, **options: Any) -> TuneJob:
    settings = Settings(trials=trials, batch=12, keep=4, repeats=QUICK, final=QUICK)
    arguments: dict[str, Any] = {
        "tasks": [TASK],
        "target": HOST,
        "work_dir": root / "work",
        "store": TileStore.create(root / "db", device=HOST.device, isa=HOST.isa),
        "settings": settings,
        "spaces": {FAMILY: space},
        "calibrate": False,
        "progress": False,
    }
    return TuneJob(**{**arguments, **options})


def run(root: Path, trials: int, space: Space = SPACE, **options: Any) -> TuneResult:
    return make_job(root, trials, space, **options).run()


class After:
    """A lowering that does something once, before the given number of builds is over."""

    def __init__(self, builds: int, action) -> None:
        self.left = builds
        self.action = action

    def __call__(self, mod: tvm.IRModule) -> tvm.IRModule:
        self.left -= 1
        if self.left == 0:
            self.action()
        return mod


def test_job_records_right_tiles_with_provenance_and_trace(tmp_path: Path) -> None:
    result = run(tmp_path, trials=6)
    assert (result.measured, result.reused, result.failed, result.interrupted) == (6, 0, 0, False)
    store = TileStore.open(tmp_path / "db", device=HOST.device)
    assert store.records() == result.records
    assert 1 <= len(result.records) <= 4
    extents = {(r.tile.tile_m, r.tile.tile_n, r.tile.tile_k) for r in result.records}
    assert len(extents) == len(result.records)
    for record in result.records:
        assert record.task == TASK
        assert record.provenance.device == HOST.device
        assert record.provenance.arch == HOST.mcpu
        assert record.provenance.trials == 6
        schedule = replay(record, workload_module(SPACE, TASK))
        assert tile_of(schedule, TASK) == record.tile


def test_finished_job_leaves_only_databases(tmp_path: Path) -> None:
    run(tmp_path, trials=3)
    files = {p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()}
    assert {str(path) for path in files} == {
        f"work/{FAMILY}/database_workload.json",
        f"work/{FAMILY}/database_tuning_record.json",
        f"db/{HOST.device}/{FILE_NAME}",
    }


def test_job_continues_from_its_work_folder(tmp_path: Path) -> None:
    assert run(tmp_path, trials=4).measured == 4
    again = run(tmp_path, trials=10)
    assert (again.measured, again.reused) == (6, 4)
    assert all(record.provenance.trials == 10 for record in again.records)
    done = run(tmp_path, trials=10)
    assert (done.measured, done.reused) == (0, 10)


def test_small_space_is_measured_once_and_ends_the_job(tmp_path: Path) -> None:
    result = run(tmp_path, trials=20, space=space_with(sample=sample_few))
    assert result.measured == 4
    lines = (tmp_path / "work" / FAMILY / "database_tuning_record.json").read_text().splitlines()
    assert len(set(lines)) == len(lines) == 4


def test_wrong_tiles_are_never_recorded(tmp_path: Path) -> None:
    def sabotage(mod: tvm.IRModule) -> tvm.IRModule:
        if tile_annotation(mod)[3] == 8:
            return tvm.IRModule({"main": mod["main"].with_body(tirx.Evaluate(0))})
        return mod

    result = run(tmp_path, trials=8, space=space_with(lower=sabotage))
    assert 0 < result.wrong == result.failed < 8
    assert {record.tile.tile_k for record in result.records} == {16}
    assert run(tmp_path, trials=8).measured == 0


def test_job_without_any_right_tile_fails_and_says_why(tmp_path: Path) -> None:
    def refuse(mod: tvm.IRModule) -> tvm.IRModule:
        raise ValueError("cannot lower this")

    with pytest.raises(TuningError, match="cannot lower this"):
        run(tmp_path, trials=2, space=space_with(lower=refuse))
    assert TileStore.open(tmp_path / "db", device=HOST.device).all() == ()


def test_job_none_of_whose_earlier_candidates_ran_says_how_to_go_on(tmp_path: Path) -> None:
    def refuse(mod: tvm.IRModule) -> tvm.IRModule:
        raise ValueError("cannot lower this")

    with pytest.raises(TuningError):
        run(tmp_path, trials=2, space=space_with(lower=refuse))
    with pytest.raises(TuningError, match="ran in earlier runs; .* or remove the work folder"):
        run(tmp_path, trials=2)


def test_missing_compiler_is_found_before_any_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        with pytest.raises(BackendUnavailable, match="a C compiler on PATH"):
            run(tmp_path, trials=2)
    assert run(tmp_path, trials=2).reused == 0


def test_library_that_cannot_be_linked_ends_the_job_and_is_no_failed_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setenv("CXX", str(tmp_path / "no-compiler"))
        with pytest.raises(BackendUnavailable, match="no-compiler"):
            run(tmp_path, trials=2)
    again = run(tmp_path, trials=2)
    assert (again.measured, again.reused, again.failed) == (2, 0, 0)


def test_full_temporary_files_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr("pit_tvm.files._ROOM", 2**80)
        with pytest.raises(BackendUnavailable, match="work_dir: .* No space left"):
            run(tmp_path, trials=2)
    assert run(tmp_path, trials=2).measured == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_after_the_candidate_and_saves_what_was_found(
    tmp_path: Path, number: signal.Signals
) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    lower = After(3, lambda: os.kill(os.getpid(), number))
    result = run(tmp_path, trials=5, space=space_with(lower=lower))
    assert result.interrupted and result.measured == 3
    assert TileStore.open(tmp_path / "db", device=HOST.device).records() == result.records != ()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    resumed = run(tmp_path, trials=5)
    assert (resumed.measured, resumed.reused, resumed.interrupted) == (2, 3, False)


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, trials=4, space=space_with(lower=After(3, twice)))
    assert not (tmp_path / "work" / FAMILY / RUNNING).exists()
    assert run(tmp_path, trials=4).reused == 2


def test_killed_job_continues_where_it_was_and_loads_no_tensor_intrinsics(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from tests.tuning.test_job import After, run, space_with

def die():
    print("tvm.s_tir.tensor_intrin" in sys.modules, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

run(Path({str(tmp_path)!r}), trials=6, space=space_with(lower=After(4, die)))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (-signal.SIGKILL, "False"), done.stderr
    assert (tmp_path / "work" / FAMILY / RUNNING).exists()
    resumed = run(tmp_path, trials=6)
    assert (resumed.measured, resumed.reused) == (3, 3)
    assert not (tmp_path / "work" / "artifacts").exists()


def test_what_is_in_the_work_folder_stays(tmp_path: Path) -> None:
    mine = tmp_path / "work" / "artifacts" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    run(tmp_path, trials=1)
    assert mine.read_text() == "mine"
    assert not list((tmp_path / "work").glob(".pit-tvm-artifacts-*"))


def test_calibration_adds_libraries_and_constants(tmp_path: Path) -> None:
    tasks = [TASK, task(HOST.isa, m=8)]
    result = run(tmp_path, trials=1, tasks=tasks, calibrate=True)
    store = TileStore.open(tmp_path / "db", device=HOST.device)
    assert [r.task for r in libraries(store, "float32") if r.note == "numpy"] == tasks
    assert constants_of(store)["launch_us"] > 0
    assert {record.kind for record in result.records} == {"pit", "library", "profile"}


def test_task_of_another_isa_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTarget, match="task.isa"):
        run(tmp_path, trials=1, tasks=[task("sve")])


def test_target_that_does_not_run_here_is_refused(tmp_path: Path) -> None:
    other = resolve_target("llvm -mtriple=aarch64-linux-gnu")
    with pytest.raises(UnsupportedTarget, match="over RPC"):
        run(tmp_path, trials=1, target=other, tasks=[task(other.isa)])


def test_gpu_that_is_not_here_is_not_tuned_over_rpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pit_tvm.tuning.job.runs_here", lambda target: False)
    gpu = resolve_target("cuda -arch=sm_90a")
    with pytest.raises(UnsupportedTarget, match="target: expected") as refused:
        run(tmp_path, trials=1, target=gpu, tasks=[task(gpu.isa)])
    assert "RPC" not in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [{"tasks": []}, {"settings": Settings(trials=0)}, {"settings": Settings(keep=0)}],
)
def test_empty_job_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(TuningError):
        run(tmp_path, trials=1, **options)
