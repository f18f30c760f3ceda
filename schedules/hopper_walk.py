"""Which tile a cluster of CTAs computes next: a persistent walk of all groups, on the device."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T


@T.meta_class
class TileWalk:
    """The walk of one cluster; after ``locate`` group, live, row0 and col0 name its tile.

    Parameters
    ----------
    count : Buffer (groups,) int32, live rows of each group, in global memory
    before, lives : Buffer (most_groups + 1,) and (most_groups,) int32, in shared memory; unused
        for one group
    groups, n : run-time sizes
    most_groups : 1, or the most groups that ``before`` holds
    tile_m, tile_n, cluster, raster, sms : the knobs of RowsTile

    Tiles of one group are walked ``raster`` bands of rows at a time, down the rows first, for reuse
    in L2. With several groups every cluster alternates between the front and the back of the tile
    list, so that groups bound by arithmetic and groups bound by memory run side by side.
    """

    def __init__(
        self,
        count: Any,
        before: Any,
        lives: Any,
        groups: Any,
        n: Any,
        most_groups: int,
        tile_m: int,
        tile_n: int,
        cluster: int,
        raster: int,
        sms: int,
    ) -> None:
        # The place of this cluster's tile in the order of execution.
        self.turn = T.local_scalar("int32")
        self.total = T.local_scalar("int32")
        self.group = T.local_scalar("int32")
        self.live = T.local_scalar("int32")
        self.row0 = T.local_scalar("int32")
        self.col0 = T.local_scalar("int32")
        self.count, self.before, self.lives, self.groups = count, before, lives, groups
        self.most_groups, self.tile_m, self.tile_n, self.raster = (
            most_groups,
            tile_m,
            tile_n,
            raster,
        )
        self.band = tile_m * cluster  # rows of one cluster
        self.clusters = sms // cluster
        self.cols = T.truncdiv(n + (tile_n - 1), tile_n)

    def bands(self, live: Any) -> Any:
        """Bands of rows that ``live`` rows fill."""
        return T.truncdiv(live + (self.band - 1), self.band)

    def more(self) -> Any:
        """Whether ``turn`` still names a tile."""
        return self.turn < self.total

    @T.inline
    def prefix(self, lane):
        """One warp fills lives and before[g], the tiles of groups below g; sync after it."""
        run: T.int32 = 0
        for chunk in T.serial(T.truncdiv(self.groups + 31, 32)):
            g: T.let = chunk * 32 + lane
            tiles: T.int32 = 0
            if g < self.groups:
                self.lives[g] = self.count[g]
                tiles = self.bands(self.lives[g]) * self.cols
            for s in T.unroll(5):
                left: T.int32 = T.cuda.__shfl_up_sync(
                    T.uint32(0xFFFFFFFF), tiles, T.shift_left(1, s), 32
                )
                if lane >= T.shift_left(1, s):
                    tiles = tiles + left
            if g < self.groups:
                self.before[g + 1] = run + tiles
            run = run + T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), tiles, 31, 32)
        if lane == 0:
            self.before[0] = 0

    @T.inline
    def begin(self, cluster_id):
        self.turn = cluster_id
        self.group = 0
        if self.most_groups == 1:
            self.live = self.count[0]
            self.total = self.bands(self.live) * self.cols
        else:
            self.total = self.before[self.groups]

    @T.inline
    def advance(self):
        self.turn = self.turn + self.clusters

    @T.inline
    def locate(self, rank):
        """The tile of this turn for the CTA ``rank`` of the cluster."""
        local: T.int32 = self.turn
        if self.most_groups > 1:
            # Even places count from the front, odd ones from the back. An even number of clusters
            # swaps neighbours in every second round, so that each cluster sees both; an odd number
            # alternates by itself.
            place: T.int32 = self.turn
            if self.clusters % 2 == 0:
                swapped: T.let = T.bitwise_xor(
                    place, T.bitwise_and(T.truncdiv(place, self.clusters), 1)
                )
                if swapped < self.total:
                    place = swapped
            from_end: T.let = T.truncdiv(place, 2)
            local = T.if_then_else(
                T.bitwise_and(place, 1) == 0, from_end, self.total - 1 - from_end
            )
            self.find(local)
            local = local - self.before[self.group]
        first: T.let = T.truncdiv(local, self.raster * self.cols) * self.raster
        height: T.let = T.min(self.bands(self.live) - first, self.raster)
        inner: T.let = local - first * self.cols
        column: T.let = T.truncdiv(inner, height)
        self.col0 = column * self.tile_n
        self.row0 = (first + inner - column * height) * self.band + rank * self.tile_m

    @T.inline
    def find(self, tile):
        """Binary search: the last group that begins at or before ``tile`` (never an empty one)."""
        above: T.int32 = self.groups
        self.group = 0
        while above - self.group > 1:
            middle: T.let = T.truncdiv(self.group + above, 2)
            if self.before[middle] <= tile:
                self.group = middle
            else:
                above = middle
        self.live = self.lives[self.group]
