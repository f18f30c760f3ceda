"""Parts of the Hopper k-axis family: its knobs, its tiles, and which tile is computed next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx

from pit_tvm.structs import Tile

from .hopper_knobs import SHARED_LIMIT, RowsTile, as_tile, knobs_of, require

COLUMNS = "columns-hopper"
HEIGHTS = (32, 64, 128)  # rows of a band
STRIP = 16  # bands of a group that are computed at once, beside half as many columns of tiles
_EXTENTS = ("height", "tile_n", "tile_k")


@dataclass(frozen=True)
class ColumnsTile:
    """Knobs of the family; every field is a tuning decision but ``height``, the micro-tile's.

    ``shared``: the two warpgroups that multiply share tiles, with 64 rows each of 128 (1) or half
    of the columns each (2). Otherwise (0) they take tiles in turn: one writes while the other
    multiplies.
    """

    height: int = 64
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    shared: int = 0
    store_cols: int = 64
    sms: int = 132

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows of one consumer."""
        return 1 if self.shared == 1 else -(-self.height // 64)

    @property
    def columns(self) -> int:
        """Columns of one consumer."""
        return self.tile_n // 2 if self.shared == 2 else self.tile_n

    @property
    def part(self) -> RowsTile:
        """The accumulators of both consumers side by side, for the epilogue."""
        return RowsTile(
            tile_m=128 * self.blocks, tile_n=self.columns, stages=2, store_cols=self.store_cols
        )

    @property
    def flipped_part(self) -> RowsTile:
        """The same where the product is turned: columns are rows then."""
        stored = min(self.store_cols, self.height)
        return RowsTile(tile_m=2 * self.columns, tile_n=self.height, stages=2, store_cols=stored)

    @property
    def parts_shape(self) -> tuple[int, int, int]:
        """Of sums that CTAs exchange: warpgroups with parts of tiles, sums of a thread, threads."""
        return self.sms * 4, self.blocks * (self.columns // 2), 128

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of one CTA."""
        wide = -(-self.height // 64) * 64 + self.tile_n
        staged = 8 * (16 * (self.store_cols + 8) + 256) * 2
        return 1024 + self.stages * wide * self.tile_k * 2 + staged + 16 * self.stages + 16

    def check(self) -> None:
        """Raise ScheduleError (a ValueError) for a combination that the template cannot build."""
        rules = {
            f"height one of {HEIGHTS}": self.height in HEIGHTS,
            "shared 0, 2, or 1 for height 128": self.shared in (0, 2, self.height // 128),
            "64, 128, 192 or 256 columns of tile_n for a consumer": self.columns
            in (64, 128, 192, 256),
            "at most 128 accumulators per thread": self.blocks * self.columns <= 256,
            "tile_k 32 or 64": self.tile_k in (32, 64),
            "2 stages or more": self.stages >= 2,
            "store_cols 32, 64 or 128": self.store_cols in (32, 64, 128),
            f"at most {SHARED_LIMIT} bytes of shared memory": self.shared_bytes <= SHARED_LIMIT,
        }
        require("columns_kernel", self, rules)


@T.meta_class
class BandWalk:
    """Which tiles a CTA computes: down the bands of one column tile, then of the next, so that all
    CTAs read the same columns of rhs at a time. After ``take`` band, col0 and live name the tile,
    steps counts its stages, and ``then`` is the band of the next tile, if there is ``more``.
    """

    def __init__(self, count: Any, bands: Any, n: Any, knobs: ColumnsTile) -> None:
        self.band = T.local_scalar("int32")
        self.col0 = T.local_scalar("int32")
        self.live = T.local_scalar("int32")
        self.steps = T.local_scalar("int32")
        self.then = T.local_scalar("int32")
        self.next0 = T.local_scalar("int32")  # first column of the next tile
        self.coming = T.local_scalar("int32")  # and its count
        self.down = T.local_scalar("int32")  # from one tile to the next: bands, columns
        self.right = T.local_scalar("int32")
        self.first = self.ahead = 0  # places in their lists where this tile and the next begin
        self.out0 = 0  # row of out where the bands begin
        self.count, self.bands, self.n = count, bands, n
        self.sms, self.width, self.depth = knobs.sms, knobs.tile_n, knobs.tile_k

    def more(self) -> Any:
        """Whether there is another tile to take."""
        return self.next0 < self.n

    def list_of(self, band: Any) -> Any:
        """The list of a band."""
        return band

    @T.inline
    def begin(self, place):
        self.right = T.truncdiv(self.sms, self.bands)
        self.down = self.sms - self.right * self.bands
        self.next0 = T.truncdiv(place, self.bands)
        self.then = place - self.next0 * self.bands
        self.next0 = self.next0 * self.width
        self.right = self.right * self.width
        self.coming = self.count[self.then]

    @T.inline
    def take(self):
        """Also asks for the count of the next tile, which is needed when that begins."""
        self.col0 = self.next0
        self.band = self.then
        self.live = self.coming
        self.steps = T.truncdiv(self.live + (self.depth - 1), self.depth)
        self.next0 = self.next0 + self.right
        self.then = self.then + self.down
        if self.then >= self.bands:
            self.then = self.then - self.bands
            self.next0 = self.next0 + self.width
        self.coming = self.count[self.then]


@T.meta_class
class GroupWalk:
    """The same for groups that have a list and a product each, of ``m`` rows of out: a group's
    tiles one after the other, along strips of `STRIP` bands: tiles that are computed at once make a
    square, and gather little. ``then`` is the group of the next tile.
    """

    def __init__(self, count: Any, groups: Any, m: Any, n: Any, knobs: ColumnsTile) -> None:
        self.band = T.local_scalar("int32")
        self.col0 = T.local_scalar("int32")
        self.live = T.local_scalar("int32")
        self.steps = T.local_scalar("int32")
        self.group = T.local_scalar("int32")
        self.then = T.local_scalar("int32")
        self.tile = T.local_scalar("int32")  # the next of all groups'
        self.coming = T.local_scalar("int32")  # and its count
        self.first = self.ahead = 0
        self.count, self.groups = count, groups
        self.sms, self.width, self.depth = knobs.sms, knobs.tile_n, knobs.tile_k
        self.bands = T.truncdiv(m + (knobs.height - 1), knobs.height)
        self.across = T.truncdiv(n + (knobs.tile_n - 1), knobs.tile_n)
        self.each = self.bands * self.across
        self.out0 = self.group * m

    def more(self) -> Any:
        """Whether there is another tile to take."""
        return self.tile < self.groups * self.each

    def list_of(self, band: Any) -> Any:
        """The list of a band."""
        return self.group

    @T.inline
    def begin(self, place):
        self.tile = place
        self.look()

    @T.inline
    def look(self):
        """Ask for the count of the next tile, which is needed when that begins."""
        self.then = T.min(T.truncdiv(self.tile, self.each), self.groups - 1)
        self.coming = self.count[self.then]

    @T.inline
    def take(self):
        self.group = self.then
        self.live = self.coming
        self.steps = T.truncdiv(self.live + (self.depth - 1), self.depth)
        place: T.let = self.tile - self.group * self.each
        first: T.let = T.truncdiv(place, STRIP * self.across) * STRIP
        high: T.let = T.min(self.bands - first, STRIP)
        rest: T.let = place - first * self.across
        self.band = first + T.truncmod(rest, high)
        self.col0 = T.truncdiv(rest, high) * self.width
        self.tile = self.tile + self.sms
        self.look()


@T.meta_class
class BandProduct:
    """The product of one stage by a warpgroup: of as many groups of 16 of its depth as live.

    ``flip``: the band gives the instruction's columns, so that none of its rows is unused.
    """

    def __init__(self, lhs_tile: Any, rhs_tile: Any, knobs: ColumnsTile, flip: bool) -> None:
        self.lhs_tile, self.rhs_tile, self.blocks = lhs_tile, rhs_tile, knobs.blocks
        self.flip, self.line = flip, min(knobs.height, 64)
        self.high, self.wide = -(-knobs.height // 64), knobs.tile_n // 64
        self.each, self.most = knobs.columns // 64, knobs.tile_k // 16

    @T.inline
    def run(self, acc, stage, block, side, groups, accum, tried):
        """acc (+)= lhs @ rhs over ``groups`` groups, at least ``tried``; lhs from ``block`` on, and
        rhs of one ``side``."""
        if tried == self.most:
            self.multiply(acc, stage, block, side, accum, tried * 16)
        else:
            if groups <= tried:
                self.multiply(acc, stage, block, side, accum, tried * 16)
            else:
                self.run(acc, stage, block, side, groups, accum, tried + 1)

    def band(self, stage: Any, block: Any, depth: int) -> Any:
        """The tile of a band: matrices that an instruction reads."""
        at, line = stage * self.high + block, self.line if self.flip else 64
        return self.lhs_tile[at : at + self.blocks, 0:depth, 0:line]

    def beside(self, stage: Any, side: Any, depth: int) -> Any:
        """The same of what all bands are multiplied by."""
        at = stage * self.wide + side * self.each
        return self.rhs_tile[at : at + self.each, 0:depth, 0:64]

    @T.inline
    def multiply(self, acc, stage, block, side, accum, depth):
        band = T.meta_var(self.band(stage, block, depth))
        beside = T.meta_var(self.beside(stage, side, depth))
        Tx.wg.gemm_async(
            acc,
            beside if self.flip else band,
            band if self.flip else beside,
            transA=True,
            transB=True,
            accum=accum,
            dispatch="pit_wgmma",
        )


# Knobs that are sound on every Hopper chip, for each height: the fastest first.
STARTING = (
    ColumnsTile(32, 384, stages=3, shared=2),
    ColumnsTile(32, store_cols=128),
    ColumnsTile(64, 512, 32, stages=5, shared=2, store_cols=128),
    ColumnsTile(64, store_cols=128),
    ColumnsTile(128, shared=1),
    ColumnsTile(128, 128, stages=6),
)

# Where the product is turned.
FLIPPED = (ColumnsTile(32, shared=2), ColumnsTile(64, shared=2), ColumnsTile(128, shared=2))

# With one list for all bands, or a list and a product for every group; few columns are those of a
# bias's gradient.
RANGES = (
    ColumnsTile(128, shared=1),
    ColumnsTile(128, 192, stages=5, shared=1),
    ColumnsTile(128, 128, stages=6, shared=1),
    ColumnsTile(128, 64, stages=8, shared=1),
)


def columns_tile(tile: Tile) -> ColumnsTile:
    """The kernel's knobs of a tile of this family.

    Raises
    ------
    TileNotFound
        The tile is of another family, has an unknown knob, or the template cannot build it.
    """
    extents = {"height": tile.tile_m, "tile_n": tile.tile_n, "tile_k": tile.tile_k}
    return knobs_of(tile, ColumnsTile, (COLUMNS,), **extents)


def starting_columns(dtype: str, height: int, flip: bool = False) -> tuple[Tile, ...]:
    """Tiles for micro-tiles of ``height`` rows; with ``flip`` of products turned."""
    tiles = FLIPPED if flip else STARTING
    return tuple(as_tile(k, COLUMNS, dtype, _EXTENTS) for k in tiles if k.height == height)


def starting_ranges(dtype: str) -> tuple[Tile, ...]:
    """Tiles for one list of all bands, or for one of every group."""
    return tuple(as_tile(knobs, COLUMNS, dtype, _EXTENTS) for knobs in RANGES)
