"""Parts of the flipped Hopper rows kernel: posts with row ids, sums of any height, its SWrite."""

from __future__ import annotations

from typing import Any

from tvm.backend.cuda.lang.pipeline import MBarrier
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx

from .hopper_knobs import BAND, TILE_K, TILES_AHEAD, RowsOptions, RowsTile
from .hopper_ring import RhsTiles, release
from .hopper_swrite import CHUNK, PTX_TYPE, activate, multiply


@T.meta_class
class RowPosts:
    """Where the producer posts each tile that it begins to fill: its head and its rows' ids.

    ``heads``: group (-1 ends the consumers' loop), height, first output column. ``ids``: out row of
    each of the tile's rows, -1 for none; ``per_row``: their factors or biases. A post has barriers
    of its own. It is written when all consumers have handed back the one that was there before,
    after their epilogue, and ready when every warp of the producer says so.
    """

    def __init__(self, pool: Any, knobs: RowsTile) -> None:
        self.ready = MBarrier(pool, TILES_AHEAD)
        self.taken = MBarrier(pool, TILES_AHEAD)
        self.consumers, self.rows = knobs.consumers, knobs.tile_m
        self.turns = -(-knobs.tile_m // 128)

    def place(self, pool: Any, options: RowsOptions) -> None:
        """Memory of the posts, behind the tiles."""
        self.heads = pool.alloc((TILES_AHEAD, 4), "int32", align=16)
        self.ids = pool.alloc((TILES_AHEAD, self.rows), "int32", align=16)
        if options.per_row:
            self.per_row = pool.alloc((TILES_AHEAD, self.rows), "float32", align=16)
        self.coming = T.alloc_local([self.turns], "int32")

    @T.inline
    def init(self):
        self.ready.init(4)
        self.taken.init(self.consumers)

    @T.inline
    def ask(self, ids, walk, thread):
        """Ask for the ids of the walk's tile; they are needed when the tile begins."""
        for p in T.unroll(self.turns):
            self.coming[p] = -1
            if (p * 128 + thread < walk.high) & (walk.row0 + p * 128 + thread < walk.live):
                self.coming[p] = ids[walk.group, walk.row0 + p * 128 + thread]

    @T.inline
    def fill(self, slot, thread):
        for p in T.unroll(self.turns):
            if p * 128 + thread < self.rows:
                self.ids[slot, p * 128 + thread] = self.coming[p]

    @T.inline
    def fill_per_row(self, slot, thread, per_row):
        for p in T.unroll(self.turns):
            if p * 128 + thread < self.rows:
                self.per_row[slot, p * 128 + thread] = T.float32(0)
                if self.coming[p] >= 0:
                    self.per_row[slot, p * 128 + thread] = T.float32(
                        per_row[T.int64(self.coming[p])]
                    )

    @T.inline
    def head(self, slot, group, high, col0):
        self.heads[slot, 0] = group
        self.heads[slot, 1] = high
        self.heads[slot, 2] = col0


@T.meta_class
class FlipEpilogue:
    """What becomes of a warpgroup's sums: blocks of 64 weight rows x up to ``rows`` live rows.

    Parameters
    ----------
    pool : SMEMPool, for the staged rows: two lots of BAND rows for each warpgroup
    posts : RowPosts, for the ids of the rows
    knobs, options : what the kernel is built with
    """

    def __init__(self, pool: Any, posts: RowPosts, knobs: RowsTile, options: RowsOptions) -> None:
        self.posts, self.options, self.rows = posts, options, knobs.tile_m
        self.blocks = knobs.tile_n // (64 * knobs.consumers)
        self.out_blocks = self.blocks // options.halves
        self.width = 64 * self.out_blocks  # output columns of a warpgroup
        self.tile_width = self.width * knobs.consumers
        # Blocks of one warpgroup lie side by side; gates may be half a tile from what they gate.
        self.apart = 64 if options.sides == 1 else 64 * knobs.consumers
        self.part = self.blocks * 64 if options.sides == 1 else 64
        self.per_block = knobs.tile_m // 2
        shape = (knobs.consumers, 2, BAND, self.width + CHUNK)
        self.staged = pool.alloc(shape, options.dtype, align=16)
        self.biases = T.alloc_local([self.blocks * 2], "float32")
        self.lanes = self.width // CHUNK  # that store one row
        self.at_once = 128 // self.lanes
        self.passes = BAND // self.at_once
        self.convert = f"cvt.rn.{PTX_TYPE[options.dtype]}x2.f32"

    @T.inline
    def ask_bias(self, bias, group, first, n, warp, lane):
        """Ask for the bias of this lane's two weight rows of each block."""
        for b in T.unroll(self.blocks):
            for side in T.unroll(2):
                apart = T.meta_var(self.options.sides > 1)
                step = T.meta_var(2 if self.options.interleaved else 1)
                col: T.let = (
                    first * step
                    + warp * 16
                    + ((0 if apart else b * 64) + side * 8)
                    + T.truncdiv(lane, 4)
                )
                self.biases[b * 2 + side] = T.float32(0)
                if col < n * step:
                    self.biases[b * 2 + side] = T.float32(
                        bias[
                            T.int64(group),
                            T.int64(col + (b if apart else 0) * n),
                        ]
                    )

    def value(self, acc: Any, block: Any, row: Any, side: Any, odd: int, per_row: Any) -> Any:
        """The finished fp32 value of the tile's live row ``row`` + 2 * (lane % 4) + ``odd``, weight
        row lane // 4 + 8 * ``side`` of this warp's part of a block. ``row``: a multiple of 8;
        ``per_row``: the live row's factor or bias, None where it has none."""
        x = self._sum(acc, block, row, side, odd)
        act, gate = self.options.act, self.options.gate
        if gate is not None:
            x = multiply(act, gate, x, self._sum(acc, block + 1, row, side, odd))
        else:
            x = activate(act, x + per_row if self.options.row_bias else x)
        return x * per_row if self.options.row_scale else x

    def per_row(self, slot: Any, row: Any, lane: Any, odd: int) -> Any:
        """The number of the live row that `value` says, from the posts."""
        if not self.options.per_row:
            return None
        return self.posts.per_row[slot, row + T.truncmod(lane, 4) * 2 + odd]

    def _sum(self, acc: Any, block: Any, row: Any, side: Any, odd: int) -> Any:
        x = acc[block * self.per_block + row // 2 + side * 2 + odd]
        return x + self.biases[block * 2 + side] if self.options.bias else x

    @T.inline
    def write(self, acc, out, slot, high, first, n, wg, warp, lane):
        """Finish the sums and store the tile's rows, a band at a time, at columns from ``first``.

        A band is turned in one half of the staging memory while the one before it leaves the other.
        """
        thread: T.let = warp * 32 + lane
        col: T.let = T.truncmod(thread, self.lanes) * CHUNK
        leaving = T.alloc_local([self.passes, 4], "uint32")
        targets = T.alloc_local([self.passes], "int32")
        self.turn(acc, slot, 0, 0, wg, warp, lane)
        for c in T.unroll(self.rows // BAND):
            if c * BAND < high:
                T.ptx["bar.sync"](T.uint32(wg + 1), T.uint32(128))
                for p in T.unroll(self.passes):
                    line: T.let = p * self.at_once + T.truncdiv(thread, self.lanes)
                    targets[p] = self.posts.ids[slot, c * BAND + line]
                    T.ptx["ld.shared.v4.b32"](
                        *[leaving[p, i] for i in range(4)],
                        self.staged.ptr_to([wg, c % 2, line, col]),
                    )
                if c + 1 < self.rows // BAND:
                    if (c + 1) * BAND < high:
                        self.turn(acc, slot, c + 1, (c + 1) % 2, wg, warp, lane)
                for p in T.unroll(self.passes):
                    if (targets[p] >= 0) & (first + col < n):
                        T.ptx["st.global.v4.b32"](
                            out.ptr_to([T.int64(targets[p]), T.int64(first + col)]),
                            *[leaving[p, i] for i in range(4)],
                        )

    @T.inline
    def write_own(self, acc, out, slot, high, first, n, wg, warp, lane, split, rank):
        """The same for the bands of one CTA of ``split``: every split-th from ``rank``."""
        thread: T.let = warp * 32 + lane
        col: T.let = T.truncmod(thread, self.lanes) * CHUNK
        leaving = T.alloc_local([4], "uint32")
        for c in T.unroll(self.rows // BAND):
            if (c * BAND < high) & (c % split == rank):
                self.turn(acc, slot, c, c // split % 2, wg, warp, lane)
                T.ptx["bar.sync"](T.uint32(wg + 1), T.uint32(128))
                for p in T.unroll(self.passes):
                    line: T.let = p * self.at_once + T.truncdiv(thread, self.lanes)
                    target: T.let = self.posts.ids[slot, c * BAND + line]
                    if (target >= 0) & (first + col < n):
                        T.ptx["ld.shared.v4.b32"](
                            *[leaving[i] for i in range(4)],
                            self.staged.ptr_to([wg, c // split % 2, line, col]),
                        )
                        T.ptx["st.global.v4.b32"](
                            out.ptr_to([T.int64(target), T.int64(first + col)]),
                            *[leaving[i] for i in range(4)],
                        )

    @T.inline
    def turn(self, acc, slot, c, half, wg, warp, lane):
        """Finish band ``c`` and put it in a half of the staging memory, a row of ``out`` in each
        of its rows."""
        if self.options.interleaved:
            self.turn_pairs(acc, slot, c, half, wg, warp, lane)
        else:
            self.turn_blocks(acc, slot, c, half, wg, warp, lane)

    @T.inline
    def turn_pairs(self, acc, slot, c, half, wg, warp, lane):
        """The same where gates are beside what they gate, so that two lanes have a pair: each
        finishes those of one side."""
        place: T.let = T.truncdiv(lane, 4)
        upper: T.let = T.truncmod(place, 2)
        col: T.let = warp * 8 + upper * 4 + T.truncdiv(place, 2)
        for b in T.unroll(self.blocks):
            for q in T.unroll(4):
                row = T.meta_var(c * BAND + q // 2 * 8)
                one: T.float32 = self._sum(acc, b, row, 0, q % 2)
                two: T.float32 = self._sum(acc, b, row, 1, q % 2)
                mine: T.float32 = T.if_then_else(upper == 0, one, two)
                theirs: T.float32 = T.cuda.__shfl_xor_sync(
                    T.uint32(0xFFFFFFFF), T.if_then_else(upper == 0, two, one), 4, 32
                )
                one = T.if_then_else(upper == 0, mine, theirs)
                two = T.if_then_else(upper == 0, theirs, mine)
                value: T.float32 = multiply(self.options.act, self.options.gate, one, two)
                if self.options.row_scale:
                    value = value * self.per_row(slot, row, lane, q % 2)
                line: T.let = q // 2 * 8 + T.truncmod(lane, 4) * 2 + q % 2
                self.staged[wg, half, line, b * 32 + col] = T.cast(value, self.options.dtype)

    @T.inline
    def turn_blocks(self, acc, slot, c, half, wg, warp, lane):
        pair = T.alloc_local([4], "uint32")
        for b in T.unroll(self.out_blocks):
            for q in T.unroll(4):
                row = T.meta_var(c * BAND + q // 2 * 8)
                low: T.float32 = self.value(acc, b, row, q % 2, 0, self.per_row(slot, row, lane, 0))
                upper: T.float32 = self.value(
                    acc, b, row, q % 2, 1, self.per_row(slot, row, lane, 1)
                )
                T.ptx[self.convert](pair[q], upper, low)
            T.ptx["stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"](
                self.staged.ptr_to(
                    [
                        wg,
                        half,
                        T.truncdiv(lane, 16) * 8 + T.truncmod(lane, 8),
                        b * 64 + warp * 16 + T.truncmod(T.truncdiv(lane, 8), 2) * 8,
                    ]
                ),
                *[pair[i] for i in range(4)],
            )


@T.meta_class
class FlipSums:
    """The k loop of a consumer warpgroup, once for every height: instructions name theirs."""

    def __init__(
        self,
        full: Any,
        empty: Any,
        take: Any,
        rows_tile: Any,
        weights: RhsTiles,
        epilogue: FlipEpilogue,
        knobs: RowsTile,
    ) -> None:
        self.full, self.empty, self.take = full, empty, take
        self.rows_tile, self.weights, self.rows = rows_tile, weights, knobs.tile_m
        self.blocks, self.apart, self.part = epilogue.blocks, epilogue.apart, epilogue.part
        self.turned, self.matrices = weights.turned, weights.matrices
        self.widths = knobs.widths
        self.split = knobs.cluster
        self.prev = T.local_scalar("int32")

    @T.inline
    def run(self, acc, high, steps, wg, thread, first, last):
        """acc = weights @ rows: a binary search for the loop of the least of the widths, from the
        ``first`` to the ``last``, that holds the height ``high``."""
        if first == last:
            self.loop(acc, steps, wg, thread, self.widths[first])
        else:
            middle = T.meta_var((first + last) // 2)
            if high <= self.widths[middle]:
                self.run(acc, high, steps, wg, thread, first, middle)
            else:
                self.run(acc, high, steps, wg, thread, middle + 1, last)

    @T.inline
    def loop(self, acc, steps, wg, thread, width):
        if self.split > 1:
            if steps == 0:  # the others have the whole depth
                for b in T.unroll(self.blocks):
                    for i in T.unroll(width // 2):
                        acc[b * (self.rows // 2) + i] = T.float32(0)
        for kt in T.serial(steps):
            self.full.wait(self.take.stage, self.take.phase)
            T.ptx.fence.proxy.async_.shared__cta()
            self.multiply(acc, self.take.stage, wg, width, kt > 0)
            T.ptx.wgmma.wait_group.sync.aligned(1)
            if kt > 0:
                release(self.empty, self.prev, thread, 1)
            self.prev = self.take.stage
            self.take.advance()
        T.ptx.wgmma.wait_group.sync.aligned(0)
        if self.split == 1:
            release(self.empty, self.prev, thread, 1)
        else:
            if steps > 0:
                release(self.empty, self.prev, thread, 1)

    @T.inline
    def multiply(self, acc, stage, wg, width, accum):
        if self.turned:
            Tx.wg.gemm_async(
                acc,
                self.weights.tiles[
                    stage * self.matrices + wg * (self.part // 64) : stage * self.matrices
                    + wg * (self.part // 64)
                    + 1,
                    0:TILE_K,
                    0:TILE_K,
                ],
                self.rows_tile[stage : stage + 1, 0:width, 0:TILE_K],
                transA=True,
                accum=accum,
                dispatch="pit_wgmma_flip",
                blocks=self.blocks,
                apart=self.apart,
            )
        else:
            Tx.wg.gemm_async(
                acc,
                self.weights.tiles[
                    stage : stage + 1, wg * self.part : wg * self.part + 64, 0:TILE_K
                ],
                self.rows_tile[stage : stage + 1, 0:width, 0:TILE_K],
                accum=accum,
                dispatch="pit_wgmma_flip",
                blocks=self.blocks,
                apart=self.apart,
            )
