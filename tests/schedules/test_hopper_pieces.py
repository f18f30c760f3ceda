"""The Hopper family of live pieces of rows as CUDA source; running it needs the GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from pit_tvm.errors import ScheduleError, TileNotFound
from pit_tvm.schedules.hopper_knobs import SHARED_LIMIT
from pit_tvm.schedules.hopper_piece_parts import (
    FLIPPED,
    PIECES,
    STARTING,
    PiecesTile,
    pieces_tile,
    starting_pieces,
)
from pit_tvm.schedules.hopper_pieces import pieces_kernel
from pit_tvm.selection.gpu_pieces import range_of
from pit_tvm.structs import Tile
from tests.schedules.cuda_text import cuda_text

NARROW, WIDE = PiecesTile(1376, 32, 32, 6, 3), PiecesTile(512, 64, 48, 6, 3)
SLOTS = STARTING[0]


@pytest.mark.parametrize(
    ("dtype", "knobs", "options", "shape", "turned"),
    [
        ("float16", NARROW, {}, "m64n32k16.f32.f16.f16", "1"),
        ("bfloat16", WIDE, {"rhs_layout": "nk", "bias": True}, "m64n64k16.f32.bf16.bf16", "0"),
        ("float16", NARROW, {"flip": True, "bias": True}, "m64n32k16.f32.f16.f16", "1"),
    ],
)
def test_live_rows_are_gathered_and_their_sums_stay_in_shared_memory(
    dtype: str, knobs: PiecesTile, options: dict[str, Any], shape: str, turned: str
) -> None:
    source = cuda_text(pieces_kernel(dtype, knobs, act="relu", **options))
    body = source.split("__global__")[-1]
    assert f"wgmma.mma_async.sync.aligned.{shape}" in source
    assert set(re.findall(r"1, 1, 0, ([01]);", source)) == {turned}
    # Rows by copies of 16 bytes, weights by TMA, no sum but the CTA's own.
    assert "cp_async_cg" in body and "cp.async.bulk.tensor.2d" in source
    assert "atomicAdd" not in body and not re.search(r"\bred\.", source)
    assert "pit_relu" in body and ("bias_ptr" in body) == ("bias" in options)
    assert body.count(f"pit_load_{knobs.cols // 16}(") == 2
    # 64-byte rows of weights have a swizzle of their own.
    swizzle = 2 if knobs.cols == 32 else 3
    assert re.search(rf"encode_matrix_descriptor\(\(&\(desc_b_.*, {swizzle}\);", body)


@pytest.mark.parametrize("flip", [False, True])
def test_starting_tiles_fit_and_keep_their_knobs_as_tiles(flip: bool) -> None:
    tiles = starting_pieces("bfloat16", flip)
    assert [pieces_tile(tile) for tile in tiles] == list(FLIPPED if flip else STARTING)
    for tile, knobs in zip(tiles, FLIPPED if flip else STARTING, strict=True):
        knobs.check()
        assert knobs.shared_bytes <= SHARED_LIMIT and tile.dtype == "bfloat16"
        least, most = knobs.registers
        warpgroups = knobs.consumers * most + (knobs.warpgroups - knobs.consumers) * least
        assert 128 * warpgroups <= 65536


def test_only_tiles_with_slots_finish_rows_without_sums() -> None:
    def body(knobs: PiecesTile, **options: Any) -> str:
        return cuda_text(pieces_kernel("float16", knobs, **options)).split("__global__")[-1]

    found, plain, flipped = body(SLOTS), body(NARROW), body(FLIPPED[0], flip=True)
    # Pairs of columns change places before rows are stored; dead rows are never summed.
    assert "pit_turn_quad(" in found and "pit_turn_quad(" not in plain + flipped
    # Those that fetch leave, and those that multiply enter; all meet behind what these find.
    everyone = 128 * SLOTS.consumers + 32 * SLOTS.stages
    for verb, barrier, times in (("arrive", 2, 1), ("sync", 2, 1), ("sync", 3, 2)):
        calls = rf"bar_{verb}\w*\(\(uint\){barrier}, \(uint\){everyone}\)"
        assert [len(re.findall(calls, b)) for b in (found, plain)] == [times, 0]
    # Who fetches waits until a stage is free, and for what is known of a tile.
    waits = [b.split("setmaxnreg_inc")[0].count("mbarrier_wait(") for b in (found, plain)]
    assert waits == [2, 1]
    assert "pit_put(" in found and "pit_put(" in flipped and "pit_put(" not in plain


def test_rows_with_one_piece_wait_in_16_bits_where_columns_are_stored() -> None:
    def body(dtype: str, knobs: PiecesTile, **options: Any) -> str:
        return cuda_text(pieces_kernel(dtype, knobs, **options)).split("__global__")[-1]

    for dtype, name in (("float16", "half"), ("bfloat16", "nv_bfloat16")):
        slots, plain = (body(dtype, knobs, flip=True) for knobs in (FLIPPED[0], NARROW))
        halves = rf"\*\({name} \*\)\(&\("  # 16 bits of a word as they are
        assert re.search(halves, slots) and not re.search(halves, plain)
        assert "st_vec_shared_v4_b32(" in slots and "st_vec_shared_v4_b32(" not in plain
        # One look for each row of a word, by a lane of its own.
        assert slots.count("__shfl_sync") > 16 <= plain.count("__shfl_sync")


@pytest.mark.parametrize("m", [1, 31, 32, 33, 500, 512, 513, 4096, 5000, 100_000])
@pytest.mark.parametrize("knobs", [*STARTING, FLIPPED[0], PiecesTile(64), PiecesTile(1376)])
def test_ranges_are_even_begin_at_words_and_fit(m: int, knobs: PiecesTile) -> None:
    tile = Tile("", "", "float16", knobs.rows, knobs.cols, 64, (("slots", knobs.slots),))
    tile = replace(tile, knobs=(*tile.knobs, ("stages", knobs.stages)))
    for n in (8, 768, 4096):
        high = range_of(m, n, 4096, tile)
        assert 0 < high <= knobs.most_rows and high % 32 == 0
        if not knobs.slots:  # as few as may be
            assert -(-m // high) <= -(-m // knobs.rows)


def test_ranges_of_tiles_with_slots_let_ctas_end_together() -> None:
    tile = starting_pieces("float16")[0]
    # Of 128 columns of tiles each CTA takes one, of 24 there are five ranges for every one.
    assert range_of(4096, 4096, 4096, tile) == 4096
    assert 132 * 0.9 < 24 * -(-2048 // range_of(2048, 768, 3072, tile)) <= 132
    # Two tiles of all rows for a CTA are less work than four of a third of them.
    assert range_of(3000, 5120, 2560, tile) == 3008


@pytest.mark.parametrize(
    ("knobs", "word"),
    [
        ({"rows": 504}, "rows"),
        ({"rows": 528}, "slots 0, for whole words"),
        ({"slots": 2}, "slots"),
        ({"cols": 128}, "cols"),
        ({"room": 44}, "room"),
        ({"consumers": 1}, "consumers"),
        ({"stages": 6, "consumers": 4}, "stages"),
        ({"stages": 0}, "stages"),
        ({"rows": 1024}, "shared memory"),
    ],
)
def test_a_tile_that_cannot_be_built_says_which_rule_it_breaks(
    knobs: dict[str, int], word: str
) -> None:
    with pytest.raises(ScheduleError, match=word):
        pieces_kernel("float16", PiecesTile(**knobs))


@pytest.mark.parametrize(
    ("options", "word"),
    [({"dtype": "float32"}, "dtype"), ({"act": "tanh"}, "act"), ({"rhs_layout": "mk"}, "layout")],
)
def test_options_that_no_kernel_can_have_are_refused(options: dict[str, str], word: str) -> None:
    with pytest.raises(ScheduleError, match=word):
        pieces_kernel(**{"dtype": "float16", "knobs": WIDE, **options})


def test_tiles_of_others_and_unknown_knobs_are_refused() -> None:
    tile = starting_pieces("float16")[0]
    assert tile.family == PIECES
    for wrong in (
        replace(tile, family="rows-hopper"),
        replace(tile, knobs=(("lag", 1),)),
        replace(tile, tile_m=40),
    ):
        with pytest.raises(TileNotFound):
            pieces_tile(wrong)
