"""CUDA kernels for slices that the user names by row ids or lengths.

Ids come in as int32 or int64 (``bits``) and leave as int32. Those out of range are dropped, so
nothing is written outside a list, whatever the input holds. All lists but that of `copy_rows` come
out ascending. CTAs that share a list each count what stands before their own part.
"""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from ..schedules.dependent import after_predecessor
from .cuda_detect_device import AT_ONCE, WARP, atomic_or, cta_scan, load_ids

THREADS = 1024
MARKED = 32 * THREADS  # positions whose bits one CTA collects
SPREAD = 4096  # rows of a sequence that one CTA lists
SPREAD_THREADS = 256
REPORTERS = 128  # threads that report counts


def copy_rows(bits: int) -> tvm.tirx.PrimFunc:
    """``ids[0]`` = the ids of ``src`` (size,) from 0 to ``rows - 1``, in their order.

    A CTA copies ``share`` ids, a multiple of `THREADS`.
    """

    @T.prim_func
    def kernel(
        src: T.Buffer(("size",), f"int{bits}", align=bits // 8),
        rows: T.int32,
        share: T.int32,
        ids: T.Buffer((1, "capacity"), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
    ):
        size, capacity = T.int32(), T.int32()
        T.device_entry()
        block = T.cta_id([T.truncdiv(size + share - 1, share)])
        thread = T.thread_id([THREADS])
        after_predecessor()
        totals = T.alloc_shared([WARP], "int32")
        earlier = T.alloc_shared([1], "int32")
        value = T.alloc_local([1], "int32")
        total = T.alloc_local([1], "int32")
        loaded = T.alloc_local([AT_ONCE], "int32")
        first: T.int32 = block * share
        found: T.int32 = 0
        at: T.int32 = thread
        if thread == 0:
            earlier[0] = 0
        T.cuda.cta_sync()
        while at < first:
            load_ids(loaded, src, at, THREADS, first, rows, bits)
            for u in T.unroll(AT_ONCE):
                found = found + T.int32(loaded[u] >= 0)
            at = at + THREADS * AT_ONCE
        if found > 0:
            T.evaluate(T.cuda.atomic_add(T.address_of(earlier[0]), found))
        T.cuda.cta_sync()
        found = earlier[0]
        at = first + thread
        while at - thread < T.min(first + share, size):
            load_ids(loaded, src, at, THREADS, T.min(size, at + 1), rows, bits)
            value[0] = T.int32(loaded[0] >= 0)
            cta_scan(value, total, totals, thread, THREADS // WARP)
            if (loaded[0] >= 0) & (found + value[0] < capacity):
                ids[0, found + value[0]] = loaded[0]
            found = found + total[0]
            at = at + THREADS
        if (thread == 0) & (first + share >= size):
            count[0] = T.min(found, capacity)

    return kernel


_SEND = """__forceinline__ __device__ void pit_send(long long at, int value) {
  *reinterpret_cast<volatile int*>(at) = value;
}
"""


def report_counts() -> tvm.tirx.PrimFunc:
    """Writes ``count`` (slots,), int32, to ``address``, which may be pinned memory of the host:
    each element at once, in any order."""

    @T.prim_func
    def kernel(count: T.Buffer(("slots",), "int32", align=4), address: T.int64):
        slots = T.int32()
        T.device_entry()
        _block = T.cta_id([1])
        thread = T.thread_id([REPORTERS])
        after_predecessor()
        at: T.int32 = thread
        while at < slots:
            T.cuda.func_call("pit_send", address + T.int64(at) * 4, count[at], source_code=_SEND)
            at = at + REPORTERS

    return kernel


def mark_rows(bits: int) -> tvm.tirx.PrimFunc:
    """Bits of the positions that ``src`` (size,) names: ``lines`` (1, words), uint32."""

    @T.prim_func
    def kernel(
        src: T.Buffer(("size",), f"int{bits}", align=bits // 8),
        lines: T.Buffer((1, "held"), "uint32", align=4),
    ):
        size, held = T.int32(), T.int32()
        T.device_entry()
        block = T.cta_id([T.truncdiv(held + THREADS - 1, THREADS)])
        thread = T.thread_id([THREADS])
        words = T.alloc_shared([THREADS], "uint32")
        loaded = T.alloc_local([AT_ONCE], "int32")
        place: T.int32 = 0
        at: T.int32 = thread
        words[thread] = T.uint32(0)
        T.cuda.cta_sync()
        while at < size:
            load_ids(loaded, src, at, THREADS, size, held * 32, bits)
            for u in T.unroll(AT_ONCE):
                place = loaded[u] - block * MARKED
                if (place >= 0) & (place < MARKED):
                    atomic_or(
                        T.address_of(words[T.shift_right(place, 5)]),
                        T.shift_left(T.uint32(1), T.uint32(T.bitwise_and(place, 31))),
                    )
            at = at + THREADS * AT_ONCE
        T.cuda.cta_sync()
        if block * THREADS + thread < held:
            lines[0, block * THREADS + thread] = words[thread]

    return kernel


@T.jit
def _spread(
    src: T.Buffer(("size",), f"int{bits}", align=bits // 8),
    batch: T.int32,
    padded: T.int32,
    pieces: T.int32,
    ids: T.Buffer((1, "capacity"), "int32", align=4),
    count: T.Buffer((1,), "int32", align=4),
    others: T.Optional(T.Buffer((1, "capacity"), "int32", align=4)),
    other_count: T.Optional(T.Buffer((1,), "int32", align=4)),
    *,
    bits: T.constexpr,
    cumulative: T.constexpr,
):
    """The template of `spread_lengths`."""
    T.device_entry()
    block = T.cta_id([batch * pieces])
    thread = T.thread_id([SPREAD_THREADS])
    after_predecessor()
    earlier = T.alloc_shared([1], "int32")
    which: T.int32 = T.truncdiv(block, pieces)
    first: T.int32 = T.truncmod(block, pieces) * SPREAD
    before: T.int32 = 0
    length: T.int64 = 0
    at: T.int32 = thread
    if thread == 0:
        earlier[0] = 0
    T.cuda.cta_sync()
    while at < which:
        length = T.int64(src[at])
        if cumulative:
            length = T.int64(src[at + 1]) - length
        if (length > 0) & (length <= T.int64(padded)):
            before = before + T.int32(length)
        at = at + SPREAD_THREADS
    if before > 0:
        T.evaluate(T.cuda.atomic_add(T.address_of(earlier[0]), before))
    T.cuda.cta_sync()
    before = earlier[0]
    length = T.int64(src[which])
    if cumulative:
        length = T.int64(src[which + 1]) - length
    live: T.int32 = 0
    if (length > 0) & (length <= T.int64(padded)):
        live = T.int32(length)
    at = first + thread
    while at < T.min(first + SPREAD, padded):
        if at < live:
            ids[0, before + at] = which * padded + at
        else:
            if others is not None:
                others[0, which * padded - before + at - live] = which * padded + at
        at = at + SPREAD_THREADS
    if (thread == 0) & (block == batch * pieces - 1):
        count[0] = before + live
        if others is not None:
            other_count[0] = batch * padded - before - live


def spread_lengths(bits: int, cumulative: bool, both: bool) -> tvm.tirx.PrimFunc:
    """Rows of sequences of ``padded`` rows each, of which the first ``length`` are live.

    ``src`` holds ``batch`` lengths, or ``batch + 1`` running sums. A length that is not between
    0 and ``padded`` counts as 0. ``both``: the rows of padding go to ``others``. ``pieces`` CTAs
    share a sequence.
    """
    absent = {} if both else {"others": None, "other_count": None}
    return _spread.specialize(bits=bits, cumulative=cumulative, **absent)
