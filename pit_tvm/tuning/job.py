"""An offline tuning job: tasks in, records in a tile database out; interruptible and resumable."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm
from tvm.support import cc
from tvm.target import Target

from ..errors import BackendUnavailable, TuningError, UnsupportedTarget, mismatch
from ..interrupts import pass_interrupts
from ..structs import TileTask
from ..target import TargetInfo, runs_here
from ..threads import start_thread_pool
from ..tile_db.record import Provenance, TileRecord, make_provenance
from ..tile_db.store import TileStore
from .backend import Backend, host_backend
from .calibrate import NUMPY, Library, measure_library
from .history import work_folder
from .task_run import Bench, Counts, Settings, TaskRun
from .tasks import Space, load_space

_ARTIFACTS = ".pit-tvm-artifacts-"  # beginning of the names of folders with built candidates


@dataclass(frozen=True)
class TuneResult:
    """What a job did: the records that it wrote, and what became of the candidates.

    ``measured`` candidates are new, ``reused`` ones are from earlier runs of the work folder;
    ``wrong`` are those of the ``failed`` whose result was wrong. ``errors`` are the texts of the
    failures, most frequent first.
    """

    records: tuple[TileRecord, ...]
    measured: int
    reused: int
    failed: int
    wrong: int
    errors: tuple[str, ...]
    interrupted: bool


@dataclass(frozen=True)
class TuneJob:
    """Tunes ``tasks`` for ``target`` and appends the best tiles to ``store``.

    Parameters
    ----------
    work_dir
        MetaSchedule's database of every candidate. A job that is run again there continues.
    spaces
        Search space by family; families that it lacks come from the registry.
    backend
        How candidates are built and where they run: `host_backend`, over RPC with
        ``rpc.rpc_sessions``, or ``cuda_backend.cuda_backend``.
    device
        Folder of the records; "" for this machine's.
    calibrate
        Also measure ``libraries`` on every product, and the device's constants: this layer's and
        those of ``constants``, by name. Only where this process runs the candidates.
    """

    tasks: Sequence[TileTask]
    target: TargetInfo
    work_dir: Path
    store: TileStore
    settings: Settings = Settings()
    spaces: Mapping[str, Space] = field(default_factory=dict)
    backend: Backend = field(default_factory=host_backend)
    device: str = ""
    calibrate: bool = True
    libraries: Sequence[Library] = (NUMPY,)
    constants: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    progress: bool = True

    def run(self) -> TuneResult:
        """Run until done, or until SIGINT or SIGTERM asks to stop; a second signal ends at once.

        After every task its records are in the store. An interrupted job records the best tiles
        found so far.

        Raises
        ------
        UnsupportedTarget
            This machine cannot run the target's code, or a task is for another instruction set.
        TuningError
            There are no tasks, another job holds the work folder, or no tile could be recorded.
        BackendUnavailable
            Candidates cannot be linked or written here, or the device cannot be reached.
        """
        pass_interrupts()
        self._check()
        counts = Counts()
        records: list[TileRecord] = []
        with work_folder(self.work_dir), _stop_signals() as stop, self._bar() as bar:
            provenance = self._provenance()
            with _artifacts(self.work_dir) as artifacts:
                target = Target(self.target.tvm_target)
                bench = Bench(target, self.backend, self.work_dir, artifacts)
                for task in self.tasks:
                    if stop.is_set():
                        break
                    found = self._tune(task, bench, provenance, counts, stop, bar)
                    self.store.append(found)
                    records += found
                records += self._compare(records, bench, provenance, counts, stop)
            if self.calibrate and not stop.is_set():
                measured = self._calibrate(provenance)
                self.store.append(measured)
                records += measured
            interrupted = stop.is_set()
        errors = tuple(text for text, _ in counts.errors.most_common())
        if not interrupted and not any(record.kind == "pit" for record in records):
            why = errors[0] if errors else "no candidate, or none that ran in earlier runs"
            advice = "" if errors else "allow more trials, or remove the work folder"
            raise TuningError(mismatch("tuning job", "at least one right tile", why, advice))
        return TuneResult(
            tuple(records),
            counts.measured,
            counts.reused,
            counts.failed,
            counts.wrong,
            errors,
            interrupted,
        )

    def _check(self) -> None:
        if not self.tasks:
            raise TuningError(mismatch("tasks", "at least one", "none"))
        if self.settings.trials < 1 or self.settings.keep < 1 or self.settings.batch < 1:
            raise TuningError(mismatch("settings", "numbers of at least 1", self.settings))
        other = [task for task in self.tasks if task.isa != self.target.isa]
        if other:
            raise UnsupportedTarget(mismatch("task.isa", self.target.isa, other[0].isa))
        if self.backend.here and not runs_here(self.target):
            on_cpu = self.target.kind == "llvm"
            expected = "an instruction set of this machine" if on_cpu else "a GPU of this machine"
            advice = "tune for it over RPC" if on_cpu else "run it where the driver finds one"
            raise UnsupportedTarget(mismatch("target", expected, self.target.isa, advice))
        if self.backend.here and self.target.kind == "llvm" and cc.get_cc() is None:
            raise BackendUnavailable(mismatch("tuning job", "a C compiler on PATH", "none"))
        if self.calibrate and not self.backend.here:
            raise TuningError(mismatch("calibrate", "False for a job over RPC", True))

    def _provenance(self) -> Provenance:
        """Of all records; a server decides by itself how many threads it runs."""
        if self.target.kind == "llvm":
            start_thread_pool(self.target.threads)
        with self.backend.open_session() as session:
            threads = session.threads
        return make_provenance(self.device or self.target.device, self.target.mcpu, threads)

    def _bar(self) -> tqdm:
        total = len(self.tasks) * self.settings.trials
        return tqdm(total=total, unit="trial", disable=None if self.progress else True)

    def _tune(
        self,
        task: TileTask,
        bench: Bench,
        provenance: Provenance,
        counts: Counts,
        stop: _Stop,
        bar: Any,
    ) -> list[TileRecord]:
        """One task; adds what happened to ``counts``."""
        bar.set_description(f"{task.dtype} {task.m}x{task.n}x{task.k}")

        def tick(fastest: float) -> None:
            bar.set_postfix_str(f"best {2e-9 * task.m * task.n * task.k / fastest:.1f} GFLOP/s")
            bar.update()

        run = self._task_run(task, bench, stop, tick)
        bar.update(run.counts.reused)
        found = run.run(provenance)
        counts.add(run.counts)
        return found

    def _task_run(
        self, task: TileTask, bench: Bench, stop: _Stop, tick: Callable[[float], None]
    ) -> TaskRun:
        space = self.spaces.get(task.family) or load_space(task.family)
        return TaskRun(task, space, self.settings, bench, stop.is_set, tick)

    def _compare(
        self,
        records: Sequence[TileRecord],
        bench: Bench,
        provenance: Provenance,
        counts: Counts,
        stop: _Stop,
    ) -> list[TileRecord]:
        """Every task's fastest tile on the other tasks: selection compares like with like."""
        fastest: dict[TileTask, TileRecord] = {}
        for record in sorted((r for r in records if r.trace), key=lambda r: r.secs):
            if record.task is not None:
                fastest.setdefault(record.task, record)
        known = {(record.task, record.tile) for record in records}
        added: list[TileRecord] = []
        for task in tqdm(fastest, desc="compare", disable=None if self.progress else True):
            if stop.is_set():
                break
            others = {
                record.tile: record
                for other, record in fastest.items()
                if (other.family, other.dtype) == (task.family, task.dtype)
                and (task, record.tile) not in known
            }
            run = self._task_run(task, bench, stop, lambda _: None)
            added += run.measure(others.values(), provenance)
            counts.errors += run.counts.errors
        self.store.append(added)
        return added

    def _calibrate(self, provenance: Provenance) -> list[TileRecord]:
        """Every library on every product once, whatever families of tiles were tuned for it."""
        single = [task for task in reversed(self.tasks) if task.groups == 1]
        products = {(task.dtype, task.m, task.n, task.k): task for task in single}
        library = [
            measure_library(task, provenance, library, self.settings.seed)
            for task in reversed(products.values())
            for library in self.libraries
        ]
        return [*library, self.backend.measure_profile(self.target, self.constants)]


@dataclass
class _Stop:
    """How often SIGINT or SIGTERM came: once asks to stop, twice interrupts."""

    signals: int = 0

    def is_set(self) -> bool:
        return self.signals > 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals > 1:
            raise KeyboardInterrupt


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Counts the signals. Handlers belong to the main thread: in any other none are counted."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    earlier = {
        number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def _artifacts(work_dir: Path) -> Iterator[Path]:
    """An empty folder for built candidates, removed at the end; also those that were left over.
    TuningError if it cannot be made."""
    for left in work_dir.glob(f"{_ARTIFACTS}*"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_ARTIFACTS, dir=work_dir))
    except OSError as error:
        raise TuningError(mismatch("work_dir", "a folder that can be written", error)) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
