"""Costs of products over live columns of bands, and the choice between them and dense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pit_tvm.selection.gpu_columns import ColumnsWork, select_columns, tile_us
from pit_tvm.selection.gpu_cost import GpuDense, gpu_rates
from pit_tvm.structs import MicroTile, Plan, Tile

RATES = gpu_rates([], "float16", "sm_90a", "torch", [])
SIZE = 4096
# Microseconds that calls on 4096^3 took on an H200 at 50, 80, 90, 95 and 99 % zeros, without 7 for
# their index.
TIMES = {
    32: (282.7, 119.5, 69.0, 43.9, 24.4),
    64: (147.2, 66.1, 41.4, 30.0, 20.2),
    128: (123.3, 56.0, 36.7, 27.7, 18.1),
}
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


@pytest.mark.parametrize("height", TIMES)
def test_predictions_are_near_what_was_measured(height: int) -> None:
    for share, us in zip(SHARES, TIMES[height], strict=True):
        predicted, bound = tile_us(tile(height), work(height, share), RATES)
        assert bound < predicted and predicted == pytest.approx(us, rel=0.12)


@pytest.mark.parametrize("height", TIMES)
def test_dense_wins_where_much_is_live(height: int) -> None:
    assert plan(work(height, 1.0)).choice.kind == "dense"
    sparse = plan(work(height, 0.05))
    assert sparse.choice.kind == "pit" and not sparse.tuned
    assert sparse.choice.covered == pytest.approx(0.05, abs=1e-3)
    assert len(sparse.candidates) == 3 and "dense" in str(sparse)


def test_zeros_make_dense_products_faster() -> None:
    dense = [plan(work(32, share)).candidates[-1] for share in (1.0, 0.9, 0.1)]
    costs = [c.cost_us for c in dense]
    assert costs[0] > costs[1] > costs[2] == pytest.approx(0.8 * costs[0])


def test_packing_is_a_part_of_the_cost() -> None:
    own, packed = (dict(plan(work(32, 0.1, p)).choice.parts)["pack"] for p in (False, True))
    assert own == 0.0 < packed


def test_nothing_live_still_writes_the_result() -> None:
    empty = replace(work(32, 0.1), counts=(0,) * 128)
    assert empty.touched == 0.0
    predicted, bound = tile_us(tile(32), empty, RATES)
    assert 0 < bound < predicted < 30
