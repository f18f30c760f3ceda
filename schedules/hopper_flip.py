"""The Hopper rows family with live rows as columns of the tensor cores' tile.

The same product, arguments and options as ``hopper_rows``, where ``knobs.flip`` asks for it:
weights are the instruction's rows, in blocks of 64, and gathered rows its columns, which come in
steps of 8 where that matters. So a tile is as high in live rows as the group's count asks for: few
rows are padding, and the weights of a group of up to ``tile_m`` rows pass once. With ``cluster`` 2
two CTAs share a tile's depth, for products of few tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.lang.pipeline import PipelineState

from .dependent import after_predecessor
from .hopper_dead import STORING, DeadRows
from .hopper_flip_parts import FlipEpilogue, FlipSums, RowPosts
from .hopper_knobs import BAND, TILE_K, TILES_AHEAD, RowsTile
from .hopper_ring import RhsTiles, hand_back, matrices, steps_of
from .hopper_walk import TileWalk

_ADD_FROM = """
__forceinline__ __device__ void pit_add_from(int rank, const void* at, float* sums) {
  unsigned here = (unsigned)__cvta_generic_to_shared(at);
  float a, b, c, d;
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;"
               " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
               : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(here), "r"(rank) : "memory");
  sums[0] += a, sums[1] += b, sums[2] += c, sums[3] += d;
}
"""


def add_from(rank: Any, place: Any, sums: Any) -> Any:
    """Add to four sums the four float32 at a place in the shared memory of the cluster's CTA
    ``rank``."""
    return T.cuda.func_call("pit_add_from", rank, place, sums, source_code=_ADD_FROM)


@T.meta_class
class DepthSplit:
    """Sums of the halves of the depth, exchanged through the shared memory of a cluster's two CTAs.

    Bands of BAND live rows are dealt out to them: each finishes its own of the tile, and lays its
    sums of the others out for the other CTA. They take the place of the ring of stages, which is
    empty between two tiles: all threads of a CTA meet when its sums are done (``begin``), and those
    of the cluster when they lie there and when they are read (``meet``).

    Parameters
    ----------
    pool : SMEMPool at the place where the ring begins; it is left there
    rank : this CTA's place in the cluster
    knobs : what the kernel is built with
    """

    def __init__(self, pool: Any, rank: Any, knobs: RowsTile) -> None:
        self.rank, self.bands = rank, knobs.tile_m // BAND
        self.blocks = knobs.tile_n // (64 * knobs.consumers)
        self.per_block = knobs.tile_m // 2
        shape = (-(-self.bands // 2), self.blocks * 2, knobs.consumers * 128, 4)
        self.parts = pool.alloc(shape, "float32", align=128)

    @T.inline
    def begin(self):
        T.cuda.cta_sync()

    @T.inline
    def meet(self):
        T.ptx.barrier.cluster.arrive()
        T.ptx.barrier.cluster.wait()

    @T.inline
    def attend(self):
        """By threads without sums: whenever the others meet for a tile."""
        self.begin()
        for _ in T.unroll(2):
            self.meet()

    def place(self, band: int, part: int, thread: Any) -> Any:
        """Where four sums lie that the other CTA made, or wants."""
        return self.parts.ptr_to([band // 2, part, thread, 0])

    def at(self, band: int, part: int) -> int:
        """Where four neighbouring sums of a band begin among a thread's accumulators."""
        return part // 2 * self.per_block + band * 8 + part % 2 * 4

    @T.inline
    def exchange(self, acc, high, thread):
        """Afterwards ``acc`` holds the whole sums of this CTA's bands. ``thread`` counts those of
        all consumers."""
        self.begin()
        for c in T.unroll(self.bands):
            if (c * BAND < high) & (c % 2 != self.rank):
                for p in T.unroll(self.blocks * 2):
                    T.ptx["st.shared.v4.f32"](
                        self.place(c, p, thread), *[acc[self.at(c, p) + i] for i in range(4)]
                    )
        self.meet()
        for c in T.unroll(self.bands):
            if (c * BAND < high) & (c % 2 == self.rank):
                for p in T.unroll(self.blocks * 2):
                    place: T.let = self.place(c, p, thread)
                    sums: T.let = T.address_of(acc[self.at(c, p)])
                    T.evaluate(add_from(1 - self.rank, place, sums))
        # What was read here, in either CTA, is written by TMA next.
        T.ptx.fence.proxy.async_.shared__cluster()


@T.jit
def flipped_rows(
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
    *,
    knobs: T.constexpr,
    options: T.constexpr,
):
    """The template; ``hopper_rows.rows_kernel`` gives it its knobs and options."""
    groups, n, k = T.int32(), T.int32(), T.int32()
    shape = T.meta_var(options.rhs_shape(options.matrix(groups, 1), n, k))
    rhs = T.match_buffer(rhs_h, shape, options.dtype, layout=matrices(*shape))

    TM = T.meta_var(knobs.tile_m)
    STAGES = T.meta_var(knobs.stages)
    WGS = T.meta_var(knobs.consumers)
    PASSES = T.meta_var(TM // BAND)
    SPLIT = T.meta_var(knobs.cluster)

    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
    cta = T.cta_id_in_cluster([SPLIT])
    bx = T.cta_id([knobs.sms])
    wg = T.warpgroup_id([WGS + 1])
    warp = T.warp_id_in_wg([4])
    lane = T.lane_id([32])
    thread: T.let = warp * 32 + lane
    rank: T.int32 = cta  # read the special register once

    pool = T.SMEMPool()
    full = TMABar(pool, STAGES)
    empty = MBarrier(pool, STAGES)
    posts = RowPosts(pool, knobs)
    pool.move_base_to(1024)
    if SPLIT > 1:
        split = DepthSplit(pool, rank, knobs)
        pool.move_base_to(1024)
    rows_tile = pool.alloc_tcgen05_mma_AB((STAGES, TM, TILE_K), options.dtype)
    weights = RhsTiles(pool, rhs, n, replace(knobs, cluster=1), options)
    epilogue = FlipEpilogue(pool, posts, knobs, options)
    posts.place(pool, options)
    walk = TileWalk(pool, count, groups, n, knobs, epilogue.tile_width, options.slot)
    pool.commit()
    full.init(128 + 1)
    empty.init(WGS)
    posts.init()
    if dead is not None:
        zeros = DeadRows(dead, deads, out, knobs.sms)
    T.ptx.fence.mbarrier_init.release.cluster()
    if SPLIT > 1:
        split.meet()
    after_predecessor()
    all_steps: T.let = steps_of(k, depth)
    each: T.let = T.truncdiv(all_steps + SPLIT - 1, SPLIT)
    begin: T.let = T.min(rank * each, all_steps)
    steps: T.let = T.min(all_steps - begin, each)
    if knobs.most_groups > 1:
        walk.arrange(wg * 128 + thread, (WGS + 1) * 128)
    if (wg == 0) & (warp == 0):
        if knobs.most_groups > 1:
            walk.prefix(lane)
        else:
            walk.fit_height(lane)
    T.cuda.cta_sync()

    if wg == WGS:
        T.ptx["setmaxnreg.dec.sync.aligned.u32"](knobs.registers[0])
        walk.begin(T.truncdiv(bx, SPLIT))
        put = PipelineState(STAGES, 1)
        post = PipelineState(TILES_AHEAD, 1)
        rows = T.alloc_local([PASSES], "int32")
        group: T.int32 = 0
        col0: T.int32 = 0
        high: T.int32 = 0
        more: T.int32 = 0
        mine: T.let = T.truncdiv(thread, 8)
        if dead is not None:
            if warp == STORING:
                zeros.begin_beside(bx, walk.tiles() * steps, lane)
        if walk.more():
            more = 1
            walk.locate(0)
            posts.ask(ids, walk, thread)
        while more == 1:
            group = walk.group
            col0 = walk.col0
            high = walk.high
            posts.taken.wait(post.stage, post.phase)
            posts.fill(post.stage, thread)
            if per_row is not None:
                posts.fill_per_row(post.stage, thread, per_row)
            if thread == 0:
                posts.head(post.stage, group, high, col0)
            T.ptx["bar.sync"](T.uint32(WGS + 1), T.uint32(128))
            if lane == 0:
                posts.ready.arrive(post.stage)
            for p in T.unroll(PASSES):
                rows[p] = posts.ids[post.stage, p * BAND + mine]
                if options.packed:
                    if rows[p] >= 0:
                        rows[p] = walk.row0 + p * BAND + mine
                elif options.share > 1:
                    if rows[p] >= 0:
                        rows[p] = T.truncdiv(rows[p], options.share)
            post.advance()
            walk.advance()
            more = 0
            if walk.more():
                more = 1
                walk.locate(0)
                posts.ask(ids, walk, thread)
            for kt in T.serial(steps):
                empty.wait(put.stage, put.phase)
                if thread == 0:
                    full.arrive(put.stage, knobs.tile_n * TILE_K * 2)
                    weights.fetch(
                        put.stage,
                        options.matrix(group, 0),
                        col0,
                        begin + kt,
                        0,
                        full.ptr_to([put.stage]),
                        0,
                    )
                Tx.copy_async(
                    rows_tile[put.stage],
                    lhs[0:TM, (begin + kt) * TILE_K : (begin + kt) * TILE_K + TILE_K],
                    dispatch="pit_sread",
                    rows=rows,
                    thread=thread,
                    skip_dead=True,
                )
                T.ptx["cp.async.mbarrier.arrive.noinc.shared.b64"](full.ptr_to([put.stage]))
                put.advance()
                if dead is not None:
                    if warp == STORING:
                        zeros.store_beside(lane)
            if SPLIT > 1:  # when sums are done, laid out, and read
                # Sums take the place of copies: none may be under way.
                T.ptx.cp.async_.wait_all()
                split.attend()
        posts.taken.wait(post.stage, post.phase)
        if thread == 0:
            posts.head(post.stage, -1, 0, 0)
        T.ptx["bar.sync"](T.uint32(WGS + 1), T.uint32(128))
        if lane == 0:
            posts.ready.arrive(post.stage)
    else:
        T.ptx["setmaxnreg.inc.sync.aligned.u32"](knobs.registers[1])
        take = PipelineState(STAGES, 0)
        read = PipelineState(TILES_AHEAD, 0)
        acc = T.alloc_local([epilogue.blocks * (TM // 2)], "float32")
        sums = FlipSums(full, empty, take, rows_tile, weights, epilogue, knobs)
        tile_group: T.int32 = 0
        while tile_group >= 0:
            posts.ready.wait(read.stage, read.phase)
            tile_group = posts.heads[read.stage, 0]
            tall: T.int32 = posts.heads[read.stage, 1]
            first: T.int32 = posts.heads[read.stage, 2] + wg * epilogue.width
            if tile_group >= 0:
                if first >= n:  # no output column for this warpgroup
                    hand_back(full, empty, take, steps, wg, thread, 1)
                    if SPLIT > 1:
                        split.attend()
                else:
                    if bias is not None:
                        epilogue.ask_bias(bias, options.matrix(tile_group, 0), first, n, warp, lane)
                    sums.run(acc, tall, steps, wg, thread, 0, len(knobs.widths) - 1)
                    if SPLIT > 1:
                        split.exchange(acc, tall, wg * 128 + thread)
                        split.meet()
                        epilogue.write_own(
                            acc, out, read.stage, tall, first, n, wg, warp, lane, SPLIT, rank
                        )
                    else:
                        epilogue.write(acc, out, read.stage, tall, first, n, wg, warp, lane)
            # All are done with the post before one thread hands it back.
            T.ptx["bar.sync"](T.uint32(wg + 1), T.uint32(128))
            if thread == 0:
                posts.taken.arrive(read.stage)
            read.advance()
        if dead is not None:
            walk.begin(T.truncdiv(bx, SPLIT))
            zeros.store_rest(bx, walk.tiles() * steps, wg * 4 + warp, WGS * 4, lane)
