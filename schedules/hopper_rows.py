"""The m-axis family for Hopper (sm_90a): gathered lhs rows, dense rhs, scattered output rows.

    out[ids[g, i], :] = act(lhs[ids[g, i] // share, :] @ rhs[g].T + bias[g]),   i < count[g]

lhs (stored, k) and out (out_rows, n) are row-major, rhs (groups, n, k) is stored as nn.Linear does
or (groups, k, n) as matmul does, bias is (groups, n), all fp16 or all bf16 with fp32 accumulation;
ids is (groups, capacity) int32 and count (groups,) int32. ``rows_kernel`` lists the options. Rows
that ids does not name are not read, and written as ``fills`` asks alone; the weights of an empty
group are not read either.
All sizes are run-time values and the live counts are read on the device, so one kernel serves every
shape; n and k must be multiples of 8 (16-byte rows), every address 16-byte aligned, and ids in
range: the caller checks. PIT, SOSP'23, section 3.3.

One producer warpgroup walks the tiles, gathers lhs rows by cp.async into the 128-byte-swizzled
layout that wgmma reads (SRead; ``packed`` rows come by TMA) and fetches rhs by TMA into a ring of
stages; the other warpgroups multiply and scatter rows (SWrite). ``knobs.flip`` takes the template
of ``hopper_flip`` instead.
"""

from __future__ import annotations

import tvm
from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.lang.pipeline import PipelineState

from pit_tvm.gates import Gate

from .dependent import after_predecessor
from .hopper_dead import STORING, DeadRows
from .hopper_epilogue import Epilogue, EpilogueRows
from .hopper_flip import flipped_rows
from .hopper_knobs import SHARED_LIMIT, TILE_K, TILES_AHEAD, RowsOptions, RowsTile
from .hopper_primitives import register
from .hopper_ring import RhsTiles, TilePosts, announce, hand_back, matrices, release, steps_of
from .hopper_walk import TileWalk

__all__ = ["SHARED_LIMIT", "TILE_K", "RowsOptions", "RowsTile", "rows_kernel"]

GATHER_STEP = 16  # rows that one warpgroup gathers at once, 8 lanes for each


@T.inline
def ask_rows(rows, ids, walk, first, count, options):
    """rows[p] = lhs row for row first + p * GATHER_STEP of the walk's tile, -1 beyond the live
    rows; nothing where rows are packed."""
    if not options.packed:
        for p in T.unroll(count):
            rows[p] = -1
            if first + p * GATHER_STEP < walk.live:
                rows[p] = T.truncdiv(ids[walk.group, first + p * GATHER_STEP], options.share)


@T.jit
def gathered_rows(
    lhs: T.Buffer(("stored", "k"), options.dtype),
    ids: T.Buffer(("groups", "capacity"), "int32"),
    count: T.Buffer(("groups",), "int32"),
    dead: T.Optional(T.Buffer((1, "most"), "int32")),
    deads: T.Optional(T.Buffer((1,), "int32")),
    depth: T.Optional(T.Buffer((1,), "int32", align=4)),
    rhs_h: T.handle,
    bias: T.Optional(T.Buffer(("options.matrix(groups, 1)", "n * options.halves"), options.dtype)),
    per_row: T.Optional(T.Buffer(("known",), options.per_row, align=2)),
    out: T.Buffer(("out_rows", "n"), options.out_dtype),
    live_bits: T.Optional(T.Buffer(("out_rows", "T.truncdiv(n + 127, 128) * 16"), "uint8")),
    *,
    knobs: T.constexpr,
    options: T.constexpr,
):
    """The template; ``rows_kernel`` gives it its knobs and options."""
    groups, n, k = T.int32(), T.int32(), T.int32()
    shape = T.meta_var(options.rhs_shape(options.matrix(groups, 1), n, k))
    rhs = T.match_buffer(rhs_h, shape, options.dtype, layout=matrices(*shape))

    TM = T.meta_var(knobs.tile_m)
    CL = T.meta_var(knobs.cluster)
    STAGES = T.meta_var(knobs.stages)
    WGS = T.meta_var(knobs.consumers)
    LAG = T.meta_var(0 if options.packed else knobs.lag)
    HEIGHT = T.meta_var(TM // WGS)  # rows of one consumer warpgroup
    PASSES = T.meta_var(TM // GATHER_STEP)
    PACKED = T.meta_var(options.packed)

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
    posts = TilePosts(pool, WGS)
    pool.move_base_to(1024)
    lhs_tile = pool.alloc_tcgen05_mma_AB((STAGES, TM, TILE_K), options.dtype)
    rhs_tiles = RhsTiles(pool, rhs, n, knobs, options)
    epilogue = Epilogue(pool, knobs, options)
    walk = TileWalk(pool, count, groups, n, knobs, epilogue.width, options.slot)
    pool.commit()
    full.init(1 if PACKED else (4 if LAG > 0 else 128) + 1)
    empty.init(WGS * CL)
    posts.init()
    if dead is not None:
        zeros = DeadRows(dead, deads, out, knobs.sms)
    T.ptx.fence.mbarrier_init.release.cluster()
    if CL > 1:
        T.ptx.barrier.cluster.arrive()
        T.ptx.barrier.cluster.wait()
    after_predecessor()
    if knobs.most_groups > 1:
        walk.arrange(wg * 128 + thread, (WGS + 1) * 128)
        if (wg == 0) & (warp == 0):
            walk.prefix(lane)
    if (CL == 1) | (knobs.most_groups > 1):
        T.cuda.cta_sync()
    steps: T.let = steps_of(k, depth)

    if wg == WGS:
        T.ptx["setmaxnreg.dec.sync.aligned.u32"](knobs.registers[0])
        walk.begin(T.truncdiv(bx, CL))
        put = PipelineState(STAGES, 1)
        done = PipelineState(STAGES, 0)
        post = PipelineState(TILES_AHEAD, 1)
        rows = T.alloc_local([PASSES], "int32")
        # rows of the next tile, asked for during this one
        coming = T.alloc_local([PASSES], "int32")
        group: T.int32 = 0
        if PACKED:
            packed0: T.int32 = 0
        col0: T.int32 = 0
        apart: T.int32 = 0
        more: T.int32 = 0
        pending: T.int32 = 0
        mine: T.let = T.truncdiv(thread, 8)
        if dead is not None:
            if warp == STORING:
                zeros.begin_beside(bx, walk.tiles() * steps, lane)
        if walk.more():
            more = 1
            walk.locate(rank)
            ask_rows(coming, ids, walk, walk.row0 + mine, PASSES, options)
        while more == 1:
            group = walk.group
            col0 = walk.col0
            if CL > 1:
                apart = walk.apart
            if PACKED:
                packed0 = walk.row0
            else:
                for p in T.unroll(PASSES):
                    rows[p] = coming[p]
            for kt in T.serial(steps):
                empty.wait(put.stage, put.phase)
                if thread == 0:
                    full.arrive(put.stage, (knobs.tile_n + (TM if PACKED else 0)) * TILE_K * 2)
                    rhs_tiles.fetch(
                        put.stage,
                        options.matrix(group, 0),
                        col0,
                        kt,
                        rank,
                        full.ptr_to([put.stage]),
                        apart,
                    )
                    if PACKED:
                        Tx.copy_async(
                            lhs_tile[put.stage],
                            lhs[packed0 : packed0 + TM, kt * TILE_K : kt * TILE_K + TILE_K],
                            dispatch="tma_explicit",
                            mbar=full.ptr_to([put.stage]),
                        )
                if not PACKED:
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
                if dead is not None:
                    if warp == STORING:
                        zeros.store_beside(lane)
                if kt == 0:
                    # Told while the first copies are under way.
                    posts.post(post, warp, lane, group, walk.live, walk.row0, col0)
                    walk.advance()
                    more = 0
                    if walk.more():
                        more = 1
                        walk.locate(rank)
                        ask_rows(coming, ids, walk, walk.row0 + mine, PASSES, options)
        if LAG > 0:
            T.ptx.cp.async_.wait_group(0)
            while pending > 0:
                announce(full, done, lane)
                pending = pending - 1
        posts.post(post, warp, lane, -1, 0, 0, 0)
    else:
        T.ptx["setmaxnreg.inc.sync.aligned.u32"](knobs.registers[1])
        part: T.let = wg * 4 + warp
        take = PipelineState(STAGES, 0)
        read = PipelineState(TILES_AHEAD, 0)
        acc = T.alloc_local([HEIGHT // 64 * (knobs.tile_n // 2)], "float32")
        held = EpilogueRows(epilogue)
        prev: T.int32 = 0
        tile_group: T.int32 = 0
        epilogue.begin()
        while tile_group >= 0:
            posts.ready.wait(read.stage, read.phase)
            tile_group = posts.slots[read.stage, 0]
            live: T.int32 = posts.slots[read.stage, 1]
            row0: T.int32 = posts.slots[read.stage, 2] + wg * HEIGHT
            tile_col: T.int32 = posts.slots[read.stage, 3]
            # All have read before one thread hands the post back.
            T.ptx["bar.sync"](T.uint32(wg + 1), T.uint32(128))
            if thread == 0:
                posts.taken.arrive(read.stage)
            read.advance()
            if tile_group >= 0:
                if row0 >= live:  # no live row for this warpgroup
                    hand_back(full, empty, take, steps, wg, thread, CL)
                else:
                    epilogue.ask(held, ids, tile_group, row0, live, warp, lane)
                    if bias is not None:
                        epilogue.fetch_bias(
                            bias, options.matrix(tile_group, 0), tile_col, n, part, lane
                        )
                    for kt in T.serial(steps):
                        full.wait(take.stage, take.phase)
                        if LAG == 0 and not PACKED:
                            T.ptx.fence.proxy.async_.shared__cta()
                        rhs_tiles.multiply(
                            acc,
                            lhs_tile[take.stage, wg * HEIGHT : wg * HEIGHT + HEIGHT, 0:TILE_K],
                            take.stage,
                            kt > 0,
                        )
                        T.ptx.wgmma.wait_group.sync.aligned(1)
                        if kt > 0:
                            release(empty, prev, thread, CL)
                        prev = take.stage
                        take.advance()
                        epilogue.between(out, part, lane)
                    if per_row is not None:
                        epilogue.fetch_per_row(held, per_row)
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                    release(empty, prev, thread, CL)
                    if bias is not None:
                        epilogue.finish_bias()
                    epilogue.write(held, acc, out, live_bits, tile_col, part, lane)
        epilogue.finish(out, part, lane)
        if dead is not None:
            walk.begin(T.truncdiv(bx, CL))
            zeros.store_rest(bx, walk.tiles() * steps, part, WGS * 4, lane)
    if CL > 1:  # a CTA must outlive its neighbours' arrivals
        T.ptx.barrier.cluster.arrive()
        T.ptx.barrier.cluster.wait()


def rows_kernel(
    dtype: str,
    knobs: RowsTile,
    *,
    bias: bool = False,
    act: str = "none",
    share: int = 1,
    rhs_layout: str = "nk",
    gate: Gate | None = None,
    row_scale: bool = False,
    accumulate: int = 0,
    live_bits: bool = False,
    slot: int = 0,
    packed: bool = False,
    deep: bool = False,
    row_bias: bool = False,
    fills: bool = False,
) -> tvm.tirx.PrimFunc:
    """The kernel of one set of knobs: lhs, ids, count, [dead, deads,] [depth,] rhs, [bias,]
    [scale,] out, [live].

    Parameters
    ----------
    dtype : element type of lhs, rhs, bias and (unless ``accumulate``) out: float16 or bfloat16
    bias : add bias[g] (groups, n), with gated pairs (groups, 2 n) in the order of rhs's columns
    act : none, relu, relu2, gelu, gelu_tanh or silu
    share : ids per lhs row (top-k routing ids name token * k + choice); out rows are the ids
    rhs_layout : "nk" for rhs (groups, n, k), "kn" for (groups, k, n)
    gate : half of rhs's 2 n columns are gates, see `Gate`
    row_scale : scale (float32, one per id) multiplies the finished row: scale[ids[g, i]]
    accumulate : 0 stores; s > 0 adds the row to out[ids[g, i] // s] instead, in float32 and in no
        fixed order (sums differ in the last bits from call to call)
    live_bits : also say which elements of each stored row are not zero, in live (out_rows, n / 8
        rounded up to a multiple of 16) uint8. The first n / 8 columns are the `BitMask` of out that
        the next operator's detection takes, at any micro-tile; the others are undefined. As for
        `Values` NaN is live and -0.0 is not; rows that ids does not name are not written
    slot : groups are slots of so many columns of one product: rhs is (1, ..), bias (1, n), and the
        rows of group g get their columns from g * slot to (g + 1) * slot only
    packed : lhs has the rows of the one group's list one after another: out[ids[0, i]] is computed
        of lhs[i]
    deep : the extent of k is capacity: depth (1,) int32, on the device, says how much of it counts,
        rounded up to a whole `TILE_K`, at least one
    row_bias : in the place of scale, one bias of ``dtype`` per id: bias[ids[g, i]] is added before
        the activation
    fills : rows of out that dead (1, capacity) int32 names, as many as deads (1,) says, become 0

    Raises
    ------
    ScheduleError (a ValueError) for knobs or options that the template cannot build
    """
    how = (accumulate, live_bits, slot, packed, deep, row_bias, fills)
    options = RowsOptions(dtype, bias, act, share, rhs_layout, gate, row_scale, *how)
    options.check(knobs)
    register()
    absent = {} if bias else {"bias": None}
    if not options.per_row:
        absent["per_row"] = None
    if not fills:
        absent |= {"dead": None, "deads": None}
    if not deep:
        absent["depth"] = None
    if knobs.flip:  # RowsOptions.check refuses live_bits there
        return flipped_rows.specialize(knobs=knobs, options=options, **absent)
    if not live_bits:
        absent["live_bits"] = None
    return gathered_rows.specialize(knobs=knobs, options=options, **absent)
