"""Lowers ``pit.early_exit``: a CTA returns before it does anything for positions that are dead."""

from __future__ import annotations

import tvm_ffi
from tvm import tirx

from ..primitive.early_exit import EARLY_EXIT
from .lower_dynamic_extent import live_extent
from .rebuild import loops_in, rebuilt, unmarked


def lower_early_exit(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put a return in front of every annotated loop's body, for CTAs behind the live positions.

    Raises
    ------
    ScheduleError
        No guard under an annotated loop bounds it, or two disagree.
    """
    # Errors inside a callback of structural_map lose their type: extents are worked out before.
    extents = {loop.loop_var: live_extent(loop) for loop in loops_in(func.body, EARLY_EXIT)}
    if not extents:
        return func

    def lowered(loop: tirx.For) -> tirx.For:
        extent = extents.get(loop.loop_var)
        if extent is None:
            return loop
        leave = tirx.Evaluate(tirx.op.thread_return())
        guard = tirx.IfThenElse(extent <= loop.loop_var, leave, None)
        body, notes = tirx.SeqStmt([guard, loop.body]), unmarked(loop, EARLY_EXIT)
        return rebuilt(loop, body=body, annotations=notes)

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.For, lowered)]))
