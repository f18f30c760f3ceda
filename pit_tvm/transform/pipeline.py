"""The flat list of passes that a scheduled function goes through before ``tvm.compile``."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import s_tir, tirx

from .lower_dynamic_extent import lower_dynamic_extent
from .lower_parallel_tiles import lower_parallel_tiles

FuncPass = Callable[[tirx.PrimFunc], tirx.PrimFunc]


def _each(transform: FuncPass) -> tvm.transform.Pass:
    @tirx.transform.prim_func_pass(opt_level=0, name=transform.__name__)
    def run(
        func: tirx.PrimFunc, _mod: tvm.IRModule, _ctx: tvm.transform.PassContext
    ) -> tirx.PrimFunc:
        return transform(func)

    return run


def lower(mod: tvm.IRModule, dump: Callable[[str, str], None] | None = None) -> tvm.IRModule:
    """Lower ``mod`` until no pit annotation is left; the rest is TVM's default pipeline.

    The first passes are TVM's own, in its order: our loops become dynamic only once buffers have
    their final size. ``dump(pass name, script)`` sees the module after every pass.
    """
    passes = [
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.CompactBufferAllocation(),
        _each(lower_dynamic_extent),
        _each(lower_parallel_tiles),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.StmtSimplify(),
        s_tir.transform.LowerOpaqueBlock(),
    ]
    for step in passes:
        mod = step(mod)
        if dump is not None:
            dump(step.info.name, mod.script())
    return mod
