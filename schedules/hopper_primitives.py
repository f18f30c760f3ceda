"""SRead, wgmma and SWrite as TIRx tile primitives for sm_90a, registered out of tree.

* copy_async, ``pit_sread``: rows of a matrix gathered into a tile (PIT's SRead)
  ``Tx.copy_async(tile, lhs[0:m, k0:k0 + 64], dispatch="pit_sread", rows=, thread=)``
* copy_async, ``pit_sread_held``: the same where lanes hold the ids, for several matrices
  ``Tx.copy_async(tile, rhs[0:64, n0:n0 + 64], dispatch="pit_sread_held", held=, ...)``
* gemm_async, ``pit_wgmma_flip``: acc (+)= weights_tile @ rows_tile.T, live rows as columns
* gemm_async, ``pit_wgmma``: acc (+)= lhs_tile @ rhs_tile.T, or lhs_tile @ rhs_tile
  ``Tx.wg.gemm_async(acc, lhs_tile, rhs_tile, transB=, accum=, dispatch="pit_wgmma")``
* copy, ``pit_swrite``: epilogue, then rows scattered through ``staged`` or added (PIT's SWrite)
  ``Tx.wg.copy(out[0:16, c0:c0 + cols], staged[w, 0:16, 0:cols], dispatch="pit_swrite", acc=, ...)``

Importing this module registers nothing: call ``register`` before building a kernel that uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import tvm
import tvm.backend.cuda.tile_primitive  # stock variants first
from tvm.script import tirx as T
from tvm.tirx.operator.tile_primitive.dispatcher import (
    fail,
    list_registered_schedules,
    predicate,
    register_dispatch,
)
from tvm.tirx.tile_primitive import TilePrimitiveCall

from .hopper_swrite import CHUNK, PTX_TYPE, swrite

THREADS = 128  # one warpgroup
SWIZZLES = {64: 3, 32: 2}  # of tiles whose rows have so many elements


def _starts(region: Any) -> list[Any]:
    return [r.min for r in region.region]


def _extents(region: Any, turned: int) -> tuple[int, int]:
    """(rows or columns, depth) of an operand's tile of one or several matrices."""
    extents = [int(r.extent) for r in region.region]
    chunks, high, wide = extents[-3:] if len(extents) > 2 else (1, *extents)
    return (chunks * wide, high) if turned else (chunks * high, wide)


def sread(call: Any, _sctx: Any) -> Any:
    """16-byte cp.async copies by one warpgroup; 128 * 8 / width rows at once.

    Each thread fetches one 16-byte column of every such row of the tile; ``rows`` (local, int32)
    holds its row ids in the source. -1 is a dead row, which is filled with zeros and not read, like
    columns beyond the source's width. The caller commits or announces the copies. With
    ``skip_dead``, dead rows are left as they are instead.
    """
    call = TilePrimitiveCall.downcast(call)
    dst, src = call.args[0], call.args[1]
    tile, source = dst.source, src.source
    height, width = int(dst.region[-2].extent), int(dst.region[-1].extent)
    per_row = width // CHUNK
    step = THREADS // per_row
    if width % CHUNK or THREADS % per_row or height % step:
        fail(f"pit_sread: a {height} x {width} tile does not divide among {THREADS} threads")
    rows, thread = call.config["rows"], call.config["thread"]
    skip_dead = bool(call.config.get("skip_dead", False))
    at, col0 = _starts(dst), src.region[-1].min

    @T.inline
    def fetch(p, row, col, size):
        T.ptx["cp.async.cg.shared.global"](
            tile.ptr_to([*at[:-2], at[-2] + p * step + row, at[-1] + col]),
            source.ptr_to([T.int64(T.max(rows[p], 0)), T.int64(col0 + col)]),
            16,
            T.uint32(size),
        )

    @T.prim_func(check_well_formed=False)
    def impl():
        row: T.let = T.truncdiv(thread, per_row)
        col: T.let = T.truncmod(thread, per_row) * CHUNK
        inside: T.let = col0 + col < source.shape[1]
        for p in T.unroll(height // step):
            if skip_dead:
                if rows[p] >= 0:
                    fetch(p, row, col, T.if_then_else(inside, 16, 0))
            else:
                fetch(p, row, col, T.if_then_else((rows[p] >= 0) & inside, 16, 0))

    return impl


# ``place`` of a row in its matrix, in pieces of 16 bytes; below ``least`` it is dead, and not read.
# The move keeps the address of a whole tile's columns apart from that of a row.
FETCH = """
__forceinline__ __device__ void pit_fetch(void* to, const void* from, int place, int least) {
  unsigned at = (unsigned)__cvta_generic_to_shared(to);
  long long columns;
  asm("mov.b64 %0, %1;" : "=l"(columns) : "l"(from));
  long long row = columns + static_cast<long long>(place) * 16;
  asm volatile("{ .reg .pred dead; setp.lt.s32 dead, %2, %3;"
               " cp.async.cg.shared.global [%0], [%1], 16, dead; }"
               :: "r"(at), "l"(row), "r"(place), "r"(least) : "memory");
}
"""


def sread_held(call: Any, _sctx: Any) -> Any:
    """16-byte cp.async copies by one warpgroup; every fourth row by the same warp.

    Lane i of a warp holds in ``held`` (int32) the id in the source of the warp's row i, -1 for a
    dead one, which is filled with zeros and not read, like columns beyond the source's width. Of
    the rows from the first ``rows`` on, whole groups of 16 may be left as they are. The next
    columns of the source follow in the next matrices of the tile, ``matrices`` in all. The
    source's width is a multiple of 8, and it has less than 2**34 elements. The caller commits or
    announces the copies.
    """
    call = TilePrimitiveCall.downcast(call)
    dst, src = call.args[0], call.args[1]
    tile, source = dst.source, src.source
    height, width = (int(r.extent) for r in dst.region[-2:])
    matrices = int(call.config["matrices"])
    pieces, each = matrices * width // CHUNK, height // 4
    across = gcd(pieces, 32)  # lanes that fetch one row together
    at_once = 32 // across
    if width % CHUNK or height % 4 or each > 32 or each % at_once:
        fail(f"pit_sread_held: {matrices} x {height} x {width} does not divide among 4 warps")
    held, warp, lane = (call.config[name] for name in ("held", "warp", "lane"))
    live, at_a_time = call.config["rows"], max(4 // at_once, 1)  # copies for a group of rows
    at, batch, col0 = _starts(dst), _starts(src)[:-2], src.region[-1].min

    @T.inline
    def fetch(line, col, place):
        T.cuda.func_call(
            "pit_fetch",
            tile.ptr_to(
                [
                    at[-3] + T.truncdiv(col, width),
                    at[-2] + line * 4 + warp,
                    at[-1] + T.truncmod(col, width),
                ]
            ),
            source.ptr_to([*batch, 0, T.int64(col0 + col)]),
            place,
            T.if_then_else(col0 + col < source.shape[-1], 0, 2**31 - 1),
            source_code=FETCH,
        )

    @T.prim_func(check_well_formed=False)
    def impl():
        row: T.let = T.truncdiv(lane, across)
        first: T.let = T.truncmod(lane, across) * CHUNK
        # Multiplied before they are shuffled, and shuffled before the first copy: producers are
        # bound by what they do, and wait, for each row.
        own: T.let = held * T.truncdiv(source.shape[-1], CHUNK)
        places = T.alloc_local([each // at_once], "int32")
        for p in T.unroll(each // at_once):
            places[p] = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), own, p * at_once + row, 32)
        for q in T.unroll(each // at_once // at_a_time):
            if q * at_once * at_a_time * 4 < live:
                for p in T.unroll(at_a_time):
                    for c in T.unroll(pieces // across):
                        fetch(
                            (q * at_a_time + p) * at_once + row,
                            c * across * CHUNK + first,
                            places[q * at_a_time + p],
                        )

    return impl


def _described(tiles: Any, turned: int) -> tuple[int, int, int, int]:
    """What a descriptor of an operand says, where addresses count 16 bytes: how far 16 of k, the
    next matrix, and 8 rows are, and the swizzle."""
    high, wide = (int(extent) for extent in tiles.shape[-2:])
    step, following = (2 * wide, high * wide // 8) if turned else (2, 1)
    return step, following, wide, SWIZZLES[wide]


def wgmma(call: Any, _sctx: Any) -> Any:
    """One warpgroup multiplies 64-row blocks by the rhs tile and commits the group; no wait.

    ``acc`` is a flat local fp32 buffer, m / 64 blocks of n / 2. lhs is (m, k), rhs (1, n, k), in
    the 128-byte-swizzled layout. With ``transA`` lhs is (m / 64, k, 64), with ``transB`` rhs
    (n / 64, k, 64): rows of the depth, as a row-major (k, n) matrix has them. These may be matrices
    of 32 columns as well, in the 64-byte-swizzled layout.
    """
    call = TilePrimitiveCall.downcast(call)
    acc, a, b = call.args[0].source, call.args[1], call.args[2]
    accum, turned_lhs, turned = call.args[5], int(bool(call.args[3])), int(bool(call.args[4]))
    lhs, rhs = a.source, b.source
    m, k = _extents(a, turned_lhs)
    n, depth = _extents(b, turned)
    if m % 64 or n % 8 or n > 256 or k % 16 or depth != k or lhs.dtype not in PTX_TYPE:
        fail(f"pit_wgmma: no instruction for {m} x {n} x {k} {lhs.dtype}")
    kind = PTX_TYPE[lhs.dtype]
    chain = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    each = n // 2
    a0, b0 = _starts(a), _starts(b)
    lhs_step, *lhs_layout = _described(lhs, turned_lhs)
    rhs_step, *rhs_layout = _described(rhs, turned)
    apart = int(lhs.shape[-2]) * 8 if turned_lhs else 512  # from 64 rows to the next

    @T.prim_func(check_well_formed=False)
    def impl():
        desc_a: T.uint64 = T.uint64(0)
        desc_b: T.uint64 = T.uint64(0)
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(desc_a), lhs.ptr_to(a0), *lhs_layout)
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(desc_b), rhs.ptr_to(b0), *rhs_layout)
        T.ptx.wgmma.fence.sync.aligned()
        for kk in T.unroll(k // 16):
            for block in T.unroll(m // 64):
                T.ptx[chain](
                    *[acc[block * each + i] for i in range(each)],
                    desc_a + T.uint64(kk * lhs_step) + T.uint64(block * apart),
                    desc_b + T.uint64(kk * rhs_step),
                    tvm.tirx.any(accum, kk > 0),
                    1,
                    1,
                    turned_lhs,
                    turned,
                )
        T.ptx.wgmma.commit_group.sync.aligned()

    return impl


def wgmma_flip(call: Any, _sctx: Any) -> Any:
    """One warpgroup multiplies 64-row blocks of a weights tile by gathered rows as columns, and
    commits the group; no wait.

    ``acc`` is a flat local fp32 buffer of ``blocks`` parts; the first n / 2 of each are used. Both
    tiles are in the 128-byte-swizzled layout. The rows are (1, n, k). Weights begin at the region's
    start: rows of k, or with ``transA`` rows of the depth as a row-major (k, 64) matrix has them;
    ``apart`` rows of 128 bytes from one block to the next.
    """
    call = TilePrimitiveCall.downcast(call)
    acc, a, b = call.args[0].source, call.args[1], call.args[2]
    turned, accum = int(bool(call.args[3])), call.args[5]
    weights, rows = a.source, b.source
    blocks, apart = int(call.config["blocks"]), int(call.config["apart"])
    n, k = int(b.region[-2].extent), int(b.region[-1].extent)
    if n % 8 or n > 256 or k % 16 or rows.dtype not in PTX_TYPE:
        fail(f"pit_wgmma_flip: no instruction for 64 x {n} x {k} {rows.dtype}")
    kind = PTX_TYPE[rows.dtype]
    chain = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    each = int(acc.shape[0]) // blocks
    a0, b0 = _starts(a), _starts(b)
    step = 128 if turned else 2  # 16 of the depth: 16 rows of 128 bytes, or 32 bytes

    @T.prim_func(check_well_formed=False)
    def impl():
        desc_a: T.uint64 = T.uint64(0)
        desc_b: T.uint64 = T.uint64(0)
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(desc_a), weights.ptr_to(a0), 1, 64, 3)
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(desc_b), rows.ptr_to(b0), 1, 64, 3)
        T.ptx.wgmma.fence.sync.aligned()
        for kk in T.unroll(k // 16):
            for block in T.unroll(blocks):
                T.ptx[chain](
                    *[acc[block * each + i] for i in range(n // 2)],
                    desc_a + T.uint64(kk * step) + T.uint64(block * (apart * 8)),
                    desc_b + T.uint64(kk * 2),
                    tvm.tirx.any(accum, kk > 0),
                    1,
                    1,
                    turned,
                    0,
                )
        T.ptx.wgmma.commit_group.sync.aligned()

    return impl


def _opt_in(name: str):
    def forced(call, _sctx):
        return getattr(call, "dispatch", None) == name, f"only by dispatch={name!r}"

    return predicate(f"{name} is asked for", forced)


def register() -> None:
    """Register the variants with TIRx; a second call does nothing."""
    table: list[tuple[str, str, Callable]] = [
        ("copy_async", "pit_sread", sread),
        ("copy_async", "pit_sread_held", sread_held),
        ("gemm_async", "pit_wgmma", wgmma),
        ("gemm_async", "pit_wgmma_flip", wgmma_flip),
        ("copy", "pit_swrite", swrite),
    ]
    known = {
        name for targets in list_registered_schedules().values() for name in targets.get("cuda", [])
    }
    for op, name, impl in table:
        if name not in known:
            register_dispatch(op, "cuda", variant=name, priority=5, when=[_opt_in(name)])(impl)
