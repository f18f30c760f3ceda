"""The epilogue of a consumer warpgroup: what it fetches early, and its SWrite."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx

from .hopper_knobs import RowsOptions, RowsTile
from .hopper_swrite import gate_config

# ``bytes``, a multiple of 16, from shared memory to global memory, by no thread.
_COPY = """__forceinline__ __device__ void pit_bulk_copy(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(__cvta_generic_to_global(to)),
                  "r"((unsigned)__cvta_generic_to_shared(from)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
"""
# Until this thread's copies have read what they copy, or are done.
_WAIT = """__forceinline__ __device__ void pit_bulk_{name}() {{
  asm volatile("cp.async.bulk.wait_group{how} 0;" ::: "memory");
}}
"""


@T.meta_class
class LateRows:
    """Finished rows of each consumer warp, kept in shared memory until bulk copies have taken them.

    Stores by threads stand in the way of the copies that gather, and of the threads' own waits for
    the next tile's stages. Bulk copies do not, if they are spread over that tile's k steps: all at
    once they hold up its weights (16384 x 3072 x 768 on an H200: 133 us by stores, 133 by copies at
    once, 119 by four of them a step).

    Parameters
    ----------
    pool : SMEMPool, for the rows
    warps, rows, columns, dtype : of the rows: so many of each warp, by lanes 16 at a time
    each : rows that a warp copies in a step
    """

    def __init__(
        self, pool: Any, warps: int, rows: int, columns: int, dtype: str, each: int
    ) -> None:
        self.rows, self.columns, self.each = rows, columns, each
        self.staged = pool.alloc((warps, rows, columns + 8), dtype, align=16)
        self.ids = T.alloc_local([rows // 16], "int32")  # out rows of lanes 0 to 15, -1 for none
        self.next = T.local_scalar("int32")
        self.col0 = T.local_scalar("int32")

    @T.inline
    def begin(self):
        """Before the first tile: no row waits."""
        self.next = self.rows
        self.col0 = 0
        for block in T.unroll(self.rows // 16):
            self.ids[block] = -1

    @T.inline
    def keep(self, ids, col0):
        """What the warp has staged belongs to rows ``ids`` of ``out``, at columns from ``col0``."""
        for block in T.unroll(self.rows // 16):
            self.ids[block] = ids[block]
        self.col0 = col0
        self.next = 0
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.warp_sync()

    @T.inline
    def copy(self, out, part, lane, count):
        """Begin to copy the next ``count`` rows, those that are left."""
        if self.next < self.rows:
            for block in T.unroll(self.rows // 16):
                row: T.let = block * 16 + lane
                due: T.let = (self.next <= row) & (row < self.next + count) & (lane < 16)
                if due & (self.ids[block] >= 0):
                    T.cuda.func_call(
                        "pit_bulk_copy",
                        out.ptr_to([T.int64(self.ids[block]), T.int64(self.col0)]),
                        self.staged.ptr_to([part, row, 0]),
                        T.min(self.columns, out.shape[1] - self.col0) * 2,
                        source_code=_COPY,
                    )
            self.next = self.next + count

    @T.inline
    def make_room(self, out, part, lane):
        """Copy what is left; the warp may stage again afterwards."""
        self.copy(out, part, lane, self.rows)
        T.cuda.func_call("pit_bulk_read", source_code=_WAIT.format(name="read", how=".read"))
        T.cuda.warp_sync()

    @T.inline
    def finish(self, out, part, lane):
        """Behind the last tile: all rows are written."""
        self.copy(out, part, lane, self.rows)
        T.cuda.func_call("pit_bulk_done", source_code=_WAIT.format(name="done", how=""))


@T.meta_class
class Epilogue:
    """Bias, row scale and output rows of one warpgroup's part of a tile.

    Parameters
    ----------
    pool : SMEMPool, for the staged rows, their bits and the tile's bias, one part per warp
    knobs, options : what the kernel is built with
    """

    def __init__(self, pool: Any, knobs: RowsTile, options: RowsOptions) -> None:
        warps = knobs.consumers * 4
        self.width = knobs.tile_n // options.halves
        self.blocks = knobs.tile_m // knobs.consumers // 64
        self.late = None
        if knobs.late:
            rows = self.blocks * 16
            self.late = LateRows(pool, warps, rows, self.width, options.dtype, knobs.late)
            self.staged = self.late.staged
        else:
            self.staged = pool.alloc((warps, 16, knobs.store_cols + 8), options.dtype, align=16)
        self.bias = pool.alloc((warps, 256), options.dtype, align=16)
        self.octets = None
        if options.live_bits:
            self.octets = pool.alloc(
                (warps, 16, knobs.tile_n // options.halves // 8), "uint8", align=16
            )
        self.options = options
        self.halves = options.halves
        self.paired = options.interleaved
        self.cols = knobs.store_cols
        self.lanes = knobs.store_cols // 8  # that store one staged row
        self.at_once = 32 // self.lanes  # staged rows that a warp stores at once
        self.stores = 16 // self.at_once
        self.by_pair = options.accumulate > 0 or options.per_row != ""
        self.into = max(options.accumulate, 1)

    @T.inline
    def ask(self, mine, ids, group, row0, live, warp, lane):
        """Ask for the ids of this lane's rows; they are needed after the k loop. Without ``ids``
        rows go to their own places."""
        if self.late is not None:
            for p in T.unroll(self.blocks):
                at: T.let = row0 + p * 64 + warp * 16 + T.truncmod(lane, 16)
                mine.rows[p] = -1
                if at < live:
                    mine.rows[p] = self.target(ids, group, at)
        elif self.options.accumulate == 0:
            for p in T.unroll(self.blocks * self.stores):
                at: T.let = (
                    row0
                    + (p // self.stores * 64 + p % self.stores * self.at_once)
                    + warp * 16
                    + T.truncdiv(lane, self.lanes)
                )
                mine.rows[p] = -1
                if at < live:
                    mine.rows[p] = self.target(ids, group, at)
        if self.by_pair:
            for p in T.unroll(self.blocks * 2):
                place: T.let = row0 + (p // 2 * 64 + p % 2 * 8) + warp * 16 + T.truncdiv(lane, 4)
                mine.pair_rows[p] = -1
                if place < live:
                    mine.pair_rows[p] = self.target(ids, group, place)
        if self.octets is not None:
            for p in T.unroll(self.blocks):
                place: T.let = row0 + p * 64 + warp * 16 + T.truncdiv(lane, 2)
                mine.live_rows[p] = -1
                if place < live:
                    mine.live_rows[p] = self.target(ids, group, place)

    def target(self, ids: Any, group: Any, at: Any) -> Any:
        """The out row of the group's row ``at``."""
        return at if ids is None else ids[group, at]

    @T.inline
    def fetch_bias(self, bias, group, col0, n, part, lane):
        """Copy the tile's bias to this warp's part; wait for it with ``finish_bias``."""
        if self.paired:
            if (lane * 8 < self.width * 2) & (col0 * 2 + lane * 8 < n * 2):
                T.ptx["cp.async.cg.shared.global"](
                    self.bias.ptr_to([part, lane * 8]),
                    bias.ptr_to([T.int64(group), T.int64(col0 * 2 + lane * 8)]),
                    16,
                )
        else:
            for side in T.unroll(self.halves):
                if (lane * 8 < self.width) & (col0 + lane * 8 < n):
                    T.ptx["cp.async.cg.shared.global"](
                        self.bias.ptr_to([part, side * self.width + lane * 8]),
                        bias.ptr_to(
                            [
                                T.int64(group),
                                T.int64(side * n + col0 + lane * 8),
                            ]
                        ),
                        16,
                    )

    @T.inline
    def finish_bias(self):
        T.ptx.cp.async_.wait_all()
        T.cuda.warp_sync()

    @T.inline
    def fetch_per_row(self, mine, per_row):
        """The factors or biases of this lane's two rows per block."""
        for p in T.unroll(self.blocks * 2):
            mine.per_row[p] = T.float32(0)
            if mine.pair_rows[p] >= 0:
                mine.per_row[p] = T.float32(per_row[T.int64(mine.pair_rows[p])])

    @T.inline
    def write(self, mine, acc, out, live, col0, part, lane):
        """Finish the accumulators and store or add them at columns from ``col0``, or keep them
        where they are stored late.

        ``live`` gets the bits of what is not zero, unless it is None.
        """
        if self.late is not None:
            self.late.make_room(out, part, lane)
        if self.options.accumulate > 1:
            for p in T.unroll(self.blocks * 2):
                if mine.pair_rows[p] >= 0:
                    mine.pair_rows[p] = T.truncdiv(mine.pair_rows[p], self.into)
        Tx.wg.copy(
            out[0:16, col0 : col0 + self.cols],
            self.staged[part, 0:16, 0 : self.cols],
            dispatch="pit_swrite",
            acc=acc,
            width=self.width,
            act=self.options.act,
            gate=gate_config(self.options.gate),
            bias=self.bias,
            has_bias=int(self.options.bias),
            per_row=mine.per_row,
            scaled=int(self.options.row_scale),
            shifted=int(self.options.row_bias),
            warp=part,
            lane=lane,
            rows=mine.rows,
            pair_rows=mine.pair_rows,
            accumulate=self.options.accumulate,
            late=int(self.late is not None),
            **self.live_config(live, mine),
        )

        if self.late is not None:
            self.late.keep(mine.rows, col0)

    @T.inline
    def begin(self):
        """Before the first tile."""
        if self.late is not None:
            self.late.begin()

    @T.inline
    def between(self, out, part, lane):
        """In every k step: some rows of the tile before go to ``out``."""
        if self.late is not None:
            self.late.copy(out, part, lane, self.late.each)

    @T.inline
    def finish(self, out, part, lane):
        """Behind the last tile."""
        if self.late is not None:
            self.late.finish(out, part, lane)

    def live_config(self, live: Any, mine: Any) -> dict[str, Any]:
        """What SWrite is told of the bits in ``live``; nothing where it is None."""
        if live is None:
            return {}
        return {"live": live, "octets": self.octets, "live_rows": mine.live_rows}


@T.meta_class
class EpilogueRows:
    """Registers of one thread: ``rows`` of its stores, ``pair_rows`` and what is ``per_row`` of
    its sums, ``live_rows`` whose bits it stores."""

    def __init__(self, epilogue: Epilogue) -> None:
        self.rows = T.alloc_local([epilogue.blocks * epilogue.stores], "int32")
        self.pair_rows = T.alloc_local([epilogue.blocks * 2], "int32")
        self.per_row = T.alloc_local([epilogue.blocks * 2], "float32")
        self.live_rows = T.alloc_local([epilogue.blocks], "int32")
