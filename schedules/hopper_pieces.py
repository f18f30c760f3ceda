"""Products of live pieces of rows for Hopper (sm_90a): each step of k has rows of its own.

    out = act(lhs @ rhs + bias), where a row of lhs is zero outside its live pieces

A piece is 64 positions of k of one row. The m axis is permuted anew in every step of k, so sums
cannot stay in registers: a CTA keeps those of a range of rows and a few columns in shared memory,
in fp32, and walks the depth in order. In each step it gathers the rows of its range that live,
multiplies them by the step's weights, and adds what comes out at their places. Only one CTA adds to
a sum, in the order of k: results are the same at every call. Operands are all fp16 or all bf16.
Every element of out is written: where nothing lives, act(bias). Rows of all operands and of out are
multiples of 8 elements and every address is aligned to 16 bytes: the caller checks. PIT, SOSP'23,
section 3.3.

Tiles with ``slots`` keep sums for rows with several live pieces alone. A row with one is stored as
the product leaves it, and a row without any while others are computed, so that a CTA takes up to
4096 rows, and reads weights so much less often.

For pieces of columns of rhs the product is computed turned: they are what is gathered, and sums are
written by columns, beside rows with one piece, which wait for that in shared memory in 16 bits.

Every stage has a warp of its own that lists its rows, fetches them and asks TMA for weights;
several warpgroups multiply, each its share of the steps, and take turns to add.
"""

from __future__ import annotations

import tvm
from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx

from .dependent import after_predecessor
from .hopper_block_parts import OperandTiles
from .hopper_knobs import TILE_K, RowsOptions, RowsTile
from .hopper_piece_parts import WORD, PieceLists, PiecesTile
from .hopper_piece_slots import PieceSlots
from .hopper_piece_turned import sums_of
from .hopper_primitives import register


@T.jit
def live_pieces(
    lhs: T.Buffer(("m", "k"), options.dtype),
    lines: T.Buffer(("depth", "size"), "uint32", align=4),
    high: T.int32,
    rhs_h: T.handle,
    bias: T.Optional(T.Buffer((1, "m if flip else n"), options.dtype)),
    out: T.Buffer(("n", "m") if flip else ("m", "n"), options.dtype),
    *,
    knobs: T.constexpr,
    options: T.constexpr,
    flip: T.constexpr,
):
    """The template; ``pieces_kernel`` gives it its knobs and options."""
    m, n, k, size = T.int32(), T.int32(), T.int32(), T.int32()
    turned = T.meta_var(options.rhs_layout == "kn")
    rhs = T.match_buffer(rhs_h, (k, n) if turned else (n, k), options.dtype)

    STAGES = T.meta_var(knobs.stages)
    ROOM = T.meta_var(knobs.room)
    COLS = T.meta_var(knobs.cols)
    MOST = T.meta_var(-(-knobs.most_rows // WORD))  # words of a tile
    WGS = T.meta_var(knobs.consumers)
    ONES = T.meta_var(bool(knobs.slots))  # rows with one live piece have no sum
    FINISHES = T.meta_var(bool(knobs.slots) and not flip)  # nor do those that are not live

    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
    bx = T.cta_id([knobs.sms])
    wg = T.warpgroup_id([knobs.warpgroups])
    warp = T.warp_id_in_wg([4])
    lane = T.lane_id([32])

    steps: T.let = T.max(T.truncdiv(k + (TILE_K - 1), TILE_K), 1)
    pool = T.SMEMPool()
    full = TMABar(pool, STAGES)
    empty = MBarrier(pool, STAGES)
    order = MBarrier(pool, WGS)  # whose turn it is to add
    lists = PieceLists(pool, lines, size, knobs)
    slots = PieceSlots(pool, lines, size, steps, knobs, flip)
    biases = pool.alloc((COLS,), "float32", align=16)  # of a tile
    pool.move_base_to(knobs.aside)
    # An instruction reads 64 rows, those of the next stages or the weights among them: what it
    # makes of them is not added anywhere.
    rows_tile = pool.alloc_tcgen05_mma_AB((1, STAGES * ROOM, TILE_K), options.dtype)
    weights = OperandTiles(pool, rhs, turned, COLS, STAGES, options.dtype, COLS)
    sums = sums_of(flip)(pool, biases, n, knobs, options)
    pool.commit()
    # Every thread arrives for itself: what it read or wrote is behind it then.
    full.init(1 + 32)
    empty.init(128)
    order.init(128)
    slots.init()
    ranges: T.let = T.truncdiv(m + high - 1, high)
    tiles: T.let = ranges * T.truncdiv(n + (COLS - 1), COLS)
    T.ptx.fence.mbarrier_init.release.cluster()
    T.cuda.cta_sync()
    after_predecessor()
    tile: T.int32 = bx
    done: T.int32 = 0  # steps before
    begin: T.int32 = 0  # words of the tile whose rows are walked together
    end = T.alloc_local([1], "int32")

    if wg >= WGS:
        T.ptx["setmaxnreg.dec.sync.aligned.u32"](knobs.registers[0])
        stage: T.let = (wg - WGS) * 4 + warp
        if stage < STAGES:
            lists.begin()
            slots.begin()
            phase: T.int32 = 1
            asked: T.int32 = 0  # whether the bits of this stage's first step are on their way
            while tile < tiles:
                row0: T.let = T.truncmod(tile, ranges) * high
                col0: T.let = T.truncdiv(tile, ranges) * COLS
                words: T.let = T.truncdiv(T.min(high, m - row0) + (WORD - 1), WORD)
                after0: T.let = T.truncmod(tile + knobs.sms, ranges) * high  # of the next tile
                slots.leave()
                slots.learn()
                begin = 0
                while begin < words:
                    slots.reach(end, begin, words, lane)
                    lists.know(slots, begin, end[0], lane)
                    step: T.int32 = T.truncmod(stage + (STAGES - T.truncmod(done, STAGES)), STAGES)
                    if (step < steps) & (asked == 0):
                        lists.ask(step, T.truncdiv(row0, WORD), begin, end[0], lane)
                    asked = 0
                    while step < steps:
                        k0: T.int32 = step * TILE_K
                        lists.take(lane)
                        # The bits of this stage's next step are on their way meanwhile.
                        step = step + STAGES
                        if step < steps:
                            lists.ask(step, T.truncdiv(row0, WORD), begin, end[0], lane)
                        elif knobs.slots == 0:
                            if (step - steps < steps) & (tile + knobs.sms < tiles):
                                lists.ask(step - steps, T.truncdiv(after0, WORD), 0, MOST, lane)
                                asked = 1
                        first: T.int32 = 0
                        more: T.int32 = 1
                        while more == 1:
                            lists.emit(stage, 1 - phase, first, lane)
                            empty.wait(stage, phase)
                            phase = 1 - phase
                            if lane == 0:
                                lists.heads[stage] = lists.total - first
                                if (first == 0) & (lists.total > 0):
                                    full.arrive(stage, weights.bytes)
                                    weights.fetch(
                                        stage, col0, T.truncdiv(k0, TILE_K), full.ptr_to([stage])
                                    )
                                else:
                                    T.ptx.mbarrier.arrive.shared.b64(
                                        full.ptr_to([stage]), T.uint32(1)
                                    )
                            lists.fetch(rows_tile, lhs, stage, first, row0, k0, lane)
                            # The fence stands here and not before the product, which has no time
                            # for it.
                            T.ptx.cp.async_.wait_all()
                            T.ptx.fence.proxy.async_.shared__cta()
                            T.ptx.mbarrier.arrive.shared.b64(full.ptr_to([stage]), T.uint32(1))
                            first = first + ROOM
                            more = T.if_then_else(first < lists.total, 1, 0)
                    done = done + steps
                    begin = end[0]
                tile = tile + knobs.sms
    else:
        T.ptx["setmaxnreg.inc.sync.aligned.u32"](knobs.registers[1])
        acc = T.alloc_local([COLS // 2], "float32")
        rows = T.alloc_local([2], "int32")  # slots of this lane's rows; negative for none
        whole = T.alloc_local([2], "int32")  # rows of out of those that have no slot; -1 for none
        part: T.let = wg * 4 + warp
        phases: T.int32 = 0  # of all stages: one bit each
        turn: T.int32 = T.if_then_else(wg == 0, 1, 0)  # phase of its next permission to add
        sums.begin(lane)
        sums.clear_all(part * 8, WGS * 32, lane)
        T.ptx["bar.sync"](T.uint32(1), T.uint32(WGS * 128))
        while tile < tiles:
            first_row: T.let = T.truncmod(tile, ranges) * high
            last: T.let = T.min(first_row + high, m)
            height: T.let = T.truncdiv(last - first_row + (WORD - 1), WORD)
            sums.take(first_row, last, T.truncdiv(tile, ranges) * COLS)
            slots.enter()
            if bias is not None:
                if not flip:
                    sums.take_bias(bias, part * 32 + lane)
            slots.find(T.truncdiv(first_row, WORD), height, wg, warp * 32 + lane, lane)
            slots.tell()
            begin = 0
            while begin < height:
                slots.reach(end, begin, height, lane)
                if not flip:
                    if wg == 0:
                        slots.name_rows(begin, end[0], warp * 32 + lane)
                word: T.int32 = begin + part  # whose dead rows are stored next
                kt: T.int32 = T.truncmod(wg + (WGS - T.truncmod(done, WGS)), WGS)
                while kt < steps:
                    at: T.let = T.truncmod(done + kt, STAGES)
                    live: T.int32 = ROOM + 1
                    waits: T.int32 = 1
                    while live > ROOM:
                        parity: T.int32 = T.bitwise_and(T.shift_right(phases, at), 1)
                        full.wait(at, parity)
                        phases = T.bitwise_xor(phases, T.shift_left(1, at))
                        live = lists.heads[at]
                        for side in T.unroll(2):
                            place: T.let = warp * 16 + side * 8 + T.truncdiv(lane, 4)
                            rows[side] = -1
                            whole[side] = -1
                            if place < T.min(live, ROOM):
                                rows[side] = T.int32(lists.goals[at, parity, place])
                                if rows[side] < 0:
                                    whole[side] = first_row - 1 - rows[side]
                        if ONES & flip:
                            if bias is not None:
                                sums.ask_bias(bias, whole)
                        if live > 0:
                            Tx.wg.gemm_async(
                                acc,
                                rows_tile[0:1, at * ROOM : at * ROOM + 64, 0:TILE_K],
                                weights.part(at, 0, COLS),
                                transB=turned,
                                accum=False,
                                dispatch="pit_wgmma",
                            )
                            T.ptx.wgmma.wait_group.sync.aligned(0)
                        empty.arrive(at)
                        if ONES:
                            if T.cuda.any_sync(T.uint32(0xFFFFFFFF), whole[0] + whole[1] > -2):
                                if flip:
                                    sums.keep(acc, slots, begin, whole, lane)
                                else:
                                    sums.store(acc, out, whole, lane)
                        sums.ready(rows)
                        if waits == 1:
                            order.wait(wg, turn)
                            turn = 1 - turn
                            waits = 0
                        sums.add(acc, rows)
                    order.arrive(T.truncmod(wg + 1, WGS))
                    kt = kt + WGS
                    if FINISHES:
                        # Few at a time: memory takes them while the next steps come.
                        if word < end[0]:
                            sums.store_dead(out, slots, word, lane)
                            word = word + WGS * 4
                done = done + steps
                if FINISHES:
                    while word < end[0]:
                        sums.store_dead(out, slots, word, lane)
                        word = word + WGS * 4
                T.ptx["bar.sync"](T.uint32(1), T.uint32(WGS * 128))
                if flip:
                    sums.write(out, bias, slots, begin, end[0], begin + part, WGS * 4, lane)
                    T.ptx["bar.sync"](T.uint32(1), T.uint32(WGS * 128))
                    sums.clear_all(part * 8, WGS * 32, lane)
                else:
                    sums.write(out, slots, begin, end[0], part * 16, WGS * 64, lane)
                T.ptx["bar.sync"](T.uint32(1), T.uint32(WGS * 128))
                begin = end[0]
            tile = tile + knobs.sms


def pieces_kernel(
    dtype: str,
    knobs: PiecesTile,
    *,
    bias: bool = False,
    act: str = "none",
    rhs_layout: str = "kn",
    flip: bool = False,
) -> tvm.tirx.PrimFunc:
    """The kernel of one set of knobs: lhs (m, k), lines, high, rhs, [bias (1, n),] out (m, n).

    ``lines`` (steps, words), uint32, has a line for every 64 of k: bit i of word w of line t is set
    where row w * 32 + i lives in step t. ``high``, a multiple of 32 and at most
    ``knobs.most_rows``, is how many rows a CTA takes.

    Parameters
    ----------
    dtype : element type of all operands and of out: float16 or bfloat16
    bias : add bias
    act : none, relu, relu2, gelu, gelu_tanh or silu
    rhs_layout : kn or nk
    flip : what is computed is the product turned: out is (n, m), bias (1, m)

    Raises
    ------
    ScheduleError (a ValueError) for knobs or options that the template cannot build
    """
    knobs.check()
    options = RowsOptions(dtype, bias, act, rhs_layout=rhs_layout)
    options.check(RowsTile(tile_m=128, tile_n=64))
    register()
    absent = {} if bias else {"bias": None}
    return live_pieces.specialize(knobs=knobs, options=options, flip=flip, **absent)
