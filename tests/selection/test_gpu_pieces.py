"""Costs of products of live pieces of rows, and the choice between them and dense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pit_tvm.selection.gpu_cost import GpuDense, gpu_rates
from pit_tvm.selection.gpu_pieces import PiecesWork, select_pieces, tile_us
from pit_tvm.structs import MicroTile, Plan, Tile

RATES = gpu_rates([], "float16", "sm_90a", "torch", [])
SIZE = 4096
# Microseconds that calls on 4096^3 took on an H200 at 80, 90, 95, 97.5 and 99 % zeros, without 7
# for their index, by rows and columns of the tile, and the knobs of each.
TIMES = {
    (1024, 32): (737.6, 148.1, 84.3, 70.6, 62.5),
    (512, 64): (220.5, 114.5, 93.1, 81.9, 76.3),
    (352, 64): (240.8, 124.0, 108.1, 98.3, 93.0),
}
SHARES = (0.2, 0.1, 0.05, 0.025, 0.01)


def tile(rows: int, cols: int) -> Tile:
    stages = 6 if rows == 512 else 8
    knobs = (("consumers", 24 // stages), ("room", 64), ("sms", 132), ("stages", stages))
    return Tile("pieces-hopper", "sm_90a", "float16", rows, cols, 64, knobs)


def work(share: float) -> PiecesWork:
    return PiecesWork(SIZE, SIZE, SIZE, (round(SIZE * share),) * (SIZE // 64), float(SIZE * SIZE))


def plan(given: PiecesWork) -> Plan:
    micro_tile = MicroTile("lhs", "m", 0, (1, 64))
    tiles = [tile(*extents) for extents in TIMES]
    return select_pieces(micro_tile, given, tiles, GpuDense(given.m, given.n, given.k), RATES)


@pytest.mark.parametrize("extents", TIMES)
def test_costs_are_near_what_was_measured(extents: tuple[int, int]) -> None:
    for share, us in zip(SHARES, TIMES[extents], strict=True):
        assert tile_us(tile(*extents), work(share), RATES)[0] == pytest.approx(us, rel=0.3)


@pytest.mark.parametrize(("at", "share"), [*enumerate(SHARES)][1:])
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
    plain = tile_us(tile(512, 64), work(0.05), RATES)[0]
    assert tile_us(tile(512, 64), gelu, RATES)[0] > plain + 5
