"""A tile of rows that a CTA holds, and steps of the rows that its list names, for tensor cores
(mma.sync): what attention by lists and its gradients share.

Rows are gathered while they go to shared memory (SRead; PIT, SOSP'23, section 3.2). What lies
beyond the operands, in rows or in columns, is zeros there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch

from .hopper_combine import PACK
from .hopper_swrite import PTX_TYPE

QUERIES = 64  # rows of a tile
KEYS = 64  # rows of a step
WORDS = QUERIES // 32  # of the bits that tell which rows of a tile see one of a step
PART_FACTS = 6  # what a CTA is told: tile, first step, last, slot, part, parts
STEP = 64  # widths of heads are multiples in shared memory
MOST_WIDE = 256
LANES, ROWS = 32, 16  # rows of a warp, and of one instruction
THREADS = QUERIES // ROWS * LANES
ALL = 0xFFFFFFFF
_PIECE = 8  # elements of 16 bits in 16 bytes
_OWN_BITS = 0x101  # of a lane's two rows, eight apart


@dataclass(frozen=True)
class ListedTile:
    """``deep`` and ``wide``: columns of the two operands, as shared memory holds them; ``stages``:
    steps under way."""

    dtype: str
    deep: int
    wide: int
    stages: int

    def check(self, name: str) -> None:
        """Raise ScheduleError (a ValueError) for what the template ``name`` cannot build."""
        widths = range(STEP, MOST_WIDE + 1, STEP)
        rules = {
            "dtype float16 or bfloat16": self.dtype in PTX_TYPE,
            f"deep and wide multiples of {STEP} up to {MOST_WIDE}": self.deep in widths
            and self.wide in widths,
            "two to four stages": 2 <= self.stages <= 4,
        }
        for rule, holds in rules.items():
            if not holds:
                raise ScheduleError(mismatch(name, rule, self))


def ctas_of(own: int, tile: ListedTile, most: int) -> int:
    """CTAs that share a multiprocessor, at most ``most``, by shared memory: ``own`` elements of
    rows of the tile beside the steps."""
    room = own + tile.stages * KEYS * (tile.deep + tile.wide)
    return max(1, min(most, (227 * 1024) // (2 * room + 2048)))


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
class ListedRows:
    """Operands of a CTA in shared memory, and what each lane holds of its warp's 16 rows.

    Sums of 16 rows by columns lie as instructions leave them: number ``j * 4 + r * 2 + e`` of a
    lane is in row ``lane / 4 + 8 * r`` and column ``j * 8 + lane % 4 * 2 + e``.
    """

    def __init__(self, tile: ListedTile, held: int) -> None:
        self.tile = tile
        pool: Any = T.SMEMPool()
        self.pool = pool
        self.first = pool.alloc((tile.stages, KEYS, tile.deep), tile.dtype, align=128)
        self.second = pool.alloc((tile.stages, KEYS, tile.wide), tile.dtype, align=128)
        self.bits = pool.alloc((tile.stages, WORDS, KEYS), "uint32", align=16)
        self.rows = pool.alloc((QUERIES,), "int32", align=16)
        self.last = pool.alloc((4,), "int32", align=16)
        self.first_at, self.second_at = T.local_scalar("int64"), T.local_scalar("int64")
        self.plane, self.line = T.local_scalar("int32"), T.local_scalar("int32")
        self.places = T.alloc_local([2], "int32")
        self.a = T.alloc_local([held], "uint32")
        self.b = T.alloc_local([4], "uint32")
        self.p = T.alloc_local([4], "uint32")
        self.seen = T.alloc_local([KEYS // 4], "uint32")
        self.some_not = T.alloc_local([1], "uint32")
        self.scores = T.alloc_local([KEYS // 2], "float32")
        self.factor = T.alloc_local([2], "float32")

    def region(self, width: int) -> tuple[Any, Any]:
        """Room for the rows of the tile, and the same in words for what is written there later."""
        own = self.pool.alloc((QUERIES, width), self.tile.dtype, align=128)
        self.pool.move_base_to(self.pool.offset - QUERIES * width * 2)
        return own, self.pool.alloc((QUERIES, width // 2), "uint32", align=128)

    @T.inline
    def learn(self, order, ordered, first, rows, thread):
        """``rows``: which the tile has, -1 for none."""
        if thread < QUERIES:
            place: T.let = first + thread
            if ordered != 0:
                self.rows[thread] = order[self.plane, place]
            else:
                self.rows[thread] = T.Select(place < rows, place, -1)
        T.cuda.cta_sync()

    @T.inline
    def fetch_own(self, own, wide, source, start, row_step, dim, thread):
        """Ask for the tile's rows, once they are known."""
        pieces = T.meta_var(wide // _PIECE)
        for i in T.unroll(QUERIES * pieces // THREADS):
            line: T.let = T.truncdiv(i * THREADS + thread, pieces)
            piece: T.let = T.truncmod(i * THREADS + thread, pieces)
            row: T.int32 = self.rows[line]
            _copy(
                own.ptr_to([line, _swizzled(line, piece)]),
                source,
                start
                + T.cast(T.max(row, 0), "int64") * row_step
                + T.min(piece * _PIECE, dim - _PIECE),
                (row >= 0) & (piece * _PIECE < dim),
            )

    @T.inline
    def look(self, ids, step, steps, lane):
        """Learn the places of a step's rows: lane l those of rows l and l + 32."""
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
            low: T.let = T.cuda.__shfl_sync(T.uint32(ALL), self.places[0], lane, 32)
            high: T.let = T.cuda.__shfl_sync(T.uint32(ALL), self.places[1], lane, 32)
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
    def fetch(self, slot, first, first_row, dim, second, second_row, v_dim, bits, step, thread):
        """Ask for the rows of both operands in a step, and for its bits."""
        self._gather(self.first, slot, self.tile.deep, first, self.first_at, first_row, dim, thread)
        self._gather(
            self.second, slot, self.tile.wide, second, self.second_at, second_row, v_dim, thread
        )
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

    @T.inline
    def load(self, own, step, place, warp, lane):
        """``a[place ..]``: the warp's rows by the 16 columns of a step."""
        row: T.let = warp * ROWS + T.truncmod(lane, ROWS)
        T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](
            *[self.a[place + i] for i in range(4)],
            own.ptr_to([row, _swizzled(row, step * 2 + T.truncdiv(lane, ROWS))]),
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
    def score(self, scores, own, at, others, slot, wide, warp, lane):
        """``scores`` = the tile's rows by the rows of a slot, over ``wide`` columns. Fragments of
        ``own`` begin at ``a[at]``; they are loaded where ``at`` is negative."""
        for i in T.unroll(KEYS // 2):
            scores[i] = T.float32(0)
        for s in T.unroll(wide // 16):
            if at < 0:
                self.load(own, s, 0, warp, lane)
            place = T.meta_var(0 if at < 0 else at + s * 4)
            for j in T.unroll(KEYS // 16):
                row: T.let = j * 16 + T.truncdiv(lane, 16) * 8 + T.truncmod(lane, 8)
                T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](
                    *[self.b[i] for i in range(4)],
                    others.ptr_to(
                        [slot, row, _swizzled(row, s * 2 + T.truncmod(T.truncdiv(lane, 8), 2))]
                    ),
                )
                for h in T.unroll(2):
                    self._multiply(scores, j * 8 + h * 4, self.a, place, h)

    @T.inline
    def see(self, slot, warp, lane):
        """``seen``: bits of the rows of a slot; ``some_not``: whether the warp has to regard them.

        Most steps of windows and blocks are seen by all.
        """
        first: T.let = warp * ROWS
        shift: T.let = T.cast(T.truncmod(first, LANES) + T.truncdiv(lane, 4), "uint32")
        all_seen: T.uint32 = T.uint32(_OWN_BITS)
        for j in T.unroll(KEYS // 8):
            for e in T.unroll(2):
                key: T.let = j * 8 + T.truncmod(lane, 4) * 2 + e
                self.seen[j * 2 + e] = T.shift_right(
                    self.bits[slot, T.truncdiv(first, LANES), key], shift
                )
                all_seen = T.bitwise_and(all_seen, self.seen[j * 2 + e])
        some: T.let = T.cast(all_seen != T.uint32(_OWN_BITS), "int32")
        self.some_not[0] = T.cuda.ballot_sync(T.uint32(ALL), some)

    @T.inline
    def exclude(self, values, outside):
        """Values of rows that one of the tile does not see become ``outside``."""
        if self.some_not[0] != T.uint32(0):
            for j in T.unroll(KEYS // 8):
                for i in T.unroll(4):
                    bit: T.let = T.shift_right(self.seen[j * 2 + i % 2], T.uint32(i // 2 * 8))
                    if T.bitwise_and(bit, T.uint32(1)) == T.uint32(0):
                        values[j * 4 + i] = T.float32(outside)

    @T.inline
    def add(self, sums, weights, others, slot, wide, lane):
        """``sums`` += weights by the rows of a slot."""
        pack = T.meta_var(PACK[self.tile.dtype])
        for s in T.unroll(KEYS // 16):
            for i in T.unroll(4):
                at = T.meta_var(s * 8 + i * 2)
                T.ptx[pack](self.p[i], weights[at + 1], weights[at])
            row: T.let = s * 16 + T.truncmod(lane, 16)
            for c in T.unroll(wide // 16):
                T.ptx["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"](
                    *[self.b[i] for i in range(4)],
                    others.ptr_to([slot, row, _swizzled(row, c * 2 + T.truncdiv(lane, 16))]),
                )
                for h in T.unroll(2):
                    self._multiply(sums, c * 8 + h * 4, self.p, 0, h)

    @T.inline
    def store(self, sums, own, wide, out, start, row_step, dim, warp, lane):
        """Write sums by ``factor``, by way of the warp's rows of a region, which nobody reads."""
        pack = T.meta_var(PACK[self.tile.dtype])
        first: T.let = warp * ROWS
        for r in T.unroll(2):
            line: T.let = first + r * 8 + T.truncdiv(lane, 4)
            for c in T.unroll(wide // 8):
                at = T.meta_var(c * 4 + r * 2)
                T.ptx[pack](self.p[0], sums[at + 1] * self.factor[r], sums[at] * self.factor[r])
                own[line, T.truncdiv(_swizzled(line, c), 2) + T.truncmod(lane, 4)] = self.p[0]
        T.cuda.warp_sync()
        pieces = T.meta_var(wide // _PIECE)
        for i in T.unroll(ROWS * pieces // LANES):
            written: T.let = first + T.truncdiv(i * LANES + lane, pieces)
            piece: T.let = T.truncmod(i * LANES + lane, pieces)
            row: T.int32 = self.rows[written]
            if (row >= 0) & (piece * _PIECE < dim):
                for w in T.unroll(4):
                    self.b[w] = own[written, T.truncdiv(_swizzled(written, piece), 2) + w]
                T.ptx["st.global.v4.b32"](
                    out.ptr_to([start + T.cast(row, "int64") * row_step + piece * _PIECE]),
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
