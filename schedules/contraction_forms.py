"""The forms of a contraction that the CPU family schedules, one for each sparse axis and none.

Every form has the dense operand packed into column panels and the sparse operand staged into a
panel in list order; see :func:`pit_tvm.schedules.contraction.apply`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import te, tirx

from pit_tvm.analysis.access import block_infos
from pit_tvm.analysis.contraction import Contraction
from pit_tvm.structs import MicroTile, Tile
from pit_tvm.transform.axis_map import (
    AxisMap,
    Expr,
    Packed,
    Remap,
    Vars,
    ceil_div,
    padded_map,
    rows_map,
)
from pit_tvm.transform.insert_sread_swrite import GROUP, SparseForm, insert_sread_swrite
from pit_tvm.transform.remap_axes import remap_axes
from pit_tvm.transform.unalign import parameter

DEPTH_STEP = 64  # packed operands hold a multiple of this many reduction steps
# Column panels are two vectors wide in every tile, so that one packed copy serves them all.
PANEL_VECTORS = 2


@dataclass(frozen=True)
class Roles:
    """Which loop of the main block does what; names as the rewrite gives them.

    ``threads`` are spread over the threads in this order, "" standing for the column blocks;
    ``serial`` follow inside. ``panels`` column panels make a column block. ``gathered`` names the
    dense operand if its rows are picked by the index. ``tile_rows``: rows of a tile, if they are
    positions in one list that threads share, so that tiles of any other height do as well.
    """

    block: str
    threads: tuple[str, ...]
    serial: tuple[str, ...]
    row: str
    panel: str
    lane: str
    reduce_outer: str  # "" if the reduction has one loop
    reduce_inner: str
    panels: int
    gathered: str = ""
    tile_rows: int = 0


def contraction_form(
    func: tirx.PrimFunc,
    con: Contraction,
    tile: Tile,
    lanes: int,
    micro_tile: MicroTile | None,
    num_groups: int = 0,
) -> tuple[tirx.PrimFunc, Roles]:
    """``func`` rewritten for one micro-tile (None: the dense form), and its loops' roles.

    ``lanes`` is the number of accumulators in a vector; ``num_groups`` is 0 without groups.
    """
    sizes = axis_extents(func, con)
    width = PANEL_VECTORS * lanes
    slot = extent_on(con, micro_tile, con.column)
    columns = padded_map(con.column, sizes[con.column], width, slot)
    dense = next(p for p in func.params if p.name == con.dense)
    packed = {con.dense: _packed(con, dense, lanes, slot)}
    depth = _even(sizes[con.reduce], tile.tile_k)
    maps: dict[str, AxisMap] = {con.column: columns}
    axis = micro_tile.axis if micro_tile else ""
    also = micro_tile.also is not None if micro_tile else False  # the reduction
    splits = extent_on(con, micro_tile, con.reduce) if axis == con.row else 0
    row_extent = extent_on(con, micro_tile, con.row) if axis == con.reduce else 0
    if axis != con.reduce and not splits and not also:
        maps[con.reduce] = rows_map(con.reduce, sizes[con.reduce], depth)
    if axis != con.row:
        maps[con.row] = rows_map(con.row, sizes[con.row], row_extent or tile.tile_m)
    if micro_tile is None:
        rewritten = remap_axes(
            func,
            Remap(
                con.block, maps, staged=(con.sparse,), stage_dtype=con.accumulator, packed=packed
            ),
        )
    else:
        positions = {con.row: tile.tile_m, con.reduce: tile.tile_k}.get(axis, 1)
        groups = (num_groups, con.group) if con.group else None
        form = SparseForm(
            positions, maps, (con.sparse,), con.accumulator, packed, groups, also=tile.tile_k
        )
        rewritten = insert_sread_swrite(func, micro_tile, form)
    panels = _panels(columns.parts[-2].extent, max(1, tile.tile_n // width))
    roles = _roles(con, axis, bool(splits), panels, tile.tile_m)
    if also:
        roles = replace(roles, gathered=con.dense)
    return rewritten, _in_slots(roles, con, columns) if slot else roles


def axis_extents(func: tirx.PrimFunc, con: Contraction) -> dict[str, Expr]:
    """Extent of every axis of the contraction block: an int, or an expression if symbolic."""
    info = next(i for i in block_infos(func) if i.name == con.block)
    sizes: dict[str, Expr] = {}
    for iv in info.block.iter_vars:
        extent = iv.dom.extent
        sizes[info.iter_vars[iv.var]] = int(extent) if isinstance(extent, tirx.IntImm) else extent
    return sizes


def pack_func(func: tirx.PrimFunc, con: Contraction, lanes: int) -> tirx.PrimFunc:
    """Copies the dense operand into column panels: ``[.., panels, depth, 2 * lanes]``.

    Zeros fill the last panel and the depth up to a multiple of 64. The result has the
    accumulator's dtype.
    """
    dense = next(p for p in func.params if p.name == con.dense)
    source = te.placeholder(dense.shape, dense.dtype, con.dense)
    width = PANEL_VECTORS * lanes
    column, depth = con.dense_axes.index(con.column), con.dense_axes.index(con.reduce)

    def element(*where: Expr) -> Expr:
        *lead, p, k, lane = where
        indices = list(lead)
        for position, value in sorted({column: p * width + lane, depth: k}.items()):
            indices.insert(position, value)
        inside = tirx.And(p * width + lane < dense.shape[column], k < dense.shape[depth])
        value = source(*indices).astype(con.accumulator)
        return tirx.if_then_else(inside, value, tirx.const(0, con.accumulator))

    packed = te.compute(packed_shape(con, dense.shape, lanes), element, name="packed")
    return te.create_prim_func([source, packed])


def _packed(con: Contraction, dense: tirx.Var, lanes: int, slot: int) -> Packed:
    shape = packed_shape(con, dense.shape, lanes)
    param = parameter(con.dense, shape, con.accumulator)
    depth = con.dense_axes.index(con.reduce)
    lead = [d for d, a in enumerate(con.dense_axes) if a not in (con.column, con.reduce)]

    def load(v: Vars, where: list[Expr]) -> Expr:
        # A group is not among the original's indices once its tile row stands for it.
        outer = [v[GROUP] if not con.dense_axes[d] and GROUP in v else where[d] for d in lead]
        panel, lane = v[f"{con.column}_p"], v[f"{con.column}_l"]
        if slot:  # the last one may have fewer panels, and stores nothing beyond them
            panel += v[f"{con.column}_t"] * (slot // (PANEL_VECTORS * lanes))
            panel = tirx.min(panel, shape[-3] - 1)
        return tirx.BufferLoad(param, [*outer, panel, where[depth], lane])

    return Packed(param, load)


def packed_shape(con: Contraction, shape: list[Expr], lanes: int) -> list[Expr]:
    """Shape of the packed form of a dense operand of ``shape``; see :func:`pack_func`."""
    width = PANEL_VECTORS * lanes
    column, depth = con.dense_axes.index(con.column), con.dense_axes.index(con.reduce)
    lead = [extent for d, extent in enumerate(shape) if d not in (column, depth)]
    return [
        *lead,
        ceil_div(shape[column], width),
        ceil_div(shape[depth], DEPTH_STEP) * DEPTH_STEP,
        width,
    ]


def _even(extent: Expr, tile_k: int) -> int:
    """A panel depth near ``tile_k`` that cuts ``extent`` evenly, if possible without a rest."""
    if not isinstance(extent, int):
        return tile_k
    near = max(1, round(extent / tile_k))
    for blocks in (near, near + 1, near - 1):
        if blocks and extent % (8 * blocks) == 0:
            return extent // blocks
    return ceil_div(ceil_div(extent, near), 8) * 8


def _panels(available: Expr, wanted: int) -> int:
    """The divisor of the number of panels that is nearest to ``wanted``, in ratio; an even one if
    there is any, for register blocks of two panels."""
    if not isinstance(available, int):
        return 1
    step = 2 if wanted > 1 and available % 2 == 0 else 1
    divisors = (d for d in range(step, available + 1, step) if available % d == 0)
    return min(divisors, key=lambda d: (max(d / wanted, wanted / d), d))


def extent_on(con: Contraction, micro_tile: MicroTile | None, axis: str) -> int:
    """Extent of a micro-tile on an axis; 0 where its operand has no such axis."""
    axes = con.axes_of(micro_tile.operand) if micro_tile else ()
    return micro_tile.extents[axes.index(axis)] if micro_tile and axis in axes else 0


def _in_slots(roles: Roles, con: Contraction, columns: AxisMap) -> Roles:
    """The roles where rows have a list for every slot of columns: threads share the slots."""
    threads = (*con.batch, columns.parts[0].name, "")
    return replace(roles, threads=threads, serial=(f"{con.row}_t",), tile_rows=0)


def _roles(con: Contraction, axis: str, splits: bool, panels: int, tile_m: int) -> Roles:
    row, reduce = con.row, con.reduce
    batch = tuple(name for b in con.batch for name in ((f"{b}_t", f"{b}_r") if b == axis else (b,)))
    outer = f"{reduce}_t"
    serial: tuple[str, ...] = ()
    threads: tuple[str, ...]
    if splits:
        threads, serial, outer = (*batch, ""), (f"{reduce}_t", f"{row}_t"), ""
    elif axis == row and con.group:
        threads, serial = ("", GROUP), (f"{row}_t",)
    elif axis == row and batch:
        threads, serial = (*batch, ""), (f"{row}_t",)
    elif axis == row:
        threads = ("", f"{row}_t")
    else:
        threads = (*batch, f"{row}_t", "")
    return Roles(
        block=con.block,
        threads=threads,
        serial=serial,
        row=f"{row}_r",
        panel=f"{con.column}_p",
        lane=f"{con.column}_l",
        reduce_outer=outer,
        reduce_inner=f"{reduce}_r",
        panels=panels,
        gathered=con.dense if axis == reduce else "",
        tile_rows=tile_m if f"{row}_t" in threads and axis in ("", row) else 0,
    )
