"""Rows of a finished tile that leave while the next one is computed."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

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
