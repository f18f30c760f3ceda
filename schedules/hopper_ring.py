"""What producer and consumers of the Hopper rows family share: barriers, posts, rhs tiles."""

from __future__ import annotations

from typing import Any

from tvm.backend.cuda.lang.pipeline import MBarrier
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx

from .hopper_knobs import TILE_K, TILES_AHEAD, RowsOptions, RowsTile


def matrices(number: Any, *shape: Any) -> Any:
    """Layout of so many matrices of a ``shape``, one behind the other, as TMA is told it: how far
    they are apart takes more than 32 bits where they are large. Unsigned, like nothing else, it
    shares no part with what a kernel counts."""
    strides: list[Any] = [1]
    for extent in shape[:0:-1]:
        strides.insert(0, strides[0] * extent)
    apart = T.uint64(strides[0]) * T.uint64(shape[0])
    return T.TileLayout(T.S[(number, *shape) : (apart, *strides)])


def steps_of(k: Any, depth: Any) -> Any:
    """Steps of `TILE_K` in the depth ``k``, or in what the buffer ``depth`` says of it, at least
    one: a tile is told with its first step."""
    return T.truncdiv((k if depth is None else T.max(depth[0], 1)) + TILE_K - 1, TILE_K)


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
def hand_back(full, empty, take, steps, wg, thread, cluster):
    """The stages of a tile of which this warpgroup computes nothing."""
    for _ in T.serial(steps):
        full.wait(take.stage, take.phase)
        # No wgmma keeps the four warps together here.
        T.ptx["bar.sync"](T.uint32(wg + 1), T.uint32(128))
        release(empty, take.stage, thread, cluster)
        take.advance()


@T.meta_class
class TilePosts:
    """Where the producer posts group, live rows, row0 and col0 of each tile that it begins to fill.

    A post has barriers of its own, local to the CTA. It is written when all consumer warpgroups
    have taken the one that was there before, and it is ready when every warp of the producer has
    seen that: a warp that looked later could miss a phase and wait for ever. (One waiting thread
    would do too, but in a branch of one thread a wait costs the compiler its proof that stages are
    the same in a whole warp, and every k step pays for that.)
    """

    def __init__(self, pool: Any, consumers: int, warps: int = 4) -> None:
        self.ready = MBarrier(pool, TILES_AHEAD)
        self.taken = MBarrier(pool, TILES_AHEAD)
        self.slots = pool.alloc((TILES_AHEAD, 4), "int32", align=16)
        self.consumers, self.warps = consumers, warps

    @T.inline
    def init(self):
        self.ready.init(self.warps)
        self.taken.init(self.consumers)

    @T.inline
    def post(self, state, warp, lane, group, live, row0, col0):
        """By all ``warps`` of the producer; group -1 ends the consumers' loop."""
        self.taken.wait(state.stage, state.phase)
        T.cuda.warp_sync()
        if lane == 0:
            if warp == 0:
                self.slots[state.stage, 0] = group
                self.slots[state.stage, 1] = live
                self.slots[state.stage, 2] = row0
                self.slots[state.stage, 3] = col0
            self.ready.arrive(state.stage)
        state.advance()


@T.meta_class
class RhsTiles:
    """The ring's rhs tiles and the boxes that TMA fetches for one of them.

    rhs (groups, n, k) gives tiles of k-major rows, one (tile_n, 64) matrix per stage; (groups, k,
    n) gives 64-column matrices (64 of k, 64 of n) side by side. With gates apart from what they
    gate the first side of a tile's columns are gates, the second side the others.
    """

    def __init__(self, pool: Any, rhs: Any, n: Any, knobs: RowsTile, options: RowsOptions) -> None:
        self.rhs, self.n = rhs, n
        self.turned = options.rhs_layout == "kn"
        self.step = options.halves // options.sides  # rhs columns beside each other, of one of out
        self.matrices = knobs.tile_n // TILE_K if self.turned else 1
        self.high = TILE_K if self.turned else knobs.tile_n
        self.pieces = options.pieces(knobs)
        self.width = knobs.tile_n // self.pieces
        self.per_side = self.pieces // options.sides
        self.cluster = knobs.cluster
        # Each CTA fetches its part of every tile; where that does not come out even, they take
        # turns with whole tiles.
        self.shared = self.pieces % knobs.cluster == 0
        self.each = self.pieces // knobs.cluster if self.shared else self.pieces
        self.everyone = (1 << knobs.cluster) - 1
        shape = (knobs.stages * self.matrices, self.high, TILE_K)
        self.tiles = pool.alloc_tcgen05_mma_AB(shape, options.dtype)

    @T.inline
    def fetch(self, stage, group, col0, kt, rank, bar, apart):
        """By one thread: this CTA's boxes of the tile at output column ``col0``, k step ``kt``; all
        of them, for itself alone, where the cluster's CTAs are ``apart``."""
        if self.cluster == 1:
            for q in T.unroll(self.pieces):
                self.fetch_box(stage, group, col0, kt, bar, q, 0)
        else:
            mask: T.let = T.if_then_else(apart == 1, T.shift_left(1, rank), self.everyone)
            for q in T.unroll(self.pieces):
                turn: T.let = T.truncdiv(q, self.each) if self.shared else T.truncmod(kt, 2)
                if (apart == 1) | (turn == rank):
                    self.fetch_box(stage, group, col0, kt, bar, q, T.cast(mask, "uint16"))

    @T.inline
    def fetch_box(self, stage, group, col0, kt, bar, piece, mask):
        """The box number ``piece``, for the CTAs of ``mask``, or for this one where that is 0."""
        side: T.let = T.truncdiv(piece, self.per_side)
        col: T.let = (
            side * self.n + col0 * self.step + T.truncmod(piece, self.per_side) * self.width
        )
        if self.turned:
            Tx.copy_async(
                self.tiles[stage * self.matrices + piece, 0:TILE_K, 0:TILE_K],
                self.rhs[
                    group : group + 1,
                    kt * TILE_K : kt * TILE_K + TILE_K,
                    col : col + TILE_K,
                ],
                dispatch="tma_explicit",
                mbar=bar,
                cta_mask=mask,
            )
        else:
            Tx.copy_async(
                self.tiles[stage, piece * self.width : piece * self.width + self.width, 0:TILE_K],
                self.rhs[
                    group : group + 1,
                    col : col + self.width,
                    kt * TILE_K : kt * TILE_K + TILE_K,
                ],
                dispatch="tma_explicit",
                mbar=bar,
                cta_mask=mask,
            )

    @T.inline
    def multiply(self, acc, lhs_rows, stage, accum):
        """acc (+)= lhs_rows @ the tile of ``stage``, by one warpgroup; no wait."""
        Tx.wg.gemm_async(
            acc,
            lhs_rows,
            self.tiles[
                stage * self.matrices : stage * self.matrices + self.matrices,
                0 : self.high,
                0:TILE_K,
            ],
            transB=self.turned,
            accum=accum,
            dispatch="pit_wgmma",
        )
