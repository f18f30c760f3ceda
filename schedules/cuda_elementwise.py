"""The schedule of functions without sums on a GPU: whole vectors for each thread."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir import prim
from tvm.s_tir.dlight import ScheduleRule

THREADS = 256
BYTES = 16  # that a thread moves at once


class Vectorised(ScheduleRule):  # type: ignore[misc]  # TVM has no types
    """For functions whose results, behind what can be computed in place, are one block of spatial
    iterators with a last extent of whole vectors: gathered and scattered rows, sums of tensors.
    TVM's own rules move element by element."""

    def apply(self, func: Any, target: tvm.target.Target, tunable: bool) -> Any:
        """The schedule of ``func``; None if it is another kind of function."""
        sch = s_tir.Schedule(func)
        *before, last = sch.get_child_blocks(sch.get_sblock("root"))
        try:
            for block in before:
                sch.compute_inline(block)
        except s_tir.ScheduleError:
            return None
        block, loops = sch.get(last), sch.get_loops(last)
        if not loops or any(iv.iter_type != tirx.IterVar.DataPar for iv in block.iter_vars):
            return None
        extent, lanes = sch.get(loops[-1]).extent, _lanes(block)
        if not isinstance(extent, prim.IntImm) or int(extent) % lanes:
            return None
        outer, vector = sch.split(loops[-1], [None, lanes])
        grid, thread = sch.split(sch.fuse(*loops[:-1], outer), [None, THREADS])
        sch.bind(grid, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
        sch.vectorize(vector)
        return sch


def _lanes(block: s_tir.SBlock) -> int:
    """Elements of the widest result in one vector."""
    widest = max(tvm.DataType(str(region.source.dtype)).bits for region in block.writes)
    return max(1, 8 * BYTES // max(widest, 8))
