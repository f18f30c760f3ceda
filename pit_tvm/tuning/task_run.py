"""Tuning of one task: search, measure, remember, and keep the best tiles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from ..structs import Tile, TileTask
from ..tile_db.meta_json import from_tuning_record, trace_to_json
from ..tile_db.record import Provenance, TileRecord
from .backend import Backend
from .features import decision_key
from .history import History, median_secs
from .runner import Measurer, Repeats
from .search import Search, start_search
from .tasks import WRONG, Space, workload_module

# The strategy may propose what is already known; this many batches of only that end the search.
_STALE_BATCHES = 3


@dataclass(frozen=True)
class Settings:
    """How a task is searched. ``trials`` counts all candidates of the task, earlier runs included.

    Of each tile extent the best, and of those the ``keep`` fastest, are measured again as
    ``final`` says, and recorded.
    """

    trials: int = 64
    batch: int = 16
    keep: int = 8
    seed: int = 0
    repeats: Repeats = Repeats()
    final: Repeats = Repeats(repeat=9, min_repeat_ms=30, hopeless=float("inf"))


@dataclass(frozen=True)
class Bench:
    """Where candidates of a job are built and run."""

    target: Target
    backend: Backend
    work_dir: Path
    artifacts: Path


@dataclass
class Counts:
    """What became of the candidates."""

    measured: int = 0
    reused: int = 0
    failed: int = 0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def add_failure(self, message: str) -> None:
        """Count a candidate that did not build or run, or whose result was wrong."""
        self.failed += 1
        self.wrong += WRONG in message
        self.errors[message] += 1

    def add(self, other: Counts) -> None:
        """Count another task's candidates too."""
        self.measured += other.measured
        self.reused += other.reused
        self.failed += other.failed
        self.wrong += other.wrong
        self.errors += other.errors


class TaskRun:
    """One task of a job. ``stop()`` asks whether to end early; ``tick`` is told after each
    candidate the fastest time so far, in seconds."""

    def __init__(
        self,
        task: TileTask,
        space: Space,
        settings: Settings,
        bench: Bench,
        stop: Callable[[], bool],
        tick: Callable[[float], None],
    ) -> None:
        self.task = task
        self.space = space
        self.settings = settings
        self.bench = bench
        self.stop = stop
        self.tick = tick
        self.counts = Counts()
        self.mod = workload_module(space, task)
        # A folder per family: two of them may share a workload, but not the meaning of decisions.
        self.history = History.load(bench.work_dir / task.family, self.mod, bench.target)
        self.counts.reused = min(len(self.history.known), settings.trials)
        self.builder = bench.backend.make_builder(space.lower, bench.target, bench.artifacts)

    def run(self, provenance: Provenance) -> list[TileRecord]:
        """Search until the trials are used up, then record the best tiles."""
        if len(self.history.known) < self.settings.trials:
            self._search()
        stamped = replace(provenance, trials=len(self.history.known))
        return self._keep(stamped)

    def measure(self, others: Iterable[TileRecord], provenance: Provenance) -> list[TileRecord]:
        """This task run with the decisions of other tasks' records; wrong ones are left out."""
        candidates = [self._candidate(decisions_of(other)) for other in others]
        if not candidates:
            return []
        self._warm(candidates, limit=len(candidates))
        measurer = self._measurer(self.settings.final, data=1)
        records: list[TileRecord] = []
        for candidate in candidates:
            if self.stop():
                break
            sch = candidate.sch
            result = self._build_and_run(candidate, measurer)
            if result.error_msg is not None:
                self.counts.add_failure(str(result.error_msg))
                continue
            tile, trace = self.space.tile_of(sch, self.task), trace_to_json(sch.trace)
            secs = tuple(float(value) for value in result.run_secs)
            records.append(TileRecord("pit", provenance, tile, self.task, secs, trace=trace))
        return records

    def _candidate(self, decisions: Sequence[int]) -> ms.MeasureCandidate:
        """The candidate of given decisions, as positions in the order of sampling."""
        first = Schedule(self.mod)
        self.space.sample(first, self.task)
        trace = first.trace
        for inst, decision in zip(list(trace.decisions), decisions, strict=True):
            trace = trace.with_decision(inst, decision, remove_postproc=True)
        decided = Schedule(self.mod)
        trace.apply_to_schedule(decided, remove_postproc=True)
        return ms.MeasureCandidate(decided, ms.arg_info.ArgInfo.from_entry_func(self.mod))

    def _search(self) -> None:
        measurer = self._measurer(self.settings.repeats, data=0)
        measurer.fastest = min(map(median_secs, self.history.succeeded()), default=float("inf"))
        self._measure_starts(measurer)
        search = self._start()
        stale = 0
        while not self._finished() and stale < _STALE_BATCHES:
            batch = search.next_batch()
            if not batch:
                break
            before = len(self.history.known)
            results = self._measure_batch(batch, measurer)
            stale = 0 if len(self.history.known) > before else stale + 1
            search.tell(batch[: len(results)], results)
        search.close()

    def _measure_starts(self, measurer: Measurer) -> None:
        """The space's own proposals come first: no search ends below them."""
        if self.space.starts is not None:
            starts = self.space.starts(self.task)
            self._measure_batch([self._candidate(one) for one in starts], measurer)

    def _start(self) -> Search:
        """A search that knows what earlier runs measured."""
        settings, known = self.settings, self.history.known
        search = start_search(
            self.space,
            self.task,
            self.mod,
            self.bench.target,
            self.history.database,
            # Proposals that are already known count too, so the strategy's own limit is wider.
            trials=settings.trials * (1 + _STALE_BATCHES),
            batch=min(settings.batch, settings.trials),
            # Another seed after an interruption, or the same candidates would come again.
            seed=(settings.seed * 1_000_003 + len(known)) % 2**30,
        )
        candidates = [record.as_measure_candidate() for record in known.values()]
        results = [self.history.result(key) for key in known]
        search.learn(candidates, [result for result in results if result is not None])
        return search

    def _measure_batch(
        self, batch: list[ms.MeasureCandidate], measurer: Measurer
    ) -> list[ms.runner.RunnerResult]:
        """Results in the order of the batch, as far as it got before the end."""
        self._warm(batch, limit=self.settings.trials - len(self.history.known))
        results: list[ms.runner.RunnerResult] = []
        for candidate in batch:
            key = decision_key(candidate.sch.trace)
            result = self.history.result(key)
            if result is None:
                if self._finished():
                    break
                result = self._measure(candidate, key, measurer)
            results.append(result)
        return results

    def _warm(self, batch: Sequence[ms.MeasureCandidate], limit: int) -> None:
        """Let the builder work ahead on what is not known yet, on ``limit`` candidates at most."""
        new = [c.sch.mod for c in batch if decision_key(c.sch.trace) not in self.history.known]
        self.builder.warm(new[: max(0, limit)])

    def _finished(self) -> bool:
        return self.stop() or len(self.history.known) >= self.settings.trials

    def _measure(
        self, candidate: ms.MeasureCandidate, key: str, measurer: Measurer
    ) -> ms.runner.RunnerResult:
        """Build and run one candidate and remember how it went."""
        with self.history.running(key) as allowed:
            if allowed:
                result = self._build_and_run(candidate, measurer)
            else:
                result = ms.runner.RunnerResult(None, "ended the process twice")
            self.history.commit(candidate, result.run_secs)
        self.counts.measured += 1
        if result.error_msg is not None:
            self.counts.add_failure(str(result.error_msg))
        self.tick(measurer.fastest)
        return result

    def _build_and_run(
        self, candidate: ms.MeasureCandidate, measurer: Measurer
    ) -> ms.runner.RunnerResult:
        built = self.builder.build(candidate.sch.mod)
        if isinstance(built, str):
            return ms.runner.RunnerResult(None, built)
        return measurer.run(built)

    def _measurer(self, repeats: Repeats, data: int) -> Measurer:
        """A measurer with random data of its own; ``data`` tells its purposes apart."""
        rng = np.random.default_rng([self.settings.seed, data])
        backend = self.bench.backend
        return Measurer(
            backend.open_session, backend.make_data(self.space, self.task, rng), repeats
        )

    def _keep(self, provenance: Provenance) -> list[TileRecord]:
        """Records of the fastest tiles of different extents, measured again on other data.

        After a request to stop they keep the times of the search, whose results were right too.
        """
        best = self._best_by_extent()
        measurer = self._measurer(self.settings.final, data=1)
        kept: list[TileRecord] = []
        for tile, record in best.items():
            measured = from_tuning_record(record, tile, self.task, provenance)
            if not self.stop():
                result = self._build_and_run(record.as_measure_candidate(), measurer)
                if result.error_msg is not None:
                    self.counts.add_failure(str(result.error_msg))
                    continue
                secs = tuple(float(value) for value in result.run_secs)
                measured = replace(measured, run_secs=secs)
            kept.append(measured)
        return kept

    def _best_by_extent(self) -> dict[Tile, ms.database.TuningRecord]:
        """The fastest right candidate of each (tile_m, tile_n, tile_k) and kind, the fastest
        ``keep``."""
        found: dict[tuple[int, ...], tuple[Tile, ms.database.TuningRecord]] = {}
        for record in self.history.succeeded():
            tile = self.space.tile_of(record.as_measure_candidate().sch, self.task)
            kind = () if self.space.kind_of is None else self.space.kind_of(tile)
            found.setdefault((tile.tile_m, tile.tile_n, tile.tile_k, *kind), (tile, record))
            if len(found) == self.settings.keep:
                break
        return dict(found.values())


def decisions_of(record: TileRecord) -> list[int]:
    """The decisions of a record's trace, in the order of sampling."""
    return [decision for _, decision in json.loads(record.trace)[1]]
