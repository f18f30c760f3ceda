"""Costs of products of live pieces of rows, and the choice between them and dense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pit_tvm.schedules.hopper_piece_parts import starting_pieces
from pit_tvm.selection.gpu_cost import GpuDense, gpu_rates
from pit_tvm.selection.gpu_pieces import PiecesWork, select_pieces, tiles_us
from pit_tvm.structs import MicroTile, Plan, Tile

RATES = gpu_rates([], "float16", "sm_90a", "torch", [])
SIZE = 4096
# Microseconds that kernels took on an H200 at 90, 95, 97.5, 99 and 99.5 % zeros of 4096^3, by rows
# and columns of the tile.
TIMES = {
    (592, 32): (160.6, 118.2, 82.9, 31.3, 28.3),
    (1024, 32): (144.8, 84.0, 66.0, 58.3, 55.3),
    (512, 64): (114.4, 88.0, 75.9, 69.1, 66.7),
    (352, 64): (120.6, 104.0, 97.0, 92.1, 89.4),
}
SHARES = (0.1, 0.05, 0.025, 0.01, 0.005)
# The same at 95 and 99 %, of m, n and k, for the first three tiles.
SHAPES = {
    (8192, 1024, 1024): ((18.8, 10.8), (17.6, 14.7), (17.3, 14.8)),
    (16384, 2048, 2048): ((107.7, 35.9), (93.5, 72.0), (97.4, 79.9)),
    (4096, 3072, 768): ((27.7, 13.5), (23.2, 19.1), (20.5, 18.5)),
    (2048, 768, 3072): ((17.8, 16.1), (17.9, 13.4), (18.9, 15.3)),
}


def tile(rows: int, cols: int) -> Tile:
    slots, stages = int(rows == 592), {592: 12, 512: 6}.get(rows, 8)
    knobs = (("room", 64), ("slots", slots), ("stages", stages))
    return Tile("pieces-hopper", "sm_90a", "float16", rows, cols, 64, knobs)


def us_of(extents: tuple[int, int], given: PiecesWork) -> float:
    return tiles_us((tile(*extents),), given, RATES)[0][1]


def work(share: float, m: int = SIZE, n: int = SIZE, k: int = SIZE) -> PiecesWork:
    return PiecesWork(m, n, k, (round(m * share),) * (k // 64), float(m * k))


def plan(given: PiecesWork) -> Plan:
    micro_tile = MicroTile("lhs", "m", 0, (1, 64))
    tiles = [tile(*extents) for extents in TIMES]
    return select_pieces(micro_tile, given, tiles, GpuDense(given.m, given.n, given.k), RATES)


@pytest.mark.parametrize("extents", TIMES)
def test_costs_are_near_what_was_measured(extents: tuple[int, int]) -> None:
    for share, us in zip(SHARES, TIMES[extents], strict=True):
        assert us_of(extents, work(share)) == pytest.approx(us, rel=0.25)


@pytest.mark.parametrize("shape", SHAPES)
def test_costs_follow_the_shape(shape: tuple[int, int, int]) -> None:
    for extents, times in zip(TIMES, SHAPES[shape], strict=False):
        for share, us in zip((0.05, 0.01), times, strict=True):
            assert us_of(extents, work(share, *shape)) == pytest.approx(us, rel=0.15)


def test_costs_of_tiles_are_the_same_together() -> None:
    tiles = tuple(tile(*extents) for extents in TIMES)
    alone = [us_of(extents, work(0.03)) for extents in TIMES]
    assert [us for _, us, _ in tiles_us(tiles, work(0.03), RATES)] == pytest.approx(alone)


@pytest.mark.parametrize("shape", [(0, 512, 768), (512, 0, 768), (512, 512, 0)])
@pytest.mark.parametrize("extents", TIMES)
def test_empty_operands_have_times(extents: tuple[int, int], shape: tuple[int, int, int]) -> None:
    assert 0.0 < us_of(extents, work(0.05, *shape)) < 10.0


def test_halves_of_slots_for_rows_with_one_piece_take_more_walks() -> None:
    # 4096 rows, 13 % of them with several pieces and 34 with one: 548 slots, or 1244 turned.
    plain, flipped = (us_of((592, 32), replace(work(0.01), flip=flip)) for flip in (False, True))
    assert 1.5 * plain < flipped < 2.5 * plain
    # All have sums of their own, either way.
    for share in SHARES:
        assert us_of((512, 64), work(share)) == us_of((512, 64), replace(work(share), flip=True))


def test_few_live_columns_take_the_tile_with_slots_for_them() -> None:
    for flip in (False, True):
        tiles = starting_pieces("float16", flip)
        of = [tiles_us(tiles, replace(work(share), flip=flip), RATES) for share in SHARES]
        chosen = [min(timed, key=lambda each: each[1])[0] for timed in of]
        assert [tile.knob("slots") for tile in chosen] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(("at", "share"), [*enumerate(SHARES)])
def test_the_tile_that_was_fastest_is_chosen(at: int, share: float) -> None:
    chosen = plan(work(share)).choice
    assert chosen.tile is not None
    extents = chosen.tile.tile_m, chosen.tile.tile_n
    assert TIMES[extents][at] == min(times[at] for times in TIMES.values())


def test_dense_is_chosen_where_much_lives() -> None:
    assert plan(work(0.5)).choice.kind == "dense"
    chosen = plan(work(0.05))
    assert chosen.choice.covered == pytest.approx(0.05, rel=0.01) and "bound" in str(chosen)
    assert dict(chosen.choice.parts)["index"] > 4


def test_nothing_live_still_writes_the_output() -> None:
    empty = plan(replace(work(0.01), counts=(0,) * 64)).choice
    assert empty.kind == "pit" and empty.cost_us > 1e-3 * 2 * SIZE**2 / 4200


def test_activations_are_counted() -> None:
    gelu = replace(work(0.05), act="gelu")
    assert us_of((512, 64), gelu) > us_of((512, 64), work(0.05)) + 5
