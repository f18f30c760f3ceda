"""The GPU's cost model: its bounds, what records change, and the choice."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pit_tvm.selection import gpu_cost, gpu_measured
from pit_tvm.selection.gpu_cost import (
    GpuDense,
    GpuRates,
    GpuWork,
    dense_candidate,
    gpu_rates,
    select_gpu,
)
from pit_tvm.selection.gpu_few_rows import select_few_rows
from pit_tvm.structs import MicroTile, Tile, TileTask
from pit_tvm.tile_db.record import Provenance, TileRecord
from pit_tvm.tile_db.store import TileStore

FAMILY, GROUPED = "rows", "groups"
LIVE_ROWS = MicroTile("lhs", "m", 0, (1, 0))
PROVENANCE = Provenance("h200-sm_90a", "sm_90a", 132, "0.27", "0.1", "2026-11-21", 16)
PROFILE = TileRecord("profile", PROVENANCE, profile=(("gather_gbps", 4000.0), ("launch_us", 3.0)))


def tile(m: int = 128, n: int = 256, cluster: int = 1, family: str = FAMILY) -> Tile:
    knobs = (("cluster", cluster), ("consumers", 1 if m == 64 else 2), ("sms", 132))
    return Tile(family, "sm_90a", "float16", m, n, 64, knobs)


def task(m: int, n: int = 4096, k: int = 4096, groups: int = 1) -> TileTask:
    family = FAMILY if groups == 1 else GROUPED
    return TileTask(family, "sm_90a", "float16", m, n, k, groups)


def measured(of: Tile, on: TileTask, us: float) -> TileRecord:
    return TileRecord("pit", PROVENANCE, of, on, (1e-6 * us,))


def library(on: TileTask, us: float) -> TileRecord:
    return TileRecord("library", PROVENANCE, task=on, run_secs=(1e-6 * us,), note="torch")


GENERIC = (tile(), tile(64, 64), tile(family=GROUPED), tile(64, 64, family=GROUPED))


def rates(*records: TileRecord) -> GpuRates:
    return gpu_rates([PROFILE, *records], "float16", "sm_90a", "torch", GENERIC)


def predicted(of: GpuRates, work: GpuWork, family: str = FAMILY) -> list[float]:
    return of.tile_us(family, work)[0].tolist()


def test_untuned_tiles_step_with_their_waves() -> None:
    rows = (900, 1024, 1025, 1537)
    one, same, parted, two = (predicted(rates(), GpuWork(m, 16 * 256, 4096))[0] for m in rows)
    assert one == pytest.approx(same, rel=0.06)  # 8 x 16 tiles on 132 multiprocessors
    assert 1.4 < parted / one < 1.7  # 9 x 16, the last 12 in halves
    assert 1.7 < two / one < 2.1  # 13 x 16


def test_small_tiles_win_few_rows_and_large_tiles_many() -> None:
    large, small = predicted(rates(), GpuWork(64, 4096, 4096))
    assert small < large
    large, small = predicted(rates(), GpuWork(8192, 4096, 4096))
    assert large < small


def test_record_of_the_very_shape_is_nearly_reproduced() -> None:
    known = rates(
        measured(tile(), task(1000), 60.0),
        measured(tile(), task(8000), 500.0),
        measured(tile(64, 64), task(1000), 90.0),
    )
    assert predicted(known, GpuWork(1000, 4096, 4096)) == pytest.approx([60.0, 90.0], rel=0.05)


def test_slower_measurements_raise_predictions_of_their_tile_alone() -> None:
    fast = rates(measured(tile(), task(1000), 60.0), measured(tile(64, 64), task(1000), 90.0))
    slow = rates(measured(tile(), task(1000), 120.0), measured(tile(64, 64), task(1000), 90.0))
    work = GpuWork(2000, 4096, 4096)
    one, other = predicted(fast, work), predicted(slow, work)
    assert other[0] == pytest.approx(2 * one[0]) and other[1] == one[1]


def test_tile_that_was_not_tried_somewhere_stays_behind_there() -> None:
    known = rates(
        measured(tile(), task(1000), 60.0),
        measured(tile(), task(8000), 500.0),
        measured(tile(64, 64), task(1000), 90.0),
    )
    large, small = predicted(known, GpuWork(8000, 4096, 4096))
    assert small / large == pytest.approx(90 / 60, rel=0.1)


def test_what_a_tile_and_a_task_have_in_common_stands_for_what_was_not_tried() -> None:
    work = [GpuWork(m, 4096, 4096) for m in (1000, 8000)]
    (large, small), (later, there) = (predicted(rates(), w) for w in work)
    known = rates(
        measured(tile(), task(1000), 60.0),
        measured(tile(), task(8000), 2 * 60.0 * later / large),  # at half the clock
        measured(tile(64, 64), task(1000), 60.0 * small / large),
    )
    expected = [2 * 60.0 * later / large, 2 * 60.0 * there / large]
    assert predicted(known, work[1]) == pytest.approx(expected, rel=0.05)


def test_records_of_groups_say_less_about_the_slower_tiles() -> None:
    work = GpuWork(8192, 4096, 4096, 16)
    plain = predicted(rates(), work, GROUPED)
    known = rates(
        measured(tile(family=GROUPED), task(8192, groups=16), 400.0),
        measured(tile(64, 64, family=GROUPED), task(8192, groups=16), 1200.0),
    )
    behind = plain[1] / plain[0]
    expected = [400.0, 400.0 * behind * (3.0 / behind) ** gpu_cost._ROUTED]
    assert predicted(known, work, GROUPED) == pytest.approx(expected)


def test_tile_that_was_seldom_tried_is_left_out() -> None:
    often = [measured(tile(), task(m), 0.06 * m) for m in (1000, 2000, 3000, 4000)]
    known = rates(*often, measured(tile(64, 64), task(1000), 1.0))
    assert known.families[FAMILY].tiles == (tile(),)


def test_16_bit_types_stand_for_each_other() -> None:
    records = [PROFILE, measured(tile(), task(1000), 60.0), library(task(1000), 55.0)]
    other = gpu_rates(records, "bfloat16", "sm_90a", "torch", ())
    assert other.is_tuned(FAMILY)
    assert other.families[FAMILY].tiles == (replace(tile(), dtype="bfloat16"),)
    assert predicted(other, GpuWork(1000, 4096, 4096)) == pytest.approx([60.0])
    assert other.dense_us(1000, 4096, 4096)[0] == pytest.approx(55.0)
    single = gpu_rates(records, "float32", "sm_90a", "torch", GENERIC)
    assert not any(map(single.is_tuned, single.families))


def test_memory_bounds_groups_with_few_rows() -> None:
    work = GpuWork(64, 4096, 4096, groups=64, counts=(1,) * 64)
    us, bound = rates().tile_us(GROUPED, work)
    weights = 64 * 4096 * 4096 * 2 / 4000e3
    assert bound >= weights and (us > bound).all()


def test_empty_groups_cost_nothing() -> None:
    counts = (512, *(0,) * 63)
    one = predicted(rates(), GpuWork(512, 4096, 4096, groups=64, counts=counts), GROUPED)
    alone = predicted(rates(), GpuWork(512, 4096, 4096), FAMILY)
    assert one == pytest.approx(alone)


def test_uneven_groups_cost_more_tiles_than_even_ones() -> None:
    even = GpuWork(8192, 4096, 4096, 16, counts=(512,) * 16)
    uneven = replace(even, counts=(513, 511) * 8)  # 4 tiles and a half, and 4
    one, other = (predicted(rates(), work, GROUPED)[0] for work in (even, uneven))
    assert other > 1.05 * one


def test_groups_of_unknown_counts_cost_what_random_ones_do() -> None:
    rng = np.random.default_rng(0)
    for live, groups in ((8192, 64), (49152, 64), (300, 64), (16384, 8)):
        exact = []
        for _ in range(20):
            counts = np.bincount(rng.integers(groups, size=live), minlength=groups)
            work = GpuWork(live, 2048, 1024, groups, tuple(counts.tolist()))
            exact.append(predicted(rates(), work, GROUPED))
        guess = predicted(rates(), GpuWork(live, 2048, 1024, groups), GROUPED)
        assert guess == pytest.approx(np.mean(exact, axis=0).tolist(), rel=0.1)


def test_dense_follows_the_library_and_its_roofline() -> None:
    known = rates(library(task(1000), 55.0), library(task(8192), 430.0))
    assert known.dense_us(1000, 4096, 4096)[0] == pytest.approx(55.0, rel=0.05)
    assert known.dense_us(4096, 4096, 4096)[0] == pytest.approx(215.0, rel=0.1)
    us, bound = known.dense_us(16, 4096, 4096)
    assert us > bound > 4096 * 4096 * 2 / 4000e3


def test_choice_is_the_cheaper_and_says_how_far_from_its_bound() -> None:
    known = rates(
        measured(tile(), task(1000), 60.0),
        measured(tile(64, 64), task(1000), 90.0),
        library(task(8192), 400.0),
    )
    dense = GpuDense(8192, 4096, 4096)
    sparse = select_gpu(FAMILY, LIVE_ROWS, GpuWork(1000, 4096, 4096), dense, known, 8192)
    assert (sparse.choice.kind, sparse.choice.tile, sparse.tuned) == ("pit", tile(), True)
    assert sparse.choice.covered == pytest.approx(1000 / 8192)
    assert "x its bound" in sparse.reason and "x dense" in sparse.reason
    full = select_gpu(FAMILY, LIVE_ROWS, GpuWork(8192, 4096, 4096), dense, known, 8192)
    assert full.choice.kind == "dense" and full.choice.note == "torch"


def test_a_family_without_records_makes_an_untuned_plan() -> None:
    """Whatever was measured of another family."""
    known = rates(measured(tile(), task(1000), 60.0))
    work = GpuWork(1000, 4096, 4096, groups=16)
    plans = [select_gpu(f, LIVE_ROWS, work, None, known, 8192) for f in (FAMILY, GROUPED)]
    assert [plan.tuned for plan in plans] == [True, False]


def test_few_rows_have_a_tile_that_no_records_are_of() -> None:
    known = rates(measured(tile(), task(1000), 60.0), library(task(8192), 400.0))
    assert not select_few_rows(LIVE_ROWS, tile(), 40, GpuDense(4, 4096, 4096), known).tuned


def test_cost_is_the_sum_of_its_parts_but_the_bound() -> None:
    work = GpuWork(1000, 4096, 4096, index_bytes=8192 * 4096, extra_bytes=1e6)
    plan = select_gpu(FAMILY, LIVE_ROWS, work, None, rates(), 8192)
    for candidate in plan.candidates:
        parts = dict(candidate.parts)
        assert parts["bound"] < parts["product"]
        assert candidate.cost_us == pytest.approx(sum(parts.values()) - parts["bound"])
    parts = dict(plan.choice.parts)
    assert parts["index"] > 8192 * 4096 / 3500e3 and parts["output"] > 0
    assert not plan.tuned and "dense" not in plan.reason


def test_dense_pays_for_dead_rows_and_for_passes_over_the_output() -> None:
    work = GpuWork(8192, 4096, 4096, index_bytes=8192.0, extra_bytes=1e6)

    def cost(**options: object) -> float:
        dense = GpuDense(8192, 4096, 4096, **options)  # type: ignore[arg-type]
        plan = select_gpu(FAMILY, LIVE_ROWS, work, dense, rates(), 8192)
        return next(c.cost_us for c in plan.candidates if c.kind == "dense")

    assert cost() < cost(fills=True) and cost() < cost(extra_bytes=1e6)
    assert cost(extra_bytes=1e6) == pytest.approx(cost() + 1.25 * rates().store_us(1e6))


def test_zeros_make_products_faster_that_are_near_what_the_chip_can_do() -> None:
    def share(m: int, n: int, k: int) -> float:
        whole, half = (GpuDense(m, n, k, zeros=zeros) for zeros in (0.0, 0.9))
        costs = [dense_candidate(one, rates()).cost_us for one in (half, whole)]
        return costs[0] / costs[1]

    assert share(4096, 4096, 4096) == pytest.approx(0.87, abs=0.01)
    assert 0.9 < share(4096, 768, 3072) < share(4096, 3072, 768) < 0.96
    assert share(8, 4096, 4096) > 0.999


def test_nothing_live_costs_a_launch() -> None:
    plan = select_gpu(FAMILY, LIVE_ROWS, GpuWork(0, 4096, 4096), None, rates(), 8192)
    assert 0 < plan.choice.cost_us < 20 and math.isfinite(plan.choice.cost_us)
    empty = select_gpu(FAMILY, LIVE_ROWS, GpuWork(0, 64, 64, 4), None, rates(), 0)
    assert empty.choice.covered == 0.0


def test_shipped_records_are_reproduced() -> None:
    shipped = TileStore.open(device="h200-sm_90a", isa="sm_90a").all()
    records = [r for r in shipped if r.tile is None or r.tile.family.endswith("-hopper")]
    known = gpu_rates(records, "float16", "sm_90a", "torch", ())
    errors = []
    for r in records:
        if r.tile is None or r.tile not in known.families[r.tile.family].tiles:
            continue
        t, family = r.task, known.families[r.tile.family]
        us, bound = known.tile_us(r.tile.family, GpuWork(t.m, t.n, t.k, t.groups, share=t.share))
        errors.append(abs(us[family.tiles.index(r.tile)] / (1e6 * r.secs) - 1))
        assert bound < 1e6 * r.secs
    assert np.median(errors) < 0.05


def test_a_handful_of_tiles_is_kept_that_are_near_the_best_everywhere():
    tasks = 20
    times = np.full((30, tasks), 3.0)
    for tile in range(4):
        times[7 * tile, tile::4] = 1.0  # four tiles share the tasks
    times[3] = 1.5  # good at nothing, bad at nothing
    kept = gpu_measured.handful(times)
    assert len(kept) == gpu_measured.HANDFUL
    assert {0, 3, 7, 14, 21} <= set(kept)
    assert kept == sorted(kept)
    assert gpu_measured.handful(times[:2]) == [0, 1]


def test_tasks_of_few_rows_have_tiles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cost, "handful", lambda times: [int(times.mean(axis=1).argmin())])
    few, many = task(16, groups=32), task(8192, groups=32)
    tiles = [tile(64, n, family=GROUPED) for n in (96, 128, 192)]
    times = {few: (300.0, 60.0, 300.0), many: (3000.0, 3000.0, 500.0)}
    records = [measured(t, on, us) for on in times for t, us in zip(tiles, times[on], strict=True)]
    assert rates(*records).families[GROUPED].tiles == (tiles[1], tiles[2])
    alone = [record for record in records if record.task == many]
    assert rates(*alone).families[GROUPED].tiles == (tiles[2],)


def test_tiles_that_no_task_is_best_with_are_kept_the_nearest_first() -> None:
    times = np.array([[1.0, 1.0], [3.0, 1.2], [1.1, 3.0], [1.3, 1.3], [2.0, 2.0]])
    assert [gpu_measured.handful(times, most) for most in (1, 2, 3)] == [[0], [0, 3], [0, 2, 3]]


def test_rows_that_share_what_is_stored_read_less_and_ask_records_of_their_kind() -> None:
    alone, shared = (GpuWork(8192, 2048, 4096, 16, share=share) for share in (1, 8))
    fewer = 2 * (8192 - 1024) * 4096
    difference = alone.bytes_of_memory - shared.bytes_of_memory
    assert difference == fewer
    of = replace(task(8192), family=GROUPED, groups=16)
    known = rates(
        *(
            measured(replace(tile(), family=GROUPED), replace(of, share=share), us)
            for share, us in ((1, 900.0), (8, 700.0))
        )
    )
    us = [predicted(known, work, GROUPED)[0] for work in (alone, shared)]
    assert us[0] > 1.1 * us[1]


def test_activations_cost_tiles_what_was_measured_of_them() -> None:
    work = GpuWork(4096.0, 4096, 4096)
    plain, relu, gelu = (
        select_gpu(FAMILY, LIVE_ROWS, replace(work, act=act), None, rates(), 4096).choice.cost_us
        for act in ("none", "relu", "gelu")
    )
    assert plain == relu
    assert gelu - plain == pytest.approx(4096 * 4096 * 7.1e-7)
