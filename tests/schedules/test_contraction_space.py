"""Sampled tiles: one set of parameters and one result for every decision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import s_tir

from pit_tvm.errors import TileNotFound, TuningError
from pit_tvm.schedules import contraction_space as space
from pit_tvm.structs import TileTask
from tests.primitive.replay import assert_schedules
from tests.schedules import sparse

SIZES = {space.ROWS: (13, 21, 30), space.DEPTH: (40, 21, 10), space.BLOCKS: (5, 21, 70)}


def task(family: str, dtype: str = "float32", isa: str = "") -> TileTask:
    m, n, k = SIZES[family]
    return TileTask(family, isa or sparse.target().isa, dtype, m, n, k)


def sampled(of: TileTask, seed: int) -> tuple[Any, Any]:
    func = space.workload(of)
    sch = s_tir.Schedule(func, seed=seed)
    space.sample(sch, of)
    return func, sch


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "float32") for family in space.FAMILIES),
        (space.ROWS, "float16"),
        (space.DEPTH, "bfloat16"),
        (space.BLOCKS, "int8"),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_sampled_tile_gives_the_exact_result(family, dtype, seed):
    of = task(family, dtype)
    arrays, exact = space.example(of, np.random.default_rng())
    lowered = space.lower(sampled(of, seed)[1].mod)
    assert [p.name for p in lowered["main"].params] == ["lhs", "rhs", "ids", "count", "out"]
    out = sparse.poisoned(exact.shape, "int32" if dtype == "int8" else "float32")
    if family == space.BLOCKS:
        out[...] = 0
    fenced = [sparse.fenced(array) for array in (*arrays, out)]
    sparse.build(lowered)(*fenced)
    sparse.assert_promise(fenced[-1], exact)


@pytest.mark.parametrize("family", space.FAMILIES)
def test_decisions_replay_and_are_read_back_as_a_tile(family):
    of = task(family, isa="avx512")
    seen = set()
    for seed in range(1, 9):
        func, sch = sampled(of, seed)
        tile = space.tile_of(sch, of)
        assert (tile.family, tile.isa, tile.dtype) == (family, "avx512", "float32")
        assert tile.knob("reg_m") in space.REG_M["avx512"]
        assert tile.tile_n in space.TILE_N
        rows, blocks = tile.tile_m, tile.tile_m // tile.knob("reg_m")
        if family == space.DEPTH:
            assert rows == space.MICRO_ROWS and rows % tile.knob("reg_m") == 0
        else:
            assert blocks in space.ROW_BLOCKS and rows % tile.knob("reg_m") == 0
        assert tile.tile_k in ((64,) if family == space.BLOCKS else space.TILE_K)
        assert_schedules(sch, func, sch.mod["main"])
        seen.add(tile)
    assert len(seen) > 1


def test_family_that_does_not_exist():
    of = TileTask("contraction-diagonals", "avx512", "float32", 8, 8, 8)
    with pytest.raises(TileNotFound, match="task.family: expected one of .* got 'contraction-diag"):
        space.workload(of)


def test_instruction_set_that_does_not_exist():
    text = r"task.isa: expected one of \['avx2', 'avx512', 'generic'\], got 'mmx'"
    with pytest.raises(TileNotFound, match=text):
        space.workload(task(space.ROWS, isa="mmx"))


def test_module_without_decisions():
    mod = s_tir.Schedule(space.workload(task(space.ROWS))).mod
    with pytest.raises(TuningError, match="module: expected annotations pit.tile and pit.task"):
        space.lower(mod)


@pytest.mark.parametrize("isa", sorted(space.LANES))
def test_starting_tiles_are_whole_register_blocks_of_every_family(isa):
    tiles = space.starting_tiles(isa, "float32")
    assert [tile.family for tile in tiles] == list(space.FAMILIES)
    assert all(tile.tile_m % tile.knob("reg_m") == 0 for tile in tiles)
    assert tiles[1].tile_m == space.MICRO_ROWS and tiles[2].tile_k == space.MICRO_DEPTH


@pytest.mark.parametrize("isa", sorted(space.LANES))
@pytest.mark.parametrize("family", space.FAMILIES)
def test_first_candidates_are_decisions_that_the_space_has(family, isa):
    of = TileTask(family, isa, "float32", 1024, 1024, 1000)
    choices = [space._reg_m(of), space.ROW_BLOCKS, space.TILE_N, space.TILE_K]
    for decisions in space.starts(of):
        assert all(0 <= i < len(c) for i, c in zip(decisions, choices, strict=True))
        assert family != space.ROWS or space.TILE_K[decisions[3]] == 1024
    assert (not space.starts(of)) == (family == space.DEPTH)
