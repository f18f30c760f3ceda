"""The GPU benchmark's cases and suites, in a dry run on the CPU."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import bench_gpu_attention as attention
import bench_gpu_cases as cases
import bench_gpu_conversion as conversion
import bench_gpu_decode as decode
import bench_gpu_experts as experts
import bench_gpu_grains as grains
import bench_gpu_grid as grid
import bench_gpu_index as index
import bench_gpu_layer as layer
import bench_gpu_linear as linear
import bench_gpu_measure as measure
import bench_gpu_moe as moe
import bench_gpu_outputs as outputs
import bench_gpu_report as report
import bench_gpu_rivals as rivals
import bench_gpu_search as search
import bench_gpu_sread as sread
import bench_gpu_weights as weights
import numpy as np
import pytest
import torch
from bench_rows import Row, Stat

from pit_tvm.structs import Index

DRY = measure.GpuSettings(1, 0, quick=True, device="cpu", tiles=2)
LENGTHS = cases.Linear("fc1", 96, 24, 16, "float16", "uniform", 6)
ROWS = cases.Linear("", 60, 24, 16, "bfloat16", live=31, held_out=True)
EXPERTS = cases.Moe(5, 2, 24, 16, "zipf", tokens=40)
GATED = cases.Layer(5, 2, 16, 24, "silu", True, "hot", tokens=40)
SWITCH = cases.Layer(4, 1, 16, 24, "relu", False, "zipf", tokens=30, held_out=True)


# --------------------------------------------------------------------------------------------
# Cases


@pytest.mark.parametrize(("mix", "share"), [("uniform", 0.5), ("short", 0.24), ("tail", 0.33)])
def test_lengths_have_the_fill_of_their_mix(mix: str, share: float) -> None:
    lengths = cases.draw_lengths(np.random.default_rng(1), mix, 100_000, 128)
    assert lengths.dtype == np.int32 and 1 <= lengths.min() and lengths.max() <= 128
    assert lengths.mean() / 128 == pytest.approx(share, abs=0.02)
    if mix == "tail":
        assert (lengths == 128).mean() == pytest.approx(0.02, abs=0.01)


@pytest.mark.parametrize("top_k", [1, 3])
def test_a_token_goes_to_different_experts_in_the_shares_of_its_routing(top_k: int) -> None:
    rng = np.random.default_rng(2)
    for routing in cases.ROUTINGS:
        ids = cases.draw_routing(rng, routing, 20_000, 16, top_k).reshape(-1, top_k)
        assert ids.dtype == np.int32 and ids.min() >= 0 and ids.max() < 16
        assert all(len(set(row)) == top_k for row in ids[:100].tolist())
        shares = np.sort(np.bincount(ids[:, 0], minlength=16) / len(ids))[::-1]
        if top_k == 1:
            peak = {"uniform": 1 / 16, "zipf": 1 / (1 / np.arange(1, 17)).sum(), "hot": 0.84}
            assert shares[0] == pytest.approx(peak[routing], abs=0.01)


def test_patterns_name_the_live_rows() -> None:
    value, live = LENGTHS.pattern(np.random.default_rng(3))
    assert len(value) == 6 and len(live) == value.sum()
    assert all(row % 16 < value[row // 16] for row in live.tolist())
    ids, live = ROWS.pattern(np.random.default_rng(3))
    assert np.array_equal(np.sort(ids), live) and len(set(live.tolist())) == 31
    assert LENGTHS.counts(np.random.default_rng(3)) == (int(value.sum()),)
    assert sum(EXPERTS.counts(np.random.default_rng(3))) == EXPERTS.rows == 80


def test_labels_are_unique_and_held_out_shapes_are_nobody_elses() -> None:
    made = (
        *(cases.list_linear, cases.list_moe, cases.list_layers, cases.list_indexed),
        *(conversion.list_conversions, grains.list_grains, grains.list_tensor_cores),
        *(weights.list_weights, outputs.list_outputs, grid.list_grid),
        *(decode.list_steps, sread.list_segments, attention.list_attention),
    )
    for listed in (make(False) for make in made):
        labels = [case.label for case in listed]
        assert len(set(labels)) == len(labels)
    shapes: dict[bool, set[Any]] = {False: set(), True: set()}
    for linear_case in cases.list_linear(False):
        shapes[linear_case.held_out].add((linear_case.n, linear_case.k))
    for moe_case in cases.list_moe(False):
        shapes[moe_case.held_out].add((moe_case.experts, moe_case.n, moe_case.k))
    for layer_case in cases.list_layers(False):
        for n, k in layer_case.products:
            shapes[layer_case.held_out].add((layer_case.experts, n, k))
    assert not shapes[True] & shapes[False]
    assert 10 * len(shapes[True]) >= len(shapes[True] | shapes[False])


@pytest.mark.parametrize("quick", [False, True])
def test_sizes_are_multiples_of_what_kernels_and_peers_need(quick: bool) -> None:
    for case in (*cases.list_linear(quick), *cases.list_moe(quick)):
        assert case.n % 8 == case.k % 8 == 0
    for case in cases.list_linear(quick):
        assert not case.batch or case.stored % case.batch == 0
        assert case.batch or 0 < case.live <= case.stored
    for layer_case in cases.list_layers(quick):
        assert all(n % 8 == k % 8 == 0 for n, k in layer_case.products)
    with_experts = (*cases.list_moe(quick), *cases.list_layers(quick))
    assert all(case.experts > case.top_k for case in with_experts)


# --------------------------------------------------------------------------------------------
# Every suite measures right results, in a dry run


@pytest.mark.parametrize("case", [LENGTHS, ROWS, replace(LENGTHS, gelu=True)])
def test_linear_contenders_are_right(case: cases.Linear) -> None:
    row = linear.measure_linear(case, DRY)
    assert row.wrong == [] and row.facts["live"] > 0
    assert {"dense", "gather", "packed", "pit", "new", "zero", "index"} <= set(row.stats)
    assert {"dense", "gather", "packed", "pit", "new", "zero"} <= set(row.errors)
    assert report.Printer(linear.LINEAR, [row.label]).row(row).startswith(row.label)


def test_without_peers_only_the_plan_is_measured() -> None:
    settings = measure.GpuSettings(1, 0, True, "cpu", peers=False, tiles=2)
    row = linear.measure_linear(ROWS, settings)
    assert set(row.stats) <= {"pit", "second", "host", "host_pace", "host_varied"}
    assert row.facts["predicted_us"] > 0


def test_host_time_is_only_measured_for_short_products() -> None:
    assert measure.host_stats(lambda: None, Stat.of([1.0]), "cpu") == {}
    found = measure.host_stats(lambda: None, Stat.of([1e-6]), "cpu")["host"]
    assert found.count == measure.HOST_ROUNDS and found.median < 100


def test_host_time_is_measured_for_other_patterns_too() -> None:
    seen: list[str] = []
    dense = measure.Contender(lambda: seen.append("dense"))
    run, vary = (lambda: seen.append("run")), (lambda: seen.append("vary"))
    found = measure.host_stats(run, Stat.of([1e-6]), "cpu", dense, vary)
    assert set(found) == {"host", "host_dense", "host_pace", "host_varied"}
    assert {each.count for each in found.values()} == {measure.HOST_ROUNDS}
    first = seen.index("vary")
    assert "vary" not in seen[:first] and "dense" not in seen[first:]
    rounds = ["vary", *["run"] * measure.HOST_CALLS]
    assert seen[first:] == rounds * (2 * measure.HOST_ROUNDS)


def test_host_time_is_held_to_its_limit_in_all_rows_and_where_the_host_is_quiet() -> None:
    def row(name: str, host: float, pace: float) -> Row:
        stats = {"host": Stat(host, host, host, 1), "host_pace": Stat(pace, pace, pace, 1)}
        return Row(name, False, stats)

    slow, quick = row("slow", 23.0, 40.0), row("quick", 9.0, 22.0)
    targets = measure.host_targets("padding", [slow, quick, row("best", 8.0, 20.0)])
    assert [t.got for t in targets] == [23.0, 9.0] and "2 of 3 rows" in targets[1].name
    assert [t.got for t in measure.host_targets("padding", [slow])] == [23.0, 23.0]
    assert measure.host_targets("padding", [Row("long", False, {})]) == []


def test_expert_contenders_are_right() -> None:
    row = moe.measure_moe(EXPERTS, DRY)
    assert row.wrong == []
    assert {"whole", "sorted", "loop", "pit"} <= set(row.errors)
    assert row.facts["over_floor"] == row.us("pit") / row.facts["floor_us"]
    assert report.Printer(moe.MOE, [row.label]).row(row)


@pytest.mark.parametrize("case", [GATED, SWITCH])
def test_layer_contenders_are_right(case: cases.Layer) -> None:
    row = layer.measure_layer(case, DRY)
    assert row.wrong == []
    assert set(row.errors) == {"grouped", "loop", "pit", "eager"}
    assert row.facts["over_grouped"] == row.us("grouped") / row.us("pit")
    assert row.facts["over_rival"] is None and row.held_out == case.held_out
    assert row.facts["predicted_us"] == pytest.approx(sum(row.facts["parts_us"].values()))
    text = report.Printer(layer.LAYER, [row.label]).row(row)
    assert text.startswith(row.label) and " - " in text  # no rival
    assert [t.name for t in layer.layer_targets([row])] == ["layer: over _grouped_mm"]


def test_layer_peers_see_wrong_routing() -> None:
    data = layer.make_data(GATED, DRY)
    want = layer.wanted(data)
    run = rivals.torch_peers(data)["grouped"]
    assert measure.rounding_error(run(), want) < measure.ERROR_LIMIT
    data.ids[3] = (data.ids[3] + 1) % GATED.experts
    assert measure.rounding_error(run(), want) > measure.ERROR_LIMIT


def test_rivals_are_only_called_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = layer.make_data(SWITCH, DRY)
    on_gpu = replace(DRY, device="cuda")
    monkeypatch.setattr(rivals, "RIVALS", {"none": (("no_such_rival", "no_such_rival.x"), "x")})
    assert rivals.rivals_of(data, on_gpu) == {}
    monkeypatch.setattr(rivals, "RIVALS", {"json": (("json", "json.decoder"), "here")})
    here: Any = SimpleNamespace(variants=lambda data: {"only": len})
    monkeypatch.setitem(sys.modules, "here", here)
    assert rivals.rivals_of(data, on_gpu) == {"json": ("only", len)}
    assert rivals.rivals_of(data, DRY) == {}


def test_the_fastest_setting_of_a_rival_is_taken() -> None:
    runs = {"slow": lambda: time.sleep(2e-3), "fast": lambda: None}
    assert rivals.fastest(runs, DRY) == ("fast", runs["fast"])  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [3, 200, 256, 300])
def test_ids_are_sorted_as_bytes_where_they_fit(number: int) -> None:
    ids = torch.randint(number, (50, 2), dtype=torch.int32)
    ids[0, 0], ids[7, 1] = number - 1, number - 1
    ordered, choices = rivals.sort_ids(ids, number)
    assert ordered.dtype == torch.int32
    assert torch.equal(ordered, ids.flatten()[choices])
    assert torch.equal(choices, ids.flatten().argsort(stable=True))
    tokens, places, ends = rivals.index_ids(ids, torch.arange(number, dtype=torch.int32))
    assert torch.equal(tokens, choices // 2) and torch.equal(choices[places], torch.arange(100))
    assert torch.equal(ends, ids.flatten().bincount(minlength=number).cumsum(0).int())


@pytest.mark.parametrize("case", [EXPERTS, GATED])
def test_plans_of_tokens_with_several_experts_fit_their_kernels(case: Any) -> None:
    counts = case.counts(np.random.default_rng(1))
    for product in experts.products_of(case):
        plan = product.plan(counts, DRY.planned_target)
        assert plan.choice.tile == product.tiles(counts, DRY.planned_target, 1)[0]
        with_index = product.plan(counts, DRY.planned_target, indexed=True)
        assert with_index.choice.cost_us > plan.choice.cost_us


def test_floor_is_of_operations_or_of_the_weights_in_use() -> None:
    sizes = 3072, 768
    assert moe.floor_us(8192, *sizes, 64) == pytest.approx(70.6, abs=0.1)
    assert moe.floor_us(8192, *sizes, 32) == pytest.approx(54.1, abs=0.1)
    assert moe.floor_us(6 * 8192, *sizes, 64) == pytest.approx(324.8, abs=0.1)


@pytest.mark.parametrize(
    "case",
    [
        *(cases.Indexed("mask", 128, grain, 0.9) for grain in ((32, 1), (1, 64), (1, 0))),
        cases.Indexed("groups", 200, parts=7),
        cases.Indexed("lengths", 96, parts=6),
    ],
)
def test_index_is_exact(case: cases.Indexed) -> None:
    row = index.measure_index(case, DRY)
    assert row.errors == {"pit": 0.0} and row.facts["live"] > 0
    assert report.Printer(index.INDEX, [row.label]).row(row)


def test_wrong_lists_are_seen() -> None:
    want = [np.array([0, 2]), np.array([1])]
    ids, count = np.array([[2, 0, 9], [1, 9, 9]]), np.array([2, 1])
    assert index.same_lists(Index(ids, count), want)
    assert not index.same_lists(Index(ids, count - 1), want)
    assert not index.same_lists(Index(ids + 1, count), want)


@pytest.mark.parametrize("case", [LENGTHS, EXPERTS])
def test_selection_is_the_cheapest(case: Any) -> None:
    row = search.measure_select(case, DRY)
    assert row.errors == {"select": 0.0} and row.stats["select"].count == search.RUNS
    assert report.Printer(search.SEARCH, [row.label]).row(row)
    for counts in search.random_counts(case, 80, np.random.default_rng(1)):
        assert 1 <= sum(counts) <= 80
        assert len(counts) == (5 if case is EXPERTS else 1)


# --------------------------------------------------------------------------------------------
# Wrong results are seen


def test_rounding_error_counts_roundings_and_sees_nan() -> None:
    want = torch.full((4, 4), 3.0, dtype=torch.float64)
    got = want.half()
    assert measure.rounding_error(got, want) == 0.0
    got[1, 1] += 4 * 2.0**-9
    assert measure.rounding_error(got, want) == pytest.approx(4 * 2.0**-9 / 6 * 2**11, rel=0.3)
    got[2, 0] = float("nan")
    assert math.isinf(measure.rounding_error(got, want))
    assert math.isinf(measure.rounding_error(got[:2], want))
    assert measure.rounding_error(got[:0], want[:0]) == 0.0


def test_dead_rows_that_were_written_are_seen() -> None:
    data = linear.make_data(LENGTHS, DRY)
    out = measure.poisoned((96, 24), data.x)
    out[data.live] = data.want.half()
    assert data.judge("untouched")(out) <= 1.0
    assert math.isinf(data.judge("zero")(out))
    out[data.dead] = 0
    assert data.judge("zero")(out) <= 1.0
    assert math.isinf(data.judge("untouched")(out))
    out[data.live[0], 0] += 1
    assert data.judge("any")(out) > measure.ERROR_LIMIT
