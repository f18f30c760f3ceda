"""The Hopper search space: legal tiles only, read back as they were decided."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import s_tir

from pit_tvm.errors import TileNotFound
from pit_tvm.schedules import hopper_space as space
from pit_tvm.schedules.decisions import noted
from pit_tvm.schedules.hopper_rows import SHARED_LIMIT, RowsTile
from pit_tvm.structs import Tile, TileTask
from pit_tvm.tuning.tasks import load_space, workload_module
from tests.primitive.replay import assert_schedules

ROWS = TileTask(space.ROWS, "sm_90a", "float16", 1000, 520, 264)
GROUPS = TileTask(space.GROUPS, "sm_90a", "bfloat16", 1000, 520, 264, 7)


def sampled(task: TileTask, seed: int) -> s_tir.Schedule:
    sch = s_tir.Schedule(space.workload(task), seed=seed)
    space.sample(sch, task)
    return sch


@pytest.mark.parametrize("task", [ROWS, GROUPS])
def test_every_sampled_tile_is_legal_and_read_back(task: TileTask) -> None:
    seen = set()
    for seed in range(1, 41):
        tile = space.tile_of(sampled(task, seed), task)
        knobs = space.rows_tile(tile)
        assert knobs.shared_bytes <= SHARED_LIMIT and knobs.stages >= 2
        assert (tile.family, tile.isa, tile.dtype) == (task.family, "sm_90a", task.dtype)
        assert knobs.most_groups == (1 if task.groups == 1 else 256)
        assert space.as_tile(knobs, task.family, task.dtype) == tile
        seen.add(tile)
    assert len(seen) > 30


@pytest.mark.parametrize("groups", [1, 2, 300])
def test_every_decision_of_every_form_is_legal(groups: int) -> None:
    family = space.ROWS if groups == 1 else space.GROUPS
    values = (space.CLUSTER, space.SPARE, space.RASTER, space.LAG, space.STORE_COLS, space.LATE)
    for form in range(len(space.FORMS)):
        for ends in ([v[0] for v in values], [v[-1] for v in values]):
            knobs = space.decided([form, *ends], groups)
            knobs.check()
            assert space.rows_tile(space.as_tile(knobs, family, "float16")) == knobs


@pytest.mark.parametrize("task", [ROWS, GROUPS])
def test_decisions_replay(task: TileTask) -> None:
    sch = sampled(task, 3)
    assert_schedules(sch, space.workload(task), sch.mod["main"])


def test_candidate_becomes_the_kernel_with_the_stand_ins_parameters() -> None:
    kernel = space.lower(sampled(ROWS, 3).mod)["main"]
    names = [str(param.name).removesuffix("_h") for param in kernel.params]
    assert names == [str(param.name) for param in space.workload(ROWS).params]


def test_starts_are_decisions_of_the_space() -> None:
    starts = space.starts(ROWS)
    assert len(set(starts)) == len(starts) >= 16
    first = (range(len(space.FORMS)), space.CLUSTER, space.SPARE, space.RASTER, space.LAG)
    values = (*first, space.STORE_COLS, space.LATE)
    for start in starts:
        picked = [v[at] for v, at in zip(values, start, strict=True)]
        space.decided(picked, 1).check()


def test_rows_of_a_task_may_share_what_is_stored() -> None:
    task = replace(GROUPS, share=6)
    size = space.stored(task)
    assert size.sources == -(-size.rows // 6) and size.capacity == size.rows
    sch = s_tir.Schedule(workload_module(load_space(task.family), task))
    space.sample(sch, task)
    assert noted(sch.mod, "out")[1] == task
    knobs = space.rows_tile(space.tile_of(sch, task))
    shared = space.kernel_module(knobs, task.dtype, share=6)
    tvm.ir.assert_structural_equal(space.lower(sch.mod), shared)
    with pytest.raises(ValueError):
        tvm.ir.assert_structural_equal(space.kernel_module(knobs, task.dtype), shared)


@pytest.mark.parametrize("task", [ROWS, GROUPS, replace(GROUPS, groups=1000, m=10)])
def test_index_names_every_live_row_once(task: TileTask) -> None:
    ids, count = space.random_index(task, np.random.default_rng(0))
    size = space.stored(task)
    assert ids.shape == (task.groups, size.capacity) and ids.dtype == count.dtype == np.int32
    named = np.concatenate([ids[g, : count[g]] for g in range(task.groups)])
    assert len(named) == task.m == len(set(named.tolist())) < size.rows
    assert named.min() >= 0 and named.max() < size.rows
    assert all((ids[g, count[g] :] == -1).all() for g in range(task.groups))


def test_features_count_waves_of_the_chip() -> None:
    tile = space.as_tile(RowsTile(), space.ROWS, "float16")
    task = replace(ROWS, m=128 * 12, n=256 * 12)  # 144 tiles on 132 multiprocessors
    waves, filled, useful, stages = space.features(tile, task)
    assert (waves, useful, stages) == (2, 1.0, 4)
    assert filled == pytest.approx(144 / 264)


@pytest.mark.parametrize("form", range(len(space.FORMS)))
def test_features_of_fewer_rows_than_groups(form: int) -> None:
    task = replace(GROUPS, m=4, n=512, groups=128)
    tile = space.as_tile(space.decided((form, 1, 0, 8, 0, 64, 0), 128), space.GROUPS, "float16")
    waves, filled, useful, _ = space.features(tile, task)
    columns = 512 / tile.tile_n
    assert waves == 1 and filled == pytest.approx(4 * -(-512 // tile.tile_n) / 132)
    high = 8 if space.rows_tile(tile).flip else tile.tile_m
    assert useful == pytest.approx(columns / -(-512 // tile.tile_n) / high)


@pytest.mark.parametrize("dtype", space.DTYPES)
def test_starting_tiles_are_legal_in_both_families(dtype: str) -> None:
    tiles = space.starting_tiles("sm_90a", dtype)
    assert {tile.family for tile in tiles} == set(space.FAMILIES)
    for tile in tiles:
        assert space.rows_tile(tile).most_groups == (1 if tile.family == space.ROWS else 256)


def test_more_groups_take_memory_from_the_ring() -> None:
    wide = RowsTile(tile_n=192, stages=5, lag=3)
    assert space.for_groups(wide, 1) == wide
    fitted = space.for_groups(wide, 1000)
    assert (fitted.most_groups, fitted.stages, fitted.lag) == (1024, 4, 2)
    with pytest.raises(TileNotFound, match="groups: expected at most 1024, got 1025"):
        space.for_groups(wide, 1025)


@pytest.mark.parametrize(
    "task",
    [
        replace(ROWS, family="contraction-rows"),
        replace(ROWS, isa="avx512"),
        replace(ROWS, dtype="float32"),
        replace(ROWS, n=12),
        replace(ROWS, groups=2),
        replace(GROUPS, groups=1),
    ],
)
def test_task_of_another_kind_is_refused(task: TileTask) -> None:
    with pytest.raises(TileNotFound):
        space.workload(task)


@pytest.mark.parametrize(
    "tile",
    [
        Tile("contraction-rows", "avx512", "float16", 8, 8, 64, (("reg_m", 4),)),
        Tile(space.ROWS, "sm_90a", "float16", 128, 256, 64, (("reg_m", 4),)),
        Tile(space.ROWS, "sm_90a", "float16", 128, 256, 32),
        Tile(space.ROWS, "sm_90a", "float16", 256, 256, 64),
    ],
)
def test_tile_that_the_template_cannot_build_is_refused(tile: Tile) -> None:
    with pytest.raises(TileNotFound):
        space.rows_tile(tile)


def test_starting_tiles_of_another_isa_are_refused() -> None:
    with pytest.raises(TileNotFound, match="isa, dtype"):
        space.starting_tiles("sm_80", "float16")


@pytest.mark.parametrize(("slot", "heights"), [(64, [256, 128, 64]), (128, [192, 128, 64])])
def test_tiles_of_slots_are_as_wide_and_the_low_ones_have_more_stages(
    slot: int, heights: list[int]
) -> None:
    tiles = space.output_tiles("float16", slot, 300)
    assert [(t.tile_m, t.knob("cluster")) for t in tiles] == [
        (m, c) for m in heights for c in (1, 2)
    ]
    assert {(tile.tile_n, tile.knob("most_groups")) for tile in tiles} == {(slot, 1024)}
    stages = [tile.knob("stages") for tile in tiles[::2]]
    assert stages == [tile.knob("stages") for tile in tiles[1::2]]
    assert stages == sorted(stages) and len(set(stages)) == 3
    with pytest.raises(TileNotFound, match="1024"):
        space.output_tiles("float16", slot, 1025)
