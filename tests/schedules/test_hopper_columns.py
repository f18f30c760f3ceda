"""The Hopper k-axis family as CUDA source; running it needs the GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from pit_tvm.errors import ScheduleError, TileNotFound
from pit_tvm.schedules.hopper_bands import (
    COLUMNS,
    FLIPPED,
    HEIGHTS,
    RANGES,
    STARTING,
    ColumnsTile,
    columns_tile,
    starting_columns,
    starting_ranges,
)
from pit_tvm.schedules.hopper_columns import columns_kernel
from pit_tvm.schedules.hopper_knobs import SHARED_LIMIT
from pit_tvm.structs import Tile
from tests.schedules.cuda_text import cuda_text


def source_of(dtype: str = "float16", knobs: ColumnsTile | None = None, **options: Any) -> str:
    return cuda_text(columns_kernel(dtype, knobs or ColumnsTile(), **options))


def body_of(**options: Any) -> str:
    return source_of(**options).split("__global__")[-1]


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "f16"), ("bfloat16", "bf16")])
def test_both_operands_are_gathered_and_read_with_their_rows_as_the_depth(
    dtype: str, kind: str
) -> None:
    source = source_of(dtype)
    assert f"wgmma.mma_async.sync.aligned.m64n256k16.f32.{kind}.{kind}" in source
    assert set(re.findall(r"ps0, 1, 1, ([01], [01]);", source)) == {"1, 1"}
    assert "cp.async.cg.shared.global" in source and "cp.async.bulk" not in source


def test_only_groups_of_the_depth_with_live_rows_are_multiplied() -> None:
    found = [body_of(knobs=ColumnsTile(tile_k=k, tile_n=64)) for k in (32, 64)]
    calls = [len(re.findall(r"m64n64k16\w*\(", body)) for body in found]
    assert calls == [1 + 2, 1 + 2 + 3 + 4]


@pytest.mark.parametrize("height", HEIGHTS)
def test_a_warp_fetches_a_quarter_of_the_rows_of_both_operands(height: int) -> None:
    shared = int(height == 128)
    body = body_of(knobs=ColumnsTile(height, 256, shared=shared))
    # 64 rows: of 256 columns by 4 warps of 32 lanes with 8 columns each, and of ``height``.
    assert len(re.findall(r"pit_fetch\(", body)) == 16 + height // 16


@pytest.mark.parametrize("height", [32, 64])
def test_two_warpgroups_share_the_columns_of_a_wide_tile(height: int) -> None:
    knobs = ColumnsTile(height, 512, 32, stages=4, shared=2)
    assert (knobs.columns, knobs.blocks, knobs.part.tile_n) == (256, 1, 256)
    body = body_of(knobs=knobs)
    # 32 rows of 512 columns: 8 rows for each warp, in two pieces of 32 x 8 columns.
    assert len(re.findall(r"pit_fetch\(", body)) == 16 + height // 32
    assert "m64n256k16" in body and "m64n512" not in body


def test_packed_columns_bias_and_activation_are_parameters() -> None:
    plain = body_of(knobs=ColumnsTile(tile_n=64))
    full = body_of(knobs=ColumnsTile(tile_n=64), bias=True, act="relu", packed=True)
    assert "parts_ptr" not in plain and "bias_ptr" not in plain and "bias_ptr" in full
    assert "pit_relu" not in plain and "pit_relu" in full
    assert "capacity" in full


@pytest.mark.parametrize("height", HEIGHTS)
def test_bands_of_a_product_turned_are_the_instructions_columns(height: int) -> None:
    knobs = ColumnsTile(height, shared=2)
    body = body_of(knobs=knobs, flip=True, bias=True)
    assert f"m64n{height}k16" in body
    assert knobs.flipped_part.tile_m == 256 and knobs.flipped_part.tile_n == height
    for wrong in ({"knobs": ColumnsTile(128, shared=1)}, {"knobs": knobs, "common": True}):
        with pytest.raises(ScheduleError, match="turned|flip"):
            columns_kernel("float16", flip=True, **wrong)


def test_with_one_list_ctas_share_out_the_depth_and_exchange_sums() -> None:
    knobs = ColumnsTile(128, 128, shared=1)
    body = body_of(knobs=knobs, common=True)
    assert knobs.parts_shape == (528, 64, 128)
    assert len(re.findall(r"pit_post\(", body)) == len(re.findall(r"pit_await\(", body)) == 1
    assert len(re.findall(r"parts_ptr\[\S.* = acc_ptr", body)) == 64


@pytest.mark.parametrize("knobs", STARTING + RANGES + FLIPPED)
def test_starting_tiles_fit_and_keep_their_knobs_as_tiles(knobs: ColumnsTile) -> None:
    knobs.check()
    assert knobs.shared_bytes <= SHARED_LIMIT
    flip, one_list = knobs in FLIPPED, knobs in RANGES
    banded = starting_columns("bfloat16", knobs.height, flip)
    tiles = starting_ranges("bfloat16") if one_list else banded
    assert knobs in [columns_tile(tile) for tile in tiles]
    assert {tile.dtype for tile in tiles} == {"bfloat16"}


@pytest.mark.parametrize(
    ("knobs", "word"),
    [
        ({"height": 48}, "height"),
        ({"shared": 1}, "shared"),
        ({"tile_n": 100}, "tile_n"),
        ({"tile_n": 192, "shared": 2}, "columns"),
        ({"height": 128}, "accumulators"),
        ({"tile_k": 16}, "tile_k"),
        ({"stages": 1}, "stages"),
        ({"stages": 9}, "shared memory"),
        ({"store_cols": 48}, "store_cols"),
    ],
)
def test_a_tile_that_cannot_be_built_says_which_rule_it_breaks(
    knobs: dict[str, int], word: str
) -> None:
    with pytest.raises(ScheduleError, match=word):
        columns_kernel("float16", ColumnsTile(**knobs))


@pytest.mark.parametrize(("shared", "packed"), [(0, False), (1, True)])
def test_one_list_needs_tiles_that_are_shared_and_rows_of_k(shared: int, packed: bool) -> None:
    with pytest.raises(ScheduleError, match="packed" if packed else "shared"):
        columns_kernel("float16", ColumnsTile(128, 128, shared=shared), packed=packed, common=True)


@pytest.mark.parametrize(("dtype", "act"), [("float32", "none"), ("float16", "tanh")])
def test_options_that_no_kernel_can_have_are_refused(dtype: str, act: str) -> None:
    with pytest.raises(ScheduleError, match="dtype" if act == "none" else "act"):
        columns_kernel(dtype, ColumnsTile(), act=act)


def test_tiles_of_others_and_unknown_knobs_are_refused() -> None:
    tile = starting_columns("float16", 32)[0]
    assert tile.family == COLUMNS
    for wrong in (
        replace(tile, family="rows-hopper"),
        replace(tile, knobs=(("lag", 1),)),
        replace(tile, tile_k=48),
        Tile(COLUMNS, "sm_90a", "float16", 40, 256, 64),
    ):
        with pytest.raises(TileNotFound):
            columns_tile(wrong)
