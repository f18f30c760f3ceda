"""Kernels that write constant rows and copy rows, in pieces of 16 bytes wherever those begin."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from ..schedules.bits import lowest
from ..schedules.dependent import after_predecessor
from .cuda_detect_device import BYTES, ROOM, WARP, load16, load_any, same_lanes
from .cuda_modules import named_module

THREADS = 256
STORES = 4  # of one thread to one row at a time
MOST_BLOCKS = 132 * 8  # CTAs that an H200 holds at once

# Rows are cut at multiples of 16 bytes of the address: whole pieces are stored at once, the pieces
# at a row's ends in halfwords if `even`, else in bytes.
_PUT = """__forceinline__ __device__ void pit_put(long long at, const unsigned* v, int bytes,
                                               int even) {
  if (bytes == 16) {
    *reinterpret_cast<uint4*>(at) = make_uint4(v[0], v[1], v[2], v[3]);
  } else if (even) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (2 * i < bytes)
        reinterpret_cast<unsigned short*>(at)[i] = (unsigned short)(v[i / 2] >> 16 * (i % 2));
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < bytes)
        reinterpret_cast<unsigned char*>(at)[i] = (unsigned char)(v[i / 4] >> 8 * (i % 4));
  }
}
"""


def _put(at: Any, words: Any, count: Any, even: Any) -> Any:
    return T.cuda.func_call("pit_put", at, words, count, even, source_code=_PUT)


@T.inline
def _write_row(words, src, src_bytes, dst, dst_bytes, piece, step, even):
    """Copy the pieces ``piece``, ``piece + step`` ... of a row; 0 follows the bytes of ``src``.

    ``words`` hold zeros if ``src`` has no bytes.
    """
    starts = T.alloc_local([STORES], "int64")
    sizes = T.alloc_local([STORES], "int32")
    skew: T.int64 = T.bitwise_and(dst, T.int64(BYTES - 1))
    for u in T.unroll(STORES):
        end: T.int64 = T.int64(piece + u * step + 1) * BYTES - skew
        starts[u] = T.max(end - BYTES, T.int64(0))
        sizes[u] = T.int32(T.max(T.min(end, dst_bytes) - starts[u], T.int64(0)))
        if src_bytes > T.int64(0):
            left: T.int64 = T.max(T.min(src_bytes - starts[u], T.int64(ROOM)), T.int64(0))
            if sizes[u] == 0:
                left = T.int64(0)
            load_any(T.address_of(words[u, 0]), src + starts[u], T.int32(left))
    for u in T.unroll(STORES):
        if sizes[u] > 0:
            _put(dst + starts[u], T.address_of(words[u, 0]), sizes[u], even)


@T.inline
def _clear(words):
    for u in T.unroll(STORES):
        for w in T.unroll(4):
            words[u, w] = T.uint32(0)


@T.inline
def _write_aligned(words, value, value_bytes, dst, width, piece, step):
    """Write the pieces ``piece``, ``piece + step`` ... of a row of ``width`` of 16 aligned bytes.

    They are those at ``value``, or zeros if ``value_bytes`` is 0.
    """
    if value_bytes > T.int64(0):
        for u in T.unroll(STORES):
            load16(
                T.address_of(words[u, 0]),
                value + T.int64(piece + u * step) * BYTES,
                piece + u * step < width,
            )
    for u in T.unroll(STORES):
        if piece + u * step < width:
            _put(
                dst + T.int64(piece + u * step) * BYTES,
                T.address_of(words[u, 0]),
                BYTES,
                1,
            )


def fill_kernel(aligned: bool) -> tvm.tirx.PrimFunc:
    """Copies the ``value_bytes`` at ``value``, then zeros, to the listed rows of ``dst``.

    Rows have ``size`` bytes and begin every ``stride``; of ``rows`` rows the first ``count`` ids
    (1, capacity) name some, and ids outside are dropped. ``1 << lanes`` threads, at most 32, share
    a row of ``width`` pieces, partial ones included. ``aligned``: rows and the value begin and end
    at multiples of 16 bytes.
    """

    @T.prim_func
    def kernel(
        value: T.int64,
        value_bytes: T.int64,
        dst: T.int64,
        stride: T.int64,
        size: T.int64,
        width: T.int32,
        rows: T.int32,
        even: T.int32,
        lanes: T.int32,
        blocks: T.int32,
        ids: T.Buffer((1, "capacity"), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
    ):
        capacity = T.int32()
        T.device_entry()
        block = T.cta_id([blocks])
        thread = T.thread_id([THREADS])
        after_predecessor()
        words = T.alloc_local([STORES, 4], "uint32")
        across: T.int32 = T.shift_left(1, lanes)
        teams: T.int32 = T.shift_right(THREADS, lanes)
        shares: T.int32 = T.truncdiv(width + across * STORES - 1, across * STORES)
        item: T.int32 = block * teams + T.shift_right(thread, lanes)
        last: T.int32 = T.min(count[0], capacity) * shares
        row: T.int32 = 0
        piece: T.int32 = 0
        _clear(words)
        while item < last:
            row = ids[0, T.truncdiv(item, shares)]
            piece = T.truncmod(item, shares) * across * STORES + T.bitwise_and(thread, across - 1)
            if (row >= 0) & (row < rows):
                at: T.int64 = dst + T.int64(row) * stride
                if aligned:
                    _write_aligned(words, value, value_bytes, at, width, piece, across)
                else:
                    _write_row(words, value, value_bytes, at, size, piece, across, even)
            item = item + blocks * teams

    return kernel


def clear_kernel(bits: int) -> tvm.tirx.PrimFunc:
    """Writes zeros to every row i of ``dst`` whose id ``ids[i]``, of ``bits`` bits, names none of
    ``groups`` groups. Numbers are those of `fill_kernel`; a warp reads an id for each lane, and
    clears the rows that it finds one after the other."""
    kind = f"int{bits}"

    @T.prim_func
    def kernel(
        dst: T.int64,
        stride: T.int64,
        size: T.int64,
        width: T.int32,
        groups: T.int32,
        even: T.int32,
        blocks: T.int32,
        ids: T.Buffer(("rows",), kind, align=bits // 8),
    ):
        rows = T.int32()
        T.device_entry()
        block = T.cta_id([blocks])
        thread = T.thread_id([THREADS])
        after_predecessor()
        words = T.alloc_local([STORES, 4], "uint32")
        lane: T.let = T.truncmod(thread, WARP)
        first: T.int32 = block * THREADS + thread - lane
        outside: T.int32 = 0
        piece: T.int32 = 0
        _clear(words)
        while first < rows:
            outside = 0
            if first + lane < rows:
                group: T.int64 = T.int64(ids[first + lane])
                if (group < T.int64(0)) | (group >= T.int64(groups)):
                    outside = 1
            dead: T.uint32 = same_lanes(outside)
            if outside == 0:
                dead = T.bitwise_not(dead)
            while dead != T.uint32(0):
                row: T.int32 = first + lowest(dead)
                at: T.int64 = dst + T.int64(row) * stride
                piece = lane
                while piece < width:
                    _write_row(words, T.int64(0), T.int64(0), at, size, piece, WARP, even)
                    piece = piece + WARP * STORES
                dead = T.bitwise_and(dead, dead - T.uint32(1))
            first = first + blocks * THREADS

    return kernel


def copy_kernel() -> tvm.tirx.PrimFunc:
    """Copies rows of ``src_bytes`` to rows of ``dst_bytes``; what is left of these becomes 0.

    ``total`` rows in batches of ``rows``; strides are bytes, and anything may lie anywhere. Other
    numbers are those of `fill_kernel`; ``_device`` is any int32 vector on the device.
    """

    @T.prim_func
    def kernel(
        src: T.int64,
        src_batch: T.int64,
        src_row: T.int64,
        src_bytes: T.int64,
        dst: T.int64,
        dst_batch: T.int64,
        dst_row: T.int64,
        dst_bytes: T.int64,
        width: T.int32,
        rows: T.int32,
        total: T.int32,
        even: T.int32,
        lanes: T.int32,
        blocks: T.int32,
        _device: T.Buffer(("size",), "int32", align=4),
    ):
        T.device_entry()
        block = T.cta_id([blocks])
        thread = T.thread_id([THREADS])
        words = T.alloc_local([STORES, 4], "uint32")
        across: T.int32 = T.shift_left(1, lanes)
        teams: T.int32 = T.shift_right(THREADS, lanes)
        shares: T.int32 = T.truncdiv(width + across * STORES - 1, across * STORES)
        row: T.int32 = 0
        batch: T.int32 = 0
        _clear(words)
        share: T.int32 = block * teams + T.shift_right(thread, lanes)
        # Rows before this one, and shares of this row: no product of both need fit an int32.
        at: T.int32 = T.truncdiv(share, shares)
        share = T.truncmod(share, shares)
        while at < total:
            batch = T.truncdiv(at, rows)
            row = at - batch * rows
            _write_row(
                words,
                src + T.int64(batch) * src_batch + T.int64(row) * src_row,
                src_bytes,
                dst + T.int64(batch) * dst_batch + T.int64(row) * dst_row,
                dst_bytes,
                share * across * STORES + T.bitwise_and(thread, across - 1),
                across,
                even,
            )
            share = share + blocks * teams
            at = at + T.truncdiv(share, shares)
            share = T.truncmod(share, shares)

    return kernel


def fill_module() -> tvm.IRModule:
    """The kernels of this file by name, for `pit_tvm.runtime.cuda_build.build_cuda`."""
    made = {
        "fill_rows": fill_kernel(False),
        "fill_rows_aligned": fill_kernel(True),
        "copy_rows": copy_kernel(),
        **{f"clear_rows_{bits}": clear_kernel(bits) for bits in (32, 64)},
    }
    return named_module(made)
