"""Asynchronous copies of a software pipeline, in step with the tensor cores that they run beside.

Runs once TVM has put copies of later tiles in front of the sums of one, and waits for earlier
copies between the two.
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx import BufferStore

from .lower_prefetch_rows import replaced
from .lower_warp_mma import STEP, STEPS

_COMMIT, WAIT = "async_commit_queue_scope", "async_wait_queue_scope"


def overlap_copies(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Wait before the copies that an iteration starts, and spread those over its `warp_mma` steps.

    One barrier does for an iteration then: behind its wait all threads are done with what its
    copies overwrite. Spread, copies do not hold up the loads of fragments, which go through the
    same queue.
    """
    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.SeqStmt, _reordered)]))


def _reordered(seq: tirx.SeqStmt) -> tirx.Stmt:
    """An iteration that starts copies and then waits for earlier ones, the wait first.

    In front of the copies, one group less may be in flight. Copies in front of an iteration that
    starts its own are those of the first tile: they stay.
    """
    parts = list(seq.seq)
    groups, waits, steps = ([_under(part, key) for part in parts] for key in (_COMMIT, WAIT, STEPS))
    for at, (group, wait, step) in enumerate(zip(groups, waits[1:], steps[1:], strict=False)):
        if group is not None and wait is not None and step is not None and not _commits(step):
            count = wait.body
            spread = _spread(step, list(_rounds(parts[at])), group)
            fewer = tirx.AttrStmt(count.node, count.attr_key, count.value - 1, spread)
            own = tirx.AttrStmt(wait.node, WAIT, wait.value, fewer)
            rest = [*parts[:at], own, *parts[at + 2 :]]
            return own if len(rest) == 1 else tirx.SeqStmt(rest)
    return seq


def _under(stmt: tirx.Stmt, key: str) -> tirx.AttrStmt | None:
    """The attribute ``key`` that holds all of ``stmt``, but for blocks around it; None without."""
    while isinstance(stmt, tirx.AttrStmt | s_tir.SBlockRealize):
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == key:
            return stmt
        stmt = stmt.body if isinstance(stmt, tirx.AttrStmt) else stmt.block.body
    return None


def _commits(stmt: tirx.Stmt) -> bool:
    """Whether copies are started in ``stmt``."""
    found: list[bool] = []

    def visit(attr: tirx.AttrStmt) -> None:
        found.append(attr.attr_key == _COMMIT)

    tvm_ffi.structural_walk(stmt, (tirx.AttrStmt, visit))
    return any(found)


def _spread(steps: tirx.AttrStmt, copies: list[tirx.Stmt], group: tirx.AttrStmt) -> tirx.Stmt:
    """``steps`` with a share of ``copies`` in front of each one's sums, committed with the last:
    but the last step's, if there are others."""
    number = max(int(steps.value) - 1, 1)

    def insert(attr: tirx.AttrStmt) -> tirx.Stmt:
        if attr.attr_key != STEP:
            return attr
        step = int(attr.value)
        if step == number:
            return attr
        first, end = (len(copies) * at // number for at in (step, step + 1))
        share = copies[first:end]
        if step + 1 == number:
            last = tirx.SeqStmt([*share, tirx.Evaluate(tirx.const(0, "int32"))])
            share = [tirx.AttrStmt(group.node, _COMMIT, group.value, last)]
        return tirx.SeqStmt([*share, attr])

    body = tvm_ffi.structural_map(steps.body, [(tirx.AttrStmt, insert)])
    return tirx.AttrStmt(steps.node, STEPS, steps.value, body)


def _rounds(stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
    """The copies of ``stmt``, one round of all threads each."""
    if isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            yield from _rounds(part)
    elif isinstance(stmt, tirx.AttrStmt):
        for part in _rounds(stmt.body):
            kept = stmt.attr_key != _COMMIT
            yield tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, part) if kept else part
    elif isinstance(stmt, s_tir.SBlockRealize) and not isinstance(stmt.block.body, BufferStore):
        for part in _rounds(stmt.block.body):
            yield tirx.IfThenElse(stmt.predicate, part, None)
    elif isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.SERIAL:
        for at in range(int(stmt.extent)):
            value = tirx.const(at, str(stmt.loop_var.ty.dtype))
            yield from _rounds(replaced(stmt.body, {stmt.loop_var: value}))
    else:
        yield stmt
