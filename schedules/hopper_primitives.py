"""SRead, wgmma and SWrite as TIRx tile primitives for sm_90a, registered out of tree.

* copy_async, ``pit_sread``: rows of a matrix gathered into a tile (PIT's SRead)
  ``Tx.copy_async(tile, lhs[0:m, k0:k0 + 64], dispatch="pit_sread", rows=, thread=)``
* gemm_async, ``pit_wgmma``: acc (+)= lhs_tile @ rhs_tile.T
  ``Tx.wg.gemm_async(acc, lhs_tile, rhs_tile, accum=, dispatch="pit_wgmma")``
* copy, ``pit_swrite``: epilogue, then rows scattered through ``staged`` (PIT's SWrite)
  ``Tx.wg.copy(out[0:16, c0:c0 + cols], staged[w, 0:16, 0:cols], dispatch="pit_swrite", acc=, ...)``

Importing this module registers nothing: call ``register`` before building a kernel that uses them.
"""

from __future__ import annotations

from collections.abc import Callable
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

PTX_TYPE = {"float16": "f16", "bfloat16": "bf16"}
THREADS = 128  # one warpgroup
CHUNK = 8  # 16-bit elements in 16 bytes


# Branch-free forms in fp32 with one or two special-function operations each. gelu by
# erf(z) = 1 - p(z) ** -16, Abramowitz and Stegun 7.1.28, absolute error below 3e-7.
ACTIVATIONS = {
    "relu": ("pit_relu", "return fmaxf(x, 0.f);"),
    "silu": ("pit_silu", "return __fdividef(x, 1.f + __expf(-x));"),
    "gelu": (
        "pit_gelu",
        "float z = fabsf(x) * 0.70710678f;"
        " float p = fmaf(z, fmaf(z, fmaf(z, fmaf(z, fmaf(z, fmaf(z, 4.30638e-5f, 2.765672e-4f),"
        " 1.520143e-4f), 9.2705272e-3f), 4.22820123e-2f), 7.05230784e-2f), 1.f);"
        " p *= p; p *= p; p *= p; p *= p;"
        " float tail = __fdividef(1.f, p), half_x = 0.5f * x;"
        " return x < 0.f ? half_x * tail : fmaf(-half_x, tail, x);",
    ),
}


def activate(act: str, x: Any) -> Any:
    """The activation ``act`` (none, relu, gelu, silu) of an fp32 expression."""
    if act == "none":
        return x
    name, body = ACTIVATIONS[act]
    code = f"__forceinline__ __device__ float {name}(float x) {{ {body} }}"
    return T.cuda.func_call(name, x, source_code=code, return_type="float32")


def _starts(region: Any) -> list[Any]:
    return [r.min for r in region.region]


def sread(call: Any, _sctx: Any) -> Any:
    """16-byte cp.async copies by one warpgroup; 128 * 8 / width rows at once.

    Each thread fetches one 16-byte column of every such row of the tile; ``rows`` (local, int32)
    holds its row ids in the source. -1 is a dead row, which is filled with zeros and not read, like
    columns beyond the source's width. The caller commits or announces the copies.
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
    at, col0 = _starts(dst), src.region[-1].min

    @T.prim_func(check_well_formed=False)
    def impl():
        row: T.let = T.truncdiv(thread, per_row)
        col: T.let = T.truncmod(thread, per_row) * CHUNK
        inside: T.let = col0 + col < source.shape[1]
        for p in T.unroll(height // step):
            T.ptx["cp.async.cg.shared.global"](
                tile.ptr_to([*at[:-2], at[-2] + p * step + row, at[-1] + col]),
                source.ptr_to([T.cast(T.max(rows[p], 0), "int64"), T.cast(col0 + col, "int64")]),
                16,
                T.cast(T.if_then_else((rows[p] >= 0) & inside, 16, 0), "uint32"),
            )

    return impl


def wgmma(call: Any, _sctx: Any) -> Any:
    """One warpgroup multiplies 64-row blocks by the rhs tile and commits the group; no wait.

    Both tiles are k-major in the 128-byte-swizzled layout; ``acc`` is a flat local fp32 buffer,
    m / 64 blocks of n / 2.
    """
    call = TilePrimitiveCall.downcast(call)
    acc, a, b = call.args[0].source, call.args[1], call.args[2]
    accum = call.args[5]
    lhs, rhs = a.source, b.source
    m, n, k = int(a.region[-2].extent), int(b.region[-2].extent), int(a.region[-1].extent)
    if m % 64 or n % 8 or n > 256 or k % 16 or lhs.dtype not in PTX_TYPE:
        fail(f"pit_wgmma: no instruction for {m} x {n} x {k} {lhs.dtype}")
    kind = PTX_TYPE[lhs.dtype]
    chain = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    each = n // 2
    a0, b0 = _starts(a), _starts(b)

    @T.prim_func(check_well_formed=False)
    def impl():
        desc_a: T.uint64 = T.uint64(0)
        desc_b: T.uint64 = T.uint64(0)
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(desc_a), lhs.ptr_to(a0), 1, 64, 3)
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(desc_b), rhs.ptr_to(b0), 1, 64, 3)
        T.ptx.wgmma.fence.sync.aligned()
        for kk in T.unroll(
            k // 16
        ):  # addresses in a descriptor count 16 bytes: 2 per k16, 512 per 64 rows
            for block in T.unroll(m // 64):
                T.ptx[chain](
                    *[acc[block * each + i] for i in range(each)],
                    desc_a + T.uint64(kk * 2) + T.cast(block * 512, "uint64"),
                    desc_b + T.uint64(kk * 2),
                    tvm.tirx.any(accum, kk > 0),
                    1,
                    1,
                    0,
                    0,
                )
        T.ptx.wgmma.commit_group.sync.aligned()

    return impl


def swrite(call: Any, _sctx: Any) -> Any:
    """Epilogue of a warpgroup's accumulators (bias, activation, conversion), then 16-byte stores.

    Each warp turns 16 rows x ``cols`` of the tile's ``width`` columns at a time in its own part of
    ``staged`` (warps, 16, cols + 8). ``acc`` holds 64-row blocks as ``wgmma`` leaves them; ``rows``
    (local, int32) the out row of each store of this lane, -1 for none; ``bias``, if given, the
    tile's bias in shared memory (warps, 256).
    """
    call = TilePrimitiveCall.downcast(call)
    dst, src, conf = call.args[0], call.args[1], call.config
    out, staged = dst.source, src.source
    warp, col0 = src.region[0].min, dst.region[-1].min
    acc, rows, lane, act, n = (conf[x] for x in ("acc", "rows", "lane", "act", "width"))
    n, bias = int(n), conf.get("bias")
    m = int(acc.shape[0]) // (n // 2) * 64
    cols = int(staged.shape[-1]) - CHUNK
    lanes = cols // CHUNK  # that store one row
    at_once = 32 // lanes
    convert = f"cvt.rn.{PTX_TYPE[out.dtype]}x2.f32"

    @T.prim_func(check_well_formed=False)
    def impl():
        pair = T.alloc_local([4], "uint32")
        for block in T.unroll(m // 64):
            for c in T.unroll((n + cols - 1) // cols):
                for j in T.unroll(cols // 16):
                    if c * cols + j * 16 < n:
                        for q in T.unroll(
                            4
                        ):  # 8 x 8 blocks: rows 0-7 and 8-15 of columns 0-7, then of 8-15
                            if c * cols + j * 16 + q // 2 * 8 < n:
                                i = T.meta_var(block * (n // 2) + c * (cols // 2) + j * 8 + q * 2)
                                low: T.float32 = acc[i]
                                high: T.float32 = acc[i + 1]
                                if bias is not None:
                                    b = T.meta_var(
                                        c * cols + j * 16 + q // 2 * 8 + T.truncmod(lane, 4) * 2
                                    )
                                    low = low + T.cast(bias[warp, b], "float32")
                                    high = high + T.cast(bias[warp, b + 1], "float32")
                                T.ptx[convert](pair[q], activate(act, high), activate(act, low))
                        if c * cols + j * 16 + 8 < n:
                            T.ptx["stmatrix.sync.aligned.m8n8.x4.shared.b16"](
                                staged.ptr_to(
                                    [warp, T.truncmod(lane, 16), j * 16 + T.truncdiv(lane, 16) * 8]
                                ),
                                pair[0],
                                pair[1],
                                pair[2],
                                pair[3],
                            )
                        else:
                            T.ptx["stmatrix.sync.aligned.m8n8.x2.shared.b16"](
                                staged.ptr_to([warp, T.truncmod(lane, 16), j * 16]),
                                pair[0],
                                pair[1],
                            )
                T.cuda.warp_sync()
                for p in T.unroll(16 // at_once):
                    row: T.let = rows[block * (16 // at_once) + p]
                    off: T.let = c * cols + T.truncmod(lane, lanes) * CHUNK
                    if (row >= 0) & (off < n) & (col0 + off < out.shape[1]):
                        for v in T.vectorized(CHUNK):
                            out[T.cast(row, "int64"), T.cast(col0 + off + v, "int64")] = staged[
                                warp,
                                p * at_once + T.truncdiv(lane, lanes),
                                T.truncmod(lane, lanes) * CHUNK + v,
                            ]
                T.cuda.warp_sync()

    return impl


def _opt_in(name: str):
    def forced(call, _sctx):
        return getattr(call, "dispatch", None) == name, f"only by dispatch={name!r}"

    return predicate(f"{name} is asked for", forced)


def register() -> None:
    """Register the three variants with TIRx; a second call does nothing."""
    table: list[tuple[str, str, Callable]] = [
        ("copy_async", "pit_sread", sread),
        ("gemm_async", "pit_wgmma", wgmma),
        ("copy", "pit_swrite", swrite),
    ]
    known = {
        name for targets in list_registered_schedules().values() for name in targets.get("cuda", [])
    }
    for op, name, impl in table:
        if name not in known:
            register_dispatch(op, "cuda", variant=name, priority=5, when=[_opt_in(name)])(impl)
