"""A matrix turned on NVIDIA GPUs: all of it, or its live pieces of columns alone.

    turned[i, k] = source[k, i]

Families that gather rows of one operand want it stored the other way round now and then. A CTA
takes a square through shared memory, 128 bytes wide: both matrices are read and written 16 bytes at
a time.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import DTypeError, mismatch

from .dependent import after_predecessor
from .hopper_knobs import TILE_K

CHUNKS = 8  # of 16 bytes in a row of a tile
AT_ONCE = {"float16": 8, "bfloat16": 8, "float32": 4}  # elements of a chunk
THREADS = 256
_ROWS = THREADS // CHUNKS  # of a tile that all threads take at once


@T.jit
def turn(
    source_h: T.handle,
    lines_h: T.Optional(T.handle),  # type: ignore[valid-type]
    turned_h: T.handle,
    *,
    dtype: T.constexpr,
):
    """The template; ``turn_kernel`` gives it its options."""
    k, m = T.int32(), T.int32()
    source = T.match_buffer(source_h, (k, m), dtype, align=16)
    if lines_h is not None:
        slots, size = T.int32(), T.int32()
        lines = T.match_buffer(lines_h, (slots, size), "uint32", align=4)
    turned = T.match_buffer(turned_h, (m, k), dtype, align=16)
    T.device_entry()
    EACH = T.meta_var(AT_ONCE[dtype])
    SIDE = T.meta_var(CHUNKS * EACH)  # elements of a tile
    # A chunk of rows is a group. Groups are 16 bytes apart, so that a warp that reads columns of
    # eight groups asks every bank once.
    across: T.let = T.truncdiv(m + (SIDE - 1), SIDE)
    block = T.cta_id([T.truncdiv(k + (SIDE - 1), SIDE) * T.truncdiv(m + (SIDE - 1), SIDE)])
    thread = T.thread_id([THREADS])
    tile = T.alloc_shared([CHUNKS, EACH * SIDE + EACH], dtype)
    line = T.alloc_local([EACH], dtype)
    alive = T.alloc_local([SIDE // 32], "uint32")
    step: T.let = T.truncdiv(block, across)
    m0: T.let = T.truncmod(block, across) * SIDE
    k0: T.let = step * SIDE
    high: T.let = T.truncdiv(thread, CHUNKS)
    chunk: T.let = T.truncmod(thread, CHUNKS)
    after_predecessor()
    for w in T.unroll(SIDE // 32):
        alive[w] = T.uint32(0xFFFFFFFF)
        if lines_h is not None:
            alive[w] = T.uint32(0)
            if T.truncdiv(m0, 32) + w < size:
                alive[w] = lines[step, T.truncdiv(m0, 32) + w]
    word: T.uint32 = alive[0]
    if chunk * EACH >= 32:
        word = alive[SIDE // 32 - 1]
    wanted: T.let = T.bitwise_and(
        T.shift_right(word, T.cast(T.truncmod(chunk * EACH, 32), "uint32")),
        T.uint32((1 << EACH) - 1),
    )
    for p in T.unroll(SIDE // _ROWS):
        row: T.let = p * _ROWS + high
        if (k0 + row < k) & (m0 + chunk * EACH < m) & (wanted != T.uint32(0)):
            T.ptx["cp.async.cg.shared.global"](
                tile.ptr_to([T.truncdiv(row, EACH), T.truncmod(row, EACH) * SIDE + chunk * EACH]),
                source.ptr_to([T.cast(k0 + row, "int64"), T.cast(m0 + chunk * EACH, "int64")]),
                16,
                16,
            )
    T.ptx.cp.async_.wait_all()
    T.cuda.cta_sync()
    for p in T.unroll(SIDE // _ROWS):
        column: T.let = p * _ROWS + high
        lives: T.let = T.bitwise_and(T.shift_right(alive[p], T.cast(high, "uint32")), T.uint32(1))
        if (k0 + chunk * EACH < k) & (m0 + column < m) & (lives != T.uint32(0)):
            for i in T.unroll(EACH):
                line[i] = tile[chunk, i * SIDE + column]
            place: T.let = T.cast(k0 + chunk * EACH, "int64")
            for v in T.vectorized(EACH):
                turned[T.cast(m0 + column, "int64"), place + v] = line[v]


def turn_kernel(dtype: str, pieces: bool = False) -> tvm.tirx.PrimFunc:
    """The kernel: source (k, m), [lines,] turned (m, k).

    k and m are multiples of 16 bytes, to which both matrices are aligned: the caller checks.

    Parameters
    ----------
    dtype : float16, bfloat16 or, without pieces, float32
    pieces : of every 64 of k only the columns are turned, and written, that live there, as
        ``lines`` (steps, words), uint32, says: bit i of word w of line t is that of column
        w * 32 + i

    Raises
    ------
    DTypeError
    """
    known = [name for name, each in AT_ONCE.items() if not pieces or each * CHUNKS == TILE_K]
    if dtype not in known:
        raise DTypeError(mismatch("dtype", f"one of {known}", repr(dtype)))
    return turn.specialize(dtype=dtype, **({} if pieces else {"lines_h": None}))
