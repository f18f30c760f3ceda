"""Costs of products over live columns of bands, and the choice between them and dense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pit_tvm.selection import gpu_columns
from pit_tvm.selection.gpu_columns import ColumnsWork, select_columns, tile_us
from pit_tvm.selection.gpu_cost import GpuDense, gpu_rates
from pit_tvm.structs import MicroTile, Plan, Tile

RATES = gpu_rates([], "float16", "sm_90a", "torch", [])
SIZE = 4096
# Microseconds that calls on 4096^3 took on an H200 at (50,) 80, 90, 95 and 99 % zeros, without 7
# for their index, by height and width of the tile.
TIMES = {
    (32, 384): (117.4, 63.2, 41.0, 21.1),
    (32, 256): (289.0, 122.3, 66.2, 41.9, 22.7),
    (64, 512): (147.8, 64.8, 39.1, 28.8, 17.7),
    (64, 256): (154.6, 67.3, 39.8, 28.1, 17.7),
    (128, 256): (128.3, 56.8, 34.6, 24.9, 14.5),
    (128, 128): (145.0, 62.6, 37.0, 25.2, 15.0),
}
HEIGHTS = (32, 64, 128)
SHARES = (0.5, 0.2, 0.1, 0.05, 0.01)


def tile(height: int, width: int = 256) -> Tile:
    return Tile("columns-hopper", "sm_90a", "float16", height, width, 64)


def work(height: int, share: float, packed: bool = False) -> ColumnsWork:
    counts = (round(SIZE * share),) * (SIZE // height)
    return ColumnsWork(SIZE, SIZE, SIZE, height, counts, float(SIZE * SIZE), packed)


def plan(given: ColumnsWork) -> Plan:
    micro_tile = MicroTile("lhs", "k", 0, (1, given.height))
    tiles = [tile(given.height), tile(given.height, 128)]
    return select_columns(micro_tile, given, tiles, GpuDense(SIZE, SIZE, SIZE), RATES)


@pytest.mark.parametrize(("height", "width"), TIMES)
def test_predictions_are_near_what_was_measured(height: int, width: int) -> None:
    times = TIMES[height, width]
    for share, us in zip(SHARES[-len(times) :], times, strict=True):
        predicted, bound = tile_us(tile(height, width), work(height, share), RATES)
        assert bound < predicted and predicted == pytest.approx(us, rel=0.08)


@pytest.mark.parametrize("height", HEIGHTS)
def test_dense_wins_where_much_is_live(height: int) -> None:
    assert plan(work(height, 1.0)).choice.kind == "dense"
    sparse = plan(work(height, 0.05))
    assert sparse.choice.kind == "pit" and not sparse.tuned
    assert sparse.choice.covered == pytest.approx(0.05, abs=1e-3)
    assert len(sparse.candidates) == 3 and "dense" in str(sparse)


def test_bands_of_which_some_have_more_to_do_cost_more() -> None:
    even = work(32, 0.2)
    few, many = (round(SIZE * share) for share in (0.15, 0.25))
    uneven = replace(even, counts=(few, many) * (len(even.counts) // 2))
    assert uneven.live == pytest.approx(even.live, rel=1e-3)
    slower = tile_us(tile(32), uneven, RATES)[0] / tile_us(tile(32), even, RATES)[0]
    assert 1.05 < slower < 1.25


def test_zeros_make_dense_products_faster() -> None:
    dense = [plan(work(32, share)).candidates[-1] for share in (1.0, 0.9, 0.1)]
    costs = [c.cost_us for c in dense]
    assert costs[0] > costs[1] > costs[2] == pytest.approx(0.87 * costs[0], rel=0.01)


def test_packing_is_a_part_of_the_cost() -> None:
    own, packed = (dict(plan(work(32, 0.1, p)).choice.parts)["pack"] for p in (False, True))
    assert own == 0.0 < packed


def test_few_columns_are_shared_by_more_tiles() -> None:
    narrow = replace(work(64, 0.1), n=512)
    wide, usual = (tile_us(tile(64, width), narrow, RATES)[0] for width in (512, 256))
    assert usual < wide


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_one_list_for_all_bands_costs_what_is_summed_shared_by_all(share: float) -> None:
    live, tokens = round(16384 * share), 16384
    grad = ColumnsWork(768, 3072, tokens, 0, (live,), 8.0 * tokens, False, common=True)
    micro_tile, tiles = MicroTile("lhs", "k", 0, (1, 0)), [tile(128), tile(128, 128)]
    chosen = select_columns(micro_tile, grad, tiles, None, RATES)
    assert {c.kind for c in chosen.candidates} == {"pit"} and len(chosen.candidates) == 2
    assert chosen.choice.covered == pytest.approx(share)
    us, bound = tile_us(tiles[0], grad, RATES)
    assert bound < us < 20.0 + 1.4 * bound
    assert grad.touched == live


# Microseconds on an H200 of k, m, n, share live: tiles of 128 rows and 256, 192 and 128 columns.
RANGES = {
    (32768, 768, 3072, 1.0): (298.1, 302.8, 340.7),
    (32768, 768, 3072, 0.5): (163.8, 163.2, 177.5),
    (32768, 768, 768, 0.5): (55.8, 47.5, 52.4),
    (8192, 4096, 4096, 0.5): (257.9, 278.1, 311.4),
    (4096, 1024, 4096, 0.1): (11.2, 14.6, 12.2),
    (16384, 2048, 1408, 0.5): (115.2, 98.2, 109.9),
    (8192, 1024, 1024, 0.1): (14.2, 11.7, 9.5),
}


@pytest.mark.parametrize("sizes", RANGES)
def test_predictions_of_one_list_are_near_what_was_measured(
    sizes: tuple[int, int, int, float],
) -> None:
    k, m, n, share = sizes
    grad = ColumnsWork(m, n, k, 0, (int(share * k),), 0.0, False, common=True)
    for width, us in zip((256, 192, 128), RANGES[sizes], strict=True):
        predicted, bound = tile_us(tile(128, width), grad, RATES)
        assert bound < predicted == pytest.approx(us, rel=0.13, abs=2.0)


@pytest.mark.parametrize(
    ("tiles", "units", "most"),
    [
        (132, 50, (50, 0)),  # whole tiles
        (528, 50, (200, 0)),
        (1, 1, (1, 0)),
        (1, 64, (8, 7)),  # equal parts
        (66, 64, (32, 1)),
        (72, 256, (140, 2)),  # and of the rest of two tiles the CTAs that have no part
        (72, 9, (9, 0)),  # not worth it
        (138, 256, (256 + 32, 7)),
    ],
)
def test_work_is_shared_out(tiles: int, units: int, most: tuple[int, int]) -> None:
    assert gpu_columns.shared_out(tiles, units) == most


def test_nothing_live_still_writes_the_result() -> None:
    empty = replace(work(32, 0.1), counts=(0,) * 128)
    assert empty.touched == 0.0
    predicted, bound = tile_us(tile(32), empty, RATES)
    assert 0 < bound < predicted < 30
