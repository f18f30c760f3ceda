"""The k-axis family with a list and a product for every group: its walk on a CPU, its source."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError
from pit_tvm.schedules.hopper_bands import STRIP, ColumnsTile, GroupWalk, starting_ranges
from pit_tvm.schedules.hopper_columns import columns_kernel
from pit_tvm.selection.gpu_columns import outer_tile
from tests.runtime.cuda_emulation import Emulator, OnDevice
from tests.schedules.cuda_text import cuda_text

SMS = 5
KNOBS = ColumnsTile(64, 64, sms=SMS)


def visits() -> tvm.tirx.PrimFunc:
    """Each tile (group, band, block of columns) gets 1 from its CTA, with what the walk says of the
    tile and of the next one: live, steps, the group's first row, the list and the next list."""

    @T.prim_func
    def kernel(p_count: T.handle, p_seen: T.handle, p_said: T.handle, m: T.int32, n: T.int32):
        groups = T.int32()
        bands = T.int32()
        blocks = T.int32()
        count = T.match_buffer(p_count, (groups,), "int32", align=4)
        seen = T.match_buffer(p_seen, (groups, bands, blocks), "int32", align=4)
        said = T.match_buffer(p_said, (groups, bands, blocks, 5), "int32", align=4)
        T.device_entry()
        cta = T.cta_id([SMS])
        lane = T.thread_id([32])
        walk = GroupWalk(count, groups, m, n, KNOBS)
        walk.begin(cta)
        while walk.more():
            walk.take()
            if lane == 0:
                block: T.let = T.truncdiv(walk.col0, 64)
                seen[walk.group, walk.band, block] = seen[walk.group, walk.band, block] + 1
                said[walk.group, walk.band, block, 0] = walk.live
                said[walk.group, walk.band, block, 1] = walk.steps
                said[walk.group, walk.band, block, 2] = walk.out0
                said[walk.group, walk.band, block, 3] = walk.list_of(walk.band)
                said[walk.group, walk.band, block, 4] = walk.then

    return kernel


def test_every_tile_of_every_group_is_computed_once(emulator: Emulator) -> None:
    kernel = emulator.compile_source(cuda_text(visits())).mod["main"]
    rng = np.random.default_rng()
    for groups, m, n in ((1, 8, 8), (3, 64, 200), (7, 200, 64), (40, 8, 72), (2, 1200, 200)):
        counts = rng.integers(0, 300, groups).astype(np.int32)
        bands, blocks = -(-m // 64), -(-n // 64)
        seen = np.zeros((groups, bands, blocks), np.int32)
        said = np.full((*seen.shape, 5), -1, np.int32)
        kernel(OnDevice(counts), OnDevice(seen), OnDevice(said), m, n)
        assert (seen == 1).all()
        group, band, block = np.ogrid[:groups, :bands, :blocks]
        first = band // STRIP * STRIP  # of the strip, whose columns come one after the other
        tile = (group * bands + first) * blocks + block * np.minimum(bands - first, STRIP)
        after = np.minimum((tile + band - first + SMS) // (bands * blocks), groups - 1)
        shown = (counts[group], -(-counts[group] // 64), m * group, group, after)
        for place, want in enumerate(shown):
            np.testing.assert_array_equal(said[..., place], np.broadcast_to(want, seen.shape))


def body_of(share: int) -> str:
    return cuda_text(columns_kernel("bfloat16", ColumnsTile(tile_n=64), share=share)).split(
        "__global__"
    )[-1]


def test_choices_share_a_row_of_the_right_operand() -> None:
    one, six = body_of(1), body_of(6)
    assert not re.search(r"held\w* / 6", one) and len(re.findall(r"held\w*\[?\w*\]? / 6", six)) == 1


@pytest.mark.parametrize("option", ["packed", "common", "flip", "bias"])
def test_groups_exclude_other_ways(option: str) -> None:
    knobs = ColumnsTile(128, shared=1) if option == "common" else ColumnsTile()
    with pytest.raises(ScheduleError, match="no share that is packed, common, flip or has a bias"):
        columns_kernel("float16", knobs, share=1, **{option: True})
    with pytest.raises(ScheduleError, match="share"):
        columns_kernel("float16", share=-1, knobs=ColumnsTile())


def test_a_tile_is_as_wide_as_its_columns_are_many() -> None:
    tiles: Any = starting_ranges("bfloat16")
    widths = [outer_tile(tiles, columns).tile_n for columns in (8, 64, 65, 128, 192, 256, 1408)]
    assert widths == [64, 64, 128, 128, 192, 256, 256]
