"""Tiles of contractions on CUDA: staged tiles, and a register block for every thread or warp.

One schedule serves every axis and either operand: rows gathered (m), both operands gathered (k),
batch, groups, rows gathered anew for every piece of the depth, and the dense form. A CTA computes
one tile; those behind the live positions leave. Of a piece it computes all tiles, and adds them to
the output as others do: dead tiles outnumber live ones, and even to leave takes time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import DataType, s_tir, tirx

from pit_tvm.analysis.contraction import Contraction
from pit_tvm.primitive.atomic_adds import atomic_adds
from pit_tvm.primitive.checks import loop_names
from pit_tvm.primitive.dynamic_extent import dynamic_extent
from pit_tvm.primitive.early_exit import early_exit
from pit_tvm.primitive.sread import sread
from pit_tvm.primitive.swrite import swrite
from pit_tvm.primitive.warp_mma import DEPTH_BYTES, warp_mma
from pit_tvm.selection.gpu_general import by_warps
from pit_tvm.structs import MicroTile, Tile
from pit_tvm.target import has_clusters
from pit_tvm.transform.lower_atomic_adds import VECTORS

from .contraction import store_of
from .contraction_forms import extent_on
from .cuda_contraction_forms import cuda_form

VECTOR_BYTES = 16
_ASYNC_BYTES = 4  # the least that an asynchronous copy moves
_DEPTH = 4  # steps of the reduction that a thread reads at once, where they are neighbours


def scheduled(
    func: tirx.PrimFunc,
    con: Contraction,
    tile: Tile,
    micro_tile: MicroTile | None,
    num_groups: int = 0,
) -> s_tir.Schedule:
    """The schedule of a contraction's kernel for one micro-tile (None: the dense form).

    Knobs of ``tile``: ``reg_m`` and ``reg_n``, rows and columns of a thread; ``stages`` of shared
    memory in flight; ``mma``, 1 for tensor cores (sm_80 and later). There, 32 lanes share 8 times
    ``reg_m`` rows and 4 times ``reg_n`` columns, and float32 operands lose bits, as `warp_mma`
    tells.
    """
    cut = _warp_pieces if by_warps(tile) else _pieces
    axis = micro_tile.axis if micro_tile else ""
    slot = extent_on(con, micro_tile, con.reduce) if axis == con.row else 0
    pieces = cut(func, con, tile)
    if slot:
        pieces[con.reduce] = (slot // tile.tile_k, *pieces[con.reduce])
    form = cuda_form(func, con, pieces, micro_tile, num_groups)
    sch = s_tir.Schedule(form.with_attr("global_symbol", "main"))
    _apply(sch, con, tile, axis, slot > 0)
    return sch


def _pieces(func: tirx.PrimFunc, con: Contraction, tile: Tile) -> dict[str, tuple[int, ...]]:
    """Pieces of a tile: a thread takes neighbours where they are neighbours in memory."""
    sides = {con.row: (con.sparse, con.sparse_axes), con.column: (con.dense, con.dense_axes)}
    cut: dict[str, tuple[int, ...]] = {}
    for axis, whole, each in (
        (con.row, tile.tile_m, tile.knob("reg_m")),
        (con.column, tile.tile_n, tile.knob("reg_n")),
    ):
        name, axes = sides[axis]
        near = min(each, _vector(func, name)) if axes[-1] == axis else 1
        cut[axis] = (each // near, whole // each, near)
    depth = _DEPTH if con.reduce in (con.sparse_axes[-1], con.dense_axes[-1]) else 1
    return {**cut, con.reduce: (tile.tile_k // depth, depth)}


def _warp_pieces(func: tirx.PrimFunc, con: Contraction, tile: Tile) -> dict[str, tuple[int, ...]]:
    """Pieces of a tile as lanes of a warp own them on tensor cores; see `warp_mma`."""
    rows, columns = tile.knob("reg_m"), tile.knob("reg_n")
    depth = DEPTH_BYTES * 8 // _bits(func, con.sparse)
    return {
        con.row: (tile.tile_m // (rows * 8), rows // 2, 2, 8),
        con.column: (tile.tile_n // (columns * 4), columns // 2, 4, 2),
        con.reduce: (tile.tile_k // depth, depth),
    }


def _vector(func: tirx.PrimFunc, name: str) -> int:
    """Elements of an operand that begin at whole vectors in every row: those moved at once. Of
    bytes only 4: TVM has no zero of 16."""
    bits = _bits(func, name)
    most = 4 if bits == 8 else VECTOR_BYTES * 8 // bits
    extent = next(p for p in func.params if p.name == name).shape[-1]
    return most if isinstance(extent, tirx.IntImm) and int(extent) % most == 0 else 1


def _bits(func: tirx.PrimFunc, name: str) -> int:
    """Width of an element of a parameter."""
    return int(DataType(next(str(p.dtype) for p in func.params if p.name == name)).bits)


@dataclass(frozen=True)
class _Panel:
    """A staged operand: its copy's block, its place among the reads of the main block, its last
    axis, the elements that move at once and the bytes that they have."""

    copy: Any
    place: int
    last: str
    vector: int
    bytes: int


def _apply(sch: s_tir.Schedule, con: Contraction, tile: Tile, axis: str, adds: bool) -> None:
    block, warps = sch.get_sblock(con.block), by_warps(tile)
    store, panels = store_of(sch, block), _panels(sch, block, con)
    loops = loop_names(sch, block)
    grid = _grid(sch, con, loops, axis, adds)
    depths = ("r0", "r1", "r2") if adds else ("t", "r0", "r1")
    outer, middle, step = (loops[f"{con.reduce}_{part}"] for part in depths)
    y, x, registers = _nest(con, loops, warps)
    inner = [*registers, step] if warps else [step, *registers]
    sch.reorder(*grid, *y, *x, outer, middle, *inner)
    sch.bind(sch.fuse(*y), "threadIdx.y")
    thread = sch.fuse(*x)
    sch.bind(thread, "threadIdx.x")
    sch.set_scope(block, 0, "local")
    vector = 2 if warps else _stored_at_once(sch, con, panels)
    if adds:
        atomic_adds(sch, store)
        vector = _adds_at_once(sch, con, panels, warps) if has_clusters(tile.isa) else 0
    for loop in swrite(sch, store, thread, vector=vector, dynamic=False):
        if sch.get(loop).kind == tirx.ForKind.SERIAL:
            sch.unroll(loop)
    wide = int(sch.get(thread).extent)
    each = tile.knob("reg_m") * tile.knob("reg_n")
    for panel in panels:
        _copy(sch, panel, outer, (tile.tile_m * tile.tile_n // each // wide, wide))
        deep = panel.last == con.reduce
        if warps or deep:
            _pad(sch, panel, deep)
        if not warps:
            _stage(sch, block, panel, middle if deep else step, con.reduce)
    if not warps:
        for loop in inner:
            sch.unroll(loop)
    init = sch.decompose_reduction(block, outer)
    for loop in sch.get_loops(init)[-len(registers) :]:
        sch.unroll(loop)
    if warps:
        warp_mma(sch, middle)
    if adds:
        dynamic_extent(sch, loops[f"{axis}_t"])
    elif axis == con.reduce:
        dynamic_extent(sch, outer)
    elif axis:
        early_exit(sch, loops[f"{axis}_t"])
    if min(panel.bytes for panel in panels) >= _ASYNC_BYTES:
        _pipeline(sch, outer, tile.knob("stages"), counted=axis == con.reduce)


def _stored_at_once(sch: s_tir.Schedule, con: Contraction, panels: list[_Panel]) -> int:
    """Neighbours in a row of the output that a thread holds and can store at once; 0 if it
    cannot."""
    func, across = sch.mod["main"], con.out_axes[-1]
    panel = panels[0 if across == con.row else 1]
    wide = _vector(func, str(func.params[-1].name))
    return wide if (panel.last, panel.vector) == (across, wide) else 0


def _adds_at_once(sch: s_tir.Schedule, con: Contraction, panels: list[_Panel], warps: bool) -> int:
    """Neighbours in a row of the output that a thread holds and can add at once; 0 if it cannot."""
    func = sch.mod["main"]
    if con.accumulator != "float32" or _vector(func, str(func.params[-1].name)) != max(VECTORS):
        return 0
    return min(VECTORS) if warps else _stored_at_once(sch, con, panels)


def _nest(con: Contraction, loops: dict[str, Any], warps: bool) -> tuple[list[Any], ...]:
    """The loops of a tile by what they become: threadIdx.y, threadIdx.x, and registers. Threads
    beside each other write neighbours."""
    rows = [loops[f"{con.row}_r{part}"] for part in range(4 if warps else 3)]
    columns = [loops[f"{con.column}_r{part}"] for part in range(len(rows))]
    if not warps:
        high, wide = [rows.pop(1)], [columns.pop(1)]
        y, x = (wide, high) if con.out_axes[-1] == con.row else (high, wide)
        return y, x, [*rows, *columns]
    return [rows[0], columns[0]], [rows[3], columns[2]], [*rows[1:3], columns[1], columns[3]]


def _stage(sch: s_tir.Schedule, block: Any, panel: _Panel, loop: Any, reduce: str) -> None:
    """A thread reads what it needs of a panel into registers, at ``loop``."""
    read = sch.cache_read(block, panel.place, "local")
    sch.compute_at(read, loop)
    if panel.last == reduce or panel.vector > 1:  # else a thread's elements lie apart
        sch.vectorize(sch.get_loops(read)[-1])


def _pad(sch: s_tir.Schedule, panel: _Panel, deep: bool) -> None:
    """Pad a panel's rows so that what a warp reads at once lies in different banks.

    That is 16 bytes each of 8 rows; or 8 floats each of 4, where rows are steps of the reduction
    (not ``deep``) and too wide for ldmatrix to transpose.
    """
    region = sch.get(panel.copy).writes[0]
    bits, inside = DataType(str(region.source.dtype)).bits, f"v_{panel.last}_"
    vector = VECTOR_BYTES * 8 // bits
    first = [str(part.min.name).startswith(inside) for part in region.region].index(True)
    factor, offset = (2 * vector, vector) if deep or bits == 16 else (32, 8)
    sch.storage_align(panel.copy, 0, first - 1, factor, offset)


def _panels(sch: s_tir.Schedule, block: Any, con: Contraction) -> list[_Panel]:
    """The staged operands of the main block: the sparse one, and the other."""
    reads = [str(region.source.name) for region in sch.get(block).reads]
    copies = {sch.get(copy).name_hint: copy for copy in sch.get_producers(block)}
    func = sch.mod["main"]

    def panel(name: str, last: str) -> _Panel:
        vector, size = _vector(func, name), _bits(func, name) // 8
        place = reads.index(f"{name}_panel")
        return _Panel(copies[f"{name}_sread"], place, last, vector, vector * size)

    pairs = ((con.sparse, con.sparse_axes), (con.dense, con.dense_axes))
    return [panel(name, axes[-1]) for name, axes in pairs]


def _grid(
    sch: s_tir.Schedule, con: Contraction, loops: dict[str, Any], axis: str, adds: bool
) -> list[Any]:
    """Binds tiles to CTAs; a loop whose end tells what lives stands alone for its index. Where a
    CTA adds up tiles of one piece of the depth, it takes them all."""
    inside = {f"{a}_r{i}" for a in (con.row, con.column, con.reduce) for i in range(4)}
    rows, columns = f"{con.reduce if adds else con.row}_t", f"{con.column}_t"
    live = f"{axis}_t" if axis and axis != con.reduce and not adds else ""
    apart = [loops[live]] if live and live != rows else []
    own = {*inside, rows, columns, live, f"{con.row}_t", f"{con.reduce}_t"}
    others = [loop for name, loop in loops.items() if name not in own]
    sch.reorder(*others, loops[columns], *apart, loops[rows])
    grid = [sch.fuse(*others, loops[columns]), *apart, loops[rows]]
    for loop, at in zip(grid, "yzx" if apart else "yx", strict=True):
        sch.bind(loop, f"blockIdx.{at}")
    return [*grid, loops[f"{con.row}_t"]] if adds else grid


def _copy(sch: s_tir.Schedule, panel: _Panel, loop: Any, threads: tuple[int, int]) -> None:
    """All threads gather one operand's tile into shared memory."""
    sch.set_scope(panel.copy, 0, "shared.dyn")
    inner = sread(sch, panel.copy, loop, dynamic=False)
    pieces = [int(sch.get(piece).extent) for piece in inner]
    rounds = _rounds(pieces, threads[0] * threads[1] * panel.vector)
    *_, y, x, vector = sch.split(sch.fuse(*inner), [None, *rounds, *threads, panel.vector])
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")
    sch.vectorize(vector)


def _rounds(pieces: list[int], size: int) -> list[int]:
    """Rounds of ``size`` elements in nested loops that end where nested ``pieces`` do, so that
    indices of pieces need no division that TVM leaves as it is."""
    rounds: list[int] = []
    end, whole = size, 1
    for piece in reversed(pieces):
        whole *= piece
        if whole > end and whole % end == 0:
            rounds.insert(0, whole // end)
            end = whole
    return rounds


def _pipeline(sch: s_tir.Schedule, loop: Any, stages: int, counted: bool) -> None:
    """Later tiles are copied while one is computed, if there are as many: known now, or arranged
    where the loop ends with a live count."""
    extent = sch.get(loop).extent
    if isinstance(extent, tirx.IntImm):
        stages = min(stages, int(extent))
    elif not counted:
        return
    if stages < 2:
        return
    sch.annotate(loop, "software_pipeline_stage", [0, 0, stages - 1])
    sch.annotate(loop, "software_pipeline_order", [0, 1, 2])
    sch.annotate(loop, "software_pipeline_async_stages", [0])
