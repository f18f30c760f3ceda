"""A matrix turned on NVIDIA GPUs: all of it, its live pieces of columns alone, or its live rows.

    turned[i, k] = source[k, i]

Families that gather rows of one operand want it stored the other way round now and then. A CTA
takes a square through shared memory, 128 bytes wide: both matrices are read and written 16 bytes at
a time.
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


_ANY_LANE = """__forceinline__ __device__ unsigned pit_any_lane(unsigned bits) {
  return __reduce_or_sync(~0u, bits);
}
"""


def _bit(word: Any, at: Any) -> Any:
    return T.bitwise_and(T.shift_right(word, T.cast(at, "uint32")), T.uint32(1))


@T.inline
def _find_rows(found, alive, word0, thread):
    """found[w] = OR of word ``word0`` + w of all lines of ``alive``, by a warp for each."""
    warp: T.let = T.truncdiv(thread, 32)
    if warp < found.shape[0]:
        bits: T.uint32 = T.uint32(0)
        at: T.int32 = T.truncmod(thread, 32)
        while (at < alive.shape[0]) & (word0 + warp < alive.shape[1]):
            bits = T.bitwise_or(bits, alive[at, word0 + warp])
            at = at + 32
        found[warp] = T.cuda.func_call(
            "pit_any_lane", bits, source_code=_ANY_LANE, return_type="uint32"
        )
    T.cuda.cta_sync()


@T.inline
def _fetch(tile, group, place, source, row, column):
    """16 bytes of the source, on their way to the tile."""
    T.ptx["cp.async.cg.shared.global"](
        tile.ptr_to([group, place]),
        source.ptr_to([T.cast(row, "int64"), T.cast(column, "int64")]),
        16,
        16,
    )


def _dead(bias: Any, row: Any, act: str, dtype: str) -> Any:
    """What stands in a row that does not live: its bias, activated, or 0."""
    if bias is None:
        return T.cast(0, dtype)
    known = T.if_then_else(row < bias.shape[0], T.cast(bias[row], "float32"), T.float32(0))
    return T.cast(activate(act, known), dtype)


@T.jit
def turn(
    source_h: T.handle,
    lines_h: T.Optional(T.handle),  # type: ignore[valid-type]
    alive_h: T.Optional(T.handle),  # type: ignore[valid-type]
    bias_h: T.Optional(T.handle),  # type: ignore[valid-type]
    turned_h: T.handle,
    *,
    dtype: T.constexpr,
    act: T.constexpr,
):
    """The template; ``turn_kernel`` and ``turn_rows_kernel`` give it its options."""
    k, m = T.int32(), T.int32()
    source = T.match_buffer(source_h, (k, m), dtype, align=16)
    if lines_h is not None:
        slots, size = T.int32(), T.int32()
        lines = T.match_buffer(lines_h, (slots, size), "uint32", align=4)
    if alive_h is not None:
        parts, words = T.int32(), T.int32()
        alive = T.match_buffer(alive_h, (parts, words), "uint32", align=4)
    if bias_h is not None:
        biases = T.int32()
        bias = T.match_buffer(bias_h, (biases,), dtype, align=2)
    else:
        bias = T.meta_var(None)
    turned = T.match_buffer(turned_h, (m, k), dtype, align=16)
    T.device_entry()
    EACH = T.meta_var(AT_ONCE[dtype])
    SIDE = T.meta_var(CHUNKS * EACH)  # elements of a tile
    # A chunk of rows is a group. Groups are 16 bytes apart, so that a warp that reads columns of
    # eight groups asks every bank once.
    across: T.let = T.truncdiv(m + (SIDE - 1), SIDE)
    block = T.cta_id([T.truncdiv(k + (SIDE - 1), SIDE) * T.truncdiv(m + (SIDE - 1), SIDE)])
    thread = T.thread_id([THREADS])
    pool = T.SMEMPool()
    tile = pool.alloc((CHUNKS, EACH * SIDE + EACH), dtype, align=16)
    if alive_h is not None:
        rows_alive = pool.alloc((SIDE // 32,), "uint32", align=16)
    pool.commit()
    line = T.alloc_local([EACH], dtype)
    columns_alive = T.alloc_local([SIDE // 32], "uint32")
    step: T.let = T.truncdiv(block, across)
    m0: T.let = T.truncmod(block, across) * SIDE
    k0: T.let = step * SIDE
    high: T.let = T.truncdiv(thread, CHUNKS)
    chunk: T.let = T.truncmod(thread, CHUNKS)
    after_predecessor()
    if alive_h is not None:
        _find_rows(rows_alive, alive, T.truncdiv(k0, 32), thread)
    for w in T.unroll(SIDE // 32):
        columns_alive[w] = T.uint32(0xFFFFFFFF)
        if lines_h is not None:
            columns_alive[w] = T.uint32(0)
            if T.truncdiv(m0, 32) + w < size:
                columns_alive[w] = lines[step, T.truncdiv(m0, 32) + w]
    word: T.uint32 = columns_alive[0]
    if chunk * EACH >= 32:
        word = columns_alive[SIDE // 32 - 1]
    wanted: T.let = T.bitwise_and(
        T.shift_right(word, T.cast(T.truncmod(chunk * EACH, 32), "uint32")),
        T.uint32((1 << EACH) - 1),
    )
    for p in T.unroll(SIDE // _ROWS):
        row: T.let = p * _ROWS + high
        if (k0 + row < k) & (m0 + chunk * EACH < m) & (wanted != T.uint32(0)):
            group: T.let = T.truncdiv(row, EACH)
            place: T.let = T.truncmod(row, EACH) * SIDE + chunk * EACH
            if alive_h is not None:
                if _bit(rows_alive[p], high) != T.uint32(0):
                    _fetch(tile, group, place, source, k0 + row, m0 + chunk * EACH)
                else:
                    line[0] = _dead(bias, k0 + row, act, dtype)
                    for v in T.unroll(1, EACH):
                        line[v] = line[0]
                    for v in T.vectorized(EACH):
                        tile[group, place + v] = line[v]
            else:
                _fetch(tile, group, place, source, k0 + row, m0 + chunk * EACH)
    T.ptx.cp.async_.commit_group()
    T.ptx.cp.async_.wait_group(0)
    T.cuda.cta_sync()
    for p in T.unroll(SIDE // _ROWS):
        column: T.let = p * _ROWS + high
        lives: T.let = _bit(columns_alive[p], high)
        if (k0 + chunk * EACH < k) & (m0 + column < m) & (lives != T.uint32(0)):
            for i in T.unroll(EACH):
                line[i] = tile[chunk, i * SIDE + column]
            first: T.let = T.cast(k0 + chunk * EACH, "int64")
            for v in T.vectorized(EACH):
                turned[T.cast(m0 + column, "int64"), first + v] = line[v]


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
    absent = {"alive_h": None, "bias_h": None, **({} if pieces else {"lines_h": None})}
    return turn.specialize(dtype=dtype, act="none", **absent)


def turn_rows_kernel(dtype: str, bias: bool = False, act: str = "none") -> tvm.tirx.PrimFunc:
    """The kernel: source (k, m), alive, [bias,] turned (m, k), of a source whose dead rows are not
    read: in their place stands act(bias), or 0.

    ``alive`` (lines, words), uint32: bit i of word w of any line says that row w * 32 + i lives.
    Extents and addresses are as for `turn_kernel`; bias may have fewer than k elements, and is 0
    beyond.

    Parameters
    ----------
    dtype : float16 or bfloat16
    act : none, relu, gelu, gelu_tanh or silu

    Raises
    ------
    DTypeError
    """
    check_dtype(dtype)
    absent = {"lines_h": None, **({} if bias else {"bias_h": None})}
    return turn.specialize(dtype=dtype, act=act, **absent)
