"""Lowers ``pit.early_exit``: a CTA returns before it does anything for positions that are dead."""

from __future__ import annotations

import tvm_ffi
from tvm import tirx

from ..primitive.early_exit import EARLY_EXIT
from .lower_dynamic_extent import live_extent
from .rebuild import rebuilt_loop


def lower_early_exit(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put a return in front of every annotated loop's body, for CTAs behind the live positions.

    Raises
    ------
    ScheduleError
        No guard under an annotated loop bounds it, or two disagree.
    """
    marked: list[tirx.For] = []

    def visit(loop: tirx.For) -> None:
        if EARLY_EXIT in (loop.annotations or {}):
            marked.append(loop)

    tvm_ffi.structural_walk(func.body, (tirx.For, visit))
    # Errors inside a callback of structural_map lose their type: extents are worked out before.
    extents = {loop.loop_var: live_extent(loop) for loop in marked}
    if not marked:
        return func

    def lowered(loop: tirx.For) -> tirx.For:
        extent = extents.get(loop.loop_var)
        if extent is None:
            return loop
        leave = tirx.Evaluate(tirx.op.thread_return())
        guard = tirx.IfThenElse(extent <= loop.loop_var, leave, None)
        notes = {k: v for k, v in loop.annotations.items() if k != EARLY_EXIT}
        return rebuilt_loop(loop, body=tirx.SeqStmt([guard, loop.body]), annotations=notes)

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.For, lowered)]))
