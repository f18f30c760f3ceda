"""Products of a few rows that read only those rows of the weights whose activations live (Hopper).

    out[i, :] = act(sum of x[i, s] * w[s, :] over the s where a row of x is not 0, + bias)

The micro-tile is as high as the operand, so there is one list of live columns, and nobody makes it:
every CTA finds those of its part of k while it reads x, and gathers their rows of w at once (SRead
with the detection inside; PIT, SOSP'23, sections 3.2 and 3.3). The weights are (k, n), so that a
row is contiguous. The parts of k are CTAs of one cluster, which add up their sums in a fixed order:
equal inputs give equal bits.

Bytes of w bound the product, so sums are left to mma.sync: 16 columns of w by 16 live ones by 8
rows of x at once, whatever the rows. The rest is latency: code that runs once per launch is short,
since instructions have to be fetched, too, and x is put in order while rows of w are under way.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch

from .cuda_few_rows_parts import (
    BLOCK,
    LANES,
    MOST_WARPS,
    PARTS,
    WIDE,
    FewRowsTile,
    LiveColumns,
    WarpProduct,
    send,
)
from .dependent import after_predecessor
from .hopper_knobs import ACTS
from .hopper_swrite import activate


@T.jit
def gathered_product(
    x: T.Buffer(("m", "k"), tile.dtype, align=16),
    w: T.Buffer(("deep", "n"), tile.dtype, align=16),
    bias: T.Optional(T.Buffer(("n",), tile.dtype, align=2)),
    out: T.Buffer(("m", "n"), tile.dtype, align=2),
    *,
    tile: T.constexpr,
    act: T.constexpr,
):
    """The template; ``few_rows`` explains it."""
    m, n, k = T.int32(), T.int32(), T.int32()
    ACROSS = T.meta_var(tile.across)
    COLUMNS = T.meta_var(tile.columns)
    OWNED = T.meta_var(tile.owned)
    THREADS = T.meta_var(tile.threads)
    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": 2})
    cta = T.cta_id_in_cluster([PARTS])
    bx = T.cta_id([T.truncdiv(n + COLUMNS - 1, COLUMNS) * PARTS])
    tx = T.thread_id([THREADS])
    rank: T.int32 = cta
    warp: T.let = T.truncdiv(tx, LANES)
    lane: T.let = T.truncmod(tx, LANES)
    pool = T.SMEMPool()
    parts = pool.alloc((PARTS, tile.rows, OWNED), "float32", align=16)
    columns = LiveColumns(pool, tile)
    pool.move_base_to(pool.offset + -pool.offset % 128)
    ring = T.meta_var(pool.offset)
    product = WarpProduct(pool, columns, warp, lane)
    pool.move_base_to(ring)  # of which nothing is left when sums are added
    sums = pool.alloc((MOST_WARPS, BLOCK, WIDE + 4), "float32", align=16)
    pool.commit()
    for i in T.unroll(tile.rows * WIDE // LANES):
        product.acc[i] = T.float32(0)
    # No CTA may be written to before it has begun.
    T.ptx["barrier.cluster.arrive.relaxed.aligned"]()
    after_predecessor()
    column0: T.let = T.truncdiv(bx, PARTS) * COLUMNS
    pieces: T.let = T.truncdiv(k + PARTS * tile.piece - 1, PARTS * tile.piece)
    size: T.let = T.truncdiv(T.truncdiv(k + PARTS * pieces - 1, PARTS * pieces) + 7, 8) * 8
    for p in T.serial(pieces):
        if p > 0:
            T.cuda.cta_sync()
        begin: T.let = (rank * pieces + p) * size
        columns.find(x, m, begin, T.min(begin + size, k), tx)
        product.run(
            w,
            column0 + T.truncmod(warp, ACROSS) * WIDE,
            n,
            x,
            m,
            T.truncdiv(warp, ACROSS),
            tile.deep,
            tx,
        )
    T.ptx.barrier.cluster.wait()
    four = T.alloc_local([4], "float32")
    for b in T.unroll(tile.blocks):
        T.cuda.cta_sync()
        for j in T.unroll(4):
            for i in T.unroll(4):
                sums[
                    warp,
                    T.truncmod(lane, 4) * 2 + i % 2,
                    j * 16 + i // 2 * 8 + T.truncdiv(lane, 4),
                ] = product.acc[(b * 4 + j) * 4 + i]
        T.cuda.cta_sync()
        for p in T.unroll((BLOCK * COLUMNS // 4 + THREADS - 1) // THREADS):
            row: T.let = T.truncdiv(p * THREADS + tx, COLUMNS // 4)
            at: T.let = T.truncmod(p * THREADS + tx, COLUMNS // 4) * 4
            if (row < BLOCK) & (b * BLOCK + row < m):
                for i in T.unroll(4):
                    four[i] = T.float32(0)
                for d in T.unroll(tile.deep):
                    for i in T.unroll(4):
                        four[i] = (
                            four[i]
                            + sums[d * ACROSS + T.truncdiv(at, WIDE), row, T.truncmod(at, WIDE) + i]
                        )
                T.evaluate(
                    send(
                        parts.ptr_to([rank, b * BLOCK + row, T.truncmod(at, OWNED)]),
                        T.truncdiv(at, OWNED),
                        *[four[i] for i in range(4)],
                    )
                )
    T.ptx.barrier.cluster.arrive()
    T.ptx.barrier.cluster.wait()
    for p in T.serial(T.truncdiv(m * OWNED + THREADS - 1, THREADS)):
        mine: T.let = T.truncdiv(p * THREADS + tx, OWNED)
        place: T.let = T.truncmod(p * THREADS + tx, OWNED)
        own: T.let = column0 + rank * OWNED + place
        if (mine < m) & (own < n):
            total: T.float32 = 0.0
            for part in T.unroll(PARTS):
                total = total + parts[part, mine, place]
            if bias is not None:
                total = total + T.float32(bias[own])
            out[mine, own] = T.cast(activate(act, total), tile.dtype)


def few_rows(tile: FewRowsTile, *, bias: bool = False, act: str = "none") -> tvm.tirx.PrimFunc:
    """out = act(x @ w + bias) by the rows of w whose column of x is not 0: x, w, [bias,] out.

    x is (m, k) with m from 1 to ``tile.rows``, w (k or less, n): columns of x beyond it are 0. out
    is (m, n) and all are of ``tile.dtype``. k and n are multiples of 8, rows of x and w aligned to
    16 bytes. ``act`` is none, relu, relu2, gelu, gelu_tanh or silu.

    Raises
    ------
    ScheduleError (a ValueError) for what cannot be built
    """
    tile.check()
    if act not in ACTS:
        raise ScheduleError(mismatch("act", f"one of {', '.join(ACTS)}", repr(act)))
    return gathered_product.specialize(tile=tile, act=act, **({} if bias else {"bias": None}))
