"""Costs of products of live blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pit_tvm.selection.gpu_blocks import BlocksWork, select_blocks, tile_us
from pit_tvm.selection.gpu_cost import GpuDense, GpuRates, gpu_rates
from pit_tvm.structs import MicroTile, Plan, Tile

MICRO = MicroTile("lhs", "k", 1, (64, 1))
WORK = BlocksWork(4096, 4096, 4096, 64, 64, (6,) * 64, True, 4096.0**2)


def tile(height: int, other: int = 256) -> Tile:
    return Tile("blocks-hopper", "sm_90a", "float16", height, other, 64)


@pytest.fixture(scope="module")
def rates() -> GpuRates:
    return gpu_rates([], "float16", "sm_90a", "torch", [])


def plan(work: BlocksWork, rates: GpuRates) -> Plan:
    dense = GpuDense(work.m, work.n, work.k)
    return select_blocks(MICRO, work, [tile(64), tile(64, 128)], dense, rates)


def test_more_live_steps_cost_more(rates: GpuRates) -> None:
    times = [
        tile_us(tile(64), replace(WORK, counts=(live,) * 64), rates)[0] for live in (1, 6, 32, 64)
    ]
    assert times == sorted(times) and times[-1] > 5 * times[0]


def test_either_side_costs_alike_but_low_bands_of_lhs_fill_instructions_badly(
    rates: GpuRates,
) -> None:
    own, other = (tile_us(tile(64), replace(WORK, of_lhs=of), rates)[0] for of in (True, False))
    assert own == pytest.approx(other)
    low = replace(WORK, height=32, counts=(32,) * 128)
    assert (
        tile_us(tile(32), low, rates)[0] > tile_us(tile(32), replace(low, of_lhs=False), rates)[0]
    )


def test_dense_is_chosen_where_much_lives_and_blocks_where_little_does(rates: GpuRates) -> None:
    assert plan(replace(WORK, counts=(64,) * 64), rates).choice.kind == "dense"
    chosen = plan(WORK, rates)
    assert chosen.choice.kind == "pit" and "bound" in str(chosen)
    assert chosen.choice.covered == pytest.approx(6 / 64)


def test_a_mask_costs_its_reading_a_block_mask_nothing(rates: GpuRates) -> None:
    read, given = (plan(replace(WORK, index_bytes=size), rates) for size in (4096.0**2, 0.0))
    parts = [dict(found.candidates[0].parts) for found in (read, given)]
    assert parts[0]["index"] > 4 and parts[1]["index"] == 0
    assert parts[0]["product"] == parts[1]["product"]


def test_activations_are_counted(rates: GpuRates) -> None:
    plain, gelu = (tile_us(tile(64), replace(WORK, act=act), rates)[0] for act in ("none", "gelu"))
    assert gelu > plain + 5


def test_nothing_live_still_writes_the_output(rates: GpuRates) -> None:
    empty = plan(replace(WORK, counts=(0,) * 64, index_bytes=0.0), rates).choice
    assert empty.kind == "pit" and empty.cost_us > 1e-3 * 2 * 4096**2 / 4200
