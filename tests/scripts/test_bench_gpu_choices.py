"""How the GPU benchmark judges what selection chose and predicted, in a dry run on the CPU."""

from __future__ import annotations

from typing import Any

import bench_gpu_decode as decode
import bench_gpu_grains as grains
import bench_gpu_granularity as granularity
import bench_gpu_grid as grid
import bench_gpu_linear as linear
import bench_gpu_measure as measure
import bench_gpu_outputs as outputs
import bench_gpu_report as report
import bench_gpu_search as search
import bench_rows as base
import pytest

DRY = measure.GpuSettings(1, 0, quick=True, device="cpu", tiles=2)


def stat(us: float) -> base.Stat:
    return base.Stat(us, us, us, 1)


def planned(label: str, second: float = 80.0, **more: Any) -> base.Row:
    """A row whose choice takes 100 us, and is predicted to take 110."""
    facts = {
        "kernel": "a tile",
        "predicted_us": 110.0,
        "others": {"second": ["another tile", 60.0]},
        **more,
    }
    stats = {"pit": stat(100.0), "second": stat(second)}
    return base.Row(label, False, stats, facts, {"pit": 0.5}, measure.ERROR_LIMIT)


def test_predictions_are_judged_by_median_error_and_by_the_fastest_of_those_timed() -> None:
    rows = [planned("a"), planned("b", predicted_us=150.0), planned("c", 99.0)]
    found = search.predictions(rows)
    assert found.median == pytest.approx(0.1) and found.choices[1].error == pytest.approx(0.5)
    assert found.choices[0].errors == pytest.approx([0.1, 0.25])
    behind = [choice.behind for choice in found.choices]
    assert behind == pytest.approx([1.25, 1.25, 1.0101], rel=1e-3)
    assert found.behind == pytest.approx(1.25) and found.aside == 0.0
    assert "3 rows" in str(found) and "50 % at worst (b)" in str(found)
    assert "in 33 % of the rows" in str(found) and "side of dense: 0" in str(found)
    error, of_fastest = search.prediction_targets(rows)
    assert error.met and not of_fastest.met and not error.held_out
    assert search.prediction_targets([]) == []


def test_choices_on_the_wrong_side_of_dense_are_named() -> None:
    dense = planned("x", kernel="dense (torch)")
    right = planned("y", 104.0, others={"second": ["dense (torch)", 150.0]})
    found = search.predictions([dense, right])
    assert [choice.aside for choice in found.choices] == pytest.approx([100 / 80, 100 / 104])
    assert str(found).endswith("other side of dense: 1: x (1.25x)")
    assert [target.met for target in search.prediction_targets([dense])] == [True, False, False]


def test_plans_of_a_row_major_operand_are_judged_apart() -> None:
    row = planned("x", rows_others={"second": ["dense (torch)", 90.0]})
    row.facts.update(rows_kernel="a tile", rows_predicted_us=80.0)
    row.stats.update({"rows": stat(100.0), "rows second": stat(90.0)})
    first, second = search.choices_of(row)
    assert (first.label, second.label) == ("x", "x rows")
    assert second.dense == ((90.0, 90.0),) and second.sparse == ((80.0, 100.0),)


@pytest.mark.parametrize(
    ("suite", "case"),
    [
        (linear.LINEAR, linear.Linear("", 60, 24, 16, "bfloat16", live=31)),
        (granularity.GRANULARITY, grains.Grain((32, 1), 0.9, sizes=(128, 128, 128))),
        (outputs.OUTPUTS, outputs.Output((128, 192, 96), (64, 64), 0.5)),
        (grid.GRID, grid.Cross((128, 192, 96), (0.5, 0.5))),
        (decode.DECODE, decode.Step(1, (96, 256))),
    ],
)
def test_every_candidate_of_a_plan_is_measured(suite: base.Suite, case: base.Case) -> None:
    plans = search.candidates_of(suite)
    row = plans.measure(case, DRY)
    found = search.predictions([row])
    choice = found.choices[0]
    timed = [*choice.dense, *choice.sparse]
    assert row.wrong == [] and len(timed) == 1 + len(row.facts["others"])
    assert max(us for us, _ in timed) <= 2 * choice.chosen[0]
    assert row.facts["times_fastest"] == max(one.behind for one in found.choices) >= 1.0
    assert report.Printer(plans, [row.label]).row(row).startswith(row.label)
