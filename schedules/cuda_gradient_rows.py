"""What CTAs of gradients of attention by lists hold: queries with gradients to their results, or
keys with values, and their sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from .cuda_listed_products import KEYS, PIECE, ROWS, STEP, place_of
from .cuda_listed_rows import ALL, LANES, QUERIES, SLOTS, ListedRows, ListedTile, ctas_of
from .hopper_combine import load_words, unpack


@dataclass(frozen=True)
class GradientTile(ListedTile):
    """Queries and keys are ``deep``, values and gradients to results ``wide``; ``of_keys``: tiles
    are of keys, steps of queries."""

    of_keys: bool

    @property
    def held(self) -> bool:
        """Whether the tile's rows stay in registers, which gains a group nothing."""
        return not (self.grouped or self.of_keys) and self.deep + self.wide <= 128

    @property
    def laid(self) -> int:
        """float32 numbers that a thread leaves of a part of a tile."""
        return (self.deep + self.wide * self.of_keys) // 2

    @property
    def ctas(self) -> int:
        """CTAs that share a multiprocessor, by its registers and shared memory."""
        most = 3 if self.deep + self.wide <= 128 else 2
        return ctas_of(QUERIES * (self.deep + self.wide), self, self.slots, most)


def _product(left: Any, right: Any, dtype: str) -> Any:
    """float32: the sum of the products of two words' halves."""
    lower, upper = (unpack(left, dtype, half) * unpack(right, dtype, half) for half in (0, 1))
    return lower + upper


@T.meta_class
class GradientRows(ListedRows):
    """Queries with gradients to their results, or keys with values, and their sums."""

    def __init__(self, tile: GradientTile) -> None:
        held = (tile.deep + tile.wide) // 4 if tile.held else 4
        super().__init__(tile, held, KEYS // 4 * (1 + tile.of_keys))
        # float32 of the queries of a step: weights, drops.
        self.facts = self.pool.alloc((SLOTS, 2, KEYS), "float32", align=16)
        self.own_a, self.out_a = self.region(tile.deep)
        self.own_b, self.out_b = self.region(tile.wide)
        self.pool.commit()
        self.slopes = T.alloc_local([KEYS // 2], "float32")
        self.sums_a = T.alloc_local([tile.deep // 2], "float32")
        self.sums_b = T.alloc_local([tile.wide // 2 if tile.of_keys else 1], "float32")
        self.weight = T.alloc_local([2], "float32")
        self.drop = T.alloc_local([2], "float32")
        # Of a result, pieces of every fourth row.
        self.kept = T.alloc_local([1 if tile.of_keys else ROWS * tile.wide // PIECE // 8], "uint32")

    @T.inline
    def begin(self):
        """Nothing has been added up."""
        for i in T.unroll(self.tile.deep // 2):
            self.sums_a[i] = T.float32(0)
        if self.tile.of_keys:
            for i in T.unroll(self.tile.wide // 2):
                self.sums_b[i] = T.float32(0)

    @T.inline
    def learn_weights(self, weights, at, warp, lane):
        """``weight`` of the lane's two queries."""
        for r in T.unroll(2):
            row: T.int32 = self.rows[warp * ROWS + r * 8 + T.truncdiv(lane, 4)]
            self.weight[r] = T.float32("inf")
            if row >= 0:
                self.weight[r] = weights[at + T.int64(row)]

    @T.inline
    def look_at_results(self, result, start, row_step, dim, warp, lane):
        """``kept``: results of the warp's queries; eight lanes have a row."""
        matrices = T.meta_var(self.tile.wide // STEP)
        for i in T.unroll(ROWS // 4):
            row: T.int32 = self.rows[warp * ROWS + i * 4 + T.truncdiv(lane, 8)]
            for m in T.unroll(matrices):
                at = T.meta_var((i * matrices + m) * 4)
                column: T.let = m * STEP + T.truncmod(lane, 8) * PIECE
                for w in T.unroll(4):
                    self.kept[at + w] = T.uint32(0)
                if (row >= 0) & (column < dim):
                    source = T.meta_var(result.ptr_to([start + T.int64(row) * row_step + column]))
                    load_words(self.kept, source, at)

    @T.inline
    def tell_drops(self, drops, at, warp, lane):
        """Write the drops of the warp's queries; ``drop`` of the lane's two."""
        matrices = T.meta_var(self.tile.wide // STEP)
        for i in T.unroll(ROWS // 4):
            own: T.let = warp * ROWS + i * 4 + T.truncdiv(lane, 8)
            total: T.float32 = T.float32(0)
            for m in T.unroll(matrices):
                place = T.meta_var(place_of(own, m * 8 + T.truncmod(lane, 8)))
                for w in T.unroll(4):
                    word: T.uint32 = self.out_b[place[0], place[1], T.truncdiv(place[2], 2) + w]
                    kept = T.meta_var(self.kept[(i * matrices + m) * 4 + w])
                    total = total + _product(word, kept, self.tile.dtype)
            for s in T.unroll(3):
                total = total + T.cuda.__shfl_xor_sync(T.uint32(ALL), total, 1 << s, 32)
            row: T.int32 = self.rows[own]
            if (row >= 0) & (T.truncmod(lane, 8) == 0):
                drops[at + T.int64(row)] = total
            other: T.float32 = T.cuda.__shfl_sync(
                T.uint32(ALL), total, T.truncmod(T.truncdiv(lane, 4), 4) * 8, 32
            )
            if T.truncdiv(lane, 16) == i % 2:
                self.drop[i // 2] = other

    @T.inline
    def fetch_facts(self, slot, weights, drops, at, thread):
        """Ask for ``facts`` of a step's queries, whose places are known; those of none are of the
        first, which their bits exclude."""
        half: T.let = T.truncmod(T.truncdiv(thread, LANES), 2)
        own: T.let = T.Select(half == 0, self.places[0], self.places[1])
        place: T.let = at + T.int64(T.max(own, 0))
        there: T.let = half * LANES + T.truncmod(thread, LANES)
        if thread < KEYS:
            T.ptx["cp.async.ca.shared.global"](
                self.facts.ptr_to([slot, 0, there]), weights.ptr_to([place]), 4
            )
        else:
            T.ptx["cp.async.ca.shared.global"](
                self.facts.ptr_to([slot, 1, there]), drops.ptr_to([place]), 4
            )

    @T.inline
    def weigh(self, slot, scale, lane):
        """``scores`` become weights; of a tile of queries, times the slope of the cap."""
        for i in T.unroll(KEYS // 2):
            if self.tile.of_keys:
                column: T.let = i // 4 * 8 + T.truncmod(lane, 4) * 2 + i % 2
                T.ptx["ex2.approx.ftz.f32"](
                    self.scores[i], self.scores[i] * scale - self.facts[slot, 0, column]
                )
            else:
                bent: T.float32 = self.scores[i] * self.bend
                T.ptx["ex2.approx.ftz.f32"](
                    self.scores[i], self.scores[i] * scale - self.weight[i // 2 % 2]
                )
                if self.tile.capped:
                    self.scores[i] = self.scores[i] * (T.float32(1) - bent * bent)

    @T.inline
    def slope(self, slot, scale, lane):
        """``slopes`` become gradients to scores. Where these were capped, weights tell how steep
        that was."""
        for i in T.unroll(KEYS // 2):
            if self.tile.of_keys:
                column: T.let = i // 4 * 8 + T.truncmod(lane, 4) * 2 + i % 2
                self.slopes[i] = self.scores[i] * (self.slopes[i] - self.facts[slot, 1, column])
                if self.tile.capped:
                    T.ptx["lg2.approx.ftz.f32"](self.held[0], self.scores[i])
                    power: T.let = self.held[0] + self.facts[slot, 0, column]
                    bent: T.let = power * (self.bend / scale)
                    self.slopes[i] = T.Select(
                        self.scores[i] == T.float32(0),
                        T.float32(0),
                        self.slopes[i] * (T.float32(1) - bent * bent),
                    )
            else:
                self.slopes[i] = self.scores[i] * (self.slopes[i] - self.drop[i // 2 % 2])

    @T.inline
    def lay_out(self, laid, at, step):
        """Leave what the thread has, for the CTA that adds up the tile."""
        half = T.meta_var(self.tile.deep // 2)
        for i in T.unroll(half):
            laid[at + i * step] = self.sums_a[i]
        if self.tile.of_keys:
            for i in T.unroll(self.tile.wide // 2):
                laid[at + (half + i) * step] = self.sums_b[i]

    @T.inline
    def take_in(self, laid, at, step):
        """Add what a thread has left."""
        half = T.meta_var(self.tile.deep // 2)
        for i in T.unroll(half):
            self.sums_a[i] = self.sums_a[i] + laid[at + i * step]
        if self.tile.of_keys:
            for i in T.unroll(self.tile.wide // 2):
                self.sums_b[i] = self.sums_b[i] + laid[at + (half + i) * step]
