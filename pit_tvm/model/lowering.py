"""From a rewritten graph to an executable: fusion, then a schedule for every function left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import ir, relax, s_tir, te, tirx

from ..schedules import generic
from ..target import TargetInfo
from ..transform.bind_names import bind_names
from ..transform.merge_loops import merge_loops
from ..transform.pipeline import as_allocated, lower, unchecked
from ..transform.spell_functions import spell_functions
from ..transform.sum_in_lanes import sum_in_lanes
from ..transform.unalign import unalign
from .added import is_scheduled
from .faults import faults_as_unsupported
from .legalize import legalize
from .rebuild import is_op, rebuild, values_of
from .wide import widen

_PIPELINE = "pit_tvm"

_STEPS = ("floor", "ceil", "round", "trunc", "sign", "floor_divide", "floor_mod", "mod")
# What these read meets in a sum, of which torch has another order.
_SUMS = ("matmul", "call_dps_packed", "call_pure_packed")


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
        if isinstance(func, tirx.PrimFunc) and not is_scheduled(func):
            with faults_as_unsupported(f"loops that can be scheduled for {var.name_hint}"):
                module.update_func(var, _scheduled(func))
    expected = f"operators that TVM can build for {target.kind}"
    # Loops are called by the graph alone, which has checked inputs and knows all shapes.
    with faults_as_unsupported(expected), unchecked():
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
    sch = s_tir.Schedule(
        merge_loops(spell_functions(unalign(func))).with_attr("global_symbol", "main")
    )
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
            (ours if is_scheduled(func) else theirs)[var] = func
        loops = lower(tvm.IRModule(theirs)).functions_items()
        with as_allocated():
            lowered = passes(tvm.IRModule({v: bind_names(sum_in_lanes(f)) for v, f in loops}))
            lowered.update(passes(lower(tvm.IRModule(ours))))
        return lowered

    return both, host, device


def stored_before_steps(module: tvm.IRModule) -> tvm.IRModule:
    """``main`` with a `MatchCast`, which nothing is fused across, of every number of bfloat16 that
    ends in an operator with steps.

    On CPUs TVM computes what is fused in float32 and rounds to bfloat16 only what leaves. Where a
    result jumps (of a comparison, a largest place, a floor) a number that is not rounded, as
    torch's is, may lie on the other side.
    """
    values = values_of(module["main"])
    stored: set[relax.Var] = set()
    for var, value in reversed(values.items()):
        if _has_steps(value) or var in stored and not is_op(value, *_SUMS):
            stored.update(relax.analysis.free_vars(value))

    def rule(builder: relax.BlockBuilder, call: relax.Call, var: relax.Var) -> relax.Expr:
        narrow = isinstance(call.ty, relax.TensorType) and str(call.ty.dtype) == "bfloat16"
        stays = narrow and var in stored
        return builder.match_cast(builder.emit(call), call.ty) if stays else call

    return rebuild(module, rule)


def _has_steps(value: relax.Expr) -> bool:
    """Whether a call gives integers or truth values, or rounded numbers."""
    types = value.ty.fields if isinstance(value.ty, relax.TupleType) else [value.ty]
    whole = any(isinstance(t, relax.TensorType) and "float" not in str(t.dtype) for t in types)
    return isinstance(value, relax.Call) and (whole or is_op(value, *_STEPS))


def copy_constants(module: tvm.IRModule) -> tvm.IRModule:
    """``main`` with a copy of each result that is a constant, lest a caller change it; for a graph
    that is lowered, because folding would make the copy a constant again."""
    return _Copies(module).result()


class _Copies:
    def __init__(self, module: tvm.IRModule) -> None:
        self.module, self.main = module, module["main"]
        self.values = values_of(self.main)
        self.builder = relax.BlockBuilder(module)
        self.bindings: list[relax.VarBinding] = []
        self.copied = False

    def result(self) -> tvm.IRModule:
        """The module, the same if no result is a constant."""
        seq = self.main.body
        body = self._own(seq.body)
        if not self.copied:
            return self.module
        blocks = [*seq.blocks, relax.BindingBlock(self.bindings)]
        main = relax.Function(
            self.main.params,
            relax.SeqExpr(blocks, body),
            self.main.ret_ty,
            self.main.is_pure,
            self.main.attrs,
        )
        made = self.builder.get()
        made[made.get_global_var("main")] = main
        return relax.transform.Normalize()(made)

    def _own(self, expr: relax.Expr) -> relax.Var:
        """A variable of what ``expr`` is, its constants copied."""
        value = expr
        while isinstance(value, relax.Var) and value in self.values:
            value = self.values[value]
        if isinstance(value, relax.Tuple):
            return self._bind(relax.Tuple([self._own(f) for f in value.fields]), value.ty)
        if not isinstance(value, ir.GenericConst):
            return expr
        self.copied = True
        copy = self.builder.add_func(_copy(value.ty), "copy_constant")
        return self._bind(relax.call_tir(copy, [value], value.ty), value.ty)

    def _bind(self, value: relax.Expr, ty: Any) -> relax.Var:
        var = relax.Var(f"result_{len(self.bindings)}", ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var


def _copy(ty: Any) -> Any:
    data = te.placeholder([int(e) for e in ty.shape.values], str(ty.dtype), "data")
    copied = te.compute(data.shape, lambda *at: data(*at), "copied")
    return te.create_prim_func([data, copied])
