"""Records that the layers share."""

from __future__ import annotations

import pickle
from dataclasses import replace

from pit_tvm.structs import MicroTile, Tile


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
