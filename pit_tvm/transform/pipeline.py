"""The flat list of passes that a scheduled function goes through before ``tvm.compile``."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir.instrument import pass_instrument

from .fold_waits import fold_waits
from .lower_atomic_adds import lower_atomic_adds
from .lower_dynamic_extent import lower_dynamic_extent
from .lower_early_exit import lower_early_exit
from .lower_even_tiles import lower_even_tiles
from .lower_parallel_tiles import lower_parallel_tiles
from .lower_prefetch_rows import lower_prefetch_rows
from .lower_prefetch_stores import lower_prefetch_stores
from .lower_warp_mma import lower_warp_mma
from .overlap_copies import overlap_copies
from .preload_fragments import preload_fragments
from .settle_strides import settle_strides

FuncPass = Callable[[tirx.PrimFunc], tirx.PrimFunc]


def _each(mod: tvm.IRModule, transform: FuncPass) -> tvm.IRModule:
    """``transform`` on every function, outside TVM's passes, which would hide our errors' types."""
    return tvm.IRModule({var: transform(func) for var, func in mod.functions_items()})


def unchecked() -> tvm.transform.PassContext:
    """The current context, but functions do not check their arguments: those checks are a fifth of
    LLVM's time. Callers must, or an argument that is wrong ends the process."""
    config = dict(tvm.transform.PassContext.current().config) | {"tirx.disable_assert": True}
    return tvm.transform.PassContext(config=config)


def as_allocated() -> tvm.transform.PassContext:
    """The current context, but scratch stays as large as it is. `lower` has made it so; behind
    loops that are fused TVM takes long to find the size, and names their variables outside."""
    config = tvm.transform.PassContext.current().config
    return tvm.transform.PassContext(config=config, instruments=[_AsAllocated()])


@pass_instrument
class _AsAllocated:
    def should_run(self, _: tvm.IRModule, info: tvm.transform.PassInfo) -> bool:
        """Whether a pass is no other."""
        return bool(info.name != "s_tir.CompactBufferAllocation")


def lower(mod: tvm.IRModule, dump: Callable[[str, str], None] | None = None) -> tvm.IRModule:
    """Lower ``mod`` until no pit annotation is left; the rest is TVM's default pipeline.

    The first passes are TVM's own, in its order: our loops become dynamic only once buffers have
    their final size. ``dump(pass name, script)`` sees the module after every pass.
    """
    passes: list[Any] = [
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.LiftThreadBinding(),
        s_tir.transform.CompactBufferAllocation(),
        lower_warp_mma,
        lower_even_tiles,
        lower_dynamic_extent,
        lower_early_exit,
        lower_atomic_adds,
        lower_prefetch_rows,
        lower_prefetch_stores,
        lower_parallel_tiles,
        s_tir.transform.UnifyThreadBinding(),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.StmtSimplify(),
        s_tir.transform.InjectSoftwarePipeline(),
        fold_waits,
        overlap_copies,
        preload_fragments,
        settle_strides,
        s_tir.transform.LowerOpaqueBlock(),
        s_tir.transform.ConvertSSA(),
    ]
    for step in passes:
        ours = isinstance(step, FunctionType)
        mod = _each(mod, step) if ours else step(mod)
        if dump is not None:
            dump(step.__name__ if ours else step.info.name, mod.script())
    return mod
