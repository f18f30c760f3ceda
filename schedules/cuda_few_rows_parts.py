"""Parts of products of a few rows: the tile, the list of live columns, and a warp's product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from .hopper_knobs import require
from .hopper_swrite import PTX_TYPE

LANES = 32
STEP = 16  # live columns of one instruction
BLOCK = 8  # rows of x of one instruction
WIDE = 64  # columns of out of one warp
PARTS = 8  # of k: CTAs of a cluster
MOST_WARPS = 12
HEIGHTS = (8, 16)
ACROSS = (1, 2, 3, 4, 6, 12)  # divisors of MOST_WARPS
AHEAD = 2  # steps in a warp's ring


@dataclass(frozen=True)
class FewRowsTile:
    """``rows``: of x at most; ``across``: warps side by side, the others take steps in turn."""

    dtype: str
    rows: int
    across: int

    @property
    def deep(self) -> int:
        """Warps that take steps of the same columns in turn."""
        return MOST_WARPS // self.across

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return MOST_WARPS * LANES

    @property
    def columns(self) -> int:
        """Columns of out of one cluster."""
        return WIDE * self.across

    @property
    def owned(self) -> int:
        """Columns that one CTA of a cluster finishes."""
        return self.columns // PARTS

    @property
    def piece(self) -> int:
        """Columns of x that a CTA looks at before it multiplies: as two CTAs have room for."""
        return 2560 * BLOCK // self.rows

    @property
    def blocks(self) -> int:
        """Instructions for all rows."""
        return self.rows // BLOCK

    def check(self) -> None:
        """Raise ScheduleError (a ValueError) for what the template cannot build."""
        rules = {
            "dtype float16 or bfloat16": self.dtype in PTX_TYPE,
            f"rows one of {HEIGHTS}": self.rows in HEIGHTS,
            f"across one of {ACROSS}": self.across in ACROSS,
        }
        require("few_rows", self, rules)


_SEND = """
__forceinline__ __device__ void pit_send4(void* at, int rank, float a, float b, float c, float d) {
  unsigned here = (unsigned)__cvta_generic_to_shared(at);
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
               " st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5}; }"
               :: "r"(here), "r"(rank), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
"""


def send(place: Any, rank: Any, *values: Any) -> Any:
    """Write four float32 at the same place in the shared memory of the cluster's CTA ``rank``."""
    return T.cuda.func_call("pit_send4", place, rank, *values, source_code=_SEND)


@T.meta_class
class LiveColumns:
    """Live columns of a piece of k, ascending: ``found`` of them in ``ids``, -1 behind the last;
    ``held`` is x in their order, by blocks of rows, zeros behind the last."""

    def __init__(self, pool: Any, tile: FewRowsTile) -> None:
        self.tile = tile
        self.totals = pool.alloc((MOST_WARPS,), "int32", align=16)
        self.ids = pool.alloc((tile.piece + STEP,), "int32", align=16)
        self.held = pool.alloc((tile.blocks, tile.piece + STEP, BLOCK), "uint16", align=16)
        self.words = T.alloc_local([BLOCK * 4], "uint32")
        self.some = T.alloc_local([4], "uint32")
        self.live = T.local_scalar("uint32")
        self.found = T.local_scalar("int32")

    @T.inline
    def look(self, x, m, first, end):
        """Which of eight columns of x from ``first`` live, NaN included: bits of ``live``."""
        for i in T.unroll(4):
            self.some[i] = T.uint32(0)
        for b in T.serial(T.truncdiv(m + BLOCK - 1, BLOCK)):
            for r in T.unroll(BLOCK):
                for i in T.unroll(4):
                    self.words[r * 4 + i] = T.uint32(0)
                if (b * BLOCK + r < m) & (first < end):
                    T.ptx["ld.global.v4.b32"](
                        *[self.words[r * 4 + i] for i in range(4)],
                        x.ptr_to([b * BLOCK + r, first]),
                    )
            for r in T.unroll(BLOCK):
                for i in T.unroll(4):
                    self.some[i] = T.bitwise_or(self.some[i], self.words[r * 4 + i])
        self.live = T.uint32(0)
        for v in T.unroll(8):
            magnitude: T.let = T.shift_left(T.uint32(0x7FFF), T.uint32(v % 2 * 16))
            lives: T.let = T.bitwise_and(self.some[v // 2], magnitude) != T.uint32(0)
            self.live = T.bitwise_or(self.live, T.shift_left(T.uint32(lives), T.uint32(v)))

    @T.inline
    def find(self, x, m, begin, end, tx):
        """List the live ones of columns ``begin`` to ``end``, at most ``tile.piece``."""
        warp: T.let = T.truncdiv(tx, LANES)
        lane: T.let = T.truncmod(tx, LANES)
        first: T.let = begin + tx * 8
        self.look(x, m, first, end)
        mine: T.let = T.int32(T.popcount(self.live))
        place: T.int32 = mine
        for d in T.unroll(5):
            before: T.int32 = T.cuda.__shfl_up_sync(T.uint32(0xFFFFFFFF), place, 1 << d, 32)
            if lane >= 1 << d:
                place = place + before
        if lane == LANES - 1:
            self.totals[warp] = place
        T.cuda.cta_sync()
        place = place - mine
        self.found = 0
        for other in T.unroll(MOST_WARPS):
            if other < warp:
                place = place + self.totals[other]
            self.found = self.found + self.totals[other]
        while self.live != T.uint32(0):
            lowest: T.let = T.bitwise_and(self.live, T.uint32(0) - self.live)
            self.ids[place] = first + T.int32(T.popcount(lowest - T.uint32(1)))
            self.live = T.bitwise_xor(self.live, lowest)
            place = place + 1
        if tx < STEP:
            self.ids[self.found + tx] = -1
        T.cuda.cta_sync()

    @T.inline
    def hold(self, x, m, tx):
        """Fill ``held``; other threads see it behind a barrier."""
        threads = T.meta_var(self.tile.threads)
        places: T.let = T.truncdiv(self.found + STEP - 1, STEP) * STEP
        for turn in T.serial(T.truncdiv(places + threads - 1, threads)):
            place: T.let = turn * threads + tx
            if place < places:
                column: T.let = self.ids[place]
                for b in T.serial(self.tile.blocks):
                    for r in T.unroll(BLOCK):
                        self.words[r] = T.uint32(0)
                        if (column >= 0) & (b * BLOCK + r < m):
                            self.words[r] = T.uint32(
                                T.reinterpret("uint16", x[b * BLOCK + r, column])
                            )
                    for i in T.unroll(4):
                        self.words[i] = T.bitwise_or(
                            self.words[i * 2], T.shift_left(self.words[i * 2 + 1], T.uint32(16))
                        )
                    T.ptx["st.shared.v4.b32"](
                        self.held.ptr_to([b, place, 0]), *[self.words[i] for i in range(4)]
                    )


@T.meta_class
class WarpProduct:
    """A warp's sums ``acc``, and its ring of rows of w: 16 live columns by 64 of out in a slot."""

    def __init__(self, pool: Any, columns: LiveColumns, warp: Any, lane: Any) -> None:
        tile = self.tile = columns.tile
        self.columns, self.warp, self.lane = columns, warp, lane
        self.ring = pool.alloc((MOST_WARPS, AHEAD, STEP, WIDE), tile.dtype, align=128)
        self.acc = T.alloc_local([tile.rows * WIDE // LANES], "float32")
        self.places = T.alloc_local([4], "int32")
        self.rows = T.alloc_local([4], "uint32")
        self.values = T.alloc_local([tile.blocks * 2], "uint32")

    def at(self, slot: Any, row: Any, chunk: Any) -> Any:
        """Address of 8 elements of a row; those of 8 rows lie in all banks."""
        return self.ring.ptr_to(
            [self.warp, slot, row, T.bitwise_xor(chunk, T.truncmod(row, 8)) * 8]
        )

    @T.inline
    def fetch(self, slot, step, steps, w, col0, n):
        """Ask for the rows of w of one step, if there is one; zeros where nothing is."""
        if step < steps:
            chunk: T.let = T.truncmod(self.lane, 8)
            for i in T.unroll(4):
                self.places[i] = self.columns.ids[step * STEP + i * 4 + T.truncdiv(self.lane, 8)]
            for i in T.unroll(4):
                T.ptx["cp.async.cg.shared.global"](
                    self.at(slot, i * 4 + T.truncdiv(self.lane, 8), chunk),
                    w.ptr_to(
                        [
                            T.int64(T.max(self.places[i], 0)),
                            T.int64(col0 + chunk * 8),
                        ]
                    ),
                    16,
                    T.uint32(T.if_then_else((self.places[i] >= 0) & (col0 + chunk * 8 < n), 16, 0)),
                )
        T.ptx.cp.async_.commit_group()

    @T.inline
    def multiply(self, slot, step):
        """acc += w of a slot, turned, by x of its step: 4 x 16 columns by all rows."""
        kind = T.meta_var(PTX_TYPE[self.tile.dtype])
        for b in T.unroll(self.tile.blocks):
            T.ptx["ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16"](
                self.values[b * 2],
                self.values[b * 2 + 1],
                self.columns.held.ptr_to([b, step * STEP + T.truncmod(self.lane, 16), 0]),
            )
        for j in T.unroll(4):
            T.ptx["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"](
                *[self.rows[i] for i in range(4)],
                self.at(
                    slot,
                    T.truncdiv(self.lane, 16) * 8 + T.truncmod(self.lane, 8),
                    j * 2 + T.truncmod(T.truncdiv(self.lane, 8), 2),
                ),
            )
            for b in T.unroll(self.tile.blocks):
                sums = T.meta_var([self.acc[(b * 4 + j) * 4 + i] for i in range(4)])
                T.ptx[f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"](
                    *sums,
                    *[self.rows[i] for i in range(4)],
                    self.values[b * 2],
                    self.values[b * 2 + 1],
                    *sums,
                )

    @T.inline
    def run(self, w, col0, n, x, m, depth, deep, tx):
        """All steps of the list, every ``deep``-th from ``depth`` on."""
        steps: T.let = T.truncdiv(self.columns.found + STEP - 1, STEP)
        for u in T.unroll(AHEAD - 1):
            self.fetch(u, u * deep + depth, steps, w, col0, n)
        self.columns.hold(x, m, tx)
        T.cuda.cta_sync()
        for i in T.serial(T.truncdiv(steps - depth + deep - 1, deep)):
            T.ptx.cp.async_.wait_group(AHEAD - 2)
            T.cuda.warp_sync()
            step: T.let = i * deep + depth
            coming: T.let = T.truncmod(i + AHEAD - 1, AHEAD)
            self.fetch(coming, step + (AHEAD - 1) * deep, steps, w, col0, n)
            self.multiply(T.truncmod(i, AHEAD), step)
