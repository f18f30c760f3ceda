"""CUDA kernel that turns bits of live positions into ascending lists of live and dead ones."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from ..schedules.bits import below, is_set
from ..schedules.dependent import after_predecessor
from .cuda_detect_device import AT_ONCE, WARP, cta_scan, cut, popcount

THREADS = 512  # words of a line that one CTA turns into positions


@T.inline
def _or_lines(lines, line0, at, parts, word):
    """word[0] = OR of word ``at`` of the ``parts`` lines from ``line0`` on."""
    word[0] = T.uint32(0)
    p: T.int32 = 0
    while p < parts:
        for u in T.unroll(AT_ONCE):
            if p + u < parts:
                word[0] = T.bitwise_or(word[0], lines[line0 + p + u, T.int64(at)])
        p = p + AT_ONCE


@T.meta_class
class _Room:
    """Memory of a CTA that turns one piece of a slot into positions."""

    def __init__(self) -> None:
        self.words = T.alloc_shared([THREADS], "uint32")
        self.before = T.alloc_shared([THREADS], "int32")  # bits that stand before each word
        self.totals = T.alloc_shared([WARP], "int32")
        self.earlier = T.alloc_shared([1], "int32")  # bits of the pieces before this one
        self.value = T.alloc_local([1], "int32")
        self.total = T.alloc_local([1], "int32")
        self.word = T.alloc_local([1], "uint32")

    @T.inline
    def begin(self, thread):
        """Clear what counts, and wait for the bits."""
        if thread == 0:
            self.earlier[0] = 0
        T.cuda.cta_sync()
        after_predecessor()


@T.inline
def _emit_piece(room, thread, lines, parts, axis, slot, word0, first, second):
    """Positions of the bits of the piece that begins at word ``word0`` of a slot. ``first`` and
    ``second``: ids and counts of set and of clear ones; ``second`` is None where nobody asks."""
    entries, grain, extent = T.meta_var(axis)
    ids, count = T.meta_var(first)
    size = T.meta_var(lines.shape[1])
    words, before, earlier, word = T.meta_var((room.words, room.before, room.earlier, room.word))
    line0: T.int64 = T.int64(slot) * parts
    found: T.int32 = 0
    at: T.int32 = thread
    while at < word0:
        _or_lines(lines, line0, at, parts, word)
        found = found + popcount(word[0])
        at = at + THREADS
    if found > 0:
        T.evaluate(T.cuda.atomic_add(T.address_of(earlier[0]), found))
    word[0] = T.uint32(0)
    if word0 + thread < size:
        _or_lines(lines, line0, word0 + thread, parts, word)
    word[0] = cut(word[0], thread * 32, 0, entries - word0 * 32)
    room.value[0] = popcount(word[0])
    words[thread] = word[0]
    cta_scan(room.value, room.total, room.totals, thread, THREADS // WARP)
    before[thread] = room.value[0]
    T.cuda.cta_sync()
    found = earlier[0]
    at = word0 * 32 * grain + thread
    last: T.int32 = T.int32(T.min(T.int64(word0 + THREADS) * 32 * grain, T.int64(extent)))
    while at < last:
        entry: T.int32 = at
        if grain > 1:
            entry = T.truncdiv(at, grain)
        mine: T.int32 = T.shift_right(entry - word0 * 32, 5)
        bit: T.int32 = T.bitwise_and(entry, 31)
        rank: T.int32 = (
            found + before[mine] + popcount(T.bitwise_and(words[mine], below(bit)))
        ) * grain
        hit: T.int32 = is_set(words[mine], bit)
        if hit != 0:
            rank = rank + at - entry * grain
            ids[T.int64(slot), T.int64(rank)] = at
        else:
            if second is not None:
                second[0][T.int64(slot), T.int64(at - rank)] = at
        at = at + THREADS
    if (thread == 0) & ((word0 + THREADS) * 32 >= entries):
        found = (found + room.total[0]) * grain
        if entries > 0:
            # The last block may reach beyond the extent.
            end: T.let = entries - 1 - word0 * 32
            found = found - is_set(words[T.shift_right(end, 5)], T.bitwise_and(end, 31)) * (
                entries * grain - extent
            )
        count[slot] = found
        if second is not None:
            second[1][slot] = extent - found


@T.jit
def _emit(
    lines: T.Buffer(("held", "size"), "uint32", align=4),
    parts: T.int32,
    entries: T.int32,
    grain: T.int32,
    extent: T.int32,
    pieces: T.int32,
    ids: T.Buffer(("slots", "capacity"), "int32", align=4),
    count: T.Buffer(("slots",), "int32", align=4),
    others: T.Optional(T.Buffer(("slots", "capacity"), "int32", align=4)),
    other_count: T.Optional(T.Buffer(("slots",), "int32", align=4)),
):
    """The template of `emit`."""
    slots = T.int32()
    other = T.meta_var(None if others is None else (others, other_count))
    T.device_entry()
    block = T.cta_id([slots * pieces])
    thread = T.thread_id([THREADS])
    room = _Room()
    room.begin(thread)
    slot: T.int32 = T.truncdiv(block, pieces)
    word0: T.int32 = T.truncmod(block, pieces) * THREADS
    axis = T.meta_var((entries, grain, extent))
    _emit_piece(room, thread, lines, parts, axis, slot, word0, (ids, count), other)


@T.jit
def _emit_axes(
    lines: T.Buffer(("held", "size"), "uint32", align=4),
    parts: T.int32,
    extent: T.int32,
    pieces: T.int32,
    ids: T.Buffer((1, "capacity"), "int32", align=4),
    count: T.Buffer((1,), "int32", align=4),
    others: T.Optional(T.Buffer((1, "capacity"), "int32", align=4)),
    other_count: T.Optional(T.Buffer((1,), "int32", align=4)),
    across: T.Buffer(("held2", "size2"), "uint32", align=4),
    across_parts: T.int32,
    across_extent: T.int32,
    across_pieces: T.int32,
    across_ids: T.Buffer((1, "capacity2"), "int32", align=4),
    across_count: T.Buffer((1,), "int32", align=4),
):
    """The template of `emit_axes`."""
    other = T.meta_var(None if others is None else (others, other_count))
    T.device_entry()
    block = T.cta_id([pieces + across_pieces])
    thread = T.thread_id([THREADS])
    room = _Room()
    room.begin(thread)
    if block < pieces:
        axis = T.meta_var((extent, 1, extent))
        _emit_piece(room, thread, lines, parts, axis, 0, block * THREADS, (ids, count), other)
    else:
        axis = T.meta_var((across_extent, 1, across_extent))
        found = T.meta_var((across_ids, across_count))
        word0: T.let = (block - pieces) * THREADS
        _emit_piece(room, thread, across, across_parts, axis, 0, word0, found, None)


def emit(both: bool) -> tvm.tirx.PrimFunc:
    """Positions of the bits of every slot that are set, and with ``both`` of those that are not.

    ``lines`` (slots * parts, words), uint32: a slot's bits are the OR of its ``parts`` lines, one
    for each of ``entries``, and anything behind them; a bit stands for ``grain`` positions of the
    ``extent`` on the PIT axis. ``pieces`` CTAs share a slot; each counts the bits before its own,
    which costs less than telling each other.
    """
    return _emit.specialize(**_absent(both))


def emit_axes(both: bool) -> tvm.tirx.PrimFunc:
    """Positions of the bits that are set on either axis of one mask, as `emit` lists a slot of one
    position an entry: with ``both`` also the clear ones of the first."""
    return _emit_axes.specialize(**_absent(both))


def _absent(both: bool) -> dict[str, Any]:
    return {} if both else {"others": None, "other_count": None}
