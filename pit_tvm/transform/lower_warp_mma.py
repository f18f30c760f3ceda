"""Lowers ``pit.warp_mma``: a warp's tile on tensor cores, by ldmatrix and mma.sync.

Runs once buffers have their final shapes and strides, which tell whether the 16 bytes that
ldmatrix takes of a row lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import TensorLoad
from tvm.script import tirx as T
from tvm.tirx import BufferLoad

from ..primitive.warp_mma import WARP_MMA
from .axis_map import Expr
from .lower_prefetch_rows import replaced
from .rebuild import loops_in
from .warp_mma_site import COLUMNS, ROWS, Site, offset_of, site_of

# Attributes around all steps of a loop, with their number; around the loads for the first of them,
# with the registers that sums and the fragments of two steps take; and around one step's sums.
STEPS, FIRST, STEP = "pit.warp_mma_steps", "pit.warp_mma_first", "pit.warp_mma_step"

_Places = Mapping[ir.Var, Expr]


def lower_warp_mma(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace every annotated loop by the instructions that compute what it holds.

    Raises
    ------
    ScheduleError
        The loop no longer holds what `warp_mma` requires, no warp runs it as one, or a lane's
        sums, rows or columns are not those of the instruction.
    """
    loops, marked = loops_in(func.body), loops_in(func.body, WARP_MMA)
    if not marked:
        return func
    # Errors inside a callback of structural_map lose their type: bodies are worked out before.
    lowered = {loop.loop_var: _lowered(site_of(loop, loops)) for loop in marked}
    return func.with_body(
        tvm_ffi.structural_map(
            func.body, [(tirx.For, lambda loop: lowered.get(loop.loop_var, loop))]
        )
    )


@dataclass(frozen=True)
class _Side:
    """How one operand's fragments come from its panel.

    ``unit`` counts matrices of 16 rows, or of 8 columns; ldmatrix moves ``each`` of them to the
    ``parts`` registers that each has, ``registers[step, unit, part]``. A lane finds its row for
    ldmatrix at ``along`` where the reduction is contiguous, at ``across`` where ``neighbours``
    are; and the element of a register, one by one, at ``element``.
    """

    load: TensorLoad
    unit: tirx.For
    each: int
    parts: int
    registers: ir.Var
    along: _Places
    across: _Places
    neighbours: Callable[[Expr], _Places]
    element: Callable[[int], _Places]


def _side_a(site: Site) -> _Side:
    lane, h, k, run = site.lane, site.h, site.k, site.run
    row, part = lane % ROWS, lane // ROWS
    return _Side(
        site.a,
        site.i,
        1,
        4,
        _registers("a_frag", site, site.i, 4),
        {h: part % 2, lane: row * COLUMNS, k: part // 2 * run},
        {h: part % 2, lane: _int(0), k: part // 2 * run + row},
        lambda v: {lane: v * COLUMNS},
        lambda r: {h: _int(r % 2), k: lane % COLUMNS + r // 2 * run},
    )


def _side_b(site: Site) -> _Side:
    lane, j, e, k, run = site.lane, site.j.loop_var, site.e, site.k, site.run
    row, part = lane % ROWS, lane // ROWS
    column = lane // COLUMNS
    return _Side(
        site.b,
        site.j,
        2,
        2,
        _registers("b_frag", site, site.j, 2),
        {j: j + part // 2, lane: row // 2, e: row % 2, k: part % 2 * run},
        {j: j + part // 2, lane: _int(0), e: _int(0), k: part % 2 * run + row},
        lambda v: {lane: v // 2, e: v % 2},
        lambda r: {lane: column // 2, e: column % 2, k: lane % COLUMNS + r * run},
    )


def _registers(name: str, site: Site, unit: tirx.For, parts: int) -> ir.Var:
    shape = (site.loop.extent, unit.extent, parts)
    return tirx.decl_buffer(shape, "uint32", name, scope="local", layout=None)


def _lowered(site: Site) -> tirx.Stmt:
    """All steps of the loop: fragments of the next are loaded before one's are multiplied."""
    steps, a, b = int(site.loop.extent), _side_a(site), _side_b(site)
    rows, columns = int(site.i.extent), int(site.j.extent)
    taken = 4 * rows * columns + 2 * (a.parts * rows + b.parts * columns)
    loads, sums = tirx.SeqStmt([_loads(site, b), _loads(site, a)]), _sums(site, a, b)
    body = []
    for step in range(steps + 1):
        if step < steps:
            own = replaced(loads, {site.loop.loop_var: _int(step)})
            body.append(own if step else tirx.AttrStmt(_int(0), FIRST, _int(taken), own))
        if step > 0:
            last = replaced(sums, {site.loop.loop_var: _int(step - 1)})
            body.append(tirx.AttrStmt(_int(0), STEP, _int(step - 1), last))
    sums_of = site.sums.buffer
    block = s_tir.SBlock(
        [],
        [_whole(buffer) for buffer in (sums_of, site.a.source, site.b.source)],
        [_whole(sums_of)],
        "warp_mma",
        tirx.SeqStmt(body),
        None,
        [a.registers, b.registers],
    )
    realize = s_tir.SBlockRealize([], tirx.const(True, "bool"), block)
    return tirx.AttrStmt(_int(0), STEPS, _int(steps), realize)


def _sums(site: Site, a: _Side, b: _Side) -> tirx.Stmt:
    """The products of one step's fragments, added up."""
    i, j = (tirx.Var(f.loop_var.name, "int32") for f in (site.i, site.j))
    step = site.loop.loop_var
    sums = []
    for at in range(4):
        four = {site.h: _int(at // 2), site.e: _int(at % 2), site.i.loop_var: i, site.j.loop_var: j}
        sums.append(BufferLoad(site.sums.buffer, [replaced(x, four) for x in site.sums.indices]))
    shape, kind = f"m16n8k{2 * site.run}", site.kind
    product = T.ptx[f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32"](
        *sums,
        *(BufferLoad(a.registers, [step, i, _int(r)]) for r in range(a.parts)),
        *(BufferLoad(b.registers, [step, j, _int(r)]) for r in range(b.parts)),
        *sums,
    )
    return _unrolled(i, site.i.extent, _unrolled(j, site.j.extent, tirx.Evaluate(product)))


def _loads(site: Site, side: _Side) -> tirx.Stmt:
    """All fragments of one step of an operand, by ldmatrix if its panel lies right for it."""
    unit, step = tirx.Var(side.unit.loop_var.name, "int32"), site.loop.loop_var
    if _in_runs(site, side, side.along, lambda v: {site.k: side.along[site.k] + v}):
        places, name = side.along, "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    elif site.kind != "tf32" and _in_runs(site, side, side.across, side.neighbours):
        places, name = side.across, "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    elif site.kind == "tf32":
        return _single_loads(site, side)
    else:
        what = f"16 bytes of {side.load.source.name} side by side, from whole 16 bytes on"
        raise site.refused(what, side.load)
    registers = [
        BufferLoad(side.registers, [step, unit * side.each + r // side.parts, _int(r % side.parts)])
        for r in range(4)
    ]
    place = _address(site, side, places, unit * side.each)
    body = _rounded(site, registers, [tirx.Evaluate(T.ptx[name](*registers, place))])
    return _unrolled(unit, tirx.floordiv(side.unit.extent, side.each), body)


def _rounded(site: Site, registers: list[BufferLoad], loads: list[tirx.Stmt]) -> tirx.Stmt:
    """Loads, and float32 to the nearest of 10 bits: mma.sync cuts the others off."""
    if site.kind == "tf32":
        rounding = T.ptx["cvt.rna.tf32.f32"]
        bits = [rounding(r, T.reinterpret("float32", r)) for r in registers]
        loads = [*loads, *map(tirx.Evaluate, bits)]
    return tirx.stmt_seq(*loads)


def _single_loads(site: Site, side: _Side) -> tirx.Stmt:
    """Fragments element by element: ldmatrix transposes elements of 16 bits only."""
    unit, step = tirx.Var(side.unit.loop_var.name, "int32"), site.loop.loop_var
    body, registers = [], []
    for r in range(side.parts):
        registers.append(BufferLoad(side.registers, [step, unit, _int(r)]))
        place = _address(site, side, side.element(r), unit)
        body.append(tirx.Evaluate(T.ptx["ld.shared.b32"](registers[r], place)))
    return _unrolled(unit, side.unit.extent, _rounded(site, registers, body))


def _in_runs(site: Site, side: _Side, places: _Places, moved: Callable[[Expr], _Places]) -> bool:
    """Whether the panel holds side by side what lies at ``moved(0)``, ``moved(1)`` .. instead of
    ``places``, as much as ldmatrix takes and from whole such pieces on."""
    v = tirx.Var("v", "int32")
    site.known.bind(v, ir.Range(0, site.run))
    offset = replaced(_offset(side), {**places, **moved(v)})
    first = replaced(offset, {v: _int(0)})
    apart = (offset - first - v, tirx.floormod(first, site.run))
    return all(tvm_ffi.structural_equal(site.known.simplify(x), _int(0)) for x in apart)


def _offset(side: _Side) -> Expr:
    return offset_of(side.load.source, list(side.load.indices))


def _address(site: Site, side: _Side, places: _Places, unit: Expr) -> Expr:
    """Address in a panel. In a pipeline, TVM is not told that it is read: it would put barriers
    around copies to other parts of the panel, where `overlap_copies` needs one for all."""
    offset = replaced(replaced(_offset(side), places), {side.unit.loop_var: unit})
    return side.load.source.access_ptr(
        0 if site.pipelined else "r", offset=site.known.simplify(offset)
    )


def _int(value: int) -> tirx.IntImm:
    return tirx.const(value, "int32")


def _unrolled(var: tirx.Var, extent: Expr, body: tirx.Stmt) -> tirx.For:
    return tirx.For(var, _int(0), extent, tirx.ForKind.UNROLLED, body)


def _whole(buffer: ir.Var) -> tirx.BufferRegion:
    return tirx.BufferRegion(buffer, [ir.Range(0, extent) for extent in buffer.shape])
