"""Records that the layers share."""

from __future__ import annotations

import pickle
from dataclasses import replace

from pit_tvm.structs import Grid, Index, Mask, MicroTile, Tile


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


def test_what_is_gathered_on_two_axes_has_an_index_of_each() -> None:
    rows = MicroTile("lhs", "m", 0, (1, 0))
    both = replace(rows, also=MicroTile("lhs", "k", 1, (0, 1)))
    assert str(both) == "1x* and *x1" and both != rows
    index = Index("ids", "count", also=Index("ids_k", "count_k", ("taken", "also")))
    assert index.arguments == ("ids", "count", "taken", "also")
    assert Grid() == Grid() != Mask(1, 1) and Grid().promises_zero
