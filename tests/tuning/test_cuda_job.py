"""A whole job of the Hopper spaces with a stand-in for the compiler and for the GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tvm
from tvm.target import Target

from pit_tvm.errors import TuningError
from pit_tvm.schedules import hopper_space
from pit_tvm.structs import TileTask
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.meta_json import replay
from pit_tvm.tile_db.record import TileRecord, make_provenance
from pit_tvm.tile_db.store import TileStore
from pit_tvm.tuning.backend import Backend
from pit_tvm.tuning.cuda_builder import CudaBuilder, Toolchain
from pit_tvm.tuning.job import TuneJob, TuneResult
from pit_tvm.tuning.runner import Repeats, Session, measure
from pit_tvm.tuning.task_run import Settings
from pit_tvm.tuning.tasks import WRONG, load_space, workload_module
from tests.tuning.test_cuda_builder import Bytes

TARGET = resolve_target("cuda -arch=sm_90a -model=h200")
ROWS = TileTask(hopper_space.ROWS, "sm_90a", "float16", 1000, 11008, 4096)
GROUPS = TileTask(hopper_space.GROUPS, "sm_90a", "bfloat16", 8192, 3072, 768, 64)


def knobs_only(mod: tvm.IRModule) -> tvm.IRModule:
    """The stand-in's module, in the place of the kernel."""
    return mod


def source(mod: tvm.IRModule, arch: str) -> str:
    return re.search(r'"pit.tile": .*?\]', mod.script()).group()


def as_library(text: str, arch: str) -> Bytes:
    return Bytes(text)


class Times(NamedTuple):
    results: tuple[float, ...]


class Module:
    """A "kernel": best at form 9 with a cluster; form 2 computes nonsense."""

    def __init__(self, path: Path) -> None:
        values = [int(v) for v in re.findall(r"\d+", Path(path).read_text())]
        self.form, self.rest = values[0], values[1:]

    def __getitem__(self, name: str) -> Any:
        return lambda *arguments: arguments[-1].append(self.form)

    def time_evaluator(self, name: str, device: Any, **options: Any) -> Any:
        secs = 1e-4 * (1 + abs(self.form - 9) + (self.rest[0] == 1) + 0.1 * self.rest[2])
        return lambda *arguments: Times((secs,) * options["repeat"])


class Data:
    def arguments(self, device: Any) -> list[Any]:
        return [[]]

    def check(self, arguments: Sequence[Any]) -> None:
        if arguments[-1] == [2]:
            raise TuningError(WRONG)


@contextmanager
def session() -> Iterator[Session]:
    yield Session(Module, None, 132)


def backend(root: Path) -> Backend:
    tools = Toolchain(source, as_library, "sm_90a", root / "kernels")

    def builder(lower: Any, target: Target, folder: Path) -> CudaBuilder:
        return CudaBuilder(lower, folder, tools, None)

    def profile(target: Any, more: Any) -> TileRecord:
        provenance = make_provenance(target.device, target.mcpu, target.threads)
        return TileRecord("profile", provenance, profile=(("launch_us", 3.0),))

    return Backend(session, builder, lambda *_: Data(), measure_profile=profile, here=False)


def run(root: Path, tasks: Sequence[TileTask], trials: int) -> TuneResult:
    spaces = {t.family: replace(load_space(t.family), lower=knobs_only) for t in tasks}
    job = TuneJob(
        tasks=tasks,
        target=TARGET,
        work_dir=root / "work",
        store=TileStore.create(root / "db", device=TARGET.device, isa=TARGET.isa),
        settings=Settings(trials=trials, keep=6),
        spaces=spaces,
        backend=backend(root),
        calibrate=False,
        progress=False,
    )
    return job.run()


@pytest.mark.parametrize("task", [ROWS, GROUPS])
def test_job_finds_and_records_the_best_tile(tmp_path: Path, task: TileTask) -> None:
    result = run(tmp_path, [task], trials=40)
    assert result.measured == 40 and result.wrong >= 1
    store = TileStore.open(tmp_path / "db", device="h200-sm_90a")
    best = store.best(task)
    assert best is not None and best.task == task
    assert (best.tile.tile_m, best.tile.tile_n) == (128, hopper_space.FORMS[9][2])
    assert best.provenance.device == "h200-sm_90a" and best.provenance.arch == "sm_90a"
    assert best.provenance.threads == 132
    space = load_space(task.family)
    again = replay(best, workload_module(space, task))
    assert space.tile_of(again, task) == best.tile
    assert best.secs <= min(record.secs for record in store.records())


def test_families_of_any_gpu_are_tuned_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ByForm(Module):
        def time_evaluator(self, name: str, device: Any, **options: Any) -> Any:
            return lambda *arguments: Times((1e-4 * (1 + self.form),) * options["repeat"])

    monkeypatch.setitem(globals(), "Module", ByForm)
    task = TileTask("rows-cuda", "sm_90a", "float32", 512, 1024, 1024)
    result = run(tmp_path, [task], trials=20)
    best = TileStore.open(tmp_path / "db", device="h200-sm_90a").best(task)
    assert result.measured == 20 and best is not None
    assert (best.tile.tile_m, best.tile.tile_n) == (128, 128)


def test_every_tasks_best_tile_is_measured_on_the_others(tmp_path: Path) -> None:
    other = replace(ROWS, m=64)
    run(tmp_path, [ROWS, other], trials=17)
    store = TileStore.open(tmp_path / "db", device="h200-sm_90a")
    tiles = {task: {r.tile for r in store.records() if r.task == task} for task in (ROWS, other)}
    assert store.best(ROWS).tile in tiles[other] and store.best(other).tile in tiles[ROWS]


def test_the_chip_is_under_load_before_times_count(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    class Noting(Module):
        def time_evaluator(self, name: str, device: Any, **options: Any) -> Any:
            asked.append((options["repeat"], options["min_repeat_ms"]))
            return super().time_evaluator(name, device, **options)

    artifact = tmp_path / "kernel"
    artifact.write_text("[9, 1, 0, 0]")
    repeats = Repeats(repeat=2, min_repeat_ms=6, warm_ms=150)
    secs = measure(Session(Noting, None, 132), artifact, Data(), repeats, float("inf"))
    assert len(secs) == 2
    assert asked == [(1, 0), (1, 150), (1, 6), (1, 6)]
