"""The Hopper family of live blocks as CUDA source; running it needs the GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from pit_tvm.errors import ScheduleError, TileNotFound
from pit_tvm.schedules.hopper_block_parts import (
    BLOCKS,
    HEIGHTS,
    LHS_HEIGHTS,
    PANEL,
    STARTING,
    BlocksTile,
    blocks_tile,
    starting_blocks,
)
from pit_tvm.schedules.hopper_blocks import blocks_kernel
from pit_tvm.schedules.hopper_knobs import SHARED_LIMIT
from pit_tvm.structs import Tile
from tests.schedules.cuda_text import cuda_text


def source_of(dtype: str = "float16", knobs: BlocksTile | None = None, **options: Any) -> str:
    return cuda_text(blocks_kernel(dtype, knobs or BlocksTile(64, 128), **options))


def body_of(**options: Any) -> str:
    return source_of(**options).split("__global__")[-1]


@pytest.mark.parametrize(
    ("side", "layouts", "dtype", "shape", "turned"),
    [
        ("lhs", ("mk", "kn"), "float16", "m64n64k16.f32.f16.f16", "0, 1"),
        ("lhs", ("km", "nk"), "bfloat16", "m64n64k16.f32.bf16.bf16", "1, 0"),
        ("rhs", ("mk", "nk"), "float16", "m64n64k16.f32.f16.f16", "0, 0"),
        ("rhs", ("km", "kn"), "float16", "m64n64k16.f32.f16.f16", "1, 1"),
    ],
)
def test_operands_are_read_as_they_are_stored(
    side: str, layouts: tuple[str, str], dtype: str, shape: str, turned: str
) -> None:
    source = source_of(dtype, side=side, lhs_layout=layouts[0], rhs_layout=layouts[1])
    assert f"wgmma.mma_async.sync.aligned.{shape}" in source
    assert set(re.findall(r"ps0, 1, 1, ([01], [01]);", source)) == {turned}
    assert "cp.async.bulk.tensor.2d" in source and "pit_fetch" not in source


@pytest.mark.parametrize(
    ("side", "knobs", "shape"),
    [
        ("lhs", BlocksTile(32, 256), "m64n128k16"),
        ("lhs", BlocksTile(128, 256, stages=4), "m64n128k16"),
        ("rhs", BlocksTile(32, 256), "m64n32k16"),
        ("rhs", BlocksTile(256, 128, stages=4), "m64n256k16"),
        ("lhs", BlocksTile(64, 256, shared=0), "m64n256k16"),
    ],
)
def test_bands_are_rows_of_the_instruction_or_its_columns(
    side: str, knobs: BlocksTile, shape: str
) -> None:
    assert shape in source_of(knobs=knobs, side=side)


@pytest.mark.parametrize(
    ("side", "layouts", "boxes"),
    [
        ("lhs", ("km", "kn"), 1 + 4),
        ("lhs", ("mk", "nk"), 1 + 1),
        ("rhs", ("km", "kn"), 4 + 1),
        ("rhs", ("mk", "nk"), 1 + 1),
    ],
)
def test_no_more_of_a_low_band_is_fetched_than_it_has(
    side: str, layouts: tuple[str, str], boxes: int
) -> None:
    own = {"side": side, "lhs_layout": layouts[0], "rhs_layout": layouts[1]}
    body = body_of(knobs=BlocksTile(32, 256, stages=3, store_cols=32), **own)
    fetched = set(re.findall(r"expect_tx.*, \(uint\)(\d+)\);", body))
    assert fetched == {str((32 + 256) * 64 * 2)}
    assert len(re.findall(r"cp_async_bulk_tensor\w*\(", body)) == boxes * PANEL


def test_bias_and_activation_are_parameters() -> None:
    plain, full = body_of(), body_of(bias=True, act="relu")
    assert "bias_ptr" not in plain and "bias_ptr" in full
    assert "pit_relu" not in plain and "pit_relu" in full


def test_one_warp_reads_the_map_and_asks_for_stages() -> None:
    body = body_of()
    assert body.count("ballot_sync") == 4 and "live_ptr" in body and "atomic" not in body


@pytest.mark.parametrize(("side", "heights"), [("lhs", LHS_HEIGHTS), ("rhs", HEIGHTS)])
def test_starting_tiles_fit_and_keep_their_knobs_as_tiles(
    side: str, heights: tuple[int, ...]
) -> None:
    assert {knobs.height for knobs in STARTING[side]} == set(heights)
    for height in heights:
        tiles = starting_blocks("bfloat16", side, height)
        assert tiles and {(tile.dtype, tile.tile_m) for tile in tiles} == {("bfloat16", height)}
        for tile in tiles:
            knobs = blocks_tile(tile)
            knobs.check(side)
            assert knobs in STARTING[side] and knobs.shared_bytes <= SHARED_LIMIT


@pytest.mark.parametrize(
    ("knobs", "side", "word"),
    [
        ({"height": 48}, "rhs", "height"),
        ({"height": 256, "other": 128}, "lhs", "height"),
        ({"other": 192}, "lhs", "other"),
        ({"height": 128, "shared": 0, "stages": 4}, "lhs", "accumulators"),
        ({"shared": 2}, "lhs", "shared 0 or 1"),
        ({"stages": 1}, "lhs", "stages"),
        ({"stages": 9}, "lhs", "shared memory"),
        ({"store_cols": 48}, "lhs", "store_cols"),
    ],
)
def test_a_tile_that_cannot_be_built_says_which_rule_it_breaks(
    knobs: dict[str, int], side: str, word: str
) -> None:
    with pytest.raises(ScheduleError, match=word):
        blocks_kernel("float16", BlocksTile(**knobs), side=side)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"act": "tanh"}, "act"),
        ({"side": "out"}, "side"),
        ({"lhs_layout": "kn"}, "lhs_layout"),
        ({"rhs_layout": "mk"}, "rhs_layout"),
    ],
)
def test_options_that_no_kernel_can_have_are_refused(options: dict[str, str], word: str) -> None:
    with pytest.raises(ScheduleError, match=word):
        blocks_kernel(**{"dtype": "float16", "knobs": BlocksTile(), **options})


def test_tiles_of_others_and_unknown_knobs_are_refused() -> None:
    tile = starting_blocks("float16", "lhs", 32)[0]
    assert tile.family == BLOCKS
    for wrong in (
        replace(tile, family="rows-hopper"),
        replace(tile, knobs=(("lag", 1),)),
        Tile(BLOCKS, "sm_90a", "float16", 40, 256, 64),
    ):
        with pytest.raises(TileNotFound):
            blocks_tile(wrong)
