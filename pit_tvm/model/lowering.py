"""From a rewritten graph to an executable: fusion, then a schedule for every function left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import ir, relax, s_tir, tirx
from tvm.ir.instrument import pass_instrument

from ..schedules import generic
from ..target import TargetInfo
from ..transform.pipeline import lower
from ..transform.unalign import unalign
from .faults import faults_as_unsupported
from .legalize import legalize
from .results import copy_constants
from .steps import stored_before_steps
from .wide import widen

# Functions that bring a schedule of their own; the others get the generic one.
SCHEDULED = "pit.scheduled"

_PIPELINE = "pit_tvm"


def build(module: tvm.IRModule, target: TargetInfo) -> Any:
    """Compile ``main`` and all that it calls for a CPU, to an executable of Relax's machine.

    TVM's passes lower and fuse the operators; each loop nest then runs on the target's threads.

    Raises
    ------
    UnsupportedModel
        TVM cannot lower, schedule or build an operator.
    """
    device = tvm.target.Target(target.tvm_target)
    # relax.build knows pipelines by name only.
    tirx.register_tir_pipeline(_PIPELINE, _pipeline)
    with faults_as_unsupported("operators that TVM can lower and fuse"):
        module = fused(stored_before_steps(module), device)
    for var, func in module.functions_items():
        if isinstance(func, tirx.PrimFunc) and SCHEDULED not in (func.attrs or {}):
            with faults_as_unsupported(f"loops that can be scheduled for {var.name_hint}"):
                module.update_func(var, _scheduled(func))
    # Loops are called by the graph alone, which has checked inputs and knows all shapes: checks of
    # their arguments are half of the code, and a third of the time to compile it.
    config = dict(tvm.transform.PassContext.current().config) | {"tirx.disable_assert": True}
    expected = f"operators that TVM can build for {target.kind}"
    with faults_as_unsupported(expected), tvm.transform.PassContext(config=config):
        return relax.build(module, device, relax_pipeline=_called, tir_pipeline=_PIPELINE)


def fused(
    module: tvm.IRModule, device: tvm.target.Target, kept: Sequence[str] = ()
) -> tvm.IRModule:
    """The graph with its operators as loops, fused, 16-bit ones in float32 inside; those that are
    ``kept`` stay as they are. Results that are constants become copies."""
    module = widen(module)
    with device:
        for step in (
            legalize(kept),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            relax.transform.DeadCodeElimination(),
        ):
            module = step(module)
    return copy_constants(module)


@tvm.transform.module_pass(opt_level=0)
def _called(module: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
    """TVM's own lowering of graphs, and no functions that nothing calls then: it leaves those of
    reshapes, which became views, a third of a model's."""
    module, called = relax.get_pipeline("default")(module), set()

    def visit(node: Any) -> None:
        if isinstance(node, ir.GlobalVar):
            called.add(node.name_hint)

    relax.analysis.post_order_visit(module["main"].body, visit)
    for var, func in module.functions_items():
        if isinstance(func, tirx.PrimFunc) and var.name_hint not in called:
            del module[var]
    return module


def _scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with its loops on threads, as annotations that pit-tvm's pipeline lowers."""
    sch = s_tir.Schedule(unalign(func).with_attr("global_symbol", "main"))
    generic.apply(sch)
    (found,) = sch.mod.functions.values()
    return found.without_attr("global_symbol")


def _pipeline() -> Any:
    """pit-tvm's lowering before TVM's."""
    passes, host, device = tirx.get_tir_pipeline("default")

    @tvm.transform.module_pass(opt_level=0)
    def both(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        ours: dict[ir.GlobalVar, Any] = {}
        theirs: dict[ir.GlobalVar, Any] = {}
        for var, func in mod.functions_items():
            (ours if SCHEDULED in (func.attrs or {}) else theirs)[var] = func
        lowered = passes(lower(tvm.IRModule(theirs)))
        config = tvm.transform.PassContext.current().config
        with tvm.transform.PassContext(config=config, instruments=[_AsAllocated()]):
            lowered.update(passes(lower(tvm.IRModule(ours))))
        return lowered

    return both, host, device


@pass_instrument
class _AsAllocated:
    """Scratch stays as large as it was asked for: TVM takes long to find that of attention is no
    smaller."""

    def should_run(self, _: tvm.IRModule, info: tvm.transform.PassInfo) -> bool:
        """Whether a pass is no other."""
        return bool(info.name != "s_tir.CompactBufferAllocation")
