"""Plain CUDA kernels that tuning needs beside its candidates: the check's, and the profile's.

They share nothing with the tiles that they check: no tensor cores, no asynchronous copies. All
sizes are run-time values. Modules of several functions, each exported by its own name.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

BLOCK, DEPTH, THREADS = 64, 16, 256  # reference: a 64 x 64 block, 16 steps of depth at a time
LANES, WARPS = 32, 4  # compare: one warp for each stored row
LARGEST = 3.0e38
ROW_FLOATS, ROWS_EACH = 1024, 8  # gather: rows of 4 KiB, several at once by each block of threads


@T.jit
def reference(
    lhs: T.Buffer(("stored", "k"), dtype),
    ids: T.Buffer(("groups", "capacity"), "int32"),
    count: T.Buffer(("groups",), "int32"),
    rhs: T.Buffer(("groups", "n", "k"), dtype),
    exact: T.Buffer(("groups", "rows", "n"), "float32"),
    *,
    dtype: T.constexpr,
):
    """``exact[g, i, :] = lhs[ids[g, i], :] @ rhs[g].T`` in float32, for ``i < count[g]``."""
    groups, rows, n, k = T.int32(), T.int32(), T.int32(), T.int32()
    T.device_entry()
    bx, by, g = T.cta_id([(n + 63) // 64, (rows + 63) // 64, groups])
    t = T.thread_id([THREADS])
    left = T.alloc_shared([DEPTH, BLOCK + 4], "float32")
    right = T.alloc_shared([DEPTH, BLOCK + 4], "float32")
    acc = T.alloc_local([16], "float32")
    line: T.let = T.truncdiv(t, 4)
    step: T.let = T.truncmod(t, 4) * 4
    row0: T.let = T.truncdiv(t, 16) * 4
    col: T.let = T.truncmod(t, 16)
    live: T.int32 = count[g]
    source: T.int32 = -1
    if by * 64 + line < live:
        source = ids[g, by * 64 + line]
    for i in T.unroll(16):
        acc[i] = T.float32(0)
    if by * 64 < live:
        for chunk in T.serial(T.truncdiv(k + 15, 16)):
            T.cuda.cta_sync()
            for v in T.unroll(4):
                at: T.let = chunk * 16 + step + v
                left[step + v, line] = T.float32(0)
                right[step + v, line] = T.float32(0)
                if (source >= 0) & (at < k):
                    left[step + v, line] = T.float32(lhs[T.int64(source), T.int64(at)])
                if (bx * 64 + line < n) & (at < k):
                    right[step + v, line] = T.float32(
                        rhs[T.int64(g), T.int64(bx * 64 + line), T.int64(at)]
                    )
            T.cuda.cta_sync()
            for kk in T.unroll(DEPTH):
                for i in T.unroll(4):
                    for j in T.unroll(4):
                        acc[i * 4 + j] = (
                            acc[i * 4 + j] + left[kk, row0 + i] * right[kk, col + j * 16]
                        )
        for i in T.unroll(4):
            for j in T.unroll(4):
                if (by * 64 + row0 + i < live) & (bx * 64 + col + j * 16 < n):
                    exact[
                        T.int64(g),
                        T.int64(by * 64 + row0 + i),
                        T.int64(bx * 64 + col + j * 16),
                    ] = acc[i * 4 + j]


@T.jit
def compare(
    out: T.Buffer(("stored", "n"), dtype),
    exact: T.Buffer(("groups", "rows", "n"), "float32"),
    slot: T.Buffer(("stored",), "int32"),
    worst: T.Buffer(("stored", 2, LANES), "float32"),
    *,
    dtype: T.constexpr,
):
    """Largest deviation and largest exact element of every stored row, one pair for each lane.

    ``worst`` float32 ``[stored, 2, 32]``; ``exact`` ``[groups, rows, n]``; ``slot[row]`` is the
    row's place ``g * rows + i`` there, -1 for a dead row, which must still hold the NaN that it
    was poisoned with. A deviation of ``LARGEST``: a live element is no number, or a dead row was
    written.
    """
    stored, rows, n = T.int32(), T.int32(), T.int32()
    T.device_entry()
    bx = T.cta_id([(stored + 3) // 4])
    t = T.thread_id([LANES * WARPS])
    row: T.let = bx * WARPS + T.truncdiv(t, LANES)
    lane: T.let = T.truncmod(t, LANES)
    deviation: T.float32 = T.float32(0)
    peak: T.float32 = T.float32(0)
    if row < stored:
        place: T.int32 = slot[row]
        for chunk in T.serial(T.truncdiv(n + LANES - 1, LANES)):
            at: T.let = chunk * LANES + lane
            if at < n:
                got: T.float32 = T.float32(out[T.int64(row), T.int64(at)])
                if place >= 0:
                    wanted: T.float32 = exact[
                        T.int64(T.truncdiv(place, rows)),
                        T.int64(T.truncmod(place, rows)),
                        T.int64(at),
                    ]
                    off: T.float32 = T.abs(got - wanted)
                    # NaN is in no order with any number, so it takes the other branch.
                    if off <= T.float32(LARGEST):
                        deviation = T.max(deviation, off)
                    else:
                        deviation = T.float32(LARGEST)
                    peak = T.max(peak, T.abs(wanted))
                else:
                    if T.abs(got) >= T.float32(0):
                        deviation = T.float32(LARGEST)
        worst[row, 0, lane] = deviation
        worst[row, 1, lane] = peak


@T.jit
def gather(
    src: T.Buffer(("rows", ROW_FLOATS), "float32"),
    ids: T.Buffer(("blocks * ROWS_EACH",), "int32"),
    sums: T.Buffer(("blocks", THREADS), "float32"),
):
    """Reads rows of 4 KiB in the order of ``ids``; sums keep the reads alive."""
    blocks = T.int32()
    T.device_entry()
    bx = T.cta_id([blocks])
    t = T.thread_id([THREADS])
    part = T.alloc_local([ROWS_EACH, 4], "float32")
    for r in T.unroll(ROWS_EACH):
        for v in T.vectorized(4):
            part[r, v] = src[T.int64(ids[bx * ROWS_EACH + r]), T.int64(t * 4 + v)]
    total: T.float32 = T.float32(0)
    for r in T.unroll(ROWS_EACH):
        for v in T.unroll(4):
            total = total + part[r, v]
    sums[bx, t] = total


@T.jit
def empty(out: T.Buffer(("size",), "float32")):
    """One thread stores one element: what a launch costs."""
    T.device_entry()
    T.cta_id([1])
    t = T.thread_id([32])
    if t == 0:
        out[0] = T.float32(0)


def check_module(dtype: str) -> tvm.IRModule:
    """``reference`` and ``compare`` for one element type."""
    return tvm.IRModule(
        {
            "reference": reference.specialize(dtype=dtype).with_attr("global_symbol", "reference"),
            "compare": compare.specialize(dtype=dtype).with_attr("global_symbol", "compare"),
        }
    )


def profile_module() -> tvm.IRModule:
    """``gather`` and ``empty``."""
    return tvm.IRModule(
        {
            "gather": gather.specialize().with_attr("global_symbol", "gather"),
            "empty": empty.specialize().with_attr("global_symbol", "empty"),
        }
    )
