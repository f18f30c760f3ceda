"""The GPU checks of grids: patterns that reach every amount, and calls by what is compiled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import bench_gpu_build as build
import check_gpu_kinds as kinds
import check_gpu_patterns as patterns
import check_gpu_problem as problems
import check_gpu_tiles as chosen
import check_gpu_values as values
import numpy as np
import pytest

from pit_tvm.runtime import cuda_arrays, cuda_bind, cuda_detect, cuda_repeat, cuda_workspace
from pit_tvm.runtime.content_keys import content_key
from pit_tvm.runtime.cuda_repeat_code import NONE
from pit_tvm.runtime.cuda_watch import CountWatch

CPU = values.Checker("cpu")


def amount_of(lives: np.ndarray) -> str:
    """How many slices of an axis live: empty, one, some or full."""
    return {0: "empty", len(lives): "full", 1: "one"}.get(int(lives.sum()), "some")


def test_grids_reach_every_amount_of_rows_with_every_amount_of_columns() -> None:
    reached, types = set(), set()
    for number in range(300):
        rng = problems.case_rng(4, "grid", number)
        call = patterns.draw_call(rng, "grid", number)
        told, live = patterns.draw_pattern(rng, call, str(rng.choice(problems.AMOUNTS)))
        assert told is not None and np.array_equal(told != 0, live)
        rows, columns = live.any(axis=1), live.any(axis=0)
        assert np.array_equal(live, np.outer(rows, columns))
        reached.add((amount_of(rows), amount_of(columns)))
        types.add(told.dtype)
    some = ("one", "some", "full")
    assert reached >= {("empty", "empty"), *((r, c) for r in some for c in some)}
    assert types == {np.dtype(bool), np.dtype(np.uint8)}


class Idle(chosen.Listed):
    """Notes the keys of the kernels that are asked for, of which none does anything; no call is
    known."""

    def module(self, key: str, build: Callable[[], Any]) -> Any:
        self.asked.add(key)
        return defaultdict(lambda: lambda *given: NONE)


@pytest.mark.parametrize("tiles", [1, 2])
def test_grids_run_both_axes_with_each_tile_by_what_is_compiled_and_by_all_of_it(
    tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls as on a GPU, up to the kernels."""
    checker, idle, known = values.Checker("cuda", tiles), Idle(), kinds.KINDS["grid"]
    made = {kind: chosen.compiled(kind, build.TARGET, tiles, idle) for kind in known}
    monkeypatch.setattr(values.Checker, "operator", lambda self, call: made[call.kind])
    monkeypatch.setattr(CountWatch, "due", lambda self: False)
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda device: False)
    monkeypatch.setattr(cuda_workspace, "stream_of", lambda device: 0)
    for module in (cuda_arrays, cuda_bind, cuda_detect):
        monkeypatch.setattr(module, "check_tensor", lambda *given, **options: None)
    for number in range(2 * len(known)):
        rng = problems.case_rng(7, "grid", number)
        call = patterns.draw_call(rng, "grid", number)
        problem = patterns.draw_data(rng, call, "half", "cpu", made[call.kind])
        assert problem.value is not None and problem.written.all()
        assert not problem.arrays[call.kind.sparse == "rhs"][problem.value == 0].any()
        report = values.Report()
        faults = values.check_problem(problem, number, checker, report)
        assert not any("Error" in fault for fault in faults)
        micro_tiles = chosen.micro_tiles_for(made[call.kind])
        checked = tiles if number < len(known) else 1
        assert report.calls == checked * len(micro_tiles) + (2 if number < len(known) else 1)
        for axes in micro_tiles:
            assert sum(f"{axes} on" in tile for tile in report.tiles) == checked
    listed = {kernel.key for kind in known for kernel in chosen.kernels_of_kind(kind, tiles)}
    asked = idle.asked - chosen._detection()
    # Operands that are not whole vectors are turned by torch.
    turns = {content_key("cuda-turn", of, False, build.ARCH) for of in ("float16", "bfloat16")}
    assert asked <= listed <= asked | turns


def test_grids_are_right_on_a_cpu() -> None:
    number = len(kinds.KINDS["grid"])
    report = values.check_family("grid", range(number), 3, CPU)
    assert report.faults == [] and (report.cases, report.calls) == (number, 2 * number)
