"""Which tile a cluster of CTAs computes next: a persistent walk of all groups, on the device."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from pit_tvm.selection.gpu_fit import HEIGHT_STEP, PER_ELEMENT, PER_GATHERED, PER_ROW

from .hopper_knobs import MOST_GROUPS

MOST_KEY = 2**20  # counts that are told apart
# Bands of a group, on average, below which its weights are what takes time.
FEW_BANDS = 2


@T.meta_class
class TileWalk:
    """The walk of one cluster; after ``locate`` group, live, row0 and col0 name its tile.

    Parameters
    ----------
    pool : SMEMPool, for what all threads know of several groups
    count : Buffer (groups,) int32, live rows of each group, in global memory
    groups, n : run-time sizes
    knobs : RowsTile
    tile_n : output columns of a tile
    slot : output columns of a group where groups are slots of one product; 0: each has all n

    Tiles of one group are walked ``raster`` bands of rows at a time, down the rows first, for reuse
    in L2. Several groups are walked from the one with the most rows to the one with the fewest.

    Where they have few bands, every cluster alternates between the front and the back of the tile
    list, so that groups bound by arithmetic and groups bound by memory run side by side.

    A cluster of two takes tiles of the same columns in two neighbouring bands of a group. Where a
    group has an odd number of them, its last band is ``apart``: the CTAs take neighbouring tiles of
    that one band, and beyond the last column one of them has no row.

    With ``knobs.flip`` every group gets tiles of one height, a multiple of 8 up to ``tile_m``: the
    fewest bands that its rows need, split evenly; an only group the height that fills the last wave
    of tiles best. ``high`` is the height of the tile, ``each`` that of an only group. The CTAs of a
    cluster have one tile then.

    Otherwise, where the last round has work for few clusters, they get the parts of its tiles that
    one warpgroup computes each: ``live`` ends with the part, whose weights the others read again.
    """

    def __init__(
        self, pool: Any, count: Any, groups: Any, n: Any, knobs: Any, tile_n: int, slot: int
    ) -> None:
        # The place of this cluster's tile in the order of execution.
        self.turn = T.local_scalar("int32")
        self.total = T.local_scalar("int32")
        self.listed = T.local_scalar("int32")  # tiles of a cluster, and those that are not parted
        self.whole = T.local_scalar("int32")
        self.part = T.local_scalar("int32")
        self.group = T.local_scalar("int32")
        self.place = T.local_scalar("int32")
        self.rows = T.local_scalar("int32")  # live ones of the group
        self.live = T.local_scalar("int32")
        self.row0 = T.local_scalar("int32")
        self.col0 = T.local_scalar("int32")
        self.high = T.local_scalar("int32")
        self.each = T.local_scalar("int32")
        self.apart = T.local_scalar("int32")
        self.most_groups, self.tile_m, self.tile_n = knobs.most_groups, knobs.tile_m, tile_n
        self.raster, self.fit, self.slot = knobs.raster, bool(knobs.flip), slot
        self.cluster = 1 if self.fit else knobs.cluster
        self.band = self.tile_m * self.cluster  # rows of one cluster
        self.clusters = knobs.sms // knobs.cluster
        self.parts = 1 if self.fit else knobs.consumers
        self.height = self.tile_m // self.parts  # of a part
        self.count, self.groups = count, groups
        self.cols = slot // tile_n if slot else T.truncdiv(n + (tile_n - 1), tile_n)
        self.before = pool.alloc((self.most_groups + 1,), "int32", align=16)
        self.lives = pool.alloc((self.most_groups,), "int32", align=16)
        self.order = pool.alloc((self.most_groups,), "int16", align=16)

    def bands(self, live: Any) -> Any:
        """Bands of rows that ``live`` rows fill: of a cluster, without one that is apart."""
        if self.fit and self.most_groups == 1:
            return T.truncdiv(live + (self.each - 1), self.each)
        return T.truncdiv(live + (self.tile_m - 1), self.band)

    def turns_of(self, live: Any) -> Any:
        """Turns of clusters that a group of ``live`` rows takes."""
        together = self.bands(live) * self.cols
        if self.cluster == 1:
            return together
        odd = T.bitwise_and(T.truncdiv(live + (self.tile_m - 1), self.tile_m), 1)
        return together + odd * T.truncdiv(self.cols + 1, 2)

    def more(self) -> Any:
        """Whether ``turn`` still names a tile."""
        return self.turn < self.total

    @T.inline
    def arrange(self, thread, threads):
        """The whole CTA fills lives, and order with the groups by falling counts."""
        rounds: T.let = T.truncdiv(self.groups + (threads - 1), threads)
        for turn in T.serial(rounds):
            g: T.let = turn * threads + thread
            if g < self.groups:
                self.lives[g] = self.count[g]
                # A key for each group: no two are equal.
                self.before[g] = T.min(self.lives[g], MOST_KEY) * MOST_GROUPS + (
                    MOST_GROUPS - 1 - g
                )
        T.cuda.cta_sync()
        for turn in T.serial(rounds):
            g: T.let = turn * threads + thread
            if g < self.groups:
                larger: T.int32 = 0
                for other in T.serial(self.groups):
                    if self.before[other] > self.before[g]:
                        larger = larger + 1
                self.order[larger] = T.cast(g, "int16")
        T.cuda.cta_sync()

    @T.inline
    def prefix(self, lane):
        """One warp fills before[i], the turns of the first i groups in order; sync after it."""
        run: T.int32 = 0
        for chunk in T.serial(T.truncdiv(self.groups + 31, 32)):
            i: T.let = chunk * 32 + lane
            turns: T.int32 = 0
            if i < self.groups:
                turns = self.turns_of(self.lives[T.int32(self.order[i])])
            for s in T.unroll(5):
                left: T.int32 = T.cuda.__shfl_up_sync(
                    T.uint32(0xFFFFFFFF), turns, T.shift_left(1, s), 32
                )
                if lane >= T.shift_left(1, s):
                    turns = turns + left
            if i < self.groups:
                self.before[i + 1] = run + turns
            run = run + T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), turns, 31, 32)
        if lane == 0:
            self.before[0] = 0

    @T.inline
    def fit_height(self, lane):
        """One warp finds the height for an only group's rows whose waves of tiles take the least
        time, as `gpu_fit.Fitting.heights` does, and leaves it in before[0]; sync after it. (From
        shared memory, it is the same for all threads in the compiler's eyes, and so is what
        follows from it.)"""
        rows: T.let = self.count[0]
        tall: T.let = T.min((lane + 1) * HEIGHT_STEP, self.band)
        tiles: T.let = T.truncdiv(rows + (tall - 1), tall) * self.cols
        waves: T.let = T.truncdiv(tiles + (self.clusters - 1), self.clusters)
        step: T.let = T.max(
            T.float32(tall) * max(self.tile_n * PER_ELEMENT, PER_GATHERED),
            T.float32(tall + self.tile_n) * PER_ROW,
        )
        cost: T.let = T.float32(waves) * step
        # The place takes the last bits of the cost, so that the least of them names its height.
        key: T.int32 = T.bitwise_or(
            T.bitwise_and(T.reinterpret("int32", cost), T.int32(-32)), 31 - lane
        )
        for s in T.unroll(5):
            other: T.int32 = T.cuda.__shfl_xor_sync(
                T.uint32(0xFFFFFFFF), key, T.shift_left(1, s), 32
            )
            key = T.min(key, other)
        if lane == 0:
            self.before[0] = T.min((32 - T.bitwise_and(key, 31)) * HEIGHT_STEP, self.band)

    @T.inline
    def begin(self, cluster_id):
        self.turn = cluster_id
        self.group = 0
        if self.most_groups == 1:
            self.rows = self.count[0]
            if self.fit:
                self.each = self.before[0]
            self.listed = self.turns_of(self.rows)
        else:
            self.listed = self.before[self.groups]
        self.total = self.listed
        if self.parts > 1:
            last: T.let = T.truncmod(self.listed, self.clusters)
            self.whole = self.listed
            if last * self.parts <= self.clusters:
                self.whole = self.listed - last
                self.total = self.whole + last * self.parts

    def tiles(self) -> Any:
        """Tiles from ``turn`` on, or parts of them."""
        ahead = self.total - self.turn + (self.clusters - 1)
        return T.truncdiv(T.max(ahead, 0), self.clusters)

    @T.inline
    def advance(self):
        self.turn = self.turn + self.clusters

    @T.inline
    def locate(self, rank):
        """The tile of this turn for the CTA ``rank`` of the cluster."""
        local: T.int32 = self.turn
        if self.parts > 1:
            self.part = -1
            if local >= self.whole:
                beyond: T.let = local - self.whole
                local = self.whole + T.truncdiv(beyond, self.parts)
                self.part = T.truncmod(beyond, self.parts)
        if self.most_groups > 1:
            if self.listed < FEW_BANDS * self.groups * self.cols:
                self.alternate(local)
                local = self.place
            self.find(local)
            local = local - self.before[self.place]
        if self.fit:
            self.high = self.each
            if self.most_groups > 1:
                even: T.let = self.bands(self.rows)
                most: T.let = T.truncdiv(self.rows + (even - 1), even)
                self.high = T.truncdiv(most + (HEIGHT_STEP - 1), HEIGHT_STEP) * HEIGHT_STEP
        if self.cluster == 1:
            self.tile_together(local, rank)
        else:
            behind: T.let = local - self.bands(self.rows) * self.cols
            if behind < 0:
                self.apart = 0
                self.tile_together(local, rank)
            else:
                self.apart = 1
                self.tile_apart(behind * 2 + rank)
        self.live = self.rows
        if self.parts > 1:
            if self.part >= 0:
                self.row0 = self.row0 + self.part * self.height
                self.live = T.min(self.rows, self.row0 + self.height)

    @T.inline
    def tile_apart(self, column):
        """The tile number ``column`` of the group's last band."""
        self.col0 = column * self.tile_n + self.group * self.slot
        self.row0 = self.rows
        if column < self.cols:
            self.row0 = self.bands(self.rows) * self.band

    @T.inline
    def tile_together(self, local, rank):
        """The tile number ``local`` of the group's bands that a cluster fills."""
        first: T.let = T.truncdiv(local, self.raster * self.cols) * self.raster
        height: T.let = T.min(self.bands(self.rows) - first, self.raster)
        inner: T.let = local - first * self.cols
        column: T.let = T.truncdiv(inner, height)
        self.col0 = column * self.tile_n + self.group * self.slot
        band: T.let = first + inner - column * height
        self.row0 = band * (self.high if self.fit else self.band) + rank * self.tile_m

    @T.inline
    def alternate(self, tile):
        """``place``: the tile from the front of the list, or from its back, in the place of the
        tile number ``tile``."""
        # Even numbers count from the front, odd ones from the back. An even number of clusters
        # swaps neighbours in every second round, so that each cluster sees both; an odd number
        # alternates by itself.
        self.place = tile
        if self.clusters % 2 == 0:
            swapped: T.let = T.bitwise_xor(tile, T.bitwise_and(T.truncdiv(tile, self.clusters), 1))
            if swapped < self.listed:
                self.place = swapped
        from_end: T.int32 = T.truncdiv(self.place, 2)
        if T.bitwise_and(self.place, 1) == 1:
            from_end = self.listed - 1 - from_end
        self.place = from_end

    @T.inline
    def find(self, turn):
        """Binary search: the last place that begins at or before ``turn`` (never an empty one)."""
        above: T.int32 = self.groups
        self.place = 0
        while above - self.place > 1:
            middle: T.let = T.truncdiv(self.place + above, 2)
            if self.before[middle] <= turn:
                self.place = middle
            else:
                above = middle
        self.group = T.int32(self.order[self.place])
        self.rows = self.lives[self.group]
