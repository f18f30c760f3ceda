"""Lowers ``pit.parallel_tiles``: a nest, whose extents may be dynamic, becomes one loop."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx

from ..analysis.expr import is_one
from ..errors import ScheduleError, mismatch
from ..primitive.checks import uses_any
from ..primitive.parallel_tiles import PARALLEL_RUNS, PARALLEL_TILES
from .axis_map import Expr

_RUNS = 256  # of which each of many threads still has some


def lower_parallel_tiles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Fuse every annotated nest into one parallel loop over the product of its extents.

    Raises
    ------
    ScheduleError
        A nest is no longer perfect, or an extent in it depends on another of its loops.
    """
    # Errors inside a callback of structural_map lose their type: nests are found before.
    marked: list[tirx.For] = []
    tvm_ffi.structural_walk(
        func.body, (tirx.For, lambda f: marked.append(f) if _depth(f) else None)
    )
    for loop in marked:
        _nest(loop)
    body = tvm_ffi.structural_map(func.body, [(tirx.For, lambda f: _fuse(f) if _depth(f) else f)])
    return func.with_body(body)


def _depth(loop: tirx.For) -> int:
    return int((loop.annotations or {}).get(PARALLEL_TILES, 0))


def _nest(loop: tirx.For) -> list[tirx.For]:
    nest = [loop]
    while len(nest) < _depth(loop):
        body = nest[-1].body
        if not isinstance(body, tirx.For):
            what = f"parallel_tiles: nest at loop {loop.loop_var.name}"
            raise ScheduleError(mismatch(what, f"{_depth(loop)} loops", len(nest)))
        if uses_any(body.extent, {outer.loop_var for outer in nest}):
            what = f"parallel_tiles: extent of loop {body.loop_var.name}"
            raise ScheduleError(mismatch(what, "none of the nest's loops in it", body.extent))
        nest.append(body)
    return nest


def _fuse(loop: tirx.For) -> tirx.Stmt:
    nest, runs = _nest(loop), PARALLEL_RUNS in loop.annotations
    # Nothing is negative, which TVM cannot prove of runs.
    div, mod = (tirx.truncdiv, tirx.truncmod) if runs else (tirx.floordiv, tirx.floormod)
    dtype = str(loop.loop_var.ty.dtype)
    zero, one = tirx.const(0, dtype), tirx.const(1, dtype)
    values: dict[ir.Var, Expr] = {part.loop_var: zero for part in nest}
    real = [part for part in nest if not is_one(part.extent)]
    fused = tirx.Var("_".join(part.loop_var.name for part in nest), dtype)
    total, rest = one, fused
    for part in reversed(real):
        # An empty nest never runs its body; the maximum keeps the division defined all the same.
        extent = tirx.max(part.extent, one)
        last = part.same_as(real[0])
        values[part.loop_var] = rest if last else mod(rest, extent)
        rest = rest if last else div(rest, extent)
        total = total * part.extent
    body = tvm_ffi.structural_map(nest[-1].body, [(ir.Var, lambda v: values.get(v, v))])
    if runs:
        return _in_runs(fused, total, body)
    return tirx.For(fused, zero, total, tirx.ForKind.PARALLEL, body)


def _in_runs(fused: ir.Var, total: Expr, body: tirx.Stmt) -> tirx.Stmt:
    """A loop in runs whose lengths differ by no more than one step."""
    run, runs = tirx.Var("run", "int64"), tirx.const(_RUNS, "int64")
    # Divided by a constant: TVM moves other divisions out of loops that they hold for.
    steps = tirx.Cast("int64", total)
    bounds = [tirx.truncdiv(steps * (run + n), runs) for n in (0, 1)]
    first, last = (tirx.Cast(str(fused.ty.dtype), bound) for bound in bounds)
    inner = tirx.For(fused, first, last - first, tirx.ForKind.SERIAL, body)
    return tirx.For(run, tirx.const(0, "int64"), runs, tirx.ForKind.PARALLEL, inner)
