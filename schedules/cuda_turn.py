"""A 16-bit matrix turned on NVIDIA GPUs: all of it, or its live pieces of columns alone.

    turned[i, k] = source[k, i]

Families that gather rows of one operand want it stored the other way round now and then. A CTA
takes 64 x 64 elements through shared memory: both matrices are read and written 16 bytes at a time.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from pit_tvm.errors import DTypeError, mismatch

from .dependent import after_predecessor

SIDE = 64  # elements of a tile
AT_ONCE = 8  # elements of 16 bits in 16 bytes
THREADS = 256
_ROWS = THREADS // AT_ONCE  # of a tile that all threads take at once
# Eight rows are a group. Groups are 16 bytes apart, so that a warp that reads columns of eight
# groups asks every bank once.
_GROUP = AT_ONCE * SIDE + AT_ONCE


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
    across: T.let = T.truncdiv(m + (SIDE - 1), SIDE)
    block = T.cta_id([T.truncdiv(k + (SIDE - 1), SIDE) * T.truncdiv(m + (SIDE - 1), SIDE)])
    thread = T.thread_id([THREADS])
    tile = T.alloc_shared([SIDE // AT_ONCE, _GROUP], dtype)
    line = T.alloc_local([AT_ONCE], dtype)
    alive = T.alloc_local([SIDE // 32], "uint32")
    step: T.let = T.truncdiv(block, across)
    m0: T.let = T.truncmod(block, across) * SIDE
    k0: T.let = step * SIDE
    high: T.let = T.truncdiv(thread, AT_ONCE)
    chunk: T.let = T.truncmod(thread, AT_ONCE)
    after_predecessor()
    for w in T.unroll(SIDE // 32):
        alive[w] = T.uint32(0 if lines_h is not None else 0xFFFFFFFF)
        if lines_h is not None:
            if T.truncdiv(m0, 32) + w < size:
                alive[w] = lines[step, T.truncdiv(m0, 32) + w]
    word: T.uint32 = T.if_then_else(chunk < 4, alive[0], alive[1])
    wanted: T.let = T.bitwise_and(
        T.shift_right(word, T.cast(T.truncmod(chunk, 4) * AT_ONCE, "uint32")), T.uint32(0xFF)
    )
    for p in T.unroll(SIDE // _ROWS):
        row: T.let = p * _ROWS + high
        if (k0 + row < k) & (m0 + chunk * AT_ONCE < m) & (wanted != T.uint32(0)):
            T.ptx["cp.async.cg.shared.global"](
                tile.ptr_to(
                    [T.truncdiv(row, AT_ONCE), T.truncmod(row, AT_ONCE) * SIDE + chunk * AT_ONCE]
                ),
                source.ptr_to([T.cast(k0 + row, "int64"), T.cast(m0 + chunk * AT_ONCE, "int64")]),
                16,
                16,
            )
    T.ptx.cp.async_.wait_all()
    T.cuda.cta_sync()
    for p in T.unroll(SIDE // _ROWS):
        column: T.let = p * _ROWS + high
        lives: T.let = T.bitwise_and(T.shift_right(alive[p], T.cast(high, "uint32")), T.uint32(1))
        if (k0 + chunk * AT_ONCE < k) & (m0 + column < m) & (lives != T.uint32(0)):
            for i in T.unroll(AT_ONCE):
                line[i] = tile[chunk, i * SIDE + column]
            for v in T.vectorized(AT_ONCE):
                turned[T.cast(m0 + column, "int64"), T.cast(k0 + chunk * AT_ONCE, "int64") + v] = (
                    line[v]
                )


def turn_kernel(dtype: str, pieces: bool = False) -> tvm.tirx.PrimFunc:
    """The kernel: source (k, m), [lines,] turned (m, k).

    k and m are multiples of 8, both matrices aligned to 16 bytes: the caller checks.

    Parameters
    ----------
    dtype : float16 or bfloat16
    pieces : of every 64 of k only the columns are turned, and written, that live there, as
        ``lines`` (steps, words), uint32, says: bit i of word w of line t is that of column
        w * 32 + i

    Raises
    ------
    DTypeError
    """
    if dtype not in ("float16", "bfloat16"):
        raise DTypeError(mismatch("dtype", "float16 or bfloat16", repr(dtype)))
    return turn.specialize(dtype=dtype, **({} if pieces else {"lines_h": None}))
