"""Rows of zeros beside a product: what the warps of its kernel store, run on a CPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError
from pit_tvm.schedules.hopper_dead import BESIDE, PIECE, DeadRows
from pit_tvm.schedules.hopper_rows import RowsTile, rows_kernel
from tests.runtime.cuda_emulation import Emulator, OnDevice
from tests.schedules.cuda_text import cuda_text

SMS, CONSUMERS = 3, 2
TILES = [
    RowsTile(),
    RowsTile(tile_n=192, stages=5, cluster=2),
    RowsTile(tile_m=144, tile_n=256, flip=1),
    RowsTile(tile_m=128, tile_n=128, stages=6, cluster=2, flip=1),
]


def stored_beside(rest: bool) -> tvm.tirx.PrimFunc:
    """What a kernel of rows does about dead ones in ``steps`` steps of each CTA's producer, and
    with ``rest`` in its consumers."""

    @T.prim_func
    def kernel(p_ids: T.handle, p_count: T.handle, p_out: T.handle, steps: T.int32):
        capacity = T.int32()
        rows = T.int32()
        n = T.int32()
        ids = T.match_buffer(p_ids, (1, capacity), "int32", align=4)
        count = T.match_buffer(p_count, (1,), "int32", align=4)
        out = T.match_buffer(p_out, (rows, n), "float16", align=16)
        T.device_entry()
        cta = T.cta_id([SMS])
        thread = T.thread_id([(1 + CONSUMERS) * 32])
        warp: T.let = T.truncdiv(thread, 32)
        lane: T.let = T.truncmod(thread, 32)
        zeros = DeadRows(ids, count, out, SMS)
        if warp == 0:
            zeros.begin_beside(cta, steps, lane)
            for _ in T.serial(steps):
                zeros.store_beside(lane)
        elif rest:
            zeros.store_rest(cta, steps, warp - 1, CONSUMERS, lane)

    return kernel


def run(
    kernel: Any, rng: np.random.Generator, rows: int, n: int, dead: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of dead rows, and which rows are zeros afterwards; the others must be as they were."""
    out = np.full((rows, n), np.nan, np.float16)
    ids = np.full((1, rows + 32), 2**30, np.int32)  # ids behind the count are not to be read
    ids[0, :dead] = rng.permutation(rows)[:dead]
    kernel(OnDevice(ids), OnDevice(np.array([dead], np.int32)), OnDevice(out), steps)
    zeroed = (out == 0).all(axis=1)
    assert np.isnan(out[~zeroed]).all()
    return ids[0, :dead], np.flatnonzero(zeroed)


@pytest.fixture
def stores(emulator: Emulator) -> Any:
    """The kernel of a producer with its consumers, or of a producer alone."""
    return lambda rest: emulator.compile_source(cuda_text(stored_beside(rest))).mod["main"]


@pytest.mark.parametrize("steps", [0, 1, 5, 400])
def test_every_dead_row_and_no_other_becomes_zeros(stores: Any, steps: int) -> None:
    kernel, rng = stores(True), np.random.default_rng(steps)
    for rows, n in ((1, 8), (40, PIECE), (333, 72), (700, 8), (130, 2 * PIECE + 8)):
        for dead in {0, 1, rows // 3, rows}:
            want, got = run(kernel, rng, rows, n, dead, steps)
            assert sorted(want) == list(got)


@pytest.mark.parametrize(("n", "steps"), [(PIECE, 2), (PIECE + 8, 10), (8, 30)])
def test_steps_hide_what_they_can(stores: Any, n: int, steps: int) -> None:
    each = steps * BESIDE // -(-n // PIECE)  # rows of a CTA
    for rows in (SMS * each, SMS * each + 50):
        want, got = run(stores(False), np.random.default_rng(n), rows, n, rows, steps)
        assert sorted(want[: SMS * each]) == list(got)


@pytest.mark.parametrize("knobs", TILES)
def test_kernels_of_rows_store_them_if_asked(knobs: RowsTile) -> None:
    plain, fills = (cuda_text(rows_kernel("float16", knobs, fills=f)) for f in (False, True))
    assert "deads_ptr" not in plain and "int* __restrict__ deads_ptr" in fills
    body = fills[fills.index('extern "C" __global__') :]
    # Producer and consumers share them out alike, by the steps of the CTA's tiles.
    shared = re.findall(r"zeros_beside_ptr\[0\] = (.*);", body)
    assert len(shared) == 2 and len(set(shared)) == 1 and "walk_total_ptr" in shared[0]
    assert body.count("min(zeros_left_ptr[0], zeros_pace_ptr[0])") == 1


@pytest.mark.parametrize(
    ("knobs", "options"), [({"most_groups": 256}, {}), ({}, {"accumulate": 1}), ({}, {"slot": 256})]
)
@pytest.mark.parametrize("flip", [0, 1])
def test_dead_rows_are_those_of_one_list(
    flip: int, knobs: dict[str, int], options: dict[str, int]
) -> None:
    tile = RowsTile(tile_m=64, tile_n=256, flip=flip, consumers=2 - (not flip), **knobs)
    with pytest.raises(ScheduleError, match="for fills"):
        rows_kernel("float16", tile, fills=True, **options)
