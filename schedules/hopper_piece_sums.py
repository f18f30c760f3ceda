"""The sums of the Hopper family of pieces of rows, in shared memory, and their SWrite."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from .bits import is_set
from .hopper_knobs import RowsOptions
from .hopper_piece_parts import WORD, PiecesTile
from .hopper_swrite import CHUNK, PTX_TYPE, activate

QUAD = 16  # columns of four chunks of 16 bytes, one for each lane that shares a row

# Addresses of a lane's even and odd chunks in two rows, known before its turn to add: the compiler
# would compute them when they are needed.
_PLACES = """__forceinline__ __device__ void pit_places(
    unsigned* at, const float* row0, const float* row1, int swap) {
  const float* from[2] = {row0, row1};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    at[i] = (unsigned)__cvta_generic_to_shared(from[i / 2] + (i % 2 ? -swap : swap));
    asm volatile("" : "+r"(at[i]));
  }
}
"""
_ADD_HEAD = "__forceinline__ __device__ void {name}(const unsigned* at, bool live, float* v) {{\n"
_LOAD = """  if (live) asm volatile("ld.shared.v4.f32 {{%0, %1, %2, %3}}, [%4+{off}];"
    : "=f"(v[{v}]), "=f"(v[{v} + 1]), "=f"(v[{v} + 2]), "=f"(v[{v} + 3]) : "r"(at[{p}]) : "memory");
"""
_STORE = """  if (live) asm volatile("st.shared.v4.f32 [%4+{off}], {{%0, %1, %2, %3}};"
    :: "f"(v[{v}]), "f"(v[{v} + 1]), "f"(v[{v} + 2]), "f"(v[{v} + 3]), "r"(at[{p}]) : "memory");
"""
# The four words of each of four lanes, as a matrix, are turned.
_TURNQUAD = """__forceinline__ __device__ void pit_turn_quad(unsigned* v, int lane) {
  bool upper = lane & 2, odd = lane & 1;
  unsigned a = __shfl_xor_sync(~0u, upper ? v[0] : v[2], 2);
  unsigned b = __shfl_xor_sync(~0u, upper ? v[1] : v[3], 2);
  if (upper) { v[0] = a; v[1] = b; } else { v[2] = a; v[3] = b; }
  a = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
  b = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
  if (odd) { v[0] = a; v[2] = b; } else { v[1] = a; v[3] = b; }
}
"""


def _chunks(verb: str, line: str, quads: int) -> tuple[str, str]:
    """Name and CUDA text of a function that moves a lane's chunks of a row, if it is ``live``."""
    name = f"pit_{verb}_{quads}"
    moves = (line.format(off=p * QUAD * 4, v=p * 4, p=p % 2) for p in range(quads))
    return name, _ADD_HEAD.format(name=name) + "".join(moves) + "}\n"


@T.meta_class
class PieceSums:
    """The fp32 sums of a CTA in shared memory, and what becomes of them.

    Four lanes share a row, each with one chunk of 16 bytes of every 64: its pairs of two
    neighbouring blocks of 8 columns, as the instruction leaves them. Every second row's lanes go
    through their chunks in another order, so that no two of them meet in one bank.
    """

    def __init__(
        self, pool: Any, bias: Any, n: Any, knobs: PiecesTile, options: RowsOptions
    ) -> None:
        self.sums = pool.alloc((knobs.rows, knobs.cols), "float32", align=128)
        self.bias, self.rows, self.columns, self.n = bias, knobs.rows, knobs.cols, n
        self.row0 = T.local_scalar("int32")  # of the tile, and its end
        self.last = T.local_scalar("int32")
        self.col0 = T.local_scalar("int32")
        self.quads, self.options = knobs.cols // QUAD, options
        self.lanes = knobs.cols // CHUNK  # that store one row
        self.at_once = 32 // self.lanes
        self.convert = f"cvt.rn.{PTX_TYPE[options.dtype]}x2.f32"
        self.held = T.alloc_local([2, self.quads * 4], "float32")
        self.places = T.alloc_local([4], "uint32")
        self.odd = T.local_scalar("int32")
        self.part = T.local_scalar("int32")

    @T.inline
    def begin(self, lane):
        self.odd = T.bitwise_and(T.truncdiv(lane, 4), 1)
        self.part = T.truncmod(lane, 4) * 4

    @T.inline
    def take(self, row0, last, col0):
        """Begin the tile of rows ``row0`` .. ``last`` - 1 and the columns from ``col0`` on."""
        self.row0 = row0
        self.last = last
        self.col0 = col0

    def chunk(self, row: Any, p: Any) -> Any:
        """Address of this lane's chunk number ``p`` of a row."""
        return self.sums.ptr_to([row, T.bitwise_xor(p, self.odd) * QUAD + self.part])

    @T.inline
    def load(self, row, side):
        for p in T.unroll(self.quads):
            T.ptx["ld.shared.v4.f32"](
                *[self.held[side, p * 4 + i] for i in range(4)], self.chunk(row, p)
            )

    @T.inline
    def clear(self, row):
        for p in T.unroll(self.quads):
            T.ptx["st.shared.v4.f32"](self.chunk(row, p), *[T.float32(0) for _ in range(4)])

    @T.inline
    def clear_all(self, first, step, lane):
        """By all warps that multiply: rows from ``first`` on, 8 of every ``step``."""
        line: T.int32 = first + T.truncdiv(lane, 4)
        while line < self.rows:
            self.clear(line)
            line = line + step

    @T.inline
    def ready(self, rows):
        """Find the places of this lane's two rows; -1 is none."""
        T.cuda.func_call(
            "pit_places",
            T.address_of(self.places[0]),
            self.sums.ptr_to([T.max(rows[0], 0), self.part]),
            self.sums.ptr_to([T.max(rows[1], 0), self.part]),
            self.odd * QUAD,
            source_code=_PLACES,
        )

    @T.inline
    def add(self, acc, rows):
        """Add this lane's two rows of the accumulators, in the order of its chunks."""
        for side in T.unroll(2):
            self.move("load", _LOAD, rows, side)
        for side in T.unroll(2):
            for p in T.unroll(self.quads):
                for i in T.unroll(4):
                    # Registers have no addresses: the order becomes a choice of two.
                    same: T.let = acc[p * 8 + i // 2 * 4 + side * 2 + i % 2]
                    other: T.let = acc[(p + 1 - p % 2 * 2) * 8 + i // 2 * 4 + side * 2 + i % 2]
                    self.held[side, p * 4 + i] = self.held[side, p * 4 + i] + T.if_then_else(
                        self.odd == 1, other, same
                    )
        for side in T.unroll(2):
            self.move("store", _STORE, rows, side)

    @T.inline
    def move(self, verb, line, rows, side):
        name = T.meta_var(_chunks(verb, line, self.quads))
        T.cuda.func_call(
            name[0],
            T.address_of(self.places[side * 2]),
            rows[side] >= 0,
            T.address_of(self.held[side, 0]),
            source_code=name[1],
        )

    @T.inline
    def take_bias(self, bias, thread):
        """By as many threads as there are columns: the bias of each."""
        if thread < self.columns:
            self.bias[thread] = T.float32(0)
            if self.col0 + thread < self.n:
                self.bias[thread] = T.float32(bias[0, T.int64(self.col0 + thread)])

    @T.inline
    def store(self, acc, out, rows, lane):
        """Finish and store this lane's two rows of the accumulators, ``rows`` of out; -1 is none.

        The four lanes of a row exchange pairs of columns, so that each has 8 that are neighbours.
        """
        words = T.alloc_local([4], "uint32")
        for side in T.unroll(2):
            for g in T.unroll(self.quads // 2):
                for j in T.unroll(4):
                    at = T.meta_var((g * 4 + j) * 4 + side * 2)
                    own: T.let = (g * 4 + j) * CHUNK + T.truncmod(lane, 4) * 2
                    low: T.float32 = self.finish(acc[at], own)
                    upper: T.float32 = self.finish(acc[at + 1], own + 1)
                    T.ptx[self.convert](words[j], upper, low)
                T.cuda.func_call(
                    "pit_turn_quad",
                    T.address_of(words[0]),
                    T.truncmod(lane, 4),
                    source_code=_TURNQUAD,
                )
                col: T.let = self.col0 + g * 32 + T.truncmod(lane, 4) * CHUNK
                if (rows[side] >= 0) & (col < self.n):
                    T.ptx["st.global.v4.b32"](
                        out.ptr_to([T.int64(rows[side]), T.int64(col)]),
                        *[words[i] for i in range(4)],
                    )

    def finish(self, x: Any, column: Any) -> Any:
        """The fp32 value of a sum in a column of the tile."""
        return self.activated(x, self.bias[column])

    def activated(self, x: Any, bias: Any) -> Any:
        """The finished value of a sum with a bias, if there is one."""
        return activate(self.options.act, x + bias if self.options.bias else x)

    def value(self, side: Any, p: Any, i: int) -> Any:
        """The finished value of element ``i`` of chunk ``p`` of those that are held."""
        column = T.bitwise_xor(p, self.odd) * QUAD + T.truncdiv(self.part, 2) + (i // 2 * 8 + i % 2)
        return self.finish(self.held[side, p * 4 + i], column)

    @T.inline
    def store_dead(self, out, slots, word, lane):
        """By a warp: rows of a word in which nothing lives."""
        words = T.alloc_local([4], "uint32")
        place: T.let = T.truncmod(lane, self.lanes) * CHUNK
        for i in T.unroll(4):
            low: T.float32 = self.finish(T.float32(0), place + i * 2)
            upper: T.float32 = self.finish(T.float32(0), place + (i * 2 + 1))
            T.ptx[self.convert](words[i], upper, low)
        alive: T.uint32 = slots.alive[word]
        for u in T.unroll(self.lanes):
            bit: T.let = u * self.at_once + T.truncdiv(lane, self.lanes)
            row: T.let = self.row0 + word * WORD + bit
            if (is_set(alive, bit) == 0) & (row < self.last) & (self.col0 + place < self.n):
                T.ptx["st.global.v4.b32"](
                    out.ptr_to([T.int64(row), T.int64(self.col0 + place)]),
                    *[words[i] for i in range(4)],
                )

    @T.inline
    def write(self, out, slots, begin, end, first, step, lane):
        """Finish and store the rows of words ``begin`` .. ``end`` - 1 that have slots, 16 at a time
        from slot ``first`` on, and clear these.

        Halves of a row turn in the row's own memory.
        """
        half = T.alloc_local([2, 4], "uint32")
        line: T.let = T.truncdiv(lane, 4)
        total: T.let = T.min(slots.total(begin, end), self.last - self.row0)
        base: T.int32 = first
        while base < total:
            for side in T.unroll(2):
                self.load(base + side * 8 + line, side)
            T.cuda.warp_sync()
            for side in T.unroll(2):
                for p in T.unroll(self.quads):
                    for h in T.unroll(2):
                        low: T.float32 = self.value(side, p, h * 2)
                        upper: T.float32 = self.value(side, p, h * 2 + 1)
                        T.ptx[self.convert](half[0, h], upper, low)
                        piece: T.let = T.bitwise_xor(T.bitwise_xor(p, self.odd) * 2 + h, line)
                        T.ptx["st.shared.b32"](
                            self.sums.ptr_to(
                                [base + side * 8 + line, piece * 4 + T.truncdiv(self.part, 4)]
                            ),
                            half[0, h],
                        )
            T.cuda.warp_sync()
            for u in T.unroll(8 // self.at_once):
                own: T.let = u * self.at_once + T.truncdiv(lane, self.lanes)
                col: T.let = T.truncmod(lane, self.lanes)
                for side in T.unroll(2):
                    T.ptx["ld.shared.v4.b32"](
                        *[half[side, i] for i in range(4)],
                        self.sums.ptr_to([base + side * 8 + own, T.bitwise_xor(col, own) * 4]),
                    )
                for side in T.unroll(2):
                    slot: T.let = base + side * 8 + own
                    if (slot < total) & (self.col0 + col * CHUNK < self.n):
                        row: T.let = self.row0 + slots.row(slot)
                        T.ptx["st.global.v4.b32"](
                            out.ptr_to([T.int64(row), T.int64(self.col0 + col * CHUNK)]),
                            *[half[side, i] for i in range(4)],
                        )
            T.cuda.warp_sync()
            for side in T.unroll(2):
                self.clear(base + side * 8 + line)
            base = base + step
