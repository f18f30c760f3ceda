"""Products of live blocks along k for Hopper (sm_90a): either operand may be the sparse one.

    out = act(lhs @ rhs + bias), where a band of lhs (or of rhs) is zero outside its live blocks

A band is ``height`` neighbouring rows of lhs, or columns of rhs, and a block is 64 positions of k
of a band. What lives stands in a map that the kernel reads itself: no list is made. Both operands'
tiles come by TMA at the depth of a live block, from rows of k or from rows of the depth alike, so
nothing is gathered element by element and nothing is turned. Operands are all fp16 or all bf16,
with fp32 sums. Every element of out is written: where nothing lives, act(bias). All sizes are run-
time values and the map is read on the device, so one kernel serves every shape; rows of all
operands and of out are multiples of 8 elements and every address is aligned to 16 bytes: the caller
checks. PIT, SOSP'23, section 3.3.

One warp walks the tiles, reads the map and asks TMA for stages; two warpgroups multiply and write,
each half of a tile or in turn whole ones. Bands of lhs lower than 64 leave the rest
of the instruction's rows unused: such products are bound by the bytes of rhs, not by arithmetic.
"""

from __future__ import annotations

import tvm
from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.lang.pipeline import PipelineState

from .bits import lowest
from .dependent import after_predecessor
from .hopper_block_parts import (
    PANEL,
    WORD,
    BlocksOptions,
    BlocksTile,
    BlockWalk,
    LiveSteps,
    OperandTiles,
)
from .hopper_epilogue import Epilogue, EpilogueRows
from .hopper_knobs import TILE_K, TILES_AHEAD
from .hopper_primitives import register
from .hopper_ring import TilePosts, release

_REGISTERS = (40, 232)  # of producer and consumers


@T.jit
def live_blocks(
    lhs_h: T.handle,
    live: T.Buffer(("size",), "uint8", align=1),
    high: T.int32,
    deep: T.int32,
    beside: T.int32,
    along: T.int32,
    rhs_h: T.handle,
    bias: T.Optional(T.Buffer((1, "n"), options.dtype)),
    out: T.Buffer(("m", "n"), options.dtype),
    *,
    knobs: T.constexpr,
    options: T.constexpr,
):
    """The template; ``blocks_kernel`` gives it its knobs and options."""
    m, n, k = T.int32(), T.int32(), T.int32()
    lhs_turned = T.meta_var(options.turned("lhs"))
    rhs_turned = T.meta_var(options.turned("rhs"))
    lhs = T.match_buffer(lhs_h, (k, m) if lhs_turned else (m, k), options.dtype)
    rhs = T.match_buffer(rhs_h, (k, n) if rhs_turned else (n, k), options.dtype)

    STAGES = T.meta_var(knobs.stages)
    OF_LHS = T.meta_var(options.side == "lhs")
    PART = T.meta_var(knobs.part(options.side))
    HALF = T.meta_var(knobs.shared * (knobs.other // 2))
    ROWS = T.meta_var(PART.tile_m // 2)  # of one consumer
    SUMS = T.meta_var(ROWS // 64 * (PART.tile_n // 2))

    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
    bx = T.cta_id([knobs.sms])
    wg = T.warpgroup_id([3])
    warp = T.warp_id_in_wg([4])
    lane = T.lane_id([32])
    thread: T.let = warp * 32 + lane

    pool = T.SMEMPool()
    full = TMABar(pool, STAGES)
    empty = MBarrier(pool, STAGES)
    order = MBarrier(pool, 2)  # whose turn it is to multiply
    posts = TilePosts(pool, 2, 1)
    pool.move_base_to(1024)
    lhs_tiles = OperandTiles(
        pool, lhs, lhs_turned, knobs.height if OF_LHS else knobs.other, STAGES, options.dtype
    )
    rhs_tiles = OperandTiles(
        pool, rhs, rhs_turned, knobs.other if OF_LHS else knobs.height, STAGES, options.dtype
    )
    epilogue = Epilogue(pool, PART, options.own)
    bands: T.let = T.truncdiv((m if OF_LHS else n) + (knobs.height - 1), knobs.height)
    steps: T.let = T.truncdiv(k + (TILE_K - 1), TILE_K)
    pool.commit()
    full.init(1)
    empty.init(1 + knobs.shared)
    order.init(4)
    posts.init()
    T.ptx.fence.mbarrier_init.release.cluster()
    T.cuda.cta_sync()
    after_predecessor()
    columns: T.let = T.truncdiv((n if OF_LHS else m) + (knobs.other - 1), knobs.other)
    panels: T.let = T.truncdiv(steps + (PANEL * WORD - 1), PANEL * WORD)

    if wg == 2:
        T.ptx["setmaxnreg.dec.sync.aligned.u32"](_REGISTERS[0])
        if warp == 0:
            put = PipelineState(STAGES, 1)
            post = PipelineState(TILES_AHEAD, 1)
            walk = BlockWalk(bands, columns, knobs.sms)
            alive = LiveSteps(live, (high, deep, beside, along), steps)
            bits: T.uint32 = T.uint32(0)
            step: T.int32 = 0
            band0: T.int32 = 0  # first of the band, and of the tile's other side
            other0: T.int32 = 0
            walk.begin(bx)
            alive.locate(0, lane)
            if walk.more():
                alive.ask(walk.band)
            while walk.more():
                for panel in T.serial(panels):
                    band0 = walk.band * knobs.height
                    other0 = walk.column * knobs.other
                    lhs0: T.let = band0 if OF_LHS else other0
                    rhs0: T.let = other0 if OF_LHS else band0
                    alive.take()
                    posts.post(post, 0, lane, panel + 1 - panels, alive.number, lhs0, rhs0)
                    # What comes next is on its way during this panel.
                    if panels > 1:
                        alive.locate(T.if_then_else(panel + 1 < panels, panel + 1, 0), lane)
                    if panel + 1 == panels:
                        walk.advance()
                    if walk.more():
                        alive.ask(walk.band)
                    for j in T.unroll(PANEL):
                        bits = alive.words[j]
                        while bits != T.uint32(0):
                            step = (panel * PANEL + j) * WORD + lowest(bits)
                            bits = T.bitwise_and(bits, bits - T.uint32(1))
                            empty.wait(put.stage, put.phase)
                            if lane == 0:
                                full.arrive(put.stage, lhs_tiles.bytes + rhs_tiles.bytes)
                                lhs_tiles.fetch(put.stage, lhs0, step, full.ptr_to([put.stage]))
                                rhs_tiles.fetch(put.stage, rhs0, step, full.ptr_to([put.stage]))
                            put.advance()
            posts.post(post, 0, lane, 1, 0, 0, 0)
    else:
        T.ptx["setmaxnreg.inc.sync.aligned.u32"](_REGISTERS[1])
        part: T.let = wg * 4 + warp
        lhs_part: T.let = T.int32(0) if OF_LHS else wg * HALF
        rhs_part: T.let = wg * HALF if OF_LHS else T.int32(0)
        take = PipelineState(STAGES, 0)
        read = PipelineState(TILES_AHEAD, 0)
        acc = T.alloc_local([SUMS], "float32")
        rows = EpilogueRows(epilogue)
        prev: T.int32 = 0
        ahead: T.int32 = 0
        begun: T.int32 = 0  # steps of this tile so far
        first: T.int32 = 1  # whether a tile begins
        more: T.int32 = 0  # what the producer posted: < 0 inside a tile, 0 at its end, 1 at last
        others: T.int32 = wg  # 0 if the next tile is this warpgroup's, 1 if it is the other one's
        turn: T.int32 = 1 - wg  # phase of its next permission to multiply
        while more < 1:
            posts.ready.wait(read.stage, read.phase)
            more = posts.slots[read.stage, 0]
            number: T.int32 = posts.slots[read.stage, 1]
            row0: T.int32 = posts.slots[read.stage, 2]
            col0: T.int32 = posts.slots[read.stage, 3] + rhs_part
            # All have read before one thread hands the post back.
            T.ptx["bar.sync"](T.uint32(wg + 1), T.uint32(128))
            if thread == 0:
                posts.taken.arrive(read.stage)
            read.advance()
            if (knobs.shared == 0) & (others == 1):  # pass over the other one's stages
                ahead = take.stage + number
                take.phase = T.bitwise_xor(take.phase, T.bitwise_and(T.truncdiv(ahead, STAGES), 1))
                take.stage = T.truncmod(ahead, STAGES)
            else:
                if knobs.shared == 0:
                    if (first == 1) & (more < 1):
                        # Stages come in the order of tiles: one that looked ahead could miss a
                        # phase.
                        order.wait(wg, turn)
                        turn = 1 - turn
                if (begun == 0) & (number == 0):
                    for i in T.unroll(SUMS):
                        acc[i] = T.float32(0)
                for kt in T.serial(number):
                    full.wait(take.stage, take.phase)
                    Tx.wg.gemm_async(
                        acc,
                        lhs_tiles.part(take.stage, lhs_part, ROWS),
                        rhs_tiles.part(take.stage, rhs_part, PART.tile_n),
                        transA=lhs_turned,
                        transB=rhs_turned,
                        accum=begun + kt > 0,
                        dispatch="pit_wgmma",
                    )
                    T.ptx.wgmma.wait_group.sync.aligned(1)
                    if kt > 0:
                        release(empty, prev, thread, 1)
                    prev = take.stage
                    take.advance()
                T.ptx.wgmma.wait_group.sync.aligned(0)
                if number > 0:
                    release(empty, prev, thread, 1)
                begun = begun + number
                if more == 0:
                    if knobs.shared == 0:
                        if lane == 0:
                            order.arrive(1 - wg)
                    last: T.let = T.min(row0 + knobs.height, m) if OF_LHS else m
                    epilogue.ask(rows, None, 0, row0 + lhs_part, last, warp, lane)
                    if bias is not None:
                        epilogue.fetch_bias(bias, 0, col0, n, part, lane)
                        epilogue.finish_bias()
                    epilogue.write(rows, acc, out, None, col0, part, lane)
                    begun = 0
            first = T.if_then_else(more == 0, 1, 0)
            if more == 0:
                others = 1 - others


def blocks_kernel(dtype: str, knobs: BlocksTile, **options: object) -> tvm.tirx.PrimFunc:
    """The kernel of one set of knobs: lhs, live, high, deep, beside, along,
    rhs, [bias (1, n),] out (m, n).

    ``live`` is uint8, not 0 where a block lives. Number ``high`` of bands and ``deep`` of blocks of
    64 share an element, and elements that are neighbours along bands and along k are ``beside`` and
    ``along`` apart: band b at depth d has ``live[b // high * beside + d // deep * along]``.

    Parameters
    ----------
    dtype : element type of all operands and of out: float16 or bfloat16
    side : the sparse operand, lhs or rhs
    lhs_layout, rhs_layout : mk or km, kn or nk
    bias : add bias
    act : none, relu, relu2, gelu, gelu_tanh or silu

    Raises
    ------
    ScheduleError (a ValueError) for knobs or options that the template cannot build
    """
    chosen = BlocksOptions(dtype, **options)  # type: ignore[arg-type]
    chosen.check(knobs)
    register()
    absent = {} if chosen.bias else {"bias": None}
    return live_blocks.specialize(knobs=knobs, options=chosen, **absent)
