"""The k-axis family for Hopper (sm_90a): live columns of lhs, other ones for every band of rows.

    out[i, :] = act(sum of lhs[s, i] * rhs[s, :] over s in ids[b, :count[b]] + bias),  i in band b

Bands are ``height`` neighbouring rows of out. lhs is k-major, (k, m): row s of it holds what
belongs to row s of rhs (k, n), so both operands are gathered by the same list. All are fp16 or all
bf16 with fp32 sums; ids is (bands, capacity) int32 with a capacity that is a multiple of 64, count
(bands,) int32. Every row of out is written: a band without a live column is act(bias). All sizes
are run-time values and counts are read on the device, so one kernel serves every shape; m and n
must be multiples of 8, every address 16-byte aligned, and ids in range: the caller checks. PIT,
SOSP'23, section 3.3.

One producer warpgroup gathers rows of live k by cp.async (SRead) into matrices of 64 columns, the
128-byte-swizzled layout in which wgmma reads operands whose rows are the depth; nothing is turned.
The other two multiply and write whole rows. For bands of columns of rhs the product is computed
turned: a band gives the columns of the instruction, so that rows are written all the same. Other
tiles of fewer than 64 rows leave the rest of the instruction's rows unused: such products are bound
by the bytes of rhs, not by arithmetic.
"""

from __future__ import annotations

import tvm
from tvm.backend.cuda.lang.pipeline import MBarrier
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.lang.pipeline import PipelineState

from .dependent import after_predecessor
from .hopper_bands import BandProduct, BandWalk, ColumnsTile, GroupWalk
from .hopper_epilogue import Epilogue, EpilogueRows
from .hopper_knobs import RowsOptions, require
from .hopper_primitives import register
from .hopper_ranges import RangeWalk
from .hopper_ring import release


@T.jit
def gathered_columns(
    lhs: T.Buffer(("stored", "m if share > 0 else width"), options.dtype),
    ids: T.Buffer(("lists", "capacity"), "int32"),
    count: T.Buffer(("lists",), "int32"),
    rhs: T.Buffer((1, "k", "n"), options.dtype),
    bias: T.Optional(T.Buffer((1, "m if flip else n"), options.dtype)),
    parts: T.Optional(T.Buffer(knobs.parts_shape, "float32")),
    flags: T.Optional(T.Buffer(knobs.parts_shape[:1], "int32")),
    out: T.Buffer(("n", "m") if flip else ("total if share > 0 else m", "n"), options.dtype),
    *,
    knobs: T.constexpr,
    options: T.constexpr,
    packed: T.constexpr,
    flip: T.constexpr,
    share: T.constexpr,
):
    """The template; ``columns_kernel`` gives it its knobs and options."""
    lists, capacity, m, n = T.int32(), T.int32(), T.int32(), T.int32()

    STAGES = T.meta_var(knobs.stages)
    DEPTH = T.meta_var(knobs.tile_k)
    HOLDS = T.meta_var(knobs.tile_k // 4)  # ids of a stage that one warp holds
    HIGH = T.meta_var(-(-knobs.height // 64))  # matrices of lhs in a stage, and of rhs
    WIDE = T.meta_var(knobs.tile_n // 64)
    LINE = T.meta_var(min(knobs.height, 64))  # of a row of lhs in one matrix
    PART = T.meta_var(knobs.flipped_part if flip else knobs.part)
    SUMS = T.meta_var(PART.tile_m // 128 * (PART.tile_n // 2))

    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
    bx = T.cta_id([knobs.sms])
    wg = T.warpgroup_id([3])
    warp = T.warp_id_in_wg([4])
    lane = T.lane_id([32])
    thread: T.let = warp * 32 + lane

    pool = T.SMEMPool()
    full = MBarrier(pool, STAGES)
    empty = MBarrier(pool, STAGES)
    order = MBarrier(pool, 2)  # whose turn it is to multiply
    pool.move_base_to(1024)
    lhs_tile = pool.alloc_tcgen05_mma_AB((STAGES * HIGH, DEPTH, 64), options.dtype)
    rhs_tile = pool.alloc_tcgen05_mma_AB((STAGES * WIDE, DEPTH, 64), options.dtype)
    epilogue = Epilogue(pool, PART, options)
    pool.commit()
    full.init(128)
    empty.init(1 if knobs.shared == 0 else 2)
    order.init(4)
    if parts is not None:
        walk = RangeWalk(count, m, n, knobs)
    elif share > 0:
        walk = GroupWalk(count, lists, m, n, knobs)  # type: ignore[assignment]
    else:
        walk = BandWalk(count, lists, n, knobs)  # type: ignore[assignment]
    T.ptx.fence.mbarrier_init.release.cluster()
    T.cuda.cta_sync()
    after_predecessor()
    walk.begin(bx)

    if wg == 2:
        T.ptx["setmaxnreg.dec.sync.aligned.u32"](PART.registers[0])
        put = PipelineState(STAGES, 1)
        # Lanes hold the ids of their warp's rows of a stage, every fourth one; those of the next
        # stage are asked for during this one.
        mine: T.let = T.truncmod(lane, HOLDS) * 4 + warp
        held: T.int32 = 0
        own: T.int32 = 0  # the same of lhs
        coming: T.int32 = 0
        if walk.more():
            coming = ids[T.int64(walk.then), T.int64(walk.ahead + mine)]
        while walk.more():
            walk.take()
            if walk.steps == 0:
                coming = ids[T.int64(walk.then), T.int64(walk.ahead + mine)]
            for kt in T.serial(walk.steps):
                held = T.if_then_else(kt * DEPTH + mine < walk.live, coming, -1)
                own = held
                if packed == 1:
                    if held >= 0:
                        own = walk.band * capacity + kt * DEPTH + mine
                if share > 1:
                    if held >= 0:
                        held = T.truncdiv(held, share)
                if kt + 1 < walk.steps:
                    coming = ids[
                        T.int64(walk.list_of(walk.band)),
                        T.int64(walk.first + (kt + 1) * DEPTH + mine),
                    ]
                else:
                    coming = ids[T.int64(walk.then), T.int64(walk.ahead + mine)]
                lhs_col: T.let = 0 if packed == 1 else walk.band * knobs.height
                empty.wait(put.stage, put.phase)
                Tx.copy_async(
                    rhs_tile[put.stage * WIDE, 0:DEPTH, 0:64],
                    rhs[0, 0:DEPTH, walk.col0 : walk.col0 + 64],
                    dispatch="pit_sread_held",
                    matrices=WIDE,
                    rows=walk.live - kt * DEPTH,
                    held=held,
                    warp=warp,
                    lane=lane,
                )
                Tx.copy_async(
                    lhs_tile[put.stage * HIGH, 0:DEPTH, 0:LINE],
                    lhs[0:DEPTH, lhs_col : lhs_col + LINE],
                    dispatch="pit_sread_held",
                    matrices=HIGH,
                    rows=walk.live - kt * DEPTH,
                    held=own,
                    warp=warp,
                    lane=lane,
                )
                T.ptx["cp.async.mbarrier.arrive.noinc.shared.b64"](full.ptr_to([put.stage]))
                put.advance()
    else:
        T.ptx["setmaxnreg.inc.sync.aligned.u32"](PART.registers[1])
        part: T.let = wg * 4 + warp
        row_part: T.let = wg if knobs.shared == 1 else 0
        side: T.let = wg if knobs.shared == 2 else 0
        take = PipelineState(STAGES, 0)
        acc = T.alloc_local([SUMS], "float32")
        rows = EpilogueRows(epilogue)
        product = BandProduct(lhs_tile, rhs_tile, knobs, flip)
        prev: T.int32 = 0
        ahead: T.int32 = 0
        others: T.int32 = wg  # 0 if the next tile is this warpgroup's, 1 if it is the other one's
        turn: T.int32 = 1 - wg  # phase of its next permission to multiply
        while walk.more():
            walk.take()
            if (knobs.shared == 0) & (others == 1):  # pass over the other one's stages
                ahead = take.stage + walk.steps
                take.phase = T.bitwise_xor(take.phase, T.bitwise_and(T.truncdiv(ahead, STAGES), 1))
                take.stage = T.truncmod(ahead, STAGES)
            else:
                band0: T.let = walk.out0 + walk.band * knobs.height
                beside0: T.let = walk.col0 + side * knobs.columns
                row0: T.let = beside0 if flip else band0 + row_part * 64
                col0: T.let = band0 if flip else beside0
                last: T.let = n if flip else T.min(band0 + knobs.height, walk.out0 + m)
                epilogue.ask(rows, None, 0, row0, last, warp, lane)
                if bias is not None:
                    epilogue.fetch_bias(bias, 0, col0, m if flip else n, part, lane)
                if knobs.shared == 0:
                    # Stages come in the order of tiles: one that looked ahead could miss a phase.
                    order.wait(wg, turn)
                    turn = 1 - turn
                if walk.steps == 0:
                    for i in T.unroll(SUMS):
                        acc[i] = T.float32(0)
                for kt in T.serial(walk.steps):
                    full.wait(take.stage, take.phase)
                    T.ptx.fence.proxy.async_.shared__cta()
                    groups: T.let = T.truncdiv(walk.live - kt * DEPTH + 15, 16)
                    product.run(acc, take.stage, row_part, side, groups, kt > 0, 1)
                    T.ptx.wgmma.wait_group.sync.aligned(1)
                    if kt > 0:
                        release(empty, prev, thread, 1)
                    prev = take.stage
                    take.advance()
                T.ptx.wgmma.wait_group.sync.aligned(0)
                if walk.steps > 0:
                    release(empty, prev, thread, 1)
                if knobs.shared == 0:
                    # By every warp: nothing else keeps those of an empty tile together.
                    if lane == 0:
                        order.arrive(1 - wg)
                if bias is not None:
                    epilogue.finish_bias()
                if parts is not None:
                    walk.share(acc, parts, flags, wg, thread)
                if walk.first == 0:
                    epilogue.write(rows, acc, out, None, col0, part, lane)
            others = 1 - others


def columns_kernel(
    dtype: str,
    knobs: ColumnsTile,
    *,
    bias: bool = False,
    act: str = "none",
    packed: bool = False,
    common: bool = False,
    flip: bool = False,
    share: int = 0,
) -> tvm.tirx.PrimFunc:
    """The kernel of one set of knobs: lhs, ids, count, rhs (1, k, n), [bias (1, n),] out (m, n).

    Parameters
    ----------
    dtype : element type of all operands and of out: float16 or bfloat16
    bias : add bias
    act : none, relu, relu2, gelu, gelu_tanh or silu
    packed : lhs is (bands * capacity, height) as `pack_columns` makes it of a row-major matrix, and
        not (k, m or more)
    common : one list, ids (1, capacity) and count (1,), is that of all bands. Before out come
        parts, float32 of `ColumnsTile.parts_shape` and any contents, and flags, int32 of the first
        dimension of that, zeros, which are zeros again afterwards
    flip : what is computed is the product turned: out is (n, m), bias (1, m). Two warpgroups share
        the columns of a tile, or take tiles in turn
    share : if not 0, lists are those of groups, each with a product of its own: lhs is (k * share,
        m), out (groups * m, n), and ``share`` neighbouring rows of lhs meet one row of rhs

    Raises
    ------
    ScheduleError (a ValueError) for knobs or options that the template cannot build
    """
    knobs.check()
    rules = {
        "shared 1 or 2 with one list for all bands": not common or knobs.shared > 0,
        "shared 0 or 2 for a product turned": not flip or knobs.shared != 1,
        "not packed and common": not (packed and common),
        "not common and flip": not (common and flip),
        "no share that is packed, common, flip or has a bias": share == 0
        or share > 0
        and not (packed or common or flip or bias),
    }
    require("columns_kernel", knobs, rules)
    options = RowsOptions(dtype, bias, act)
    options.check(knobs.flipped_part if flip else knobs.part)
    register()
    given = {"bias": bias, "parts": common, "flags": common}
    absent = {name: None for name, wanted in given.items() if not wanted}
    own = {"knobs": knobs, "options": options, "packed": int(packed), "flip": flip, "share": share}
    return gathered_columns.specialize(**own, **absent)
