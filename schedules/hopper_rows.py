"""The m-axis family for Hopper (sm_90a): gathered lhs rows, dense rhs, scattered output rows.

    out[ids[g, i], :] = act(lhs[ids[g, i] // share, :] @ rhs[g].T + bias[g]),   i < count[g]

lhs (stored, k) and out (out_rows, n) are row-major, rhs (groups, n, k) is stored as nn.Linear does,
bias is (groups, n), all fp16 or all bf16 with fp32 accumulation; ids is (groups, capacity) int32
and count (groups,) int32. Rows that ids does not name are neither read nor written, and neither are
the weights of an empty group. All sizes are run-time values and the live counts are read on the
device, so one kernel serves every shape; n and k must be multiples of 8 (16-byte rows), every
address 16-byte aligned, and ids in range: the caller checks. PIT, SOSP'23, section 3.3.

One producer warpgroup walks the tiles, gathers lhs rows by cp.async into the 128-byte-swizzled
layout that wgmma reads (SRead) and fetches rhs by TMA into a ring of stages; the other warpgroups
multiply and scatter rows (SWrite).
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.lang.pipeline import PipelineState

from .hopper_primitives import register
from .hopper_walk import TileWalk

TILE_K = 64  # elements: one 128-byte swizzle row of a 16-bit type
SHARED_LIMIT = 232448  # bytes a CTA may use on sm_90
GATHER_STEP = 16  # rows that one warpgroup gathers at once, 8 lanes for each


@dataclass(frozen=True)
class RowsTile:
    """Knobs of the family; every field is a tuning decision.

    ``consumers``: warpgroups that multiply; each takes tile_m / consumers rows in blocks of 64.
    ``cluster``: CTAs that take neighbouring row tiles and share each rhs tile by multicast.
    ``raster``: bands of rows (tile_m * cluster) walked before the next column tile, to reuse L2.
    ``lag``: k steps between issuing a gather and announcing it; 0: the copies announce themselves.
    ``store_cols``: columns that a warp stages in shared memory before it stores 16 bytes per lane.
    ``most_groups``: the most groups the kernel takes; 1 leaves the search for the group out.
    ``sms``: CTAs of the persistent grid, one per multiprocessor.
    """

    tile_m: int = 128
    tile_n: int = 256
    stages: int = 4
    consumers: int = 2
    cluster: int = 1
    raster: int = 8
    lag: int = 0
    store_cols: int = 64
    most_groups: int = 1
    sms: int = 132

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers per thread, within 65536 per multiprocessor."""
        return (56, 240) if self.consumers == 1 else (72, 216)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of one CTA."""
        ring = self.stages * (self.tile_m + self.tile_n) * TILE_K * 2
        staged = self.consumers * 4 * (16 * (self.store_cols + 8) + 256) * 2
        return 1024 + ring + staged + (2 * self.most_groups + 8) * 4

    def check(self) -> None:
        """Raise ValueError for a combination that the template cannot build."""
        rules = {
            "consumers 1 or 2": self.consumers in (1, 2),
            "tile_m 64 or 128 per consumer": self.tile_m
            in (64 * self.consumers, 128 * self.consumers),
            "tile_n a multiple of 8 from 8 to 256": self.tile_n % 8 == 0
            and 8 <= self.tile_n <= 256,
            "at most 128 accumulators per thread": self.tile_m // self.consumers * self.tile_n
            <= 128 * 128,
            "store_cols 32, 64 or 128": self.store_cols in (32, 64, 128),
            "lag below stages": 0 <= self.lag < self.stages,
            "cluster 1 or 2, a divisor of sms": self.cluster in (1, 2)
            and self.sms % self.cluster == 0,
            f"at most {SHARED_LIMIT} bytes of shared memory": self.shared_bytes <= SHARED_LIMIT,
        }
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(f"{self}: expected {rule}")


@T.inline
def announce(full, state, lane):
    """Make this warp's finished copies visible to wgmma, then count the warp in."""
    T.ptx.fence.proxy.async_.shared__cta()
    T.cuda.warp_sync()
    if lane == 0:
        T.ptx.mbarrier.arrive.shared.b64(full.ptr_to([state.stage]), T.uint32(1))
    state.advance()


@T.inline
def release(empty, stage, thread, cluster):
    """One arrival of this warpgroup in every CTA that fills the stage."""
    if cluster == 1:
        if thread == 0:
            empty.arrive(stage)
    else:
        if thread < cluster:
            empty.arrive(stage, remote=thread)


@T.inline
def ask_rows(rows, ids, walk, first, count, step, share):
    """rows[p] = row id of row first + p * step of the walk's tile, -1 beyond the live rows."""
    for p in T.unroll(count):
        rows[p] = -1
        if first + p * step < walk.live:
            rows[p] = T.truncdiv(ids[walk.group, first + p * step], share)


@T.jit
def gathered_rows(
    lhs_h: T.handle,
    ids_h: T.handle,
    count_h: T.handle,
    rhs_h: T.handle,
    bias_h: T.Optional(T.handle),  # type: ignore[valid-type]
    out_h: T.handle,
    *,
    dtype: T.constexpr,
    knobs: T.constexpr,
    act: T.constexpr,
    share: T.constexpr,
):
    """The template; ``rows_kernel`` gives it its knobs."""
    stored, out_rows, groups, capacity = T.int32(), T.int32(), T.int32(), T.int32()
    n, k = T.int32(), T.int32()
    lhs = T.match_buffer(lhs_h, (stored, k), dtype)
    ids = T.match_buffer(ids_h, (groups, capacity), "int32")
    count = T.match_buffer(count_h, (groups,), "int32")
    rhs = T.match_buffer(rhs_h, (groups, n, k), dtype)
    if bias_h is not None:
        bias = T.match_buffer(bias_h, (groups, n), dtype)
    out = T.match_buffer(out_h, (out_rows, n), dtype)

    TM = T.meta_var(knobs.tile_m)
    TN = T.meta_var(knobs.tile_n)
    CL = T.meta_var(knobs.cluster)
    STAGES = T.meta_var(knobs.stages)
    WGS = T.meta_var(knobs.consumers)
    LAG = T.meta_var(knobs.lag)
    HEIGHT = T.meta_var(TM // WGS)  # rows of one consumer warpgroup
    PASSES = T.meta_var(TM // GATHER_STEP)
    SHARED = T.meta_var(
        TN % (8 * CL) == 0
    )  # each CTA fetches a part of every rhs tile; else they take turns
    PART = T.meta_var(TN // CL if TN % (8 * CL) == 0 else TN)
    COLS = T.meta_var(knobs.store_cols)
    LANES = T.meta_var(COLS // 8)  # lanes that store one staged row
    STORES = T.meta_var(LANES // 2)  # stores of each lane per 16 rows

    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
    cta = T.cta_id_in_cluster([CL])
    bx = T.cta_id([knobs.sms])
    wg = T.warpgroup_id([WGS + 1])
    warp = T.warp_id_in_wg([4])
    lane = T.lane_id([32])
    thread: T.let = warp * 32 + lane
    rank: T.int32 = cta  # read the special register once

    pool = T.SMEMPool()
    full = TMABar(pool, STAGES)
    empty = MBarrier(pool, STAGES)
    opens = pool.alloc(
        (STAGES, 4), "int32", align=16
    )  # group, live, row0, col0 of the tile that a stage opens
    pool.move_base_to(1024)
    lhs_tile = pool.alloc_tcgen05_mma_AB((STAGES, TM, TILE_K), dtype)
    rhs_tile = pool.alloc_tcgen05_mma_AB((STAGES, TN, TILE_K), dtype)
    staged = pool.alloc((WGS * 4, 16, knobs.store_cols + 8), dtype, align=16)
    tile_bias = pool.alloc((WGS * 4, 256), dtype, align=16)
    before = pool.alloc((knobs.most_groups + 1,), "int32", align=16)
    lives = pool.alloc((knobs.most_groups,), "int32", align=16)
    pool.commit()
    full.init((4 if LAG > 0 else 128) + 1)
    empty.init(WGS * CL)
    walk = TileWalk(
        count, before, lives, groups, n, knobs.most_groups, TM, TN, CL, knobs.raster, knobs.sms
    )
    if knobs.most_groups > 1:
        if (wg == 0) & (warp == 0):
            walk.prefix(lane)
    T.ptx.fence.mbarrier_init.release.cluster()
    if CL > 1:
        T.ptx.barrier.cluster.arrive()
        T.ptx.barrier.cluster.wait()
    else:
        T.cuda.cta_sync()
    steps: T.let = T.truncdiv(k + TILE_K - 1, TILE_K)

    if wg == WGS:
        T.ptx["setmaxnreg.dec.sync.aligned.u32"](knobs.registers[0])
        walk.begin(T.truncdiv(bx, CL))
        put = PipelineState(STAGES, 1)
        done = PipelineState(STAGES, 0)
        rows = T.alloc_local([PASSES], "int32")
        coming = T.alloc_local(
            [PASSES], "int32"
        )  # rows of the next tile, asked for during this one
        group: T.int32 = 0
        col0: T.int32 = 0
        more: T.int32 = 0
        pending: T.int32 = 0
        mine: T.let = T.truncdiv(thread, 8)
        if walk.more():
            more = 1
            walk.locate(rank)
            ask_rows(coming, ids, walk, walk.row0 + mine, PASSES, GATHER_STEP, share)
        while more == 1:
            group = walk.group
            col0 = walk.col0
            for p in T.unroll(PASSES):
                rows[p] = coming[p]
            for kt in T.serial(steps):
                empty.wait(put.stage, put.phase)
                if thread == 0:
                    if kt == 0:
                        opens[put.stage, 0] = group
                        opens[put.stage, 1] = walk.live
                        opens[put.stage, 2] = walk.row0
                        opens[put.stage, 3] = col0
                    full.arrive(put.stage, TN * TILE_K * 2)
                    if SHARED | (T.truncmod(kt, CL) == rank):
                        part: T.let = T.if_then_else(SHARED, rank * PART, 0)
                        Tx.copy_async(
                            rhs_tile[put.stage, part : part + PART, 0:TILE_K],
                            rhs[
                                group : group + 1,
                                col0 + part : col0 + part + PART,
                                kt * TILE_K : kt * TILE_K + TILE_K,
                            ],
                            dispatch="tma_explicit",
                            mbar=full.ptr_to([put.stage]),
                            cta_mask=(1 << CL) - 1 if CL > 1 else 0,
                        )
                Tx.copy_async(
                    lhs_tile[put.stage],
                    lhs[0:TM, kt * TILE_K : kt * TILE_K + TILE_K],
                    dispatch="pit_sread",
                    rows=rows,
                    thread=thread,
                )
                if LAG == 0:
                    T.ptx["cp.async.mbarrier.arrive.noinc.shared.b64"](full.ptr_to([put.stage]))
                else:
                    T.ptx.cp.async_.commit_group()
                    if pending == LAG:
                        T.ptx.cp.async_.wait_group(LAG)
                        announce(full, done, lane)
                    else:
                        pending = pending + 1
                put.advance()
                if kt == 0:
                    walk.advance()
                    more = 0
                    if walk.more():
                        more = 1
                        walk.locate(rank)
                        ask_rows(coming, ids, walk, walk.row0 + mine, PASSES, GATHER_STEP, share)
        if LAG > 0:
            T.ptx.cp.async_.wait_group(0)
            while pending > 0:
                announce(full, done, lane)
                pending = pending - 1
        # A stage that opens no tile ends the consumers' loop.
        empty.wait(put.stage, put.phase)
        if thread == 0:
            opens[put.stage, 0] = -1
            full.arrive(put.stage)
        if LAG == 0:
            T.ptx["cp.async.mbarrier.arrive.noinc.shared.b64"](full.ptr_to([put.stage]))
        else:
            announce(full, done, lane)
    else:
        T.ptx["setmaxnreg.inc.sync.aligned.u32"](knobs.registers[1])
        part_id: T.let = wg * 4 + warp
        take = PipelineState(STAGES, 0)
        acc = T.alloc_local([TM // WGS // 64 * (TN // 2)], "float32")
        dst = T.alloc_local([HEIGHT // 64 * STORES], "int32")
        prev: T.int32 = 0
        tile_group: T.int32 = 0
        while tile_group >= 0:
            full.wait(take.stage, take.phase)
            tile_group = opens[take.stage, 0]
            live: T.int32 = opens[take.stage, 1]
            row0: T.int32 = opens[take.stage, 2] + wg * HEIGHT
            tile_col: T.int32 = opens[take.stage, 3]
            T.ptx["bar.sync"](
                T.cast(wg + 1, "uint32"), T.uint32(128)
            )  # all have read before one thread hands the stage back
            if tile_group >= 0:
                if row0 >= live:  # no live row for this warpgroup: hand the stages back
                    for _ in T.serial(steps):
                        full.wait(take.stage, take.phase)
                        T.ptx["bar.sync"](
                            T.cast(wg + 1, "uint32"), T.uint32(128)
                        )  # no wgmma keeps the four warps together here
                        release(empty, take.stage, thread, CL)
                        take.advance()
                else:
                    # Ask early for what the epilogue needs.
                    for p in T.unroll(HEIGHT // 64 * STORES):
                        at: T.let = (
                            row0
                            + (p // STORES * 64 + p % STORES * (16 // STORES))
                            + warp * 16
                            + T.truncdiv(lane, LANES)
                        )
                        dst[p] = -1
                        if at < live:
                            dst[p] = ids[tile_group, at]
                    if bias_h is not None:
                        if (lane * 8 < TN) & (tile_col + lane * 8 < n):
                            T.ptx["cp.async.cg.shared.global"](
                                tile_bias.ptr_to([part_id, lane * 8]),
                                bias.ptr_to(
                                    [
                                        T.cast(tile_group, "int64"),
                                        T.cast(tile_col + lane * 8, "int64"),
                                    ]
                                ),
                                16,
                            )
                    for kt in T.serial(steps):
                        full.wait(take.stage, take.phase)
                        if LAG == 0:
                            T.ptx.fence.proxy.async_.shared__cta()
                        Tx.wg.gemm_async(
                            acc,
                            lhs_tile[take.stage, wg * HEIGHT : wg * HEIGHT + HEIGHT, 0:TILE_K],
                            rhs_tile[take.stage],
                            accum=kt > 0,
                            dispatch="pit_wgmma",
                        )
                        T.ptx.wgmma.wait_group.sync.aligned(1)
                        if kt > 0:
                            release(empty, prev, thread, CL)
                        prev = take.stage
                        take.advance()
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                    release(empty, prev, thread, CL)
                    if bias_h is not None:
                        T.ptx.cp.async_.wait_all()
                        T.cuda.warp_sync()
                        Tx.wg.copy(
                            out[0:16, tile_col : tile_col + COLS],
                            staged[part_id, 0:16, 0:COLS],
                            acc=acc,
                            width=TN,
                            dispatch="pit_swrite",
                            rows=dst,
                            lane=lane,
                            act=act,
                            bias=tile_bias,
                        )
                    else:
                        Tx.wg.copy(
                            out[0:16, tile_col : tile_col + COLS],
                            staged[part_id, 0:16, 0:COLS],
                            acc=acc,
                            width=TN,
                            dispatch="pit_swrite",
                            rows=dst,
                            lane=lane,
                            act=act,
                        )
    if CL > 1:  # a CTA must outlive its neighbours' arrivals
        T.ptx.barrier.cluster.arrive()
        T.ptx.barrier.cluster.wait()


def rows_kernel(
    dtype: str, knobs: RowsTile, *, bias: bool = False, act: str = "none", share: int = 1
) -> tvm.tirx.PrimFunc:
    """The kernel of one set of knobs; its arguments are lhs, ids, count, rhs, [bias,] out.

    ``share``: ids per lhs row (top-k routing ids name token * k + choice); out rows are the ids.
    """
    knobs.check()
    register()
    optional = {} if bias else {"bias_h": None}
    return gathered_rows.specialize(dtype=dtype, knobs=knobs, act=act, share=share, **optional)
