"""Preconditions that the primitives share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import prim

from ..analysis.expr import is_one
from ..errors import ScheduleError, mismatch

SREAD, SWRITE, SPECULATIVE = "pit.sread", "pit.swrite", "pit.speculative"


def block_of(sch: s_tir.Schedule, block: Any, primitive: str, note: str | None = None) -> Any:
    """The block behind ``block``; ScheduleError if it is none of the schedule's, or lacks the
    annotation ``note``."""
    found = _behind(sch, block, primitive, "block", "get_sblock")
    if not isinstance(found, s_tir.SBlock):
        raise ScheduleError(mismatch(f"{primitive}: block", "a block", type(found).__name__))
    if note is not None and note not in (found.annotations or {}):
        raise ScheduleError(
            mismatch(
                f"{primitive}: block {found.name_hint}",
                f"annotation {note}",
                sorted(found.annotations or {}) or "none",
                "call it on a function from insert_sread_swrite",
            )
        )
    return found


def loop_of(sch: s_tir.Schedule, loop: Any, primitive: str) -> tirx.For:
    """The loop behind ``loop``; ScheduleError if it is something else."""
    found = _behind(sch, loop, primitive, "loop", "get_loops")
    if not isinstance(found, tirx.For):
        raise ScheduleError(mismatch(f"{primitive}: loop", "a loop", type(found).__name__))
    return found


def _behind(sch: s_tir.Schedule, found: Any, primitive: str, what: str, how: str) -> Any:
    """What stands behind a block or a loop; ScheduleError if nothing of the schedule does."""
    try:
        return sch.get(found)
    except (IndexError, TypeError, ValueError) as error:  # another's, no such thing, gone since
        got = f"{type(found).__name__}, which is none (any more)"
        advice = f"get it by {how}"
        text = mismatch(f"{primitive}: {what}", f"a {what} of this schedule", got, advice)
        raise ScheduleError(text) from error


@contextmanager
def moving(what: str, loop: tirx.For) -> Iterator[None]:
    """ScheduleError instead of TVM's where a block cannot be computed at ``loop``."""
    try:
        yield
    except s_tir.ScheduleError as error:
        why = str(error).strip().splitlines()[-1].removeprefix("Error message: ")
        expected = f"a block that can be computed at loop {loop.loop_var.name}"
        raise ScheduleError(mismatch(what, expected, why)) from error


def serial_loop(sch: s_tir.Schedule, loop: Any, primitive: str) -> tirx.For:
    """The serial loop behind ``loop``; ScheduleError if it is something else."""
    found = loop_of(sch, loop, primitive)
    check_serial(found, primitive)
    return found


def check_serial(loop: tirx.For, primitive: str) -> None:
    """Refuse a loop of another kind (ScheduleError)."""
    if loop.kind != tirx.ForKind.SERIAL:
        kind = tirx.ForKind(loop.kind).name.lower()
        raise ScheduleError(mismatch(f"{primitive}: loop {loop.loop_var.name}", "serial", kind))


def loop_depth(sch: s_tir.Schedule, block: Any, loop: Any, what: str) -> int:
    """Number of loops down to ``loop`` above ``block``; ScheduleError if it is not one of them."""
    target = sch.get_sref(loop)
    for depth, above in enumerate(sch.get_loops(block), start=1):
        if sch.get_sref(above).same_as(target):
            return depth
    name = sch.get(loop).loop_var.name
    raise ScheduleError(mismatch(what, "a loop above it", f"loop {name}, which is not"))


def check_guarded(loop: tirx.For, primitive: str) -> None:
    """Refuse a loop that is not `guarded` (ScheduleError)."""
    if not guarded(loop):
        what = f"{primitive}: loop {loop.loop_var.name}"
        expected = "a block below it with a guard on this loop"
        raise ScheduleError(mismatch(what, expected, "no such block"))


def guarded(loop: tirx.For) -> bool:
    """Whether a block below ``loop`` binds it to an iterator of a position that a guard tests.

    All that the block does must be under the guard, and the guard's limit must be known where the
    loop starts: it uses no loop from ``loop`` on. A loop of one iteration has nothing to end
    earlier.
    """
    if is_one(loop.extent):
        return False
    hits: list[bool] = []
    own = {loop.loop_var}
    inside = {loop.loop_var}
    tvm_ffi.structural_walk(loop.body, (tirx.For, lambda inner: inside.add(inner.loop_var)))

    def visit(realize: s_tir.SBlockRealize) -> None:
        pairs = list(zip(realize.block.iter_vars, realize.iter_values, strict=True))
        bound = {iv.var for iv, value in pairs if uses_any(value, own)}
        late = {iv.var for iv, value in pairs if uses_any(value, inside)}
        for c in _guards_of_all(realize.block):
            hits.append(isinstance(c, prim.LT) and uses_any(c.a, bound) and not uses_any(c.b, late))

    tvm_ffi.structural_walk(loop.body, (s_tir.SBlockRealize, visit))
    return any(hits)


def initialised_in(loop: tirx.For) -> str:
    """Name of a block below ``loop`` that is initialised in its first iteration only; "" if none
    is."""
    found = (str(block.name_hint) for block in reducing_over(loop) if block.init is not None)
    return next(found, "")


def reducing_over(loop: tirx.For) -> list[s_tir.SBlock]:
    """The blocks below ``loop`` whose results are complete only after its last iteration."""
    found: list[s_tir.SBlock] = []
    if is_one(loop.extent):
        return found

    def visit(realize: s_tir.SBlockRealize) -> None:
        pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
        summed = [value for iv, value in pairs if iv.iter_type == tirx.IterVar.CommReduce]
        if any(uses_any(value, {loop.loop_var}) for value in summed):
            found.append(realize.block)

    tvm_ffi.structural_walk(loop.body, (s_tir.SBlockRealize, visit))
    return found


def bound_iterator(loop: tirx.For) -> str:
    """Name, without ``v_``, of the block iterator that ``loop`` alone binds; "" if none."""
    names: list[str] = []

    def visit(realize: s_tir.SBlockRealize) -> None:
        for iv, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            if value.same_as(loop.loop_var):
                names.append(iterator_name(iv))

    tvm_ffi.structural_walk(loop.body, (s_tir.SBlockRealize, visit))
    return names[0] if len(names) == 1 else ""


def iterator_name(iterator: tirx.IterVar) -> str:
    """The name of a block's iterator without ``v_``."""
    return str(iterator.var.name).removeprefix("v_")


def is_choice(call: ir.Expr) -> bool:
    """Whether it is a call of ``if_then_else``, which evaluates only the side that it takes."""
    return getattr(getattr(call, "op", None), "name", "") == "prim.if_then_else"


def guards(stmt: tirx.Stmt) -> list[Any]:
    """Conditions, taken apart, under which positions are live in the blocks of ``stmt``.

    Those of ``if`` statements without an alternative; and of the choice that a gathered copy or a
    speculative block stores, whose other value nobody reads. A choice in any other value is part
    of that value.
    """
    out: list[Any] = []

    def branch(stmt: tirx.IfThenElse) -> None:
        if stmt.else_case is None:
            out.extend(split_and(stmt.condition))

    walk = [(tirx.IfThenElse, branch), (s_tir.SBlock, lambda b: out.extend(_stored_choice(b)))]
    tvm_ffi.structural_walk(stmt, walk)
    return out


def _guards_of_all(block: s_tir.SBlock) -> list[Any]:
    """The conditions of `guards` that hold wherever ``block`` does anything."""
    out, body = _stored_choice(block), block.body
    while isinstance(body, tirx.IfThenElse) and body.else_case is None:
        out += split_and(body.condition)
        body = body.then_case
    return out


def _stored_choice(block: s_tir.SBlock) -> list[Any]:
    marked = {SREAD, SPECULATIVE} & set(block.annotations or {})
    if not marked or not isinstance(block.body, tirx.BufferStore):
        return []
    value = block.body.value
    return split_and(value.args[0]) if isinstance(value, ir.Call) and is_choice(value) else []


def split_and(condition: Any) -> list[Any]:
    """The conditions whose conjunction ``condition`` is."""
    if isinstance(condition, prim.And):
        return [*split_and(condition.a), *split_and(condition.b)]
    return [condition]


def uses_any(expr: Any, variables: set[ir.Var]) -> bool:
    """Whether ``expr`` uses one of ``variables``."""
    found: list[ir.Var] = []
    tvm_ffi.structural_walk(expr, (ir.Var, found.append))
    return any(v in variables for v in found)


def loop_names(sch: s_tir.Schedule, block: Any) -> dict[str, Any]:
    """Loops above a block by the names of their variables, outermost first."""
    return {sch.get(loop).loop_var.name: loop for loop in sch.get_loops(block)}
