"""The schedule for any function: outer loops on the threads, live positions only, init apart.

Vectorisation is left to LLVM, which knows which accesses are contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import TensorLoad

from pit_tvm.analysis.expr import uses
from pit_tvm.primitive.checks import guarded, is_one
from pit_tvm.primitive.dynamic_extent import dynamic_extent
from pit_tvm.primitive.parallel_tiles import PARALLEL_TILES, parallel_tiles
from pit_tvm.transform.merge_loops import sums_rows


def apply(sch: s_tir.Schedule) -> None:
    """Schedule every block of ``sch`` by itself, and outer loops that several share once."""
    kinds = _kinds(sch)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        _schedule(sch, block, kinds)


def _kinds(sch: s_tir.Schedule) -> dict[ir.Var, int]:
    """What iterators of blocks the loops are, by their variables."""
    found: dict[ir.Var, int] = {}

    def visit(realize: s_tir.SBlockRealize) -> None:
        for iv, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            if isinstance(value, ir.Var):
                found[value] = iv.iter_type

    (func,) = sch.mod.functions.values()
    tvm_ffi.structural_walk(func.body, (s_tir.SBlockRealize, visit))
    return found


def _schedule(sch: s_tir.Schedule, block: Any, kind_of: Mapping[ir.Var, int]) -> None:
    loops = list(sch.get_loops(block))
    iterators = sch.get(block).iter_vars
    if not loops or len(loops) != len(iterators):
        return
    pairs = zip(loops, iterators, strict=True)
    kinds = [kind_of.get(sch.get(loop).loop_var, iv.iter_type) for loop, iv in pairs]
    several = _holds_several(sch.get(loops[0]))
    bounded = [loop for loop in loops if guarded(sch.get(loop))]
    accumulates = _accumulates(sch.get(block))
    if tirx.IterVar.CommReduce in kinds and sch.get(block).init is not None:
        first = kinds.index(tirx.IterVar.CommReduce)
        by_rows = not bounded and _sums_rows(sch.get(block), first)
        by_rows = by_rows and _is_nest([sch.get(loop) for loop in loops[first - 1 :]])
        sch.decompose_reduction(block, loops[first - 1 if by_rows else first])
        if by_rows:
            sch.reorder(*loops[first:], loops[first - 1])
    for loop in bounded:
        dynamic_extent(sch, loop)
    alone = PARALLEL_TILES not in sch.get(loops[0]).annotations
    if alone and kinds[0] == tirx.IterVar.DataPar and not accumulates:
        parallel_tiles(sch, _shared(sch, loops, kinds, bool(bounded)), runs=several)


def _holds_several(loop: tirx.For) -> bool:
    """Whether there is more than one block in a loop, which may have scratch between them."""
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(loop.body, (s_tir.SBlock, found.append))
    return len(found) > 1


def _shared(sch: s_tir.Schedule, loops: list[Any], kinds: list[int], bounded: bool) -> list[Any]:
    """The loops that threads share: the first one that takes several steps with those around it,
    and more, unless they are ``bounded``, as long as one inside takes nobody knows how many: the
    first may be few. Never the last one, which is a vector, behind another."""
    fors = [sch.get(loop) for loop in loops]
    while len(fors) > 1 and is_one(fors[-1].extent):
        fors.pop()
    depth = 1
    for number in range(1, len(fors)):
        if kinds[number - 1] != tirx.IterVar.DataPar or not _is_nest(fors[:number]):
            break
        depth = number
        inside = zip(fors[number:-1], kinds[number:-1], strict=False)
        free = [loop.extent for loop, kind in inside if kind == tirx.IterVar.DataPar]
        known = bounded or all(isinstance(extent, tirx.IntImm) for extent in free)
        if known and not is_one(fors[number - 1].extent):
            break
    return loops[:depth]


def _sums_rows(block: s_tir.SBlock, first: int) -> bool:
    """Whether the last of a result's iterators, which end before the reduction's, number ``first``
    and on, goes along rows."""
    kinds = {iv.iter_type for iv in block.iter_vars[first:]}
    if first < 2 or kinds != {tirx.IterVar.CommReduce}:  # the first one is shared by threads
        return False
    return sums_rows(block, block.iter_vars[first - 1].var)


def _is_nest(loops: Sequence[tirx.For]) -> bool:
    """Whether loops have nothing beside each other, and extents that do not depend on each
    other."""
    within = all(a.body.same_as(b) for a, b in pairwise(loops))
    extents = [e for loop in loops for e in (loop.min, loop.extent)]
    return within and not any(uses(e, loop.loop_var) for e in extents for loop in loops)


def _accumulates(block: s_tir.SBlock) -> bool:
    """Whether a block without init adds to what it stores, as a split reduction's SWrite does."""
    if block.init is not None:
        return False
    written = [region.source for region in block.writes]
    hits: list[bool] = []

    def visit(load: TensorLoad) -> None:
        hits.append(any(load.source.same_as(buffer) for buffer in written))

    tvm_ffi.structural_walk(block.body, (TensorLoad, visit))
    return any(hits)
