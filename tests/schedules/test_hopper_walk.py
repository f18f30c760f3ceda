"""Every tile is one CTA's: the walk of the m-axis family, run on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from pit_tvm.schedules.hopper_rows import RowsTile
from pit_tvm.schedules.hopper_walk import TileWalk
from tests.runtime.cuda_emulation import Emulator, OnDevice
from tests.schedules.cuda_text import cuda_text

HIGH, WIDE, SMS, MOST = 128, 64, 6, 32
PART = HIGH // 2  # rows that one of two warpgroups computes
COUNTS = (0, 1, HIGH // 2, HIGH - 1, HIGH, HIGH + 1, 2 * HIGH, 3 * HIGH, 5 * HIGH - 7, 9 * HIGH + 1)


def visits(knobs: RowsTile, slot: int) -> tvm.tirx.PrimFunc:
    """Each part of a tile (group, part of a band, block of columns) gets 1 for each CTA that
    computes it, and each CTA the number of its turns."""

    @T.prim_func
    def kernel(p_count: T.handle, p_seen: T.handle, p_turns: T.handle, n: T.int32):
        groups = T.int32()
        parts = T.int32()
        blocks = T.int32()
        count = T.match_buffer(p_count, (groups,), "int32", align=4)
        seen = T.match_buffer(p_seen, (groups, parts, blocks), "int32", align=4)
        turns = T.match_buffer(p_turns, (SMS,), "int32", align=4)
        T.device_entry()
        cta = T.cta_id([SMS])
        lane = T.thread_id([32])
        pool = T.SMEMPool()
        walk = TileWalk(pool, count, groups, n, knobs, WIDE, slot)
        pool.commit()
        if knobs.most_groups > 1:
            walk.arrange(lane, 32)
            walk.prefix(lane)
        T.cuda.cta_sync()
        walk.begin(T.truncdiv(cta, knobs.cluster))
        while walk.more():
            walk.locate(T.truncmod(cta, knobs.cluster))
            if lane == 0:
                turns[cta] = turns[cta] + 1
                block: T.let = T.truncdiv(walk.col0 - walk.group * slot, WIDE)
                for warpgroup in range(2):
                    row: T.let = walk.row0 + warpgroup * PART
                    if row < walk.live:
                        part: T.let = T.truncdiv(row, PART)
                        seen[walk.group, part, block] = seen[walk.group, part, block] + 1
            walk.advance()

    return kernel


@pytest.mark.parametrize(("slot", "raster"), [(0, 1), (0, 4), (3 * WIDE, 4)])
@pytest.mark.parametrize("cluster", [1, 2])
def test_every_tile_is_computed_once_and_few_ctas_rest(
    emulator: Emulator, cluster: int, slot: int, raster: int
) -> None:
    rng = np.random.default_rng([cluster, raster])
    kernels: dict[int, Any] = {}
    for most in (1, MOST):
        knobs = RowsTile(cluster=cluster, raster=raster, most_groups=most, sms=SMS)
        kernels[most] = emulator.compile_source(cuda_text(visits(knobs, slot))).mod["main"]
    for number in (1, 2, 7, MOST):
        for blocks in (3,) if slot else (1, 2, 5):
            counts = rng.choice(COUNTS[number == 1 :], number).astype(np.int32)
            n = blocks * WIDE - int(rng.integers(0, WIDE // 8)) * 8
            bands, parts = -(-counts // HIGH), -(-counts // PART)
            seen = np.zeros((number, int(parts.max()) + 2, blocks), np.int32)
            turns = np.zeros(SMS, np.int32)
            kernel = kernels[1 if number == 1 else MOST]
            kernel(OnDevice(counts), OnDevice(seen), OnDevice(turns), n * number if slot else n)
            want = np.arange(seen.shape[1]) < parts[:, None]
            np.testing.assert_array_equal(seen, np.repeat(want[..., None], blocks, axis=2))
            resting = int((bands % cluster).sum()) * (blocks % cluster)
            tiles = int(bands.sum()) * blocks + resting
            last = tiles % SMS  # of the last round, in halves where all have a place
            assert turns.sum() == tiles + last * (2 * last <= SMS)
            assert np.ptp(turns) <= 1
