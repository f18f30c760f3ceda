"""Search space and tiles of contractions on CPUs: gathered panel, packed operand, register blocks.

One schedule serves every axis: rows gathered (m), both operands gathered (k), rows per k-block
with accumulation, groups, and the dense form. What differs are the loops' roles, which the
rewritten function brings along.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

from tvm import s_tir, tirx

from pit_tvm.primitive.checks import guarded, is_one, loop_names, uses_any
from pit_tvm.primitive.dynamic_extent import dynamic_extent
from pit_tvm.primitive.even_tiles import even_tiles
from pit_tvm.primitive.parallel_tiles import parallel_tiles
from pit_tvm.primitive.prefetch_rows import prefetch_rows
from pit_tvm.primitive.prefetch_stores import prefetch_stores
from pit_tvm.primitive.sread import sread
from pit_tvm.primitive.swrite import swrite

from .contraction_forms import PANEL_VECTORS, Roles


def apply(sch: s_tir.Schedule, roles: Roles, *, reg_m: int, lanes: int, threads: int) -> None:
    """Schedule a rewritten contraction: register blocks of ``reg_m`` rows and one or two column
    panels, in vectors of ``lanes`` accumulators, for ``threads`` threads.

    If one panel of the staged operand holds the whole reduction, results go straight from
    registers to where they belong, whose lines are asked for before; otherwise they are summed
    up in a panel of their own.
    """
    block = sch.get_sblock(roles.block)
    copies = [p for p in sch.get_producers(block)]
    store = store_of(sch, block)
    loops = loop_names(sch, block)
    beside = _panels_beside(roles, reg_m, lanes)
    column, panel, second = sch.split(loops[roles.panel], [None, roles.panels // beside, beside])
    row_block, row = sch.split(loops[roles.row], [None, reg_m])
    vector, lane = sch.split(loops[roles.lane], [None, lanes])
    spread = [loops[name] if name else column for name in roles.threads]
    outer = [*spread, *(loops[name] for name in roles.serial)]
    reduce_outer = [loops[roles.reduce_outer]] if roles.reduce_outer else []
    reduce_inner = loops[roles.reduce_inner]
    whole = not reduce_outer or is_one(sch.get(reduce_outer[0]).extent)
    order = [panel, row_block, *reduce_outer] if whole else [*reduce_outer, panel, row_block]
    sch.reorder(*outer, *order, reduce_inner, row, second, vector, lane)
    swrite(sch, store, row_block if whole else outer[-1], vector=lanes)
    sch.transform_layout(block, ("write", 0), _by_panels(sch.get(block), roles))
    for copy in copies:
        where = outer[-1] if whole else reduce_outer[0]
        sread(sch, copy, where, pad=(roles.row, reg_m))
    sch.vectorize(lane)
    for loop in (vector, second, row):
        sch.unroll(loop)
    if _pairs_fit(reg_m, beside, lanes) and not guarded(sch.get(reduce_inner)):
        reduce_inner, pair = sch.split(reduce_inner, [None, 2])
        sch.unroll(pair)
    start = reduce_outer[0] if reduce_outer else reduce_inner
    _zero_first(sch, sch.decompose_reduction(block, start), unrolled=whole)
    for loop in (*outer, *reduce_outer, row_block, reduce_inner):
        if guarded(sch.get(loop)):
            dynamic_extent(sch, loop)
    if roles.gathered:
        prefetch_rows(sch, row_block, roles.gathered)
    if whole and _stores_rows(sch.get(store), roles):
        prefetch_stores(sch, row_block, str(sch.get(store).writes[0].source.name))
    _even_out(sch, loops, column, roles, reg_m, threads)
    if threads > 1:
        parallel_tiles(sch, spread)


def _registers(lanes: int) -> int:
    return 32 if lanes == 16 else 16  # AVX-512 has twice as many as the others


def _panels_beside(roles: Roles, reg_m: int, lanes: int) -> int:
    """Panels of a register block: two if registers hold as many sums.

    Then ten loads serve 24 products where with one panel 14 do; more than three instructions to
    a pair of products are what a core cannot issue. Rows that are gathered stay in the nearest
    cache for one panel only.
    """
    sums = 2 * PANEL_VECTORS * reg_m
    fit = sums + 2 * PANEL_VECTORS + 1 <= _registers(lanes)
    return 2 if fit and roles.panels % 2 == 0 and not roles.gathered else 1


def _pairs_fit(reg_m: int, beside: int, lanes: int) -> bool:
    """Whether two steps of the reduction at once leave all accumulators in registers."""
    return (reg_m * beside + 2) * PANEL_VECTORS + 1 <= _registers(lanes)


def _zero_first(sch: s_tir.Schedule, init: Any, *, unrolled: bool) -> None:
    """Vectorise the block that clears the sums; with ``unrolled`` those of one register block."""
    *around, lane = sch.get_loops(init)
    sch.vectorize(lane)
    if unrolled:
        for loop in around[-3:]:
            sch.unroll(loop)


def _stores_rows(store: Any, roles: Roles) -> bool:
    """Whether neighbours in a register block's row are neighbours in the output."""
    last = store.writes[0].region[-1].min
    return uses_any(last, {iv.var for iv in store.iter_vars if iv.var.name == f"v_{roles.lane}"})


def _even_out(
    sch: s_tir.Schedule,
    loops: dict[str, Any],
    column: Any,
    roles: Roles,
    reg_m: int,
    threads: int,
) -> None:
    """Tiles of one height, if they may have any: as many as the threads share evenly."""
    if not roles.tile_rows or roles.tile_rows % reg_m:
        return
    row_tiles = next(loops[name] for name in roles.threads if name == f"{roles.row[:-2]}_t")
    if not guarded(sch.get(row_tiles)):
        return
    columns = sch.get(column).extent
    share = threads // gcd(threads, int(columns)) if isinstance(columns, tirx.IntImm) else 1
    even_tiles(sch, row_tiles, rows=roles.tile_rows, multiple=reg_m, share=share)


def _by_panels(block: Any, roles: Roles) -> Callable[..., list[Any]]:
    """Layout of the accumulator: one panel's rows side by side, as register blocks meet them."""
    names = [str(r.min.name).removeprefix("v_") for r in block.writes[0].region]
    last = [names.index(name) for name in (roles.panel, roles.row, roles.lane)]
    order = [d for d in range(len(names)) if d not in last] + last
    return lambda *indices: [indices[d] for d in order]


def store_of(sch: s_tir.Schedule, block: Any) -> Any:
    """The store at the end of the chain that starts at ``block``."""
    consumers = sch.get_consumers(block)
    while sch.get_consumers(consumers[0]):
        consumers = sch.get_consumers(consumers[0])
    return consumers[0]
