"""Parts of attention by lists: the tile, and what a CTA does with queries and a step of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch

from .hopper_combine import PACK
from .hopper_swrite import PTX_TYPE

QUERIES = 64  # of a tile
KEYS = 64  # of a step
WORDS = QUERIES // 32  # of the bits that tell which queries see a key
PART_FACTS = 6  # what a CTA is told: tile, first step, last, slot, part, parts
STEP = 64  # widths of heads are multiples in shared memory
MOST_WIDE = 256
LANES, _ROWS = 32, 16  # rows of a warp, and of one instruction
THREADS = QUERIES // _ROWS * LANES
_PIECE = 8  # elements of 16 bits in 16 bytes
_ALL = 0xFFFFFFFF
_OWN_BITS = 0x101  # of a lane's two queries, eight rows apart


@dataclass(frozen=True)
class AttentionTile:
    """``wide`` and ``deep``: columns of values, and of queries and keys, as shared memory holds
    them; ``stages``: steps of keys under way."""

    dtype: str
    deep: int
    wide: int
    stages: int

    @property
    def held(self) -> bool:
        """Whether queries stay in registers."""
        return self.deep <= 128

    @property
    def laid(self) -> int:
        """float32 numbers of a part of a tile: sums of all threads, scores, weights."""
        return (self.wide // 2 + 4) * THREADS

    @property
    def ctas(self) -> int:
        """CTAs that share a multiprocessor, by its registers and shared memory."""
        room = QUERIES * max(self.deep, self.wide) + self.stages * KEYS * (self.deep + self.wide)
        return max(1, min(4 if self.wide <= 64 else 2, (227 * 1024) // (2 * room + 2048)))

    def check(self) -> None:
        """Raise ScheduleError (a ValueError) for what the template cannot build."""
        widths = range(STEP, MOST_WIDE + 1, STEP)
        rules = {
            "dtype float16 or bfloat16": self.dtype in PTX_TYPE,
            f"deep and wide multiples of {STEP} up to {MOST_WIDE}": self.deep in widths
            and self.wide in widths,
            "two to four stages": 2 <= self.stages <= 4,
        }
        for rule, holds in rules.items():
            if not holds:
                raise ScheduleError(mismatch("masked_attention", rule, self))


def _swizzled(row: Any, piece: Any) -> Any:
    """The first column of a piece of a row, so that pieces of eight rows lie in all banks."""
    return T.bitwise_xor(piece, T.truncmod(row, 8)) * _PIECE


@T.inline
def _copy(there, source, at, real):
    """Ask for a piece at ``at``, which is inside ``source``; zeros where it is not ``real``."""
    T.ptx["cp.async.cg.shared.global"](
        there, source.ptr_to([at]), 16, T.cast(real, "uint32") * T.uint32(16)
    )


@T.meta_class
class QueryTile:
    """A CTA's operands in shared memory, and what each lane holds of its warp's 16 queries."""

    def __init__(self, tile: AttentionTile) -> None:
        self.tile = tile
        pool: Any = T.SMEMPool()
        rows = QUERIES, max(tile.deep, tile.wide)
        self.q = pool.alloc(rows, tile.dtype, align=128)
        end = pool.offset
        pool.move_base_to(end - QUERIES * rows[1] * 2)
        self.out = pool.alloc((QUERIES, rows[1] // 2), "uint32", align=128)  # when q is done with
        self.k = pool.alloc((tile.stages, KEYS, tile.deep), tile.dtype, align=128)
        self.v = pool.alloc((tile.stages, KEYS, tile.wide), tile.dtype, align=128)
        self.bits = pool.alloc((tile.stages, WORDS, KEYS), "uint32", align=16)
        self.rows = pool.alloc((QUERIES,), "int32", align=16)
        self.last = pool.alloc((4,), "int32", align=16)
        pool.commit()
        self.q_at, self.out_at = T.local_scalar("int64"), T.local_scalar("int64")
        self.k_at, self.v_at = T.local_scalar("int64"), T.local_scalar("int64")
        self.plane, self.line = T.local_scalar("int32"), T.local_scalar("int32")
        self.places = T.alloc_local([2], "int32")
        self.a = T.alloc_local([4 * (tile.deep // 16 if tile.held else 1)], "uint32")
        self.b = T.alloc_local([4], "uint32")
        self.p = T.alloc_local([4], "uint32")
        self.seen = T.alloc_local([KEYS // 4], "uint32")
        self.scores = T.alloc_local([KEYS // 2], "float32")
        self.sums = T.alloc_local([tile.wide // 2], "float32")
        self.peak = T.alloc_local([2], "float32")
        self.weight = T.alloc_local([2], "float32")
        self.base = T.alloc_local([2], "float32")
        self.shrink = T.alloc_local([2], "float32")

    @T.inline
    def begin(self):
        """No key has been seen."""
        for i in T.unroll(self.tile.wide // 2):
            self.sums[i] = T.float32(0)
        for r in T.unroll(2):
            self.peak[r] = T.float32("-inf")
            self.weight[r] = T.float32(0)

    @T.inline
    def fetch_queries(self, q, row_step, order, ordered, first, queries, dim, thread):
        """Learn which rows the tile has, -1 for none, and ask for them."""
        if thread < QUERIES:
            place: T.let = first + thread
            if ordered != 0:
                self.rows[thread] = order[self.plane, place]
            else:
                self.rows[thread] = T.Select(place < queries, place, -1)
        T.cuda.cta_sync()
        pieces = T.meta_var(self.tile.deep // _PIECE)
        for i in T.unroll(QUERIES * pieces // THREADS):
            own: T.let = T.truncdiv(i * THREADS + thread, pieces)
            piece: T.let = T.truncmod(i * THREADS + thread, pieces)
            row: T.int32 = self.rows[own]
            _copy(
                self.q.ptr_to([own, _swizzled(own, piece)]),
                q,
                self.q_at
                + T.cast(T.max(row, 0), "int64") * row_step
                + T.min(piece * _PIECE, dim - _PIECE),
                (row >= 0) & (piece * _PIECE < dim),
            )
        T.ptx.cp.async_.commit_group()

    @T.inline
    def look(self, ids, step, steps, lane):
        """Learn the places of a step's keys: lane l those of keys l and l + 32."""
        for h in T.unroll(2):
            self.places[h] = -1
            if step < steps:
                self.places[h] = ids[self.plane, self.line, step * KEYS + h * LANES + lane]

    @T.inline
    def _gather(self, held, slot, wide, source, start, row_step, dim, thread):
        """Ask for the rows of a step whose places are known."""
        pieces = T.meta_var(wide // _PIECE)
        for i in T.unroll(KEYS * pieces // THREADS):
            row: T.let = T.truncdiv(i * THREADS + thread, pieces)
            piece: T.let = T.truncmod(i * THREADS + thread, pieces)
            lane: T.let = T.truncmod(row, LANES)
            low: T.let = T.cuda.__shfl_sync(T.uint32(_ALL), self.places[0], lane, 32)
            high: T.let = T.cuda.__shfl_sync(T.uint32(_ALL), self.places[1], lane, 32)
            place: T.let = T.Select(row < LANES, low, high)
            _copy(
                held.ptr_to([slot, row, _swizzled(row, piece)]),
                source,
                start
                + T.cast(T.max(place, 0), "int64") * row_step
                + T.min(piece * _PIECE, dim - _PIECE),
                (place >= 0) & (piece * _PIECE < dim),
            )

    @T.inline
    def fetch(self, slot, k, k_row, dim, v, v_row, v_dim, bits, step, steps, thread):
        """Ask for keys, values and bits of a step, if there is one."""
        if step < steps:
            self._gather(self.k, slot, self.tile.deep, k, self.k_at, k_row, dim, thread)
            self._gather(self.v, slot, self.tile.wide, v, self.v_at, v_row, v_dim, thread)
            each = T.meta_var(KEYS // 4)
            if thread < WORDS * each:
                word: T.let = T.truncdiv(thread, each)
                key: T.let = T.truncmod(thread, each) * 4
                T.ptx["cp.async.cg.shared.global"](
                    self.bits.ptr_to([slot, word, key]),
                    bits.ptr_to([self.plane, self.line, word, step * KEYS + key]),
                    16,
                    T.uint32(16),
                )
        T.ptx.cp.async_.commit_group()

    @T.inline
    def load_queries(self, step, place, warp, lane):
        """``a[place ..]``: the warp's rows by the 16 columns of a step."""
        row: T.let = warp * _ROWS + T.truncmod(lane, _ROWS)
        T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](
            *[self.a[place + i] for i in range(4)],
            self.q.ptr_to([row, _swizzled(row, step * 2 + T.truncdiv(lane, _ROWS))]),
        )

    @T.inline
    def _multiply(self, sums, at, rows, place, h):
        """sums[at ..] += 16 rows of ``rows`` by 8 columns of ``b``."""
        kind = T.meta_var(PTX_TYPE[self.tile.dtype])
        held = T.meta_var([sums[at + i] for i in range(4)])
        T.ptx[f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"](
            *held, *[rows[place + i] for i in range(4)], self.b[h * 2], self.b[h * 2 + 1], *held
        )

    @T.inline
    def score(self, slot, warp, lane):
        """``scores`` = queries by the keys of a slot."""
        for i in T.unroll(KEYS // 2):
            self.scores[i] = T.float32(0)
        for s in T.unroll(self.tile.deep // 16):
            if not self.tile.held:
                self.load_queries(s, 0, warp, lane)
            first = T.meta_var(s * 4 if self.tile.held else 0)
            for j in T.unroll(KEYS // 16):
                row: T.let = j * 16 + T.truncdiv(lane, 16) * 8 + T.truncmod(lane, 8)
                T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](
                    *[self.b[i] for i in range(4)],
                    self.k.ptr_to(
                        [slot, row, _swizzled(row, s * 2 + T.truncmod(T.truncdiv(lane, 8), 2))]
                    ),
                )
                for h in T.unroll(2):
                    self._multiply(self.scores, j * 8 + h * 4, self.a, first, h)

    @T.inline
    def exclude(self, slot, warp, lane):
        """Scores of keys that a query does not see become minus infinity."""
        first: T.let = warp * _ROWS
        shift: T.let = T.cast(T.truncmod(first, LANES) + T.truncdiv(lane, 4), "uint32")
        all_seen: T.uint32 = T.uint32(_OWN_BITS)
        for j in T.unroll(KEYS // 8):
            for e in T.unroll(2):
                key: T.let = j * 8 + T.truncmod(lane, 4) * 2 + e
                self.seen[j * 2 + e] = T.shift_right(
                    self.bits[slot, T.truncdiv(first, LANES), key], shift
                )
                all_seen = T.bitwise_and(all_seen, self.seen[j * 2 + e])
        # Most steps of windows and blocks are seen by all.
        some_not: T.let = T.cast(all_seen != T.uint32(_OWN_BITS), "int32")
        if T.cuda.ballot_sync(T.uint32(_ALL), some_not) != T.uint32(0):
            for j in T.unroll(KEYS // 8):
                for i in T.unroll(4):
                    bit: T.let = T.shift_right(self.seen[j * 2 + i % 2], T.uint32(i // 2 * 8))
                    if T.bitwise_and(bit, T.uint32(1)) == T.uint32(0):
                        self.scores[j * 4 + i] = T.float32("-inf")

    @T.inline
    def weigh(self, scale):
        """``scores`` become weights; sums of earlier steps are scaled down to theirs."""
        for r in T.unroll(2):
            top: T.float32 = self.peak[r]
            for j in T.unroll(KEYS // 8):
                for e in T.unroll(2):
                    top = T.max(top, self.scores[j * 4 + r * 2 + e])
            for s in T.unroll(2):
                top = T.max(top, T.cuda.__shfl_xor_sync(T.uint32(_ALL), top, 1 << s, 32))
            # Of a query that has seen no key yet, nothing may become a difference of infinities.
            self.base[r] = T.if_then_else(top == T.float32("-inf"), T.float32(0), top * scale)
            T.ptx["ex2.approx.ftz.f32"](self.shrink[r], self.peak[r] * scale - self.base[r])
            self.peak[r] = top
            self.weight[r] = self.weight[r] * self.shrink[r]
        for i in T.unroll(KEYS // 2):
            r = T.meta_var(i // 2 % 2)
            T.ptx["ex2.approx.ftz.f32"](self.scores[i], self.scores[i] * scale - self.base[r])
            self.weight[r] = self.weight[r] + self.scores[i]
        for i in T.unroll(self.tile.wide // 2):
            self.sums[i] = self.sums[i] * self.shrink[i // 2 % 2]

    @T.inline
    def add(self, slot, lane):
        """``sums`` += weights by the values of a slot."""
        pack = T.meta_var(PACK[self.tile.dtype])
        for s in T.unroll(KEYS // 16):
            for i in T.unroll(4):
                at = T.meta_var(s * 8 + i * 2)
                T.ptx[pack](self.p[i], self.scores[at + 1], self.scores[at])
            row: T.let = s * 16 + T.truncmod(lane, 16)
            for c in T.unroll(self.tile.wide // 16):
                T.ptx["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"](
                    *[self.b[i] for i in range(4)],
                    self.v.ptr_to([slot, row, _swizzled(row, c * 2 + T.truncdiv(lane, 16))]),
                )
                for h in T.unroll(2):
                    self._multiply(self.sums, c * 8 + h * 4, self.p, 0, h)

    @T.inline
    def lay_out(self, laid, at, thread):
        """Leave what the CTA has, for the one that adds up the tile."""
        half = T.meta_var(self.tile.wide // 2)
        for i in T.unroll(half):
            laid[at + i * THREADS + thread] = self.sums[i]
        for r in T.unroll(2):
            laid[at + (half + r) * THREADS + thread] = self.peak[r]
            laid[at + (half + 2 + r) * THREADS + thread] = self.weight[r]

    @T.inline
    def take_in(self, laid, at, thread, scale):
        """Add what a CTA has left."""
        half = T.meta_var(self.tile.wide // 2)
        for r in T.unroll(2):
            other: T.float32 = laid[at + (half + r) * THREADS + thread]
            top: T.float32 = T.max(self.peak[r], other)
            self.base[r] = T.if_then_else(top == T.float32("-inf"), T.float32(0), top * scale)
            T.ptx["ex2.approx.ftz.f32"](self.shrink[r], self.peak[r] * scale - self.base[r])
            T.ptx["ex2.approx.ftz.f32"](self.base[r], other * scale - self.base[r])
            self.peak[r] = top
            self.weight[r] = (
                self.weight[r] * self.shrink[r]
                + laid[at + (half + 2 + r) * THREADS + thread] * self.base[r]
            )
        for i in T.unroll(half):
            self.sums[i] = (
                self.sums[i] * self.shrink[i // 2 % 2]
                + laid[at + i * THREADS + thread] * self.base[i // 2 % 2]
            )

    @T.inline
    def store(self, out, row_step, dim, warp, lane):
        """Write sums by weights, by way of the warp's rows of q; zeros where no key is seen."""
        pack = T.meta_var(PACK[self.tile.dtype])
        first: T.let = warp * _ROWS
        for r in T.unroll(2):
            for s in T.unroll(2):
                self.weight[r] = self.weight[r] + T.cuda.__shfl_xor_sync(
                    T.uint32(_ALL), self.weight[r], 1 << s, 32
                )
            self.shrink[r] = T.if_then_else(
                self.weight[r] == T.float32(0), T.float32(0), T.float32(1) / self.weight[r]
            )
            line: T.let = first + r * 8 + T.truncdiv(lane, 4)
            for c in T.unroll(self.tile.wide // 8):
                at = T.meta_var(c * 4 + r * 2)
                T.ptx[pack](
                    self.p[0], self.sums[at + 1] * self.shrink[r], self.sums[at] * self.shrink[r]
                )
                self.out[line, T.truncdiv(_swizzled(line, c), 2) + T.truncmod(lane, 4)] = self.p[0]
        T.cuda.warp_sync()
        pieces = T.meta_var(self.tile.wide // _PIECE)
        for i in T.unroll(_ROWS * pieces // LANES):
            own: T.let = first + T.truncdiv(i * LANES + lane, pieces)
            piece: T.let = T.truncmod(i * LANES + lane, pieces)
            row: T.int32 = self.rows[own]
            if (row >= 0) & (piece * _PIECE < dim):
                for w in T.unroll(4):
                    self.b[w] = self.out[own, T.truncdiv(_swizzled(own, piece), 2) + w]
                T.ptx["st.global.v4.b32"](
                    out.ptr_to([self.out_at + T.cast(row, "int64") * row_step + piece * _PIECE]),
                    *[self.b[w] for w in range(4)],
                )


def comes_last(at: Any, parts: Any) -> Any:
    """int32: whether all other CTAs of a tile have come before, whose memory can be read then; the
    number at ``at`` is 0 again behind the last. By one thread, behind a barrier of its CTA."""
    code = (
        "__forceinline__ __device__ int pit_comes_last(int* at, int parts) {\n"
        "  __threadfence();\n"
        "  bool last = atomicAdd(at, 1) == parts - 1;\n"
        "  if (last) *at = 0;\n"
        "  __threadfence();\n"
        "  return last;\n}\n"
    )
    return T.cuda.func_call("pit_comes_last", at, parts, source_code=code, return_type="int32")
