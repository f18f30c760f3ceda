"""The index of a padded batch on a GPU; see `pit_tvm.runtime.live_tokens`."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from ..schedules.bits import below
from ..schedules.dependent import after_predecessor
from .cuda_detect_device import full_warp
from .cuda_modules import named_module

WARPS = 8  # of a CTA; a warp has one sequence
NOT_A_MASK = 1 << 30  # added to a count where an element is neither 0 nor 1


def count_live(bits: int) -> tvm.tirx.PrimFunc:
    """``counts[s]`` = live elements of row ``s`` of ``mask`` (batch, tokens), integers of ``bits``;
    at least 2**30 more where one is neither 0 nor 1. int32."""

    @T.prim_func
    def kernel(
        mask: T.Buffer(("batch", "tokens"), f"int{bits}", align=bits // 8),
        counts: T.Buffer(("batch",), "int32", align=4),
    ):
        batch, tokens = T.int32(), T.int32()
        T.device_entry()
        block = T.cta_id([T.truncdiv(batch + WARPS - 1, WARPS)])
        thread = T.thread_id([WARPS * 32])
        after_predecessor()
        lane: T.let = T.truncmod(thread, 32)
        sequence: T.let = block * WARPS + T.truncdiv(thread, 32)
        found: T.int32 = 0
        if sequence < batch:
            for step in T.serial(T.truncdiv(tokens + 31, 32)):
                at: T.let = step * 32 + lane
                if at < tokens:
                    value: T.let = T.int64(mask[T.int64(sequence), T.int64(at)])
                    found = found + T.int32(value != T.int64(0))
                    if (value != T.int64(0)) & (value != T.int64(1)):
                        found = T.bitwise_or(found, T.int32(NOT_A_MASK))
        for s in T.unroll(5):
            other: T.int32 = T.cuda.__shfl_xor_sync(full_warp(), found, T.shift_left(1, s), 32)
            odd: T.int32 = T.bitwise_and(T.bitwise_or(found, other), T.int32(NOT_A_MASK))
            found = T.bitwise_and(found, T.int32(NOT_A_MASK - 1)) + T.bitwise_and(
                other, T.int32(NOT_A_MASK - 1)
            )
            found = T.bitwise_or(found, odd)
        if (lane == 0) & (sequence < batch):
            counts[sequence] = found

    return kernel


def place_live(bits: int) -> tvm.tirx.PrimFunc:
    """The lists of `live_tokens.live_tokens`: mask (batch, tokens), counts (batch,), then row,
    position and sequence (batch * tokens,), starts (batch + 1,), place (batch, tokens), status,
    all int32. Lists are written up to the live tokens; ``status[0]`` is their number, at least
    2**30 more where a count says so."""

    @T.prim_func
    def kernel(
        mask: T.Buffer(("batch", "tokens"), f"int{bits}", align=bits // 8),
        counts: T.Buffer(("batch",), "int32", align=4),
        row: T.Buffer(("batch * tokens",), "int32", align=4),
        position: T.Buffer(("batch * tokens",), "int32", align=4),
        sequence_of: T.Buffer(("batch * tokens",), "int32", align=4),
        starts: T.Buffer(("batch + 1",), "int32", align=4),
        place: T.Buffer(("batch", "tokens"), "int32", align=4),
        status: T.Buffer(("words",), "int32", align=4),
    ):
        batch, tokens = T.int32(), T.int32()
        T.device_entry()
        block = T.cta_id([T.truncdiv(batch + WARPS - 1, WARPS)])
        thread = T.thread_id([WARPS * 32])
        after_predecessor()
        lane: T.let = T.truncmod(thread, 32)
        sequence: T.let = block * WARPS + T.truncdiv(thread, 32)
        # Every warp adds up the sequences before its own, and looks for a flag in them and it.
        begin: T.int32 = 0
        odd: T.int32 = 0
        for step in T.serial(T.truncdiv(sequence + 32, 32)):
            other: T.let = step * 32 + lane
            if (other <= sequence) & (other < batch):
                odd = T.bitwise_or(odd, T.bitwise_and(counts[other], T.int32(NOT_A_MASK)))
                if other < sequence:
                    begin = begin + T.bitwise_and(counts[other], T.int32(NOT_A_MASK - 1))
        for s in T.unroll(5):
            begin = begin + T.cuda.__shfl_xor_sync(full_warp(), begin, T.shift_left(1, s), 32)
            odd = T.bitwise_or(
                odd, T.cuda.__shfl_xor_sync(full_warp(), odd, T.shift_left(1, s), 32)
            )
        if sequence < batch:
            if lane == 0:
                starts[sequence] = begin
            for step in T.serial(T.truncdiv(tokens + 31, 32)):
                at: T.let = step * 32 + lane
                live: T.int32 = 0
                if at < tokens:
                    live = T.int32(mask[T.int64(sequence), T.int64(at)] != T.cast(0, f"int{bits}"))
                votes: T.uint32 = T.cuda.ballot_sync(full_warp(), live)
                to: T.let = begin + T.int32(T.popcount(T.bitwise_and(votes, below(lane))))
                if at < tokens:
                    if live == 1:
                        row[to] = sequence * tokens + at
                        position[to] = at
                        sequence_of[to] = sequence
                        place[T.int64(sequence), T.int64(at)] = to
                    else:
                        place[T.int64(sequence), T.int64(at)] = -1
                begin = begin + T.int32(T.popcount(votes))
            if (sequence == batch - 1) & (lane == 0):
                starts[batch] = begin
                status[0] = begin + odd

    return kernel


def mark_outside(bits: int) -> tvm.tirx.PrimFunc:
    """``status[word]`` becomes 1 where one of ``ids`` (size,) is not from 0 to ``limit - 1``."""

    @T.prim_func
    def kernel(
        ids: T.Buffer(("size",), f"int{bits}", align=bits // 8),
        limit: T.int64,
        word: T.int32,
        status: T.Buffer(("words",), "int32", align=4),
    ):
        size = T.int32()
        T.device_entry()
        block = T.cta_id([T.truncdiv(size + WARPS * 32 - 1, WARPS * 32)])
        thread = T.thread_id([WARPS * 32])
        after_predecessor()
        at: T.let = block * (WARPS * 32) + thread
        if at < size:
            value: T.let = T.int64(ids[at])
            if (value < T.int64(0)) | (value >= limit):
                status[word] = 1

    return kernel


def live_module() -> tvm.IRModule:
    """The kernels by name and the bits of what they read: masks of 8, 32, 64; ids of 32, 64."""
    made: dict[str, tvm.tirx.PrimFunc] = {}
    for bits in (8, 32, 64):
        made[f"count_live_{bits}"] = count_live(bits)
        made[f"place_live_{bits}"] = place_live(bits)
    for bits in (32, 64):
        made[f"mark_outside_{bits}"] = mark_outside(bits)
    return named_module(made)
