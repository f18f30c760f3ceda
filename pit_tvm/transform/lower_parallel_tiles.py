"""Lowers ``pit.parallel_tiles``: fuses a nest, whose extents may be dynamic, into one parallel loop."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx

from ..errors import ScheduleError, mismatch
from ..primitive.parallel_tiles import PARALLEL_TILES
from .axis_map import Expr


def lower_parallel_tiles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Fuse every annotated nest into one parallel loop over the product of its extents."""
    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.For, _fuse)]))


def _fuse(loop: tirx.For) -> tirx.For:
    depth = int((loop.annotations or {}).get(PARALLEL_TILES, 0))
    if not depth:
        return loop
    nest = [loop]
    while len(nest) < depth:
        body = nest[-1].body
        if not isinstance(body, tirx.For):
            what = f"parallel_tiles: nest at loop {loop.loop_var.name}"
            raise ScheduleError(mismatch(what, f"{depth} loops", len(nest)))
        nest.append(body)
    zero, one = tirx.const(0, "int32"), tirx.const(1, "int32")
    values: dict[ir.Var, Expr] = {part.loop_var: zero for part in nest}
    real = [part for part in nest if not _is_one(part.extent)]
    fused = tirx.Var("_".join(part.loop_var.name for part in nest), "int32")
    total, rest = one, fused
    for part in reversed(real):
        # An empty nest never runs its body; the maximum keeps the division defined all the same.
        extent = tirx.max(part.extent, one)
        last = part.same_as(real[0])
        values[part.loop_var] = rest if last else tirx.floormod(rest, extent)
        rest = rest if last else tirx.floordiv(rest, extent)
        total = total * part.extent
    body = tvm_ffi.structural_map(nest[-1].body, [(ir.Var, lambda v: values.get(v, v))])
    return tirx.For(fused, zero, total, tirx.ForKind.PARALLEL, body)


def _is_one(extent: Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1
