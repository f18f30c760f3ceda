"""Lowers ``pit.dynamic_extent``: loops end with the live positions, and the guards they imply go.

Runs on opaque blocks whose buffers are already compacted, so that data-dependent extents reach
loops only and never an allocation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import prim

from ..analysis.expr import is_one
from ..errors import ScheduleError, mismatch
from ..primitive.checks import SPECULATIVE, guards, is_choice, split_and, uses_any
from ..primitive.dynamic_extent import DYNAMIC_EXTENT
from .axis_map import Expr
from .rebuild import loops_in, rebuilt, unmarked


@dataclass(frozen=True)
class _Bound:
    """``base + sum(coefficient * var) < limit``, linear in the loop variables."""

    coefficients: dict[ir.Var, int]
    base: Expr
    limit: Expr


def lower_dynamic_extent(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give every annotated loop the extent that its live positions need.

    A guard ``position < count`` tells it: with the inner loops at 0, the loop runs while its first
    position is live. Guards that the new extents imply are removed; so are the outer guards of
    blocks marked speculative, whose dead positions nobody reads.

    Raises
    ------
    ScheduleError
        No guard under an annotated loop bounds it, or two disagree.
    """
    body = _without_unit_variables(func.body)
    annotated = loops_in(body, DYNAMIC_EXTENT)
    if not annotated:
        return func
    threads = [loop for loop in loops_in(body) if loop.kind == tirx.ForKind.THREAD_BINDING]
    threads = [loop for loop in threads if loop.thread_binding.thread_tag.startswith("threadIdx")]
    extents = {loop.loop_var: live_extent(loop, threads) for loop in annotated}
    body = _remove_guards(body, extents)
    return func.with_body(
        tvm_ffi.structural_map(body, [(tirx.For, lambda loop: _resize(loop, extents))])
    )


def _without_unit_variables(body: tirx.Stmt) -> tirx.Stmt:
    """``body`` with 0 for the variables of loops that run once: blocks that share such a loop may
    spell the same bound with and without it."""

    def replace(loop: tirx.For) -> tirx.For:
        if not is_one(loop.extent) or DYNAMIC_EXTENT in (loop.annotations or {}):
            return loop
        # Only its own variable, and only where it is used: a loop keeps the one that it defines.
        var, zero = loop.loop_var, tirx.const(0, str(loop.loop_var.ty.dtype))
        inner = tvm_ffi.structural_map(
            loop.body, [(ir.Var, lambda v: zero if v.same_as(var) else v)]
        )
        return rebuilt(loop, body=inner)

    return tvm_ffi.structural_map(body, [(tirx.For, replace)])


def _resize(loop: tirx.For, extents: dict[ir.Var, Expr]) -> tirx.For:
    if loop.loop_var not in extents:
        return loop
    notes = unmarked(loop, DYNAMIC_EXTENT)
    extent, stages = extents[loop.loop_var], loop.annotations.get("software_pipeline_stage")
    if stages is None:
        return rebuilt(loop, extent=extent, annotations=notes)
    ahead = int(max(stages))
    more = tirx.Var("more", "int32")
    bound = tirx.Bind(more, tirx.max(extent - ahead, 0))
    return tirx.SeqStmt([bound, rebuilt(loop, extent=tirx.max(more, 0) + ahead, annotations=notes)])


def live_extent(loop: tirx.For, threads: Sequence[tirx.For] = ()) -> Expr:
    """Iterations of ``loop`` up to the last that has a live position below it.

    ``threads``: loops around it whose iterations run together, so that it must end for all of them
    at once.

    Raises
    ------
    ScheduleError
        No guard below bounds it, or two disagree.
    """
    inner = [*threads, *loops_in(loop.body)]
    found: list[Expr] = []
    for condition in guards(loop.body):
        extent = _live(condition, loop, inner)
        if extent is not None and not any(tvm_ffi.structural_equal(extent, e) for e in found):
            found.append(extent)
    if len(found) != 1:
        raise ScheduleError(
            mismatch(
                f"dynamic extent of loop {loop.loop_var.name}",
                "one bound from the guards below it",
                [str(f) for f in found] or "none",
            )
        )
    return found[0]


def _live(condition: Expr, loop: tirx.For, inner: Sequence[tirx.For]) -> Expr | None:
    """Extent of ``loop`` from 0 to the last position that ``condition`` lets live, ``inner`` being
    the loops inside it; None if the condition bounds no such range."""
    bound = _bound(condition, loop, inner)
    if bound is None or uses_any(bound.limit, {loop.loop_var, *(f.loop_var for f in inner)}):
        return None
    stride = bound.coefficients.get(loop.loop_var)
    if stride is None:
        return None
    live = sym.Analyzer().simplify(
        tirx.floordiv(bound.limit - bound.base + (stride - 1), tirx.const(stride, "int32"))
    )
    return tirx.max(tirx.min(live, loop.extent), tirx.const(0, "int32"))


def _bound(condition: Expr, loop: tirx.For, inner: Sequence[tirx.For]) -> _Bound | None:
    """What ``condition`` says, linear in all loops, or in ``loop`` where the others start."""
    if not isinstance(condition, prim.LT):
        return None
    variables = [loop.loop_var, *(f.loop_var for f in inner)]
    return _linear(condition.a, condition.b, variables) or _at_start(condition, loop, inner)


def _linear(position: Expr, limit: Expr, variables: list[ir.Var]) -> _Bound | None:
    found = sym.detect_linear_equation(position, variables)
    if len(found) == 0 or not all(isinstance(c, tirx.IntImm) for c in found[:-1]):
        return None
    used = {v: int(c) for v, c in zip(variables, found[:-1], strict=True) if int(c)}
    if any(c < 0 for c in used.values()):  # the first position would not be the lowest
        return None
    return _Bound(used, found[-1], limit)


def _at_start(condition: Expr, loop: tirx.For, inner: Sequence[tirx.For]) -> _Bound | None:
    """The bound where all ``inner`` loops are at 0, if positions are nowhere lower: threads that
    share a copy divide what was one loop, which is not linear."""
    zeros = {f.loop_var: tirx.const(0, str(f.loop_var.ty.dtype)) for f in inner}
    first = tvm_ffi.structural_map(condition.a, [(ir.Var, lambda v: zeros.get(v, v))])
    known = sym.Analyzer()
    for f in inner:
        known.bind(f.loop_var, ir.Range(f.min, f.extent))
    further = known.simplify(condition.a - first)
    if uses_any(further, {loop.loop_var}) or known.const_int_bound(further).min_value < 0:
        return None
    return _linear(first, condition.b, [loop.loop_var])


# --------------------------------------------------------------------------------------------
# Guards that the extents imply


def _remove_guards(body: tirx.Stmt, extents: dict[ir.Var, Expr]) -> tirx.Stmt:
    """``body`` without the conditions whose innermost loop ends with the live positions."""

    def visit(stmt: tirx.Stmt, loops: list[tirx.For]) -> tirx.Stmt:
        def on_loop(loop: tirx.For, _: object) -> tirx.Stmt:
            return rebuilt(loop, body=visit(loop.body, [*loops, loop]))

        def on_if(cond: tirx.IfThenElse, _: object) -> tirx.Stmt:
            left = [c for c in split_and(cond.condition) if not _implied(c, loops, extents)]
            inner = visit(cond.then_case, loops)
            if cond.else_case is not None or not left:
                return inner if cond.else_case is None else cond
            return tirx.IfThenElse(_conjunction(left), inner, None)

        def on_choice(call: ir.Call, mutator: object) -> Expr:
            if not is_choice(call):
                return mutator.default_mutate(call)  # type: ignore[attr-defined]
            left = [c for c in split_and(call.args[0]) if not _implied(c, loops, extents)]
            value = visit(call.args[1], loops)
            return tirx.if_then_else(_conjunction(left), value, call.args[2]) if left else value

        return tvm_ffi.structural_mutate(
            stmt,
            [
                (tirx.For, on_loop),
                (tirx.IfThenElse, on_if),
                (ir.Call, on_choice),
            ],
        )

    return visit(_drop_speculative(body), [])


def _drop_speculative(body: tirx.Stmt) -> tirx.Stmt:
    def drop(block: s_tir.SBlock) -> s_tir.SBlock:
        if SPECULATIVE not in (block.annotations or {}):
            return block
        inner = block.body
        if isinstance(inner, tirx.IfThenElse):
            inner = inner.then_case
        return rebuilt(block, body=inner, annotations=unmarked(block, SPECULATIVE))

    return tvm_ffi.structural_map(body, [(s_tir.SBlock, drop)])


def _implied(condition: Expr, loops: list[tirx.For], extents: dict[ir.Var, Expr]) -> bool:
    """Whether the extent of the innermost loop that ``condition`` uses ends where it does."""
    used = [i for i, loop in enumerate(loops) if uses_any(condition, {loop.loop_var})]
    if not used or loops[used[-1]].loop_var not in extents:
        return False
    loop = loops[used[-1]]
    live = _live(condition, loop, loops[used[-1] + 1 :])
    return live is not None and tvm_ffi.structural_equal(live, extents[loop.loop_var])


def _conjunction(conditions: list[Expr]) -> Expr:
    out = conditions[0]
    for condition in conditions[1:]:
        out = tirx.And(out, condition)
    return out
