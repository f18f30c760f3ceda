"""Search space and tiles of contractions on CPUs: gathered panel, packed operand, register blocks.

One schedule serves every axis: rows gathered (m), both operands gathered (k), rows per k-block
with accumulation, groups, and the dense form. What differs are the loops' roles, which the
rewritten function brings along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import s_tir

from pit_tvm.primitive.checks import guarded, loop_names
from pit_tvm.primitive.dynamic_extent import dynamic_extent
from pit_tvm.primitive.parallel_tiles import parallel_tiles
from pit_tvm.primitive.prefetch_rows import prefetch_rows
from pit_tvm.primitive.sread import sread
from pit_tvm.primitive.swrite import swrite

from .contraction_forms import PANEL_VECTORS, Roles


def apply(sch: s_tir.Schedule, roles: Roles, *, reg_m: int, lanes: int) -> None:
    """Schedule a rewritten contraction: register blocks of ``reg_m`` rows and one column panel,
    in vectors of ``lanes`` accumulators."""
    block = sch.get_sblock(roles.block)
    copies = [p for p in sch.get_producers(block)]
    store = _store_of(sch, block)
    loops = loop_names(sch, block)
    column, inner_panel = sch.split(loops[roles.panel], [None, roles.panels])
    row_block, row = sch.split(loops[roles.row], [None, reg_m])
    vector, lane = sch.split(loops[roles.lane], [None, lanes])
    threads = [loops[name] if name else column for name in roles.threads]
    outer = [*threads, *(loops[name] for name in roles.serial)]
    reduce_outer = [loops[roles.reduce_outer]] if roles.reduce_outer else []
    reduce_inner = loops[roles.reduce_inner]
    sch.reorder(*outer, *reduce_outer, inner_panel, row_block, reduce_inner, row, vector, lane)
    swrite(sch, store, outer[-1], vector=lanes)
    sch.transform_layout(block, ("write", 0), _by_panels(sch.get(block), roles))
    for copy in copies:
        where = reduce_outer[0] if reduce_outer else outer[-1]
        sread(sch, copy, where, pad=(roles.row, reg_m))
    sch.vectorize(lane)
    sch.unroll(vector)
    sch.unroll(row)
    if _pairs_fit(reg_m, lanes) and not guarded(sch.get(reduce_inner)):
        reduce_inner, pair = sch.split(reduce_inner, [None, 2])
        sch.unroll(pair)
    start = reduce_outer[0] if reduce_outer else inner_panel
    init = sch.decompose_reduction(block, start)
    sch.vectorize(sch.get_loops(init)[-1])
    for loop in (*outer, *reduce_outer, row_block, reduce_inner):
        if guarded(sch.get(loop)):
            dynamic_extent(sch, loop)
    if roles.gathered:
        prefetch_rows(sch, row_block, roles.gathered)
    parallel_tiles(sch, threads)


def _pairs_fit(reg_m: int, lanes: int) -> bool:
    """Whether two steps of the reduction at once leave all accumulators in registers."""
    registers = 32 if lanes == 16 else 16  # AVX-512 has twice as many as the others
    return reg_m * PANEL_VECTORS + 2 * PANEL_VECTORS + 1 <= registers


def _by_panels(block: Any, roles: Roles) -> Callable[..., list[Any]]:
    """Layout of the accumulator: one panel's rows side by side, as register blocks meet them."""
    names = [str(r.min.name).removeprefix("v_") for r in block.writes[0].region]
    last = [names.index(name) for name in (roles.panel, roles.row, roles.lane)]
    order = [d for d in range(len(names)) if d not in last] + last
    return lambda *indices: [indices[d] for d in order]


def _store_of(sch: s_tir.Schedule, block: Any) -> Any:
    """The store at the end of the chain that starts at ``block``."""
    consumers = sch.get_consumers(block)
    while sch.get_consumers(consumers[0]):
        consumers = sch.get_consumers(consumers[0])
    return consumers[0]
