"""Lowers ``pit.prefetch_stores``: requests for the lines that an iteration stores to at its end.

Runs once extents are dynamic, so that dead rows are not fetched.
"""

from __future__ import annotations

import tvm_ffi
from tvm import DataType, s_tir, tirx
from tvm.tirx import BufferStore

from ..errors import ScheduleError, mismatch
from ..primitive.prefetch_stores import PREFETCH_STORES
from .axis_map import ceil_div
from .lower_prefetch_rows import LINE_BYTES, replaced, request
from .rebuild import loops_in, rebuilt, unmarked


def lower_prefetch_stores(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put the requests at the start of every iteration of the annotated loops.

    They are the loops of the store itself, with a request in place of every line that it writes.

    Raises
    ------
    ScheduleError
        The loop no longer holds computation and then one plain nest that stores to the buffer.
    """
    marked = loops_in(func.body, PREFETCH_STORES)
    if not marked:
        return func
    # Errors inside a callback of structural_map lose their type: requests are made before.
    requests = {loop.loop_var: _requests_of(loop) for loop in marked}

    def insert(loop: tirx.For) -> tirx.For:
        if loop.loop_var not in requests:
            return loop
        body = _prepended(loop.body, requests[loop.loop_var])
        return rebuilt(loop, body=body, annotations=unmarked(loop, PREFETCH_STORES))

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.For, insert)]))


def _requests_of(loop: tirx.For) -> tirx.Stmt:
    name = str(loop.annotations[PREFETCH_STORES])
    what = f"prefetch_stores: loop {loop.loop_var.name}"
    body = _inside(loop.body)
    parts = list(body.seq) if isinstance(body, tirx.SeqStmt) else []
    stores = [part for part in parts if _stores_to(part, name)]
    if len(stores) != 1:
        expected = f"statements of which one stores to {name}"
        raise ScheduleError(mismatch(what, expected, f"{len(stores)} of {len(parts)}"))
    return _requests(stores[0], what)


def _inside(stmt: tirx.Stmt) -> tirx.Stmt:
    """``stmt`` without the blocks around it, which are opaque by now."""
    while isinstance(stmt, s_tir.SBlockRealize):
        stmt = stmt.block.body
    return stmt


def _prepended(stmt: tirx.Stmt, first: tirx.Stmt) -> tirx.Stmt:
    if not isinstance(stmt, s_tir.SBlockRealize):
        rest = stmt.seq if isinstance(stmt, tirx.SeqStmt) else [stmt]
        return tirx.SeqStmt([first, *rest])
    block = rebuilt(stmt.block, body=_prepended(stmt.block.body, first))
    return s_tir.SBlockRealize(stmt.iter_values, stmt.predicate, block)


def _stores_to(stmt: tirx.Stmt, name: str) -> bool:
    found: list[bool] = []
    tvm_ffi.structural_walk(
        stmt, (BufferStore, lambda store: found.append(str(store.buffer.name) == name))
    )
    return any(found)


def _requests(stmt: tirx.Stmt, what: str) -> tirx.Stmt:
    """The nest ``stmt`` with requests for stores; its innermost loop goes from line to line."""
    stmt = _inside(stmt)
    if isinstance(stmt, BufferStore):
        return request(stmt.buffer, list(stmt.indices), write=True)
    if isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None:
        return tirx.IfThenElse(stmt.condition, _requests(stmt.then_case, what), None)
    if not isinstance(stmt, tirx.For):
        raise ScheduleError(mismatch(what, "a plain nest that stores", type(stmt).__name__))
    var, extent, step = stmt.loop_var, stmt.extent, 1
    stores: list[BufferStore] = []
    nested: list[tirx.For] = []
    rules = [(BufferStore, stores.append), (tirx.For, nested.append)]
    tvm_ffi.structural_walk(stmt.body, rules)
    if not nested:
        step = LINE_BYTES // DataType(str(stores[0].buffer.dtype)).itemsize
        extent = ceil_div(extent, step)
    again = tirx.Var(var.name, str(var.ty.dtype))
    body = replaced(_requests(stmt.body, what), {var: again * step})
    return tirx.For(again, stmt.min, extent, tirx.ForKind.SERIAL, body)
