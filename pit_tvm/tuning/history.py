"""What a job's work folder remembers: MetaSchedule's own database, made safe to interrupt."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from tvm import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from ..errors import DatabaseError, TuningError, mismatch
from ..files import write_atomically
from ..tile_db.meta_json import FAILED_SECS
from .features import decision_key

WORKLOADS = "database_workload.json"
RECORDS = "database_tuning_record.json"
RUNNING = "running.json"
# A candidate during which the process died this often is taken to be what kills it.
_MAX_ATTEMPTS = 2


class History:
    """Measured candidates of one workload and target, by their decisions; opened by ``load``.

    Failed candidates are remembered too, so that none is ever measured twice.
    """

    def __init__(
        self, folder: Path, database: ms.Database, workload: ms.database.Workload, target: Target
    ) -> None:
        self.folder = folder
        self.database = database
        self.workload = workload
        self.target = target
        self.known: dict[str, ms.database.TuningRecord] = {}
        for record in database.get_all_tuning_records():
            if record.workload.same_as(workload) and str(record.target) == str(target):
                self.known[decision_key(record.trace)] = record

    @classmethod
    def load(cls, folder: Path, mod: IRModule, target: Target) -> History:
        """Read ``folder``, made if missing, without what a killed process left half written.

        Raises
        ------
        DatabaseError
            A file is corrupt anywhere else, no database of MetaSchedule, or cannot be written,
            such as on a full disk.
        """
        try:
            folder.mkdir(exist_ok=True)
            for name in (WORKLOADS, RECORDS):
                _drop_torn_line(folder / name)
        except OSError as error:
            text = mismatch("work_dir", "folders and files that can be written", error)
            raise DatabaseError(text) from error
        try:
            database = ms.database.JSONDatabase(str(folder / WORKLOADS), str(folder / RECORDS))
        except (ValueError, TypeError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise DatabaseError(
                f"{folder / RECORDS}: no MetaSchedule database: {reason}"
            ) from error
        with nullcontext() if database.has_workload(mod) else _adding_a_line(folder / WORKLOADS):
            workload = database.commit_workload(mod)
        return cls(folder, database, workload, target)

    def result(self, key: str) -> ms.runner.RunnerResult | None:
        """What a candidate gave when it was measured; None if it never was."""
        record = self.known.get(key)
        if record is None:
            return None
        if is_failure(record):
            return ms.runner.RunnerResult(None, "failed in an earlier run")
        return ms.runner.RunnerResult([float(secs) for secs in record.run_secs], None)

    def commit(self, candidate: ms.MeasureCandidate, secs: Sequence[float] | None) -> None:
        """Remember a measurement; None stands for a candidate that failed.

        Raises
        ------
        DatabaseError
            The record cannot be written; the file is as it was.
        """
        record = ms.database.TuningRecord(
            candidate.sch.trace,
            self.workload,
            list(secs) if secs else [10 * FAILED_SECS],
            self.target,
            candidate.args_info,
        )
        with _adding_a_line(self.folder / RECORDS):
            self.database.commit_tuning_record(record)
        self.known[decision_key(candidate.sch.trace)] = record

    @contextmanager
    def running(self, key: str) -> Iterator[bool]:
        """Held while a candidate is built and run; yields False if it killed earlier processes.

        Raises
        ------
        DatabaseError
            The folder cannot be read or written.
        """
        path = self.folder / RUNNING
        attempts = _read_attempts(path)
        if attempts.get(key, 0) >= _MAX_ATTEMPTS:
            yield False
            return
        attempts = {key: attempts.get(key, 0) + 1}
        try:
            write_atomically(path, json.dumps(attempts))
        except OSError as error:
            raise DatabaseError(_unwritten(error)) from error
        try:
            yield True
        finally:  # stays behind only if the process itself ends here
            path.unlink(missing_ok=True)

    def succeeded(self) -> list[ms.database.TuningRecord]:
        """Records of candidates that ran and were right, fastest first."""
        good = [record for record in self.known.values() if not is_failure(record)]
        return sorted(good, key=median_secs)


def is_failure(record: ms.database.TuningRecord) -> bool:
    """Whether the record is of a candidate that did not build, did not run, or was wrong."""
    return not record.run_secs or median_secs(record) >= FAILED_SECS


def median_secs(record: ms.database.TuningRecord) -> float:
    """Median run time of a record, in seconds."""
    return median(float(value) for value in record.run_secs)


@contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """Make the folder and hold it for one job at a time.

    Raises
    ------
    TuningError
        Another job holds it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TuningError(mismatch("work_dir", "a folder that can be made", error)) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    except BlockingIOError as error:
        raise TuningError(
            mismatch("work_dir", "no other job in it", folder, "wait for it, or name another")
        ) from error
    finally:
        os.close(handle)


def _unwritten(error: OSError) -> str:
    return mismatch("work_dir", "files that can be written", error)


def _read_attempts(path: Path) -> dict[str, int]:
    if not path.is_file():
        return {}
    try:
        attempts = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): int(count) for key, count in attempts.items()}
    except (AttributeError, OSError, RecursionError, TypeError, ValueError) as error:
        raise DatabaseError(f"{path}:1: not written by a tuning job: {error}") from error


@contextmanager
def _adding_a_line(path: Path) -> Iterator[None]:
    """Held while MetaSchedule appends to a file, which does not look whether it could.

    Raises
    ------
    DatabaseError
        It could not; what there was of the line is gone again.
    """
    size = path.stat().st_size if path.is_file() else 0
    yield
    try:
        with path.open("r+b") as file:
            file.seek(size)
            whole = file.read().endswith(b"\n")
            if not whole:
                file.truncate(size)
    except OSError as error:
        raise DatabaseError(_unwritten(error)) from error
    if not whole:
        got, advice = f"a part of one in {path}", "make room on the disk"
        raise DatabaseError(mismatch("work_dir", "lines that can be written", got, advice))


def _drop_torn_line(path: Path) -> None:
    """Keep the complete lines; refuse a file whose complete lines are not JSON lists."""
    if not path.is_file():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DatabaseError(f"{path}:{number}: no MetaSchedule record: {error}") from error
        fault = _fault_of(parsed, path.name)
        if fault:
            raise DatabaseError(f"{path}:{number}: no MetaSchedule record: {fault}")
    if lines[-1]:
        write_atomically(path, b"\n".join([*lines[:-1], b""]).decode())


def _fault_of(line: Any, name: str) -> str:
    """What is wrong with a parsed line of the file ``name``, of what MetaSchedule itself takes: it
    reads beyond its instructions, and any times."""
    if not isinstance(line, list) or len(line) != 2:
        return "not a pair"
    try:
        (instructions, decisions), secs = line[1][:2] if name == RECORDS else (([], []), [])
        inside = all(0 <= place < len(instructions) for place, _ in decisions)
        timed = all(second > 0 for second in secs or ())
    except (TypeError, ValueError):
        return "not of a trace and its times"
    if not inside:
        return "a decision of an instruction that there is not"
    return "" if timed else f"times of {secs} seconds"
