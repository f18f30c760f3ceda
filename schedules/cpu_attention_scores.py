"""Scores of a block of queries with a block of keys on CPUs, and the values that they weigh."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T

from .cpu_attention_parts import KEYS, LOWEST, Ahead, AttentionForm, Queries, decay
from .cpu_attention_sight import Sight


@T.meta_class
class Scores:
    """A packed block of keys and values, and what a block of queries makes of it.

    A register block is two times ``half`` vectors of sums: two vectors of queries by ``half``
    scalars, or one by twice as many. ``probs`` holds scores, then their exponentials: key ``j`` and
    vector ``u`` of ``vectors`` begin at ``(j * vectors + u) * lanes``.
    """

    def __init__(
        self, form: AttentionForm, queries: Queries, sight: Sight, ahead: Ahead | None = None
    ) -> None:
        self.form, self.queries, self.sight, self.ahead = form, queries, sight, ahead
        self.lanes, self.half = form.lanes, form.sums
        self.wide, self.value_wide = queries.wide, queries.value_wide
        asks = ahead is not None and form.head_dim % self.half == 0
        self.steps = self.half if asks else 1
        self.depth = form.head_dim // self.steps
        room = KEYS + 2 * form.sums
        self.keys = T.alloc_buffer((room * self.wide,), "float32")
        self.values = T.alloc_buffer((KEYS * self.value_wide,), "float32")
        self.probs = T.alloc_buffer((room * 2 * form.lanes,), "float32")
        self.best = T.alloc_buffer((2 * form.lanes,), "float32")
        self.shrink = T.alloc_buffer((2 * form.lanes,), "float32")
        self.total = T.alloc_buffer((2 * form.lanes,), "float32")

    def at(self, start: Expr) -> Expr:
        """Indices of one vector."""
        return T.Ramp(start, 1, self.lanes)

    def height(self, vectors: int) -> int:
        """Scalars of a register block."""
        return 2 * self.half // vectors

    def last(self, vectors: int) -> int:
        """Where the last vector begins among ``vectors``."""
        return (vectors - 1) * self.lanes

    def number(self, r: Expr, high: int, vectors: int) -> Expr:
        """Which of a register block's scalars belongs to sum ``r`` of a half."""
        return r + self.half * high * (2 - vectors)

    def place(self, first: Expr, r: Expr, high: int, vectors: int) -> Expr:
        """Where sum ``r`` of a half belongs; the register block's scalars begin at ``first``."""
        scalar = first + self.number(r, high, vectors)
        return scalar * vectors * self.lanes + high * self.last(vectors)

    def peak(self, sums: Expr) -> Expr:
        """Largest of half a register block, lane by lane."""
        level = [sums[self.at(r * self.lanes)] for r in range(self.half)]
        while len(level) > 1:
            level = [T.max(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
        return level[0]

    @T.inline
    def pack(self, k, v, count):
        for key in range(count):
            row: T.let = self.sight.row(key)
            self.queries.rows.load(k, row, self.keys, key * self.wide, T.float32(1))
        for key in range(count):
            row: T.let = self.sight.row(key)
            to: T.let = key * self.value_wide
            self.queries.value_rows.load(v, row, self.values, to, T.float32(1))
        # scores come in register blocks: beyond the end the last key, which changes no maximum
        for key in range((-count) % (2 * self.half)):
            for c in range(self.wide // self.lanes):
                for w in T.vectorized(self.lanes):
                    self.keys[(count + key) * self.wide + c * self.lanes + w] = self.keys[
                        (count - 1) * self.wide + c * self.lanes + w
                    ]

    @T.inline
    def multiply(self, low, high, scalars, start, pitch, vector, vector_at, vectors):
        for r in T.unroll(self.half):
            for w in T.vectorized(self.lanes):
                low[r * self.lanes + w] = low[r * self.lanes + w] + (
                    scalars[start + r * pitch] * vector[vector_at + w]
                )
            if vectors == 2:
                for w in T.vectorized(self.lanes):
                    high[r * self.lanes + w] = high[r * self.lanes + w] + (
                        scalars[start + r * pitch] * vector[vector_at + self.lanes + w]
                    )
        if vectors == 1:
            for r in T.unroll(self.half):
                for w in T.vectorized(self.lanes):
                    high[r * self.lanes + w] = high[r * self.lanes + w] + (
                        scalars[start + (self.half + r) * pitch] * vector[vector_at + w]
                    )

    @T.inline
    def meet(self, g, count, vectors):
        """Block ``g`` meets ``count`` keys. Meanwhile ``ahead`` asks for their rows of the next
        head."""
        for u in T.unroll(vectors):
            self.best[self.at(u * self.lanes)] = self.queries.stat[self.at(self.queries.top(g, u))]
        for block in range((count + (self.height(vectors) - 1)) // self.height(vectors)):
            key: T.let = block * self.height(vectors)
            self.score(g, key, vectors)
        for u in T.unroll(vectors):
            top: T.let = self.queries.top(g, u)
            under: T.let = self.queries.top(g, 2 + u)
            for w in T.vectorized(self.lanes):
                self.shrink[u * self.lanes + w] = decay(
                    self.queries.stat[top + w] - self.best[u * self.lanes + w]
                )
            self.queries.stat[self.at(top)] = self.best[self.at(u * self.lanes)]
            for w in T.vectorized(self.lanes):
                self.total[u * self.lanes + w] = (
                    self.queries.stat[under + w] * self.shrink[u * self.lanes + w]
                )
        for key in range(count):
            for u in T.unroll(vectors):
                self.soften(g, key, u, vectors)
        for u in T.unroll(vectors):
            self.queries.stat[self.at(self.queries.top(g, 2 + u))] = self.total[
                self.at(u * self.lanes)
            ]
        for block in range(self.value_wide // self.height(vectors)):
            self.weigh(g, block * self.height(vectors), count, vectors)

    @T.inline
    def score(self, g, key, vectors):
        low = T.alloc_buffer((self.half * self.lanes,), "float32")
        high = T.alloc_buffer((self.half * self.lanes,), "float32")
        for r in T.unroll(self.half):
            low[self.at(r * self.lanes)] = T.Broadcast(T.float32(0), self.lanes)
            high[self.at(r * self.lanes)] = T.Broadcast(T.float32(0), self.lanes)
        for step in range(self.steps):
            if self.ahead is not None:
                if (self.ahead.where[0] > 0) & (g == 0):
                    for r in T.unroll(self.height(vectors) // self.steps):
                        later: T.let = key + step * (self.height(vectors) // self.steps) + r
                        self.ahead.ask(self.sight.row(later))
            for c in range(self.depth):
                column: T.let = step * self.depth + c
                self.multiply(
                    low,
                    high,
                    self.keys,
                    key * self.wide + column,
                    self.wide,
                    self.queries.turned,
                    self.queries.at(g) + column * vectors * self.lanes,
                    vectors,
                )
        if self.sight.limited:
            self.mask(low, g, key, 0, vectors)
            self.mask(high, g, key, 1, vectors)
        for r in T.unroll(self.half):
            self.probs[self.at(self.place(key, r, 0, vectors))] = low[self.at(r * self.lanes)]
            self.probs[self.at(self.place(key, r, 1, vectors))] = high[self.at(r * self.lanes)]
        self.best[self.at(0)] = T.max(self.best[self.at(0)], self.peak(low))
        self.best[self.at(self.last(vectors))] = T.max(
            self.best[self.at(self.last(vectors))], self.peak(high)
        )

    @T.inline
    def mask(self, sums, g, key, side, vectors):
        for r in T.unroll(self.half):
            for w in T.vectorized(self.lanes):
                sums[r * self.lanes + w] = T.Select(
                    self.sight.sees(
                        g, side * (vectors - 1), w, key + self.number(r, side, vectors)
                    ),
                    sums[r * self.lanes + w],
                    T.float32(LOWEST),
                )

    @T.inline
    def soften(self, g, key, u, vectors):
        start: T.let = (key * vectors + u) * self.lanes
        for w in T.vectorized(self.lanes):
            if self.sight.limited:
                self.probs[start + w] = T.Select(
                    self.sight.sees(g, u, w, key),
                    decay(self.probs[start + w] - self.best[u * self.lanes + w]),
                    T.float32(0),
                )
            else:
                self.probs[start + w] = decay(self.probs[start + w] - self.best[u * self.lanes + w])
        for w in T.vectorized(self.lanes):
            self.total[u * self.lanes + w] = self.total[u * self.lanes + w] + self.probs[start + w]

    @T.inline
    def weigh(self, g, column, count, vectors):
        low = T.alloc_buffer((self.half * self.lanes,), "float32")
        high = T.alloc_buffer((self.half * self.lanes,), "float32")
        for r in T.unroll(self.half):
            to: T.let = self.queries.sums_at(g) + self.place(column, r, 0, vectors)
            for w in T.vectorized(self.lanes):
                low[r * self.lanes + w] = self.queries.sums[to + w] * self.shrink[w]
            beside: T.let = self.queries.sums_at(g) + self.place(column, r, 1, vectors)
            for w in T.vectorized(self.lanes):
                high[r * self.lanes + w] = (
                    self.queries.sums[beside + w] * self.shrink[self.last(vectors) + w]
                )
        for key in range(count):
            self.multiply(
                low,
                high,
                self.values,
                key * self.value_wide + column,
                1,
                self.probs,
                key * vectors * self.lanes,
                vectors,
            )
        for r in T.unroll(self.half):
            to: T.let = self.queries.sums_at(g) + self.place(column, r, 0, vectors)
            self.queries.sums[self.at(to)] = low[self.at(r * self.lanes)]
            beside: T.let = self.queries.sums_at(g) + self.place(column, r, 1, vectors)
            self.queries.sums[self.at(beside)] = high[self.at(r * self.lanes)]
