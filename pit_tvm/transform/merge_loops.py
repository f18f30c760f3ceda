"""Stages that follow each other in one loop nest, wherever each reads no more than its own step.

TE makes a loop nest of every stage, and so all of an intermediate before any of it is read. Merged
nests keep it in cache, or in a register, where LLVM rounds a product and a sum once. That is no
matter unless a result jumps: such functions stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import TensorLoad, prim

from ..analysis.expr import is_one, is_zero, same, uses
from .axis_map import Expr
from .rebuild import rebuilt

_STEPS = tuple(f"tirx.{name}" for name in ("floor", "ceil", "round", "nearbyint", "trunc"))


def merge_loops(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """``func`` with its stages' loops merged, outer ones first, as deep as that is exact.

    Loops of two stages merge if they have the same extent, and both stages touch a buffer that one
    of them writes only where an index of one dimension is the loop's own variable. Functions
    that compare real numbers, or make whole ones of them, behind products and sums are not changed.
    """
    root = func.body
    if not isinstance(root, s_tir.SBlockRealize) or not isinstance(root.block.body, tirx.SeqStmt):
        return func
    stages = list(root.block.body.seq)
    if _jumps(stages):
        return func
    body = _merged([_stage(stmt) for stmt in stages])
    block = rebuilt(root.block, body=body)
    return func.with_body(s_tir.SBlockRealize(root.iter_values, root.predicate, block))


def _jumps(stages: Sequence[tirx.Stmt]) -> bool:
    """Whether stages have a step behind a product and a sum of real numbers, which may lie on its
    other side if they are rounded once."""
    steps = [number for number, stage in enumerate(stages) if _has_step(stage)]
    before = stages[: steps[-1] + 1] if steps else ()
    kinds: set[type] = set()
    for node in (prim.Mul, prim.Add, prim.Sub):
        for stage in before:
            tvm_ffi.structural_walk(
                stage, (node, lambda n: kinds.add(type(n)) if _is_real(n) else None)
            )
    return prim.Mul in kinds and len(kinds) > 1


def _has_step(stage: tirx.Stmt) -> bool:
    """Whether a stage makes integers or truth values of real numbers, or rounds to whole ones."""
    found: list[bool] = []

    def on_store(store: tirx.BufferStore) -> None:
        loads: list[TensorLoad] = []
        tvm_ffi.structural_walk(store.value, (TensorLoad, loads.append))
        found.append(not _is_real(store.value) and any(map(_is_real, loads)))

    def on_call(call: ir.Call) -> None:
        found.append(getattr(call.op, "name", "") in _STEPS)

    def on_cast(cast: prim.Cast) -> None:
        found.append(_is_real(cast.value) and not _is_real(cast))

    for node, visit in ((tirx.BufferStore, on_store), (ir.Call, on_call), (prim.Cast, on_cast)):
        tvm_ffi.structural_walk(stage, (node, visit))
    return any(found)


def _is_real(expr: Expr) -> bool:
    return "float" in str(expr.ty.dtype)


@dataclass(frozen=True, eq=False)
class _Stage:
    """A perfect nest: ``loops`` around ``body``. ``vars``: the block's variables of loops that it
    does not sum up over. ``block`` is None for anything else, which stays as it is."""

    body: tirx.Stmt
    loops: tuple[tirx.For, ...] = ()
    block: s_tir.SBlock | None = None
    vars: tuple[tuple[tirx.For, ir.Var], ...] = ()

    def mergeable(self) -> list[tuple[tirx.For, ir.Var]]:
        """Loops that may merge now, with the block's variables. The last one, which is a vector, is
        not moved outside of others, and one of one step outside of none."""
        steps = [loop for loop in self.loops if not is_one(loop.extent)]
        outer = [*self.loops[:1], *steps[:-1]]
        return [(each, var) for each, var in self.vars if any(map(each.same_as, outer))]

    def under(self, loop: tirx.For, var: ir.Var) -> _Stage:
        """What is left of the stage under a merged loop that takes the place of ``loop``."""
        old = loop.loop_var
        body = tvm_ffi.structural_map(self.body, [(ir.Var, lambda v: var if v.same_as(old) else v)])
        left = tuple(each for each in self.loops if not each.same_as(loop))
        pairs = tuple(pair for pair in self.vars if not pair[0].same_as(loop))
        return replace(self, body=body, loops=left, vars=pairs)

    def nest(self) -> tirx.Stmt:
        """The stage as it is."""
        body = self.body
        for loop in reversed(self.loops):
            body = rebuilt(loop, body=body)
        return body


_Run = list[tuple[_Stage, tirx.For, ir.Var]]  # stages, each with its loop that merges


def _merged(stages: Sequence[_Stage]) -> tirx.Stmt:
    """The stages, one after the other, with loops merged."""
    left, out = list(stages), []
    while left:
        run = _longest_run(left)
        if len(run) < 2:
            out.append(left.pop(0).nest())
            continue
        _, first, _ = run[0]
        var = tirx.Var(first.loop_var.name, first.loop_var.ty)
        inner = _merged([stage.under(loop, var) for stage, loop, _ in run])
        out.append(rebuilt(first, loop_var=var, body=inner))
        del left[: len(run)]
    return out[0] if len(out) == 1 else tirx.SeqStmt(out)


def _longest_run(stages: Sequence[_Stage]) -> _Run:
    """The first stages that a loop of the first one can be merged over."""
    best: _Run = []
    for loop, var in stages[0].mergeable():
        run: _Run = [(stages[0], loop, var)]
        while len(run) < len(stages) and (longer := _with(run, stages[len(run)])):
            run = longer
        if len(run) > len(best) and _is_own(run):
            best = run
    return best


def _with(run: _Run, stage: _Stage) -> _Run | None:
    """The run with one stage more; None if none of its loops merges."""
    extent = run[0][1].extent
    longer: list[_Run] = [[*run, (stage, *pair)] for pair in stage.mergeable()]
    fitting = (more for more in longer if same(more[-1][1].extent, extent) and _is_own(more))
    return next(fitting, None)


def _is_own(run: _Run) -> bool:
    """Whether a step of the merged loop touches nothing that another step writes."""
    touched = [
        (region, var, writes)
        for stage, _, var in run
        if stage.block is not None
        for regions, writes in ((stage.block.writes, True), (stage.block.reads, False))
        for region in regions
    ]
    for written, _, _ in (each for each in touched if each[2]):
        own = [(r, v) for r, v, _ in touched if r.source.same_as(written.source)]
        if not any(all(_is_at(r, v, d) for r, v in own) for d in range(len(written.region))):
            return False
    return True


def _is_at(region: Any, var: ir.Var, dim: int) -> bool:
    place = region.region[dim]
    return bool(place.min.same_as(var)) and is_one(place.extent)


def _stage(stmt: tirx.Stmt) -> _Stage:
    """A perfect nest around one block, each of whose loops is an iterator of it; or a statement."""
    loops: list[tirx.For] = []
    body = stmt
    while isinstance(body, tirx.For):
        loops.append(body)
        body = body.body
    if not isinstance(body, s_tir.SBlockRealize) or not all(map(_is_plain, loops)):
        return _Stage(stmt)
    block, values = body.block, list(body.iter_values)
    if block.alloc_buffers or block.match_buffers or not is_one(body.predicate):
        return _Stage(stmt)
    if any(uses(e, o.loop_var) for i in loops for e in (i.min, i.extent) for o in loops):
        return _Stage(stmt)
    pairs = [(loop, _iterators(loop.loop_var, values, block)) for loop in loops]
    if any(len(found) != 1 for _, found in pairs):
        return _Stage(stmt)
    free = [
        (loop, iv.var)
        for loop, (iv,) in pairs
        if iv.iter_type == tirx.IterVar.DataPar and not sums_rows(block, iv.var)
    ]
    return _Stage(body, tuple(loops), block, tuple(free))


def sums_rows(block: s_tir.SBlock, var: ir.Var) -> bool:
    """Whether a reduction's spatial iterator goes along rows of all that is read and written, or
    stays where it is: then a row of sums is a vector, while sums one after the other are not."""
    if all(iv.iter_type == tirx.IterVar.DataPar for iv in block.iter_vars):
        return False
    for region in (*block.reads, *block.writes):
        *outer, last = [r.min for r in region.region] or [var]
        if any(uses(e, var) for e in outer) or (uses(last, var) and not last.same_as(var)):
            return False
    return True


def _is_plain(loop: tirx.For) -> bool:
    return loop.kind == tirx.ForKind.SERIAL and not loop.annotations and is_zero(loop.min)


def _iterators(var: ir.Var, values: Sequence[Expr], block: s_tir.SBlock) -> list[tirx.IterVar]:
    """The block's iterators whose values use a loop's variable; those that are no bare variable
    twice."""
    found = [(iv, v) for iv, v in zip(block.iter_vars, values, strict=True) if uses(v, var)]
    return [iv for iv, value in found for _ in range(1 if value.same_as(var) else 2)]
