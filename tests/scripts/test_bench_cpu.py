"""The benchmark's parts at tiny sizes: results are checked, times are not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_cpu
import bench_cpu_attention as attention
import bench_cpu_cases as cases
import bench_cpu_index as index
import bench_cpu_measure as measure
import bench_cpu_products as products
import bench_cpu_report as machine
import bench_cpu_steps as steps
import bench_report as report
import bench_rows as base
import needs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pit_tvm.errors import BackendUnavailable
from pit_tvm.reference.index import live_micro_tiles
from pit_tvm.structs import Index, MicroTile, TileTask
from pit_tvm.tile_db.record import Provenance, TileRecord

ONCE = base.Settings(repeats=1, seed=0, quick=True)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's main function, with as many threads as this process has already."""
    threads = str(torch.get_num_threads())
    for name in ("OMP", "OPENBLAS", "MKL", "TVM"):
        monkeypatch.setenv(f"{name}_NUM_THREADS", threads)

    def run(*options: str) -> int:
        return bench_cpu.main(["--quick", "--repeats", "1", "--threads", threads, *options])

    return run


def row(label: str, held_out: bool = False, us: float = 1.0, **errors: float) -> base.Row:
    """A row of one contender, "pit"."""
    return base.Row(label, held_out, {"pit": base.Stat(us, us, us, 1)}, {}, errors)


def suite(*rows: base.Row) -> base.Suite:
    """A suite that has measured ``rows`` already, held to 2 microseconds."""

    def targets(kept: Sequence[base.Row]) -> list[base.Target]:
        return base.limits(kept, "time", 2, lambda r: r.us("pit"), at_least=False)

    columns = (base.time_column("pit", "pit", 1),)
    return base.Suite("made", "a title", lambda quick: rows, lambda case, _: case, columns, targets)


# --------------------------------------------------------------------------------------------
# Every suite measures right results


def test_dense_measures_the_best_tile_and_both_peers() -> None:
    found = products.measure_dense(cases.Product(cases.Shape(37, 29, 23)), ONCE)
    assert list(found.stats) == list(found.errors) == ["numpy", "torch", "pit"]
    assert found.wrong == [] and found.error < 1e-6
    assert found.facts["tile"] in found.facts["tiles"]
    assert len(products.dense_targets([found])) == 1


@pytest.mark.parametrize("grain", cases.GRAINS)
def test_masks_measure_right_products(grain: tuple[int, int]) -> None:
    found = products.measure_masked(cases.Masked(cases.Shape(70, 33, 130), grain, 0.9), ONCE)
    assert list(found.stats) == list(found.errors) == ["dense", "pit", "packing"]
    assert found.wrong == [] and found.error < 1e-6
    names = [target.name for target in products.masks_targets([found])]
    assert names == ["masks: speed-up at 90 % zeros", "masks: speed-up of every pattern"]


@pytest.mark.parametrize("case", attention.list_attended(quick=True), ids=lambda case: case.label)
def test_attention_measures_right_results(case: attention.Attended) -> None:
    found = attention.measure_attended(case, ONCE)
    assert list(found.stats) == list(found.errors) == ["pit", "torch"] and found.wrong == []
    few = found.facts["seen"] <= attention.FEW
    windows = case.kind.startswith("windows")
    assert len(attention.attention_targets([found])) == 1 + few + windows


@pytest.mark.parametrize("grain", cases.INDEX_GRAINS)
def test_index_measures_the_exact_micro_tiles(grain: tuple[int, int]) -> None:
    found = index.measure_index(cases.Indexed((70, 150), grain, 0.5), ONCE)
    assert found.errors == {"pit": 0.0}
    assert set(found.stats) == {"pit", "numpy_micro", "numpy", "torch", "read", "read_alone"}
    assert len(index.index_targets([found])) == (grain == (32, 1))


@pytest.mark.parametrize("grain", [(32, 1), ()])
def test_select_measures_a_choice_of_the_cheapest(grain: tuple[int, ...]) -> None:
    found = steps.measure_select(cases.Selected(cases.Shape(64, 64, 64), grain), ONCE)
    assert found.errors == {"select": 0.0}
    assert found.stats["select"].count == steps.SHORT_RUNS
    assert found.facts["candidates"] >= 1


@pytest.mark.parametrize("library", cases.LIBRARIES)
@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_call_measures_right_products(pattern: str, library: str) -> None:
    found = steps.measure_call(cases.Called(pattern, library), ONCE)
    assert found.wrong == [] and found.error < 1e-6
    own = sum(found.facts[name] for name in ("overhead_us", "index_us", "select_us"))
    assert own + found.stats["kernel"].median == pytest.approx(found.stats["call"].median)


# --------------------------------------------------------------------------------------------
# Wrong results are seen


@pytest.mark.parametrize(("value", "least"), [(np.nan, np.inf), (1e3, 1.0)])
def test_error_sees_a_wrong_element(value: float, least: float) -> None:
    rng = np.random.default_rng(5)
    lhs, rhs = measure.normal(rng, 20, 8), measure.normal(rng, 8, 12)
    out = lhs @ rhs
    assert measure.product_error(rng, lhs, rhs, out) < 1e-6
    out[rng.integers(20), rng.integers(12)] = value
    assert measure.product_error(rng, lhs, rhs, out) >= least


def test_error_of_a_product_that_is_zero_is_the_deviation() -> None:
    rng = np.random.default_rng(6)
    lhs, rhs, out = np.zeros((4, 3)), measure.normal(rng, 3, 2), np.full((4, 2), 0.5)
    assert measure.product_error(rng, lhs, rhs, out) == 0.5


def test_same_index_refuses_a_missing_a_repeated_and_a_dead_micro_tile() -> None:
    live = np.array([[True, False, True], [False, False, True]])
    right = np.array([[2, 0, 7], [2, 7, 7]], np.int32)
    count = np.array([2, 1], np.int32)
    assert index.same_index(Index(right, count), live, 1)
    assert index.same_index(Index(right, count), live.T, 0)
    assert not index.same_index(Index(right, count - 1), live, 1)
    for wrong in ([[2, 2, 7], [2, 7, 7]], [[2, 1, 7], [2, 7, 7]]):
        assert not index.same_index(Index(np.array(wrong), count), live, 1)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 80), st.integers(1, 140), st.sampled_from([0, 1]))
def test_numpys_micro_tiles_are_the_reference_ones(seed: int, m: int, k: int, dim: int) -> None:
    mask = np.random.default_rng(seed).random((m, k)) < 0.02
    grain = ((1, 64), (32, 1))[dim]
    live = index.live_micro_tiles(mask, grain)
    want = live_micro_tiles(mask, MicroTile("lhs", "mk"[dim], dim, grain))
    slots = live if dim == 1 else live.T
    assert [np.flatnonzero(slot).tolist() for slot in slots] == [ids.tolist() for ids in want]


# --------------------------------------------------------------------------------------------
# Held-out shapes and data


def test_a_tenth_of_the_shapes_is_held_out_and_nothing_else_uses_them() -> None:
    shapes = {*cases.DENSE, cases.MASKED}
    assert not shapes & set(cases.HELD_OUT)
    assert 10 * len(cases.HELD_OUT) >= len(shapes | set(cases.HELD_OUT))
    for listed in (cases.list_products(False), cases.list_masked(False)):
        apart = [case for case in listed if case.shape in cases.HELD_OUT]
        assert apart == [case for case in listed if case.held_out] != []


@pytest.mark.parametrize(
    ("sizes", "known"),
    [
        ((1536, 2304, 1152), True),
        ((1536, 2304, 144), True),
        ((192, 2304, 1152), True),
        ((512, 512, 512), False),
        ((1536, 512, 1152), False),
    ],
)
def test_record_of_a_held_out_shape_is_recognised(sizes: tuple[int, ...], known: bool) -> None:
    origin = Provenance("cpu-avx512", "x86-64-v4", 2, "0.27", "0.1", "2026-01-01", 0)
    task = TileTask("contraction-rows", "avx512", "float32", *sizes)
    record = TileRecord("library", origin, task=task, run_secs=(1.0,), note="numpy")
    assert machine.knows(record, cases.HELD_OUT[0]) == known


def test_data_depend_on_the_case_and_the_seed_and_differ_from_those_of_tuning() -> None:
    first = ONCE.rng("a").integers(2**62)
    assert first == ONCE.rng("a").integers(2**62)
    others = [ONCE.rng("b"), base.Settings(1, 1).rng("a"), np.random.default_rng(0)]
    assert first not in [rng.integers(2**62) for rng in others]


@pytest.mark.parametrize("grain", cases.GRAINS)
@pytest.mark.parametrize("zeros", [*cases.ZEROS, 1.0])
def test_mask_has_the_share_of_zeros_in_whole_blocks(grain: tuple[int, int], zeros: float) -> None:
    mask = base.block_mask(np.random.default_rng(7), (128, 256), grain, zeros)
    blocks = mask.reshape(128 // grain[0], grain[0], 256 // grain[1], grain[1])
    live = blocks.any(axis=(1, 3))
    assert (live == blocks.all(axis=(1, 3))).all()
    assert live.sum() == max(1, round((1 - zeros) * live.size))


# --------------------------------------------------------------------------------------------
# Measuring and reporting


def test_contenders_take_turns_and_each_turn_starts_with_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "settle", lambda: None)
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in "abc"}
    stats = measure.interleave(runs, 2, inner=2)
    assert "".join(calls) == "aaabbbccc" + "bbbcccaaa"
    assert {name: stat.count for name, stat in stats.items()} == {"a": 4, "b": 4, "c": 4}


def test_contenders_are_compared_turn_by_turn() -> None:
    seconds = {"us": [1.0, 2.0, 4.0], "a": [3.0, 8.0, 8.0], "b": [4.0, 6.0, 20.0]}
    assert measure.times_faster(seconds, "us", "a") == 3.0
    assert measure.times_faster(seconds, "us", "a", "b") == 3.0
    assert measure.times_faster(seconds, "us", "b") == 4.0


def test_stat_is_the_median_and_quartiles_in_microseconds() -> None:
    stat = base.Stat.of([5e-6, 1e-6, 3e-6, 2e-6, 4e-6])
    assert (stat.q1, stat.median, stat.q3) == pytest.approx((2.0, 3.0, 4.0))
    assert stat.count == 5


def test_target_is_the_worst_row_and_held_out_rows_have_their_own() -> None:
    rows = [row("a", us=1), row("b", us=3), row("c", held_out=True, us=2)]
    ordinary, apart = base.limits(rows, "t", 2, lambda r: r.us("pit"), at_least=False)
    assert (ordinary.got, ordinary.met, ordinary.held_out) == (3, False, False)
    assert (apart.got, apart.met, apart.held_out) == (2, True, True)
    (least,) = base.limits(rows[:2], "t", 2, lambda r: r.us("pit"))
    assert (least.got, least.met) == (1, False)


def test_table_shows_held_out_rows_apart() -> None:
    made = suite(row("first"), row("other", held_out=True))
    lines = report.table(report.Result(made, (row("other", held_out=True), row("first")))).split(
        "\n"
    )
    assert lines[0] == "made: a title"
    assert [line.split()[0] for line in lines[2:]] == ["first", "held", "other"]


def test_main_writes_json_and_ends_with_one_line_of_targets(
    main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "bench.json"
    assert main("--suite", "select", "--json", str(path)) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["suites"] == ["select"] and summary["wrong"] == []
    kept = json.loads(path.read_text())
    assert list(kept["suites"]) == ["select"] and kept["quick"]
    assert all(target["met"] is None for target in kept["targets"])
    for found in kept["suites"]["select"]["rows"]:
        assert set(found["stats_us"]["select"]) == {"median", "q1", "q3", "count"}
    assert [file.name for file in path.parent.iterdir()] == ["bench.json"]


def test_main_fails_where_a_result_is_wrong_and_names_it(
    main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = suite(row("a", pit=0.0), row("b", pit=float("inf")))
    monkeypatch.setattr(steps, "SELECT", made)
    monkeypatch.setattr(bench_cpu, "SUITES", ("made",))
    path = tmp_path / "bench.json"
    assert main("--json", str(path)) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["wrong"] == ["made b: pit"]
    errors = [found["errors"] for found in json.loads(path.read_text())["suites"]["made"]["rows"]]
    assert errors == [{"pit": 0.0}, {"pit": None}]


def test_missed_target_is_named_and_does_not_fail_the_run() -> None:
    made = suite(row("slow", us=3, pit=0.0))
    result = report.Result(made, made.cases(False))
    outcome = report.summary([result], result.targets(), quick=False)
    assert outcome["not_met"] == ["time: 3, wanted <= 2"]
    assert outcome["met"] == outcome["wrong"] == []
    assert report.summary([result], result.targets(), quick=True)["not_met"] == []


def test_held_out_option_leaves_suites_without_such_shapes_empty(
    main: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--suite", "call", "--held-out") == 0
    assert "no held-out shapes" in capsys.readouterr().out


def test_plot_draws_every_suite(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    result = report.Result(suite(), (row("a"), row("b", held_out=True)))
    path = machine.plot(tmp_path / "new", result)
    assert path.name == "made.png" and path.read_bytes().startswith(b"\x89PNG")


def test_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(BackendUnavailable, match=r"--plot: .*no_such_package.*pit-tvm\[plot\]"):
        needs.require("--plot", ["json", "no_such_package"], "plot")


def test_main_reports_a_missing_package_and_gives_status_2(
    main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs.importlib.util, "find_spec", lambda name: None)
    assert main("--suite", "select") == 2
    assert "pit-tvm[quickstart]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [["--suite", "other"], ["--repeats", "0"], ["--seed", "-1"], ["--threads", "1025"]],
)
def test_bad_option_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench_cpu.parse(options)


def test_suites_run_in_their_own_order_and_by_default_all() -> None:
    assert bench_cpu.parse([]).suite == list(bench_cpu.SUITES)
    chosen = bench_cpu.parse(["--suite", "call", "--suite", "dense", "--quick"])
    assert (chosen.suite, chosen.repeats) == (["dense", "call"], bench_cpu.QUICK_REPEATS)
