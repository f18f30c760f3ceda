"""Building and running one candidate: right, wrong, broken, hopeless."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.target import Target

from pit_tvm.errors import BackendUnavailable
from pit_tvm.target import resolve_target
from pit_tvm.tuning.builder import TileBuilder
from pit_tvm.tuning.runner import Measurer, Repeats, local_session
from pit_tvm.tuning.tasks import WRONG, Example, make_example, relative_error, workload_module
from tests.tuning import adding
from tests.tuning.stand_in import SPACE, sample, space_with, task

HOST = resolve_target("llvm")
TARGET = Target(HOST.tvm_target)
TASK = task(HOST.isa)
QUICK = Repeats(repeat=3, min_repeat_ms=0)


def build(folder: Path, lower=lambda mod: mod) -> Path | str:
    sch = Schedule(workload_module(SPACE, TASK), seed=1)
    sample(sch, TASK)
    return TileBuilder(lower, TARGET, folder).build(sch.mod)


@pytest.fixture
def example() -> Example:
    return make_example(SPACE, TASK, np.random.default_rng(0))


def test_right_candidate_gets_its_times_and_its_artifact_is_deleted(
    tmp_path: Path, example: Example
) -> None:
    built = build(tmp_path)
    assert isinstance(built, Path) and built.parent == tmp_path
    measurer = Measurer(local_session, example, QUICK)
    result = measurer.run(built)
    assert result.error_msg is None and len(result.run_secs) == 3
    assert measurer.fastest == np.median([float(secs) for secs in result.run_secs])
    assert list(tmp_path.iterdir()) == []


def test_wrong_candidate_gets_no_times(tmp_path: Path, example: Example) -> None:
    changed = example.expected.copy()
    changed[-1, -1] += 1e-4 * np.abs(changed).max()
    measurer = Measurer(local_session, replace(example, expected=changed), QUICK)
    result = measurer.run(build(tmp_path))
    assert result.run_secs is None and WRONG in result.error_msg
    assert measurer.fastest == float("inf")
    assert list(tmp_path.iterdir()) == []


def test_candidate_that_writes_nothing_is_wrong_even_where_zero_is_right(tmp_path: Path) -> None:
    def emptied(mod: tvm.IRModule) -> tvm.IRModule:
        return tvm.IRModule({"main": mod["main"].with_body(tirx.Evaluate(0))})

    made = make_example(SPACE, TASK, np.random.default_rng(0))
    zeros = replace(
        made,
        inputs=tuple(np.zeros_like(array) for array in made.inputs),
        expected=np.zeros_like(made.expected),
    )
    right = Measurer(local_session, zeros, QUICK).run(build(tmp_path))
    assert right.error_msg is None
    wrong = Measurer(local_session, zeros, QUICK).run(build(tmp_path, emptied))
    assert wrong.run_secs is None and WRONG in wrong.error_msg


def test_candidate_that_does_not_lower_or_compile_reports_why(tmp_path: Path) -> None:
    def refuse(mod: tvm.IRModule) -> tvm.IRModule:
        raise ValueError("some\nreason")

    assert build(tmp_path, refuse) == "ValueError: reason"
    assert list(tmp_path.iterdir()) == []


def test_library_that_cannot_be_written_says_nothing_about_its_candidate(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="absent"):
        build(tmp_path / "absent", SPACE.lower)


def test_artifacts_never_share_a_name(tmp_path: Path) -> None:
    paths = {build(tmp_path) for _ in range(3)}
    assert len(paths) == 3


def test_missing_artifact_is_a_failure_not_a_crash(tmp_path: Path, example: Example) -> None:
    result = Measurer(local_session, example, QUICK).run(tmp_path / "absent.so")
    assert result.run_secs is None and result.error_msg


def test_hopeless_candidate_is_measured_once(tmp_path: Path, example: Example) -> None:
    measurer = Measurer(local_session, example, Repeats(repeat=5, min_repeat_ms=0))
    measurer.fastest = 1e-12
    assert len(measurer.run(build(tmp_path)).run_secs) == 1


def test_lost_device_is_told_apart_from_a_broken_candidate(
    tmp_path: Path, example: Example
) -> None:
    def lost():
        raise BackendUnavailable("no device")

    with pytest.raises(BackendUnavailable, match="no device"):
        Measurer(lost, example, QUICK).run(build(tmp_path))


def test_bfloat16_arguments_run(tmp_path: Path) -> None:
    of = task(HOST.isa, dtype="bfloat16")
    exact = make_example(space_with(example=small_integers), of, np.random.default_rng(0))
    built = TileBuilder(SPACE.lower, TARGET, tmp_path).build(workload_module(SPACE, of))
    assert Measurer(local_session, exact, QUICK).run(built).error_msg is None


def test_output_that_is_added_to_starts_at_zero(tmp_path: Path) -> None:
    space = space_with(workload=lambda of: adding.add_rows, example=adding.example)
    built = TileBuilder(space.lower, TARGET, tmp_path).build(workload_module(space, TASK))
    example = make_example(space, TASK, np.random.default_rng(0))
    assert Measurer(local_session, example, QUICK).run(built).error_msg is None


def small_integers(of, rng):
    """Operands whose products and sums bfloat16 holds exactly."""
    lhs = rng.integers(0, 2, (of.m, of.k)).astype(ml_dtypes.bfloat16)
    rhs = rng.integers(0, 2, (of.n // 8, of.k, 8)).astype(ml_dtypes.bfloat16)
    dense = rhs.astype(np.float64).transpose(1, 0, 2).reshape(of.k, of.n)
    return [lhs, rhs], lhs.astype(np.float64) @ dense


@pytest.mark.parametrize(
    ("got", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([1.0, float("nan")], [1.0, 2.0], float("inf")),
        ([float("inf"), 2.0], [1.0, 2.0], float("inf")),
        ([0.5], [0.0], 0.5),
        ([], [], 0.0),
    ],
)
def test_relative_error(got: list[float], expected: list[float], error: float) -> None:
    assert relative_error(np.array(got), np.array(expected)) == pytest.approx(error)
