"""Which keys any query of a tile sees, and which of them do, on CPUs: one pass over a mask."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from pit_tvm.target import TargetInfo

from .contraction_space import lanes_of

WORD = 16  # keys whose bits fill a vector of the widest kind
LINE = 4  # of which a line of the mask has so many
SERIAL_BYTES = 1 << 19  # reading less takes no longer than waking another thread


def tile_of(target: TargetInfo) -> int:
    """Queries of a tile: two vectors of them; TileNotFound if the target is no CPU."""
    return 2 * lanes_of(target.isa)


def mask_lists(*, target: TargetInfo) -> tirx.PrimFunc:
    """Lists of the keys that tiles of queries see; ``main(mask, ids, bits, counts, seeing,
    shared)``.

    ``mask``: uint8 [batch, heads, queries, keys], not 0 where a query sees a key, of any strides
    but that of keys. ``ids``, ``bits``: int32 [batch * heads * tiles, keys]; a tile has `tile_of`
    rows, ``shared``, int64, of each query in order, where that divides them. Of each tile
    ``counts``, int32, says how many keys any of its queries sees; ``ids`` are these keys,
    ascending, and bit ``r`` of their ``bits`` is 1 if the query of row ``r`` does. Behind the last
    query stands the last one again. What is behind a list's end is anything. ``seeing``, int32, are
    the bits of all keys: of the queries that see any.

    Raises
    ------
    TileNotFound
        The target is no CPU.
    """
    tile = tile_of(target)
    loop = T.parallel if target.threads > 1 else T.serial

    @T.prim_func(s_tir=True)
    def main(
        p_mask: T.handle,
        p_ids: T.handle,
        p_bits: T.handle,
        p_counts: T.handle,
        p_seeing: T.handle,
        shared: T.int64,
    ):
        batch, heads, queries, keys = T.int64(), T.int64(), T.int64(), T.int64()
        of_batch, of_head, of_query = T.int64(), T.int64(), T.int64()
        lists = T.int64()
        mask = T.match_buffer(
            p_mask,
            (batch, heads, queries, keys),
            "uint8",
            strides=(of_batch, of_head, of_query, T.int64(1)),
            align=1,
        )
        ids = T.match_buffer(p_ids, (lists, keys), "int32", align=4)
        bits = T.match_buffer(p_bits, (lists, keys), "int32", align=4)
        counts = T.match_buffer(p_counts, (lists,), "int32", align=4)
        seeing = T.match_buffer(p_seeing, (lists,), "int32", align=4)
        if batch * heads * queries * keys < SERIAL_BYTES:
            alone = Lister(tile, (mask, ids, bits, counts, seeing))
            for number in range(lists):
                alone.run(number, heads, queries, keys, shared)
        else:
            for number in loop(lists):
                lister = Lister(tile, (mask, ids, bits, counts, seeing))
                lister.run(number, heads, queries, keys, shared)

    return main


@T.meta_class
class Lister:
    """Makes one list."""

    def __init__(self, tile: int, arrays: tuple[Expr, ...]) -> None:
        self.tile = tile
        self.mask, self.ids, self.bits, self.counts, self.seeing = arrays
        self.where = T.alloc_buffer((4,), "int64")  # plane, sequence, head, first query
        self.fit = T.alloc_buffer((2,), "int64")  # queries of a tile, rows of a query
        self.own = T.alloc_buffer((1,), "int32")  # bits of a tile's first query
        self.found = T.alloc_buffer((1,), "int64")
        self.all, self.sum = T.alloc_buffer((1,), "int32"), T.alloc_buffer((1,), "int32")
        self.words = T.alloc_buffer((LINE * WORD,), "int32")

    @T.inline
    def run(self, number, heads, queries, keys, shared):
        # through memory, because TVM takes long to simplify what is bound to divisions
        self.fit[0] = self.tile // shared
        self.fit[1] = shared
        self.own[0] = T.Cast("int32", (T.int64(1) << shared) - 1)
        tiles: T.let = (queries + self.fit[0] - 1) // self.fit[0]
        self.where[0] = number // tiles
        self.where[1] = self.where[0] // heads
        self.where[2] = self.where[0] - self.where[1] * heads
        self.where[3] = (number - self.where[0] * tiles) * self.fit[0]
        self.found[0] = T.int64(0)
        self.all[0] = T.int32(0)
        for line in range(keys // (LINE * WORD)):
            self.fold(line * (LINE * WORD), queries, LINE)
            self.keep(number, line * (LINE * WORD), LINE)
        done: T.let = keys // (LINE * WORD) * (LINE * WORD)
        for word in range((keys - done) // WORD):
            self.fold(done + word * WORD, queries, 1)
            self.keep(number, done + word * WORD, 1)
        for key in range(keys % WORD):
            at: T.let = keys - keys % WORD + key
            self.words[0] = T.int32(0)
            for r in range(self.fit[0]):
                self.words[0] = self.with_bit(self.words[0], self.row(r, queries), r, at)
            self.all[0] = self.all[0] | self.words[0]
            self.add(number, at, 0)
        self.counts[number] = T.Cast("int32", self.found[0])
        self.seeing[number] = self.all[0]

    def row(self, r: Expr, queries: Expr) -> Expr:
        """Which query is the ``r``-th of the tile."""
        return T.min(self.where[3] + r, queries - 1)

    def with_bit(self, bits: Expr, row: Expr, r: Expr, key: Expr) -> Expr:
        """A key's bits, and what a query adds to them."""
        seen = self.mask[self.where[1], self.where[2], row, key] != T.uint8(0)
        own = self.own[0] << T.Cast("int32", r * self.fit[1])
        return tirx.Select(seen, bits | own, bits)

    @T.inline
    def fold(self, start, queries, words):
        sums = T.alloc_buffer((LINE * WORD,), "int32")
        for w in T.vectorized(words * WORD):
            sums[w] = T.int32(0)
        for r in range(self.fit[0]):
            row: T.let = self.row(r, queries)
            for word in T.unroll(words):
                for w in T.vectorized(WORD):
                    sums[word * WORD + w] = self.with_bit(
                        sums[word * WORD + w], row, r, start + word * WORD + w
                    )
        for w in T.vectorized(words * WORD):
            self.words[w] = sums[w]

    @T.inline
    def keep(self, number, start, words):
        self.sum[0] = self.united(words)
        self.all[0] = self.all[0] | self.sum[0]
        if self.sum[0] != 0:
            for key in range(words * WORD):
                self.add(number, start + key, key)

    def united(self, words: int) -> Expr:
        """The bits of so many words."""
        intrinsic = f"llvm.vector.reduce.or.v{words * WORD}i32"
        bits = self.words[T.Ramp(0, 1, words * WORD)]
        return T.call_llvm_pure_intrin("int32", intrinsic, bits)

    @T.inline
    def add(self, number, key, word):
        # always written, to stay if it counts: a branch that nobody can foretell takes longer
        self.ids[number, self.found[0]] = T.Cast("int32", key)
        self.bits[number, self.found[0]] = self.words[word]
        self.found[0] = self.found[0] + T.Cast("int64", self.words[word] != 0)
