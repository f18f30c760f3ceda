"""Records that the layers share."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pit_tvm.errors import DatabaseError, ShapeError
from pit_tvm.structs import (
    BlockMask,
    Candidate,
    Grid,
    Groups,
    Index,
    Lengths,
    Mask,
    MicroTile,
    Rows,
    Tile,
)


def test_a_hash_is_kept_and_stays_in_its_process() -> None:
    tile = Tile("rows", "avx512", "float32", 192, 512, 128, (("reg_m", 12),))
    same = replace(tile)
    assert hash(tile) == hash(same) == hash(tile) and tile == same
    assert "_hash" not in tile.__getstate__()  # type: ignore[attr-defined]
    copy = pickle.loads(pickle.dumps(tile))
    assert copy == tile and "_hash" not in vars(copy) and hash(copy) == hash(tile)
    assert hash(replace(tile, tile_m=64)) != hash(tile)
    other = MicroTile("lhs", "m", 0, (1, 0))
    assert {other: 1}[MicroTile("lhs", "m", 0, (1, 0))] == 1


def test_a_knob_that_a_record_lacks_is_an_error_of_its_database() -> None:
    tile = Tile("rows", "avx512", "float32", 192, 512, 128, (("unknown", 12),))
    assert tile.knob("unknown") == 12
    with pytest.raises(DatabaseError, match="reg_m of a tile of rows, got unknown"):
        tile.knob("reg_m")


def test_what_is_gathered_on_two_axes_has_an_index_of_each() -> None:
    rows = MicroTile("lhs", "m", 0, (1, 0))
    both = replace(rows, also=MicroTile("lhs", "k", 1, (0, 1)))
    assert str(both) == "1x* and *x1" and both != rows
    index = Index("ids", "count", also=Index("ids_k", "count_k", ("taken", "also")))
    assert index.arguments == ("ids", "count", "taken", "also")
    assert Grid() == Grid() != Mask(1, 1) and Grid().promises_zero


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_integers_of_numpy_are_kept_as_those_of_python(kind: Any) -> None:
    for spec, same in (
        (Mask(kind(32), 1), Mask(32, 1)),
        (BlockMask(kind(8), kind(4)), BlockMask(8, 4)),
        (Rows(kind(1)), Rows(1)),
        (Lengths(kind(1), cumulative=True), Lengths(1, cumulative=True)),
        (Groups(kind(3), kind(1)), Groups(3, 1)),
    ):
        assert spec == same and repr(spec) == repr(same) and hash(spec) == hash(same)


@pytest.mark.parametrize("extent", [True, np.True_, 1.0, np.float32(1), "1", None, 0, np.int64(-1)])
def test_what_is_no_integer_is_no_extent(extent: Any) -> None:
    with pytest.raises(ShapeError, match="^Mask: expected extents that are integers"):
        Mask(extent, 1)
    if extent != 0:
        with pytest.raises(ShapeError, match="^Groups.num_groups: expected an integer"):
            Groups(extent)


@pytest.mark.parametrize("extent", [-3, 1.5, "64", None])
def test_micro_tiles_have_whole_extents(extent: Any) -> None:
    with pytest.raises(ShapeError, match="^MicroTile.extents: expected integers of at least 0"):
        MicroTile("lhs", "m", 0, (1, extent))


@pytest.mark.parametrize("value", ["no", 1, 0, None, [True]])
def test_lengths_are_cumulative_or_not(value: Any) -> None:
    with pytest.raises(ShapeError, match="^Lengths.cumulative: expected True or False, got"):
        Lengths(cumulative=value)


def test_candidates_that_run_the_same_go_one_way_whatever_they_cost() -> None:
    tile, micro_tile = Tile("f", "sm_90a", "float16", 64, 64, 64), MicroTile("lhs", "m", 0, (1, 64))
    choice = Candidate("pit", micro_tile, tile, 2.0, (("product", 2.0),), 0.5)
    assert choice.way == choice._replace(cost_us=3.0, parts=(), covered=0.1).way
    for other in (
        Candidate("dense", None, None, 2.0),
        choice._replace(tile=replace(tile, tile_m=128)),
        choice._replace(micro_tile=replace(micro_tile, axis="k")),
    ):
        assert choice.way != other.way
