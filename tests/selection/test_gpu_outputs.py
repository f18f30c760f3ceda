"""The cost of products with a sparse output against times of one H200, and what plans choose."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.selection.gpu_cost import GpuDense, gpu_rates
from pit_tvm.selection.gpu_outputs import OutputsWork, select_outputs, tile_us
from pit_tvm.structs import MicroTile, Tile

MICRO_TILE = MicroTile("out", "m", 0, (1, 64))
RATES = gpu_rates([], "float16", "sm_90a", "torch", ())
STAGES = {256: 5, 128: 8, 64: 13}
# 4096^3 in float16 with so much of 64x64 blocks live: microseconds by the height of a tile.
TIMES = {
    0.5: {256: 156.0, 128: 173.0},
    0.2: {256: 76.0, 128: 84.7},
    0.1: {256: 38.5, 128: 47.0, 64: 52.5},
    0.05: {128: 28.6, 64: 35.5},
    0.01: {256: 25.0, 128: 19.5, 64: 15.9},
}

# The same of 128x128 blocks.
WIDE_STAGES = {192: 5, 128: 6, 64: 8}
WIDE_TIMES = {
    0.5: {192: 119.0, 128: 116.2, 64: 158.2},
    0.2: {192: 75.1, 128: 58.2, 64: 84.3},
    0.1: {192: 36.1, 128: 33.4, 64: 42.9},
    0.05: {192: 34.7, 128: 27.4, 64: 28.5},
    0.01: {192: 25.4, 128: 24.3, 64: 20.0},
}


# Of either where two multiprocessors share a tile, by the share of live blocks and their side.
SHARED_TIMES = {
    (0.01, 64): {256: 19.8, 128: 15.7, 64: 16.0},
    (0.01, 128): {192: 19.8, 128: 18.5, 64: 17.2},
    (0.05, 128): {192: 29.2, 128: 29.1},
}


def tile(tile_m: int, cluster: int = 1) -> Tile:
    knobs = (("cluster", cluster), ("sms", 132), ("stages", STAGES[tile_m]))
    return Tile("groups-hopper", "sm_90a", "float16", tile_m, 64, 64, knobs)


def wide_tile(tile_m: int, cluster: int = 1) -> Tile:
    knobs = (("cluster", cluster), ("sms", 132), ("stages", WIDE_STAGES[tile_m]))
    return Tile("groups-hopper", "sm_90a", "float16", tile_m, 128, 64, knobs)


def work(live: float, **options: bool) -> OutputsWork:
    blocks = np.random.default_rng(0).random((64, 64)) < live
    return OutputsWork(4096, 4096, 4096, 64, tuple(blocks.sum(axis=0) * 64), 4096.0, **options)


def wide_work(live: float) -> OutputsWork:
    blocks = np.random.default_rng(0).random((32, 32)) < live
    return OutputsWork(4096, 4096, 4096, 128, tuple(blocks.sum(axis=0) * 128), 1024.0)


@pytest.mark.parametrize(
    ("live", "tile_m"), [(live, tile_m) for live, times in TIMES.items() for tile_m in times]
)
def test_predictions_are_near_what_was_measured(live: float, tile_m: int) -> None:
    predicted, bound = tile_us(tile(tile_m), work(live), RATES)
    assert predicted == pytest.approx(TIMES[live][tile_m], rel=0.2)
    assert bound < predicted


@pytest.mark.parametrize("live", WIDE_TIMES)
def test_a_round_of_few_tiles_takes_as_long_as_a_full_one(live: float) -> None:
    """160 tiles of 192 rows at 0.2 are two rounds of 132 multiprocessors, as 224 of 128 are."""
    measured = WIDE_TIMES[live]
    predicted = {m: tile_us(wide_tile(m), wide_work(live), RATES)[0] for m in measured}
    assert predicted == pytest.approx(measured, rel=0.2)
    chosen = min(predicted, key=predicted.__getitem__)
    assert measured[chosen] <= 1.05 * min(measured.values())


@pytest.mark.parametrize(("live", "side"), SHARED_TIMES)
def test_shared_tiles_are_chosen_where_they_are_few(live: float, side: int) -> None:
    product, made = (work(live), tile) if side == 64 else (wide_work(live), wide_tile)
    measured = SHARED_TIMES[live, side]
    predicted = {m: tile_us(made(m, 2), product, RATES)[0] for m in measured}
    assert predicted == pytest.approx(measured, rel=0.25)
    tiles = [made(m, cluster) for m in measured for cluster in (1, 2)]
    chosen = select_outputs(MICRO_TILE, product, tiles, None, RATES).choice.tile
    assert chosen is not None and chosen.knob("cluster") == 2
    assert measured[chosen.tile_m] <= 1.05 * min(measured.values())


def test_shared_tiles_of_several_rounds_are_no_candidates() -> None:
    tiles = [tile(m, cluster) for m in STAGES for cluster in (1, 2)]
    found = select_outputs(MICRO_TILE, work(0.2), tiles, None, RATES)
    assert [dict(c.tile.knobs)["cluster"] for c in found.candidates if c.tile] == [1, 1, 1]


def test_the_cheapest_tile_or_the_dense_product_is_chosen() -> None:
    tiles = [tile(tile_m) for tile_m in STAGES]
    dense = GpuDense(4096, 4096, 4096)
    chosen = [
        select_outputs(MICRO_TILE, work(live), tiles, dense, RATES).choice
        for live in (1.0, 0.1, 0.05, 0.01)
    ]
    assert [c.tile.tile_m if c.tile else 0 for c in chosen] == [0, 256, 128, 64]
    alone = select_outputs(MICRO_TILE, work(1.0), tiles, None, RATES)
    assert alone.choice.kind == "pit" and len(alone.candidates) == 3


def test_clearing_the_output_costs_its_bytes() -> None:
    cleared = select_outputs(MICRO_TILE, work(0.1, clears=True), [tile(256)], None, RATES)
    assert dict(cleared.choice.parts)["output"] == pytest.approx(8.4, rel=0.01)


def test_nothing_live_costs_a_launch() -> None:
    nothing = OutputsWork(4096, 4096, 4096, 64, (0,) * 64, 0.0)
    assert tile_us(tile(256), nothing, RATES)[0] < 7.0
