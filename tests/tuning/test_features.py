"""Features and mutations of candidates, and that the cost model learns from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from pit_tvm.errors import TuningError
from pit_tvm.tile_db.meta_json import trace_to_json
from pit_tvm.tuning.features import (
    decision_key,
    feature_vector,
    knob_values,
    mutate,
    tile_annotation,
)
from pit_tvm.tuning.search import Search, start_search
from pit_tvm.tuning.tasks import workload_module
from tests.tuning.stand_in import SPACE, scheduled, space_with, task

TASK = task("avx2")


def search(tmp_path: Path, space=SPACE, trials: int = 64) -> Search:
    mod = workload_module(space, TASK)
    return start_search(
        space,
        TASK,
        mod,
        Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}),
        ms.database.JSONDatabase(work_dir=str(tmp_path)),
        trials=trials,
        batch=8,
        seed=0,
    )


@pytest.mark.parametrize("seed", range(1, 9))
def test_features_hold_the_sampled_values_and_the_annotation(seed: int) -> None:
    sch = scheduled(seed)
    values = knob_values(sch.trace)
    assert tile_annotation(sch.mod) == values
    features = feature_vector(TASK, sch)[0]
    assert features[3 : 3 + len(values)].tolist() == values
    assert features[:3].tolist() == [4.0, 5.0, 5.0]


def test_features_differ_exactly_where_decisions_differ() -> None:
    schedules = [scheduled(seed) for seed in range(1, 25)]
    keys = [decision_key(sch.trace) for sch in schedules]
    vectors = [tuple(feature_vector(TASK, sch)[0]) for sch in schedules]
    assert 1 < len(set(keys)) < len(keys)
    for key, vector in zip(keys, vectors, strict=True):
        same = [other == vector for other in vectors]
        assert same == [other == key for other in keys]


def test_looking_at_a_candidate_leaves_its_trace_alone() -> None:
    sch = scheduled(3)
    before = trace_to_json(sch.trace)
    feature_vector(TASK, sch)
    decision_key(sch.trace)
    assert trace_to_json(sch.trace) == before


def test_module_without_annotation_has_no_tile() -> None:
    assert tile_annotation(workload_module(SPACE, TASK)) == []


@pytest.mark.parametrize("seed", range(30))
def test_mutation_moves_one_knob_to_another_valid_value(seed: int) -> None:
    trace = scheduled(5).trace
    mutated = mutate(trace, seed)
    before, after = (json.loads(decision_key(each)) for each in (trace, mutated))
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 1
    replayed = Schedule(workload_module(SPACE, TASK))
    mutated.apply_to_schedule(replayed, remove_postproc=False)
    assert tile_annotation(replayed.mod) != tile_annotation(scheduled(5).mod)


def test_space_without_choice_cannot_be_mutated() -> None:
    sch = Schedule(workload_module(SPACE, TASK))
    sch.sample_categorical([4], [1.0])
    assert mutate(sch.trace, 1) is None


def test_cost_model_ranks_unseen_candidates_after_learning(tmp_path: Path) -> None:
    running = search(tmp_path)

    def seconds(candidate: ms.MeasureCandidate) -> float:
        tile_m, reg_m, panels, tile_k = knob_values(candidate.sch.trace)
        return 1e-3 / (tile_m * reg_m * panels + 0.01 * tile_k)

    unseen: dict[str, ms.MeasureCandidate] = {}
    seen: dict[str, ms.MeasureCandidate] = {}
    for seed in range(1, 120):
        sch = scheduled(seed)
        candidate = ms.MeasureCandidate(sch, ms.arg_info.ArgInfo.from_entry_func(sch.mod))
        (seen if len(seen) < 16 else unseen).setdefault(decision_key(sch.trace), candidate)
    train = list(seen.values())
    held = [candidate for key, candidate in unseen.items() if key not in seen]
    results = [ms.runner.RunnerResult([seconds(candidate)], None) for candidate in train]
    running.learn(train, results)
    predicted = running.model.predict(running.context, held)
    actual = [1 / seconds(candidate) for candidate in held]
    assert len(held) >= 8
    assert (
        np.corrcoef(np.argsort(np.argsort(predicted)), np.argsort(np.argsort(actual)))[0, 1] > 0.5
    )


def test_valid_candidates_are_proposed(tmp_path: Path) -> None:
    running = search(tmp_path, trials=16)
    batch = running.next_batch()
    assert len(batch) == 8
    assert all(len(tile_annotation(candidate.sch.mod)) == 4 for candidate in batch)
    running.tell(batch, [ms.runner.RunnerResult([1e-3], None)] * 8)
    assert len(running.next_batch()) == 8
    running.close()


def test_knobs_that_only_an_annotation_uses_are_searched(tmp_path: Path) -> None:
    def annotate(sch: Schedule, task) -> None:
        knobs = [sch.sample_categorical([1, 2, 4, 8], [0.25] * 4) for _ in range(3)]
        sch.annotate(sch.get_sblock("out"), "pit.tile", knobs)

    batch = search(tmp_path, space_with(sample=annotate)).next_batch()
    tiles = {tuple(tile_annotation(candidate.sch.mod)) for candidate in batch}
    assert len(batch) == 8 and len(tiles) > 4
    assert all(knob_values(item.sch.trace) == tile_annotation(item.sch.mod) for item in batch)


def test_space_that_cannot_schedule_is_refused(tmp_path: Path) -> None:
    def broken(sch: Schedule, task) -> None:
        sch.get_sblock("absent")

    with pytest.raises(TuningError, match="a schedule"):
        search(tmp_path, space_with(sample=broken))
