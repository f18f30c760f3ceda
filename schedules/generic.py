"""The schedule for any function: outer loops on the threads, live positions only, init apart.

Vectorisation is left to LLVM, which knows which accesses are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from pit_tvm.analysis.expr import uses
from pit_tvm.primitive.checks import guarded, is_one
from pit_tvm.primitive.dynamic_extent import dynamic_extent
from pit_tvm.primitive.parallel_tiles import parallel_tiles


def apply(sch: s_tir.Schedule) -> None:
    """Schedule every block of ``sch`` by itself."""
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        _schedule(sch, block)


def _schedule(sch: s_tir.Schedule, block: Any) -> None:
    loops = list(sch.get_loops(block))
    kinds = [iv.iter_type for iv in sch.get(block).iter_vars]
    if not loops or len(loops) != len(kinds):
        return
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
    if kinds[0] == tirx.IterVar.DataPar and not accumulates:
        parallel_tiles(sch, _shared(sch, loops, kinds))


def _shared(sch: s_tir.Schedule, loops: list[Any], kinds: list[int]) -> list[Any]:
    """The loops that threads share: the first one that takes several steps, with those around it;
    never the last one, which is a vector, behind another."""
    for number in range(1, len(loops)):
        nest = [sch.get(loop) for loop in loops[:number]]
        if kinds[number - 1] != tirx.IterVar.DataPar or not _is_nest(nest):
            break
        if not is_one(nest[-1].extent):
            return loops[:number]
    return loops[:1]


def _sums_rows(block: s_tir.SBlock, first: int) -> bool:
    """Whether the last of a result's iterators, which end before the reduction's, number ``first``
    and on, goes along rows of all that is read and written, or stays where it is: then a row of
    sums is a vector, while sums one after the other are not."""
    kinds = {iv.iter_type for iv in block.iter_vars[first:]}
    if first < 2 or kinds != {tirx.IterVar.CommReduce}:  # the first one is shared by threads
        return False
    var = block.iter_vars[first - 1].var
    for region in (*block.reads, *block.writes):
        *outer, last = [r.min for r in region.region] or [var]
        if any(uses(e, var) for e in outer) or (uses(last, var) and not last.same_as(var)):
            return False
    return True


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
