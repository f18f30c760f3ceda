"""A matrix turned on NVIDIA GPUs: all of it, or its live rows.

    turned[i, k] = source[k, i]

Families that gather rows of one operand want it stored the other way round now and then. A CTA
takes tiles through shared memory, `TILE_K` rows of 128 bytes: both matrices are read and written 16
bytes at a time.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import DTypeError, mismatch

from .cuda_pack import check_dtype
from .dependent import after_predecessor
from .hopper_knobs import TILE_K
from .hopper_swrite import activate

CHUNKS = 8  # of 16 bytes in a row of a tile
AT_ONCE = {"float16": 8, "bfloat16": 8, "float32": 4}  # elements of a chunk
THREADS = 256
_ROWS = THREADS // CHUNKS  # of a tile that all threads take at once
_PASSES = TILE_K // _ROWS
_TILES = 2  # beside each other, which a CTA reads at once

_ANY_LANE = """__forceinline__ __device__ unsigned pit_any_lane(unsigned bits) {
  return __reduce_or_sync(~0u, bits);
}
"""


def shifted(word: Any, by: Any) -> Any:
    """A word whose bit ``by`` has become the lowest."""
    return T.shift_right(word, T.uint32(by))


def bit_of(word: Any, at: Any) -> Any:
    """Bit number ``at`` of a word."""
    return T.bitwise_and(shifted(word, at), T.uint32(1))


def _dead(bias: Any, row: Any, act: str, dtype: str) -> Any:
    """What stands in a row that does not live: its bias, activated, or 0."""
    if bias is None:
        return T.cast(0, dtype)
    known = T.if_then_else(row < bias.shape[0], T.float32(bias[row]), T.float32(0))
    return T.cast(activate(act, known), dtype)


@T.inline
def _find_rows(found, alive, k0, lane):
    """found = which rows live from ``k0`` on: those in any line, of which lanes read some."""
    for w in T.unroll(found.shape[0]):
        word: T.let = T.truncdiv(k0, 32) + w
        bits: T.uint32 = T.uint32(0)
        at: T.int32 = lane
        while (at < alive.shape[0]) & (word < alive.shape[1]):
            bits = T.bitwise_or(bits, alive[at, word])
            at = at + 32
        found[w] = T.cuda.func_call(
            "pit_any_lane", bits, source_code=_ANY_LANE, return_type="uint32"
        )


@T.meta_class
class _Tiles:
    """Tiles in shared memory, of rows of 128 bytes whose chunks change places: threads that read a
    column of chunks, or of elements, ask every bank once."""

    def __init__(self, dtype: str, thread: Any) -> None:
        self.dtype, self.each = dtype, AT_ONCE[dtype]
        pool: Any = T.SMEMPool()
        self.tiles = pool.alloc((_TILES, TILE_K, CHUNKS * self.each), dtype, align=128)
        pool.commit()
        self.warp, self.lane = T.truncdiv(thread, 32), T.truncmod(thread, 32)
        self.high, self.chunk = T.truncdiv(thread, CHUNKS), T.truncmod(thread, CHUNKS)
        self.line = T.alloc_local([self.each], dtype)
        self.words = T.alloc_local([4], "uint32")

    def place(self, row: Any, chunk: Any) -> Any:
        """Where a chunk of a row begins."""
        if self.each == 4:
            turned = T.truncmod(T.truncdiv(row, 4), CHUNKS)
        else:
            turned = T.truncmod(T.truncdiv(row, 8), 4) * 2 + T.truncmod(row, 2)
        return T.bitwise_xor(chunk, turned) * self.each

    @T.inline
    def fetch(self, tile, row, source, k0, column):
        """Begin to copy this thread's chunk of a row."""
        T.ptx["cp.async.cg.shared.global"](
            self.tiles.ptr_to([tile, row, self.place(row, self.chunk)]),
            source.ptr_to([T.int64(k0 + row), T.int64(column)]),
            16,
            16,
        )

    @T.inline
    def fill(self, tile, row, value):
        """Write one value to this thread's chunk of a row."""
        self.line[0] = value
        for v in T.unroll(1, self.each):
            self.line[v] = self.line[0]
        for v in T.vectorized(self.each):
            self.tiles[tile, row, self.place(row, self.chunk) + v] = self.line[v]

    @T.inline
    def store(self, tile, turned, m0, k0):
        """Write the columns of a tile as rows, from row ``m0`` on."""
        if self.each == 4:
            self.store_elements(tile, turned, m0, k0)
        else:
            self.store_matrices(tile, turned, m0, k0)

    @T.inline
    def store_elements(self, tile, turned, m0, k0):
        for p in T.unroll(_PASSES):
            line: T.let = (p * CHUNKS + self.chunk) * self.each
            if (k0 + line < turned.shape[1]) & (m0 + self.high < turned.shape[0]):
                for i in T.unroll(self.each):
                    begin: T.let = self.place(line + i, T.truncdiv(self.high, self.each))
                    self.line[i] = self.tiles[
                        tile, line + i, begin + T.truncmod(self.high, self.each)
                    ]
                place: T.let = T.int64(k0 + line)
                for v in T.vectorized(self.each):
                    turned[T.int64(m0 + self.high), place + v] = self.line[v]

    @T.inline
    def store_matrices(self, tile, turned, m0, k0):
        """A warp takes a chunk of columns by the instruction that turns matrices of 8 x 8: of four,
        whose rows are chosen so that a lane gets eight neighbours."""
        column: T.let = self.warp * 8 + T.truncdiv(self.lane, 4)
        for half in T.unroll(_PASSES):
            row: T.let = (
                half * 32
                + T.truncdiv(T.truncmod(self.lane, 8), 2) * 8
                + T.truncdiv(self.lane, 8) * 2
                + T.truncmod(self.lane, 2)
            )
            T.ptx["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"](
                *[self.words[i] for i in range(4)],
                self.tiles.ptr_to([tile, row, self.place(row, self.warp)]),
            )
            first: T.let = k0 + half * 32 + T.truncmod(self.lane, 4) * 8
            if (first < turned.shape[1]) & (m0 + column < turned.shape[0]):
                T.ptx["st.global.v4.b32"](
                    turned.ptr_to([T.int64(m0 + column), T.int64(first)]),
                    *[self.words[i] for i in range(4)],
                )


@T.jit
def turn(
    source: T.Buffer(("k", "m"), dtype, align=16),
    alive: T.Optional(T.Buffer(("parts", "words"), "uint32", align=4)),
    bias: T.Optional(T.Buffer(("biases",), dtype, align=2)),
    turned: T.Buffer(("m", "k"), dtype, align=16),
    *,
    dtype: T.constexpr,
    act: T.constexpr,
    beside: T.constexpr,
):
    """The template; ``turn_kernel`` and ``turn_rows_kernel`` give it its options."""
    k, m = T.int32(), T.int32()
    T.device_entry()
    WIDE = T.meta_var(CHUNKS * AT_ONCE[dtype])  # columns of a tile
    ACROSS = T.meta_var(WIDE * _TILES)  # of a CTA
    across: T.let = T.truncdiv(m + (ACROSS - 1), ACROSS)
    block = T.cta_id([T.truncdiv(k + (TILE_K - 1), TILE_K) * T.truncdiv(m + (ACROSS - 1), ACROSS)])
    thread = T.thread_id([THREADS])
    held = _Tiles(dtype, thread)
    if alive is not None:
        rows_alive = T.alloc_local([_PASSES], "uint32")
    step: T.let = T.truncdiv(block, across)
    m0: T.let = T.truncmod(block, across) * ACROSS
    k0: T.let = step * TILE_K
    if not beside:
        after_predecessor()
    if alive is not None:
        _find_rows(rows_alive, alive, k0, held.lane)
    for tile in T.unroll(_TILES):
        column: T.let = m0 + tile * WIDE + held.chunk * held.each
        for p in T.unroll(_PASSES):
            row: T.let = p * _ROWS + held.high
            if (k0 + row < k) & (column < m):
                if alive is not None:
                    if bit_of(rows_alive[p], held.high) != T.uint32(0):
                        held.fetch(tile, row, source, k0, column)
                    else:
                        held.fill(tile, row, _dead(bias, k0 + row, act, dtype))
                else:
                    held.fetch(tile, row, source, k0, column)
    T.ptx.cp.async_.commit_group()
    T.ptx.cp.async_.wait_group(0)
    T.cuda.cta_sync()
    for tile in T.unroll(_TILES):
        held.store(tile, turned, m0 + tile * WIDE, k0)
    if beside:
        after_predecessor()


def turn_kernel(dtype: str, beside: bool = False) -> tvm.tirx.PrimFunc:
    """The kernel: source (k, m), turned (m, k).

    k and m are multiples of 16 bytes, to which both matrices are aligned: the caller checks.

    Parameters
    ----------
    dtype : float16, bfloat16 or float32
    beside : work while the kernel before ends: see `pit_tvm.schedules.dependent`

    Raises
    ------
    DTypeError
    """
    if dtype not in AT_ONCE:
        raise DTypeError(mismatch("dtype", f"one of {list(AT_ONCE)}", repr(dtype)))
    options = {"dtype": dtype, "act": "none", "beside": beside}
    return turn.specialize(**options, alive=None, bias=None)


def turn_rows_kernel(dtype: str, bias: bool = False, act: str = "none") -> tvm.tirx.PrimFunc:
    """The kernel: source (k, m), alive, [bias,] turned (m, k), of a source whose dead rows are not
    read: in their place stands act(bias), or 0.

    ``alive`` (lines, words), uint32: bit i of word w of any line says that row w * 32 + i lives.
    Extents and addresses are as for `turn_kernel`; bias may have fewer than k elements, and is 0
    beyond.

    Parameters
    ----------
    dtype : float16 or bfloat16
    act : none, relu, relu2, gelu, gelu_tanh or silu

    Raises
    ------
    DTypeError
    """
    check_dtype(dtype)
    absent = {} if bias else {"bias": None}
    return turn.specialize(dtype=dtype, act=act, beside=False, **absent)
