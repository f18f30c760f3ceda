"""The search space of tiles on CUDA: sound tiles only, read back, and one result for all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import s_tir

from pit_tvm.errors import TileNotFound
from pit_tvm.runtime.cuda_build import kernel_source
from pit_tvm.schedules import cuda_contraction_space as space
from pit_tvm.structs import TileTask
from pit_tvm.tuning.tasks import make_example
from tests.primitive.replay import assert_schedules
from tests.runtime.cuda_emulation import Emulator, OnDevice

TASK = TileTask(space.ROWS, "sm_90a", "float32", 70, 72, 24)
BANDS = replace(TASK, family=space.COLUMNS[32], k=6)
ARCHS = {"sm_80": 163, "sm_89": 99, "sm_90a": 227, "sm_100": 227, "sm_120a": 99}


def sampled(task: TileTask, seed: int) -> s_tir.Schedule:
    sch = s_tir.Schedule(space.workload(task), seed=seed)
    space.sample(sch, task)
    return sch


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", space.DTYPES)
@pytest.mark.parametrize("family", space.FAMILIES)
def test_every_tile_fits_its_chip(family: str, dtype: str, arch: str) -> None:
    task = replace(TASK, family=family, dtype=dtype, isa=arch)
    depths = space._WARP_DEPTHS if dtype in space._WARP_DTYPES else space._DEPTHS
    height = next((h for h, name in space.COLUMNS.items() if name == family), 0)
    made = [
        space._decided((form, depth, 4), task)
        for form in range(len(space._forms(task)))
        for depth in depths
    ]
    assert len(made) >= 2 * len(depths)
    for tile in (*made, *space.starting_tiles(arch, dtype, height)):
        assert (tile.family, tile.isa, tile.dtype) == (family, arch, dtype)
        assert height in (0, tile.tile_m) and 32 <= space.threads(tile) <= 512
        assert space.shared_bytes(tile) <= ARCHS[arch] * 1024
        assert tile.knob("stages") >= 2 and tile.tile_k >= min(depths)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", space.DTYPES)
def test_tiles_of_pieces_fit_their_chip_and_divide_every_piece(dtype: str, arch: str) -> None:
    (tile,) = space.starting_tiles(arch, dtype, family=space.PIECES)
    assert (tile.family, tile.isa, tile.dtype) == (space.PIECES, arch, dtype)
    assert space.DEPTH_STEP % tile.tile_k == 0 and space.threads(tile) % 32 == 0
    assert space.shared_bytes(tile) <= ARCHS[arch] * 1024


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("height", [0, *space.BANDS])
def test_float32_has_tiles_on_tensor_cores_where_it_may(height: int, arch: str) -> None:
    made = space.starting_tiles(arch, "tf32", height)
    assert made
    for tile in (*made, *space.starting_tiles(arch, "tf32", family=space.PIECES)):
        assert tile.knob("mma") == 1 and height in (0, tile.tile_m) or tile.family == space.PIECES
        assert space.shared_bytes(tile) <= ARCHS[arch] * 1024
        assert tile.knob("stages") >= 2 and tile.tile_k in (16, 32)


@pytest.mark.parametrize("family", space.FAMILIES)
def test_decisions_replay_and_are_read_back(family: str) -> None:
    task = replace(TASK, family=family)
    tiles = set()
    for seed in range(1, 9):
        sch = sampled(task, seed)
        tiles.add(space.tile_of(sch, task))
        assert_schedules(sch, space.workload(task), sch.mod["main"])
    assert len(tiles) > 4


@pytest.mark.parametrize("family", space.FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_starts_are_tiles_to_start_from(family: str, dtype: str) -> None:
    task = replace(TASK, family=family, dtype=dtype)
    height = next((h for h, name in space.COLUMNS.items() if name == family), 0)
    values = [
        (at[0], space._WARP_DEPTHS if dtype != "float32" else space._DEPTHS, at)
        for at in space.starts(task)
    ]
    made = [
        space._decided((form, depths[at[1]], space._STAGES[at[2]]), task)
        for form, depths, at in values
    ]
    assert tuple(made) == space.starting_tiles("sm_90a", dtype, height)


@pytest.mark.parametrize("task", [TASK, BANDS, replace(BANDS, dtype="int8")])
def test_a_candidate_computes_the_example(task: TileTask, emulator: Emulator) -> None:
    rng = np.random.default_rng()
    lowered = space.lower(sampled(task, int(rng.integers(1, 2**30))).mod)
    names = [str(param.name) for param in space.workload(task).params]
    assert [str(p.name) for p in lowered["main"].params][:4] == names[:4]
    data = make_example(space, task, rng)
    out = np.full(data.expected.shape, 77, data.dtype)
    kernel = emulator.compile_source(kernel_source(lowered)).mod["main"]
    kernel(*map(OnDevice, (*data.inputs, out)))
    assert np.abs(out - data.expected).max() <= data.tolerance * np.abs(data.expected).max()


@pytest.mark.parametrize(
    "task",
    [
        replace(TASK, family="rows-hopper"),
        replace(TASK, isa="avx512"),
        replace(TASK, dtype="float64"),
        replace(TASK, groups=2),
    ],
)
def test_task_of_another_kind_is_refused(task: TileTask) -> None:
    with pytest.raises(TileNotFound):
        space.workload(task)
