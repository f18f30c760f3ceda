"""One list of live k for all bands of the Hopper k-axis family: CTAs share out the whole work.

Tiles that fill the device are computed whole, all CTAs at the same k, so that they find what they
gather in the second-level cache. The depth of the tiles behind them is cut into equal parts, one
for a CTA, and of what these leave all other CTAs take as much each, from one tile after the other,
if it is worth the exchange of sums: a small output with a deep sum keeps every CTA busy. The CTA
with a tile's first part adds up the sums of the others, in their order: the result depends on what
lives alone. Sums go through memory; a flag for each warpgroup tells that they are there. A CTA
waits for CTAs before it only, which the device has begun by then.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from pit_tvm.selection.gpu_columns import EXCHANGE, MOST_PARTS

from .hopper_bands import ColumnsTile

# Both are told where the sums are: nothing is moved past them then.
_POST = """
__forceinline__ __device__ void pit_post(int* at, float* sums) {
  asm volatile("st.release.gpu.global.s32 [%0], 1;" :: "l"(at), "l"(sums) : "memory");
}
"""
_AWAIT = """
__forceinline__ __device__ void pit_await(int* at, float* sums) {
  int there;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                  : "=r"(there) : "l"(at), "l"(sums) : "memory");
  while (!there);
}
"""


def _up(size: Any, step: Any) -> Any:
    """Steps that hold ``size``."""
    return T.truncdiv(size + (step - 1), step)


@T.meta_class
class RangeWalk:
    """Which tiles and parts of tiles a CTA computes, in the order of `BandWalk`. After ``take``
    band and col0 name the tile, ``first`` the part's first place in the list, live what lives from
    there on, steps its stages; ``ahead`` is the first place of the next part, if there is ``more``.
    """

    then = 0  # the band whose list the next part has
    out0 = 0

    def __init__(self, count: Any, m: Any, n: Any, knobs: ColumnsTile) -> None:
        self.band = T.local_scalar("int32")
        self.col0 = T.local_scalar("int32")
        self.first = T.local_scalar("int32")
        self.live = T.local_scalar("int32")
        self.steps = T.local_scalar("int32")
        self.ahead = T.local_scalar("int32")
        self.all = T.local_scalar("int32")  # that lives
        self.units = T.local_scalar("int32")  # steps of a tile, at least one
        self.whole = T.local_scalar("int32")  # the next whole tile, and how many there are
        self.wholes = T.local_scalar("int32")
        self.each = T.local_scalar("int32")  # steps of an equal part
        self.parts = T.local_scalar("int32")  # equal parts of a tile
        self.rest = T.local_scalar("int32")  # steps of a tile behind them
        self.base = T.local_scalar("int32")  # where in a tile this CTA's parts begin at first
        self.span = T.local_scalar("int32")  # steps of a tile from there that are like its own
        self.at = T.local_scalar("int32")  # the next of all tiles' spans, and the end of its own
        self.end = T.local_scalar("int32")
        self.slot = T.local_scalar("int32")  # of this part's sums, or of the first ones to add
        self.left = T.local_scalar("int32")  # parts whose sums are to be added
        self.count, self.n, self.depth = count, n, knobs.tile_k
        self.sms, self.width = knobs.sms, knobs.tile_n
        self.bands = _up(m, knobs.height)

    def more(self) -> Any:
        """Whether there is another part to take."""
        return (self.whole < self.wholes) | (self.at < self.end)

    def list_of(self, band: Any) -> Any:
        """The list of a band."""
        return 0

    @T.inline
    def begin(self, place):
        self.all = self.count[0]
        self.units = T.max(_up(self.all, self.depth), 1)
        tiles: T.let = _up(self.n, self.width) * self.bands
        cut: T.let = T.truncmod(tiles, self.sms)
        rank: T.let = self.sms - 1 - place
        self.whole = rank
        self.wholes = tiles - cut
        self.each = T.max(_up(cut * self.units, self.sms), T.min(self.units, EXCHANGE))
        self.each = T.max(self.each, _up(self.units, MOST_PARTS))
        self.parts = T.truncdiv(self.units, self.each)
        self.rest = self.units - self.parts * self.each
        if self.each + EXCHANGE * _up(self.each, T.max(self.rest, 1)) >= _up(
            self.units, self.parts
        ):
            self.each = _up(self.units, self.parts)
            self.parts = _up(self.units, self.each)
            self.rest = 0
        self.span = self.rest
        self.base = self.parts * self.each
        self.at = (rank - self.parts * cut) * self.each
        self.end = T.min(self.at + self.each, cut * self.rest)
        if rank < self.parts * cut:
            self.span = self.each
            self.base = T.truncdiv(rank, cut) * self.each
            self.at = T.truncmod(rank, cut) * self.each
            self.end = self.at + T.min(self.each, self.units - self.base)
        self.look()

    @T.inline
    def look(self):
        """See where the next part begins."""
        self.ahead = 0
        if (self.whole >= self.wholes) & (self.at < self.end):
            self.ahead = (self.base + T.truncmod(self.at, self.span)) * self.depth

    @T.inline
    def take(self):
        if self.whole < self.wholes:
            self.place(self.whole, 0, self.units)
            self.left = 0
            self.whole = self.whole + self.sms
        else:
            which: T.let = T.truncdiv(self.at, self.span)
            start: T.let = self.base + (self.at - which * self.span)
            number: T.let = T.min((which + 1) * self.span, self.end) - self.at
            self.place(self.wholes + which, start, number)
            self.slot = which * (self.parts + 1)
            self.left = self.parts - 1
            if self.rest > 0:  # one or two parts more
                last: T.let = T.truncdiv((which + 1) * self.rest - 1, self.each)
                self.left = self.left + 1 + last - T.truncdiv(which * self.rest, self.each)
            if start > 0:
                self.slot = self.slot + T.min(T.truncdiv(start, self.each), self.parts) - 1
                if start > self.parts * self.each:
                    self.slot = self.slot + 1
            self.at = self.at + number
        self.look()

    @T.inline
    def place(self, tile, start, number):
        """The tile and the steps of it that are taken."""
        self.col0 = T.truncdiv(tile, self.bands) * self.width
        self.band = tile - T.truncdiv(tile, self.bands) * self.bands
        self.first = start * self.depth
        self.live = self.all - start * self.depth
        self.steps = T.min(number, self.all)  # none where nothing lives

    @T.inline
    def share(self, acc, parts, flags, wg, thread):
        """The tile's whole sums to the warpgroup that has its first part, from all others."""
        at: T.int32 = self.slot * 2 + wg
        if self.first > 0:
            for i in T.unroll(int(acc.shape[0])):
                parts[at, i, thread] = acc[i]
            T.ptx["bar.sync"](T.uint32(wg + 1), T.uint32(128))
            if thread == 0:
                T.cuda.func_call(
                    "pit_post", flags.ptr_to([at]), parts.ptr_to([at, 0, 0]), source_code=_POST
                )
        else:
            while self.left > 0:
                T.cuda.func_call(
                    "pit_await", flags.ptr_to([at]), parts.ptr_to([at, 0, 0]), source_code=_AWAIT
                )
                for i in T.unroll(int(acc.shape[0])):
                    acc[i] = acc[i] + parts[at, i, thread]
                T.ptx["bar.sync"](T.uint32(wg + 1), T.uint32(128))
                if thread == 0:
                    flags[at] = 0  # as the next launch expects it
                at = at + 2
                self.left = self.left - 1
