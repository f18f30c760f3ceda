"""Algorithm 1: candidates, their costs, and the choice of the cheapest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from pit_tvm.selection.rates import Rates
from pit_tvm.selection.select import GENERIC, DenseRoute, Route, Selection
from pit_tvm.structs import MicroTile, Plan, Tile, TileTask

ROWS, DEPTH = "contraction-rows", "contraction-depth"
REG_M = 12
ROW_TILE = Tile(ROWS, "avx512", "float32", 96, 4096, 256, (("reg_m", REG_M),))
SMALL_TILE = Tile(ROWS, "avx512", "float32", 8, 4096, 256, (("reg_m", 4),))
DEPTH_TILE = Tile(DEPTH, "avx512", "float32", 32, 4096, 128, (("reg_m", 8),))
TILES = (ROW_TILE, SMALL_TILE, DEPTH_TILE)
GFLOPS = 100.0  # per thread, of the measured tiles below

M, N, K = 2048, 1024, 1536
ROW = MicroTile("lhs", "m", 0, (1, 0))
COLUMN = MicroTile("lhs", "k", 1, (32, 1))


def rates(threads: int = 2, dense_over_tile: float = 1.3) -> Rates:
    """Fake rates: every tile at the same speed, the library a little faster."""
    task = TileTask("contraction", "avx512", "float32", 1024, 1024, 1024)
    secs = 2 * 1024**3 / (1e9 * GFLOPS * threads)
    measured = ((task, secs),)
    profile = {"launch_us": 10.0, "detect_gbps": 8.0, "store_gbps": 4.0}
    dense = ((task, secs / dense_over_tile),)
    return Rates("avx512", threads, dict.fromkeys(TILES, measured), dense, profile)


Live = tuple[Route, float]


def rows(covered: float, m: int = M, extra: float = 0.0) -> Live:
    return Route(ROW, ROWS, float(M * K), 1, m, 1.0, float(K), N, extra), covered


def columns(covered: float) -> Live:
    return Route(COLUMN, DEPTH, float(M * K), M // 32, K, 32.0, 1.0, N), covered


def changed(live: Live, **changes: object) -> Live:
    return replace(live[0], **changes), live[1]  # type: ignore[arg-type]


def select(
    routes: Sequence[Live], dense: DenseRoute | None, given: Rates, tiles: Sequence[Tile]
) -> Plan:
    prepared = Selection([route for route, _ in routes], dense, given, tiles)
    return prepared.plan([covered for _, covered in routes])


DENSE = DenseRoute(M, N, K, 1, 0.0, "numpy")


def cost(plan: Plan, micro_tile: MicroTile) -> float:
    return min(c.cost_us for c in plan.candidates if c.micro_tile == micro_tile)


def test_candidates_are_the_tiles_of_each_route_s_family_and_dense() -> None:
    plan = select([rows(0.3), columns(0.2)], DENSE, rates(), TILES)
    assert [(c.micro_tile, c.tile, c.kind) for c in plan.candidates] == [
        (ROW, ROW_TILE, "pit"),
        (ROW, SMALL_TILE, "pit"),
        (COLUMN, DEPTH_TILE, "pit"),
        (None, None, "dense"),
    ]
    assert [c.covered for c in plan.candidates] == [0.3, 0.3, 0.2, 1.0]
    assert plan.tuned


def test_costs_are_the_sums_of_their_parts() -> None:
    plan = select([rows(0.3, extra=5e6), columns(0.2)], DENSE, rates(), TILES)
    for candidate in plan.candidates:
        assert candidate.cost_us == pytest.approx(sum(us for _, us in candidate.parts))
        assert all(us >= 0 for _, us in candidate.parts)
    parts = dict(plan.candidates[0].parts)
    assert parts["index"] == pytest.approx(M * K / 8e3)
    assert parts["output"] == pytest.approx(5e6 / 4e3)
    assert parts["launch"] == 10


@pytest.mark.parametrize("tile", TILES)
def test_cost_never_falls_with_density(tile: Tile) -> None:
    """Neither at a new register block, nor where one more tile wakes an idle thread."""
    route, steps = (columns, K) if tile.family == DEPTH else (rows, M)
    costs = [
        select([route(live / steps)], None, rates(), [tile]).choice.cost_us
        for live in range(0, steps + 1, 4)
    ]
    falls = [4 * i for i, (less, more) in enumerate(pairwise(costs)) if more < less * (1 - 1e-9)]
    assert falls == []
    assert costs[-1] > costs[0]


def test_dense_wins_at_full_density_and_loses_at_low_density() -> None:
    kinds = []
    for covered in (0.0, 0.05, 0.5, 0.7, 0.9, 1.0):
        plan = select([rows(covered), columns(covered)], DENSE, rates(), TILES)
        kinds.append(plan.choice.kind)
        assert plan.choice.cost_us == min(c.cost_us for c in plan.candidates)
    assert kinds == ["pit", "pit", "pit", "pit", "dense", "dense"]


def test_the_axis_that_covers_less_wins() -> None:
    assert select([rows(0.9), columns(0.1)], DENSE, rates(), TILES).choice.micro_tile == COLUMN
    assert select([rows(0.1), columns(0.9)], DENSE, rates(), TILES).choice.micro_tile == ROW


def test_one_live_row_costs_a_register_block() -> None:
    one, twelve, thirteen = (
        select([rows(live / M)], None, rates(), [ROW_TILE]).choice for live in (1, REG_M, REG_M + 1)
    )
    assert one.cost_us == pytest.approx(twelve.cost_us)
    assert dict(thirteen.parts)["product"] == pytest.approx(2 * dict(one.parts)["product"])


def test_tiles_that_leave_threads_idle_cost_more() -> None:
    """96 live rows are one tile of 96 rows or twelve of 8."""
    plan = select([rows(96 / M)], None, rates(threads=2), TILES)
    assert plan.choice.tile == SMALL_TILE
    large, small = (dict(c.parts)["product"] for c in plan.candidates)
    assert large == pytest.approx(2 * small)


def test_more_slots_of_the_same_length_cost_in_proportion() -> None:
    one = select([columns(0.2)], None, rates(), TILES).choice
    double = select([changed(columns(0.2), slots=2 * M // 32)], None, rates(), TILES).choice
    assert dict(double.parts)["product"] == pytest.approx(2 * dict(one.parts)["product"])


@pytest.mark.parametrize("route", [rows(0.0), changed(rows(0.0), slots=0), columns(0.0)])
def test_nothing_live_costs_index_and_launch_alone(route: Live) -> None:
    """No slots at all is an operand without any depth."""
    choice = select([route], None, rates(), TILES).choice
    assert dict(choice.parts)["product"] == 0
    assert choice.cost_us == pytest.approx(M * K / 8e3 + 10)


def test_route_without_a_family_runs_the_generic_schedule() -> None:
    route = Route(ROW, "", 0.0, 1, M, float(K), 1.0, 1)
    plan = select([(route, 0.5)], DENSE, rates(), TILES)
    assert [c.tile for c in plan.candidates] == [None, None]
    assert plan.candidates[0].kind == "pit" and plan.candidates[0].cost_us > 10


def test_dense_counts_every_matrix_of_a_batch_and_its_epilogue() -> None:
    once = select([], DENSE, rates(), ()).choice
    batch = select([], replace(DENSE, batch=8, extra_bytes=8e6), rates(), ()).choice
    assert batch.cost_us == pytest.approx(8 * once.cost_us + 8e6 / 4e3)
    assert once.note == "numpy" and str(once) == "dense (numpy)"


def test_reason_compares_with_the_other_kind() -> None:
    plan = select([rows(0.1)], DENSE, rates(), [ROW_TILE])
    factor = plan.candidates[-1].cost_us / plan.choice.cost_us
    assert plan.reason == f"cheapest of 2, {factor:.2f}x dense"
    assert "pit only" in select([rows(0.1)], None, rates(), TILES).reason
    assert "x pit" in select([rows(1.0)], DENSE, rates(), TILES).reason


def test_nothing_is_a_multiple_of_no_time() -> None:
    plan = select([rows(1.0)], DenseRoute(1, 1, 1, 1, 0.0, "numpy"), rates(), TILES)
    assert plan.choice.kind == "dense" and f"{plan.choice.cost_us:.1f}" == "0.0"
    behind = min(c.cost_us for c in plan.candidates if c.kind == "pit") - plan.choice.cost_us
    assert plan.reason == f"cheapest of {len(plan.candidates)}, {behind:.1f} us less than pit"


def test_untuned_rates_make_an_untuned_plan() -> None:
    plan = select([rows(0.1)], DENSE, replace(rates(), tuned=False), TILES)
    assert not plan.tuned
    assert str(plan).splitlines()[-1].startswith("untuned")


@pytest.mark.parametrize(("dense_over_tile", "kind"), [(0.9, "dense"), (0.7, "pit")])
def test_a_tile_that_saves_nothing_must_be_much_cheaper(dense_over_tile: float, kind: str) -> None:
    plan = select([rows(1.0)], DENSE, rates(dense_over_tile=dense_over_tile), TILES)
    assert cost(plan, ROW) < next(c.cost_us for c in plan.candidates if c.kind == "dense")
    assert plan.choice.kind == kind


def test_one_selection_serves_every_pattern() -> None:
    """What is prepared is never changed by a plan: the same counts give the same plan again."""
    (row, _), (column, _) = rows(1.0), columns(1.0)
    prepared = Selection([row, column], DENSE, rates(), TILES)
    patterns = [(0.3, 0.2), (0.0, 1.0), (1.0, 1.0), (0.07, 0.9), (0.3, 0.2)]
    plans = [prepared.plan(pattern) for pattern in patterns]
    alone = [select([(row, a), (column, b)], DENSE, rates(), TILES) for a, b in patterns]
    assert plans == alone and plans[0] == plans[-1]


def test_dense_is_left_out_of_patterns_that_it_does_not_serve() -> None:
    prepared = Selection([rows(1.0)[0]], DENSE, rates(), TILES)
    assert {c.kind for c in prepared.plan([0.9], whole=False).candidates} == {"pit"}
    assert {c.kind for c in prepared.plan([0.9]).candidates} == {"pit", "dense"}


def test_lists_that_share_the_live_entries_have_a_part_of_them_each() -> None:
    shared = changed(rows(0.5), slots=8, shared=True)
    eighth = changed(rows(0.5), slots=8, entries=M // 8)
    plans = [select([each], None, rates(), TILES) for each in (shared, eighth)]
    assert [c.cost_us for c in plans[0].candidates] == [c.cost_us for c in plans[1].candidates]


def test_a_mask_costs_in_proportion_to_what_is_live() -> None:
    output = [
        dict(select([changed(rows(share), mask_bytes=4e6)], None, rates(), TILES).choice.parts)
        for share in (0.0, 0.5, 1.0)
    ]
    assert [parts["output"] for parts in output] == pytest.approx([0.0, 500.0, 1000.0])


def test_reason_names_the_margin_where_it_decided() -> None:
    """The cheapest is not taken if it saves no work and is not much cheaper."""
    plan = select([rows(1.0)], DENSE, rates(dense_over_tile=0.9), TILES)
    gain = plan.choice.cost_us / cost(plan, ROW)
    assert plan.choice.kind == "dense" and 1.0 < gain < 1.25
    least = min(plan.candidates, key=lambda candidate: candidate.cost_us)
    said = f"{least} is predicted {gain:.2f}x faster but saves no work: below the margin of 1.25x"
    assert plan.reason == f"not the cheapest of 3: {said}"


def test_reason_names_the_margin_between_tiles_too() -> None:
    nearly = [rows(1.0), changed(rows(0.99), index_bytes=1e6, extra_bytes=8e6)]
    plan = select(nearly, replace(DENSE, extra_bytes=1e9), rates(), [ROW_TILE])
    assert plan.choice is plan.candidates[1] and plan.choice.cost_us > plan.candidates[0].cost_us
    assert "not the cheapest of 3" in plan.reason and "saves no work" in plan.reason


@pytest.mark.parametrize(("covered", "kind"), [(0.1, "pit"), (1.0, "dense")])
def test_plan_of_the_generic_schedule_is_untuned(covered: float, kind: str) -> None:
    """Whatever was measured for products."""
    route = Route(ROW, "", 0.0, 1, M, float(K), 1.0, 1)
    plan = select([(route, covered)], DenseRoute(1, 1, M * K, 1, 0.0, GENERIC), rates(), TILES)
    assert plan.choice.kind == kind and not plan.tuned


def test_plan_is_tuned_if_its_tile_was_measured() -> None:
    known = rates()
    own = replace(known, tiles=known.tiles | {DEPTH_TILE: ()})
    kinds = [(0.1, 0.9), (0.9, 0.1), (1.0, 1.0)]
    plans = [select([rows(a), columns(b)], DENSE, own, TILES) for a, b in kinds]
    assert [plan.choice.micro_tile for plan in plans] == [ROW, COLUMN, None]
    # Dense was weighed against a tile that was measured, or not.
    assert [plan.tuned for plan in plans] == [True, False, True]
    assert not select([columns(1.0)], DENSE, own, TILES).tuned
