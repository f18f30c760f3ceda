"""Kernels that turn row ids, lengths and group ids into the lists of live slices.

Each reads its input once or twice, checks it while reading and reports faults in ``bad``; it
writes nothing outside ``ids``, whatever the input holds. Ids come in as int32 or int64 (``bits``)
and leave as int32; the 64 entries after a list's
end hold 0, as far as there is room.
"""

from __future__ import annotations

from typing import TypeVar

import tvm
from tvm.script import tirx as T

from .detect_compact import PAD
from .detect_kernels import n_count, n_ids, n_src

n_starts = TypeVar("n_starts")


def copy_rows(bits: int) -> tvm.IRModule:
    """Copy ``src[size]`` to ``ids``; ``bad[0]`` is 1 if an id is outside ``0 .. rows - 1``."""
    dtype = f"int{bits}"

    @T.prim_func(s_tir=True)
    def main(
        src: T.Buffer((n_src,), dtype, align=bits // 8),
        ids: T.Buffer((n_ids,), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
        bad: T.Buffer((1,), "int32", align=4),
        size: T.int64,
        rows: T.int64,
    ):
        outside = T.alloc_buffer((1,), "int32")
        outside[0] = 0
        for i in range(size):
            ids[i] = T.Cast("int32", src[i])
            below: T.let = src[i] < T.Cast(dtype, 0)
            above: T.let = T.Cast("int64", src[i]) >= rows
            outside[0] = outside[0] | T.Cast("int32", below) | T.Cast("int32", above)
        for i in range(T.min(T.int64(PAD), ids.shape[0] - size)):
            ids[size + i] = 0
        count[0] = T.Cast("int32", size)
        bad[0] = outside[0]

    return tvm.IRModule({"main": main})


def expand_lengths(bits: int, cumulative: bool) -> tvm.IRModule:
    """Rows of the sequences of ``padded`` rows each: the first ``length`` of each are live.

    ``src`` holds ``batch`` lengths, or ``batch + 1`` running sums of them. ``bad[0]`` is 1 if a
    length is outside ``0 .. padded`` or the sums do not start at 0; such lengths count as 0.
    """
    dtype = f"int{bits}"

    def length_of(src: tvm.ir.Expr, i: tvm.ir.Expr) -> tvm.ir.Expr:
        if cumulative:
            return T.Cast("int64", src[i + 1]) - T.Cast("int64", src[i])
        return T.Cast("int64", src[i])

    @T.prim_func(s_tir=True)
    def main(
        src: T.Buffer((n_src,), dtype, align=bits // 8),
        ids: T.Buffer((n_ids,), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
        bad: T.Buffer((1,), "int32", align=4),
        batch: T.int64,
        padded: T.int64,
    ):
        end = T.alloc_buffer((1,), "int64")
        end[0] = T.int64(0)
        bad[0] = 0
        if cumulative:
            if src[0] != T.Cast(dtype, 0):
                bad[0] = 1
        for sequence in range(batch):
            length: T.let = length_of(src, sequence)
            if T.And(length >= T.int64(0), length <= padded):
                for i in range(length):
                    ids[end[0] + i] = T.Cast("int32", sequence * padded + i)
                end[0] = end[0] + length
            else:
                bad[0] = 1
        count[0] = T.Cast("int32", end[0])
        live: T.let = end[0]
        for i in range(T.min(T.int64(PAD), ids.shape[0] - live)):
            ids[live + i] = 0

    return tvm.IRModule({"main": main})


def split_groups(bits: int, parallel: bool) -> tvm.IRModule:
    """Rows of every group, ascending: row ``i`` goes to group ``src[i]``, or nowhere if -1.

    ``ids``: ``[groups, capacity]``, ``capacity`` at least ``rows``; ``count``: ``[groups]``;
    ``starts``: int32 scratch ``[parts, groups]``. The rows are cut into ``parts`` pieces: count
    each piece, turn the counts into starts, then write each piece.
    ``bad[0]`` is 1 if an id is outside ``-1 .. groups - 1``; such rows go nowhere.
    """
    dtype = f"int{bits}"
    loop = T.parallel if parallel else T.serial

    def known(group: tvm.ir.Expr, groups: tvm.ir.Expr) -> tvm.ir.Expr:
        return T.And(group >= T.Cast(dtype, 0), T.Cast("int64", group) < groups)

    @T.prim_func(s_tir=True)
    def main(
        src: T.Buffer((n_src,), dtype, align=bits // 8),
        ids: T.Buffer((n_ids,), "int32", align=4),
        count: T.Buffer((n_count,), "int32", align=4),
        starts: T.Buffer((n_starts,), "int32", align=4),
        bad: T.Buffer((1,), "int32", align=4),
        rows: T.int64,
        groups: T.int64,
        capacity: T.int64,
        parts: T.int64,
    ):
        bad[0] = 0
        for part in loop(parts):
            for each in range(groups):
                starts[part * groups + each] = 0
            begin: T.let = rows * part // parts
            for i in range(rows * (part + 1) // parts - begin):
                group: T.let = src[begin + i]
                if known(group, groups):
                    at: T.let = part * groups + T.Cast("int64", group)
                    starts[at] = starts[at] + 1
                else:
                    if group != T.Cast(dtype, -1):
                        bad[0] = 1
        for each in range(groups):
            end = T.alloc_buffer((2,), "int32")
            end[0] = 0
            for part in range(parts):
                end[1] = starts[part * groups + each]
                starts[part * groups + each] = end[0]
                end[0] = end[0] + end[1]
            count[each] = end[0]
            found: T.let = T.Cast("int64", end[0])
            for i in range(T.min(T.int64(PAD), capacity - found)):
                ids[each * capacity + found + i] = 0
        for part in loop(parts):
            first: T.let = rows * part // parts
            for i in range(rows * (part + 1) // parts - first):
                owner: T.let = src[first + i]
                if known(owner, groups):
                    place: T.let = part * groups + T.Cast("int64", owner)
                    list_end: T.let = T.Cast("int64", owner) * capacity + starts[place]
                    ids[list_end] = T.Cast("int32", first + i)
                    starts[place] = starts[place] + 1

    return tvm.IRModule({"main": main})
