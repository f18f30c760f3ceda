"""Lowers ``pit.prefetch_rows``: requests for the rows that the next outer iteration gathers.

Runs once extents are dynamic, so that dead positions are not fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import DataType, ir, tirx
from tvm.ir import TensorLoad

from ..errors import ScheduleError, mismatch
from ..primitive.checks import uses_any
from ..primitive.prefetch_rows import PREFETCH_ROWS
from .axis_map import Expr
from .rebuild import loops_in, rebuilt, unmarked

LINE_BYTES = 64
_ALL_CACHES, _DATA = 3, 1  # arguments of LLVM's prefetch


@dataclass(frozen=True)
class _Site:
    """An annotated loop, the loops around and directly inside it, and one load of the buffer."""

    around: tirx.For
    loop: tirx.For
    rows: tirx.For
    load: TensorLoad
    lanes: int


def lower_prefetch_rows(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put the requests at the start of every iteration of the annotated loops.

    The last outer iteration requests rows behind its operand: requests never fault.

    Raises
    ------
    ScheduleError
        The loops around or below an annotated one were changed, or it reads the buffer no more.
    """
    loops = loops_in(func.body)
    # Errors inside a callback of structural_map lose their type: sites are worked out before.
    sites = [_site(loop, loops) for loop in loops_in(func.body, PREFETCH_ROWS)]
    if not sites:
        return func
    requests = {site.loop.loop_var: _requests(site) for site in sites}

    def insert(loop: tirx.For) -> tirx.For:
        if loop.loop_var not in requests:
            return loop
        body = tirx.SeqStmt([requests[loop.loop_var], loop.body])
        return rebuilt(loop, body=body, annotations=unmarked(loop, PREFETCH_ROWS))

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.For, insert)]))


def _site(loop: tirx.For, loops: list[tirx.For]) -> _Site:
    what = f"prefetch_rows: loop {loop.loop_var.name}"
    around = next((outer for outer in loops if outer.body.same_as(loop)), None)
    if around is None or not isinstance(loop.body, tirx.For):
        raise ScheduleError(mismatch(what, "a loop around it and one in it", "another nest"))
    name, loads = str(loop.annotations[PREFETCH_ROWS]), []

    def visit(load: TensorLoad) -> None:
        if str(load.source.name) == name:
            loads.append(load)

    tvm_ffi.structural_walk(loop.body, (TensorLoad, visit))
    if not loads:
        raise ScheduleError(mismatch(what, f"to read {name}", "no such load"))
    lanes = 1

    def widen(inner: tirx.For) -> None:
        nonlocal lanes
        if inner.kind != tirx.ForKind.SERIAL and uses_any(loads[0].indices[-1], {inner.loop_var}):
            lanes *= int(inner.extent)

    tvm_ffi.structural_walk(loop.body.body, (tirx.For, widen))
    return _Site(around, loop, loop.body, loads[0], lanes)


def _requests(site: _Site) -> tirx.Stmt:
    """A share of the rows: every iteration of the annotated loop requests as many."""
    rows, outer = site.rows.extent, site.loop
    share = tirx.floordiv(rows + outer.extent - 1, tirx.max(outer.extent, 1))
    step = tirx.Var("ahead", str(outer.loop_var.ty.dtype))
    values: dict[ir.Var, Expr] = {
        site.around.loop_var: site.around.loop_var + 1,
        site.rows.loop_var: outer.loop_var * share + step,
    }

    def first(inner: tirx.For) -> None:
        values[inner.loop_var] = inner.min

    tvm_ffi.structural_walk(site.rows.body, (tirx.For, first))
    indices = [replaced(index, values) for index in site.load.indices]
    per_line = LINE_BYTES // DataType(str(site.load.ty.dtype)).itemsize
    lines = [
        request(site.load.source, [*indices[:-1], indices[-1] + lane])
        for lane in range(0, site.lanes, per_line)
    ]
    live = tirx.max(tirx.min(share, rows - outer.loop_var * share), 0)
    body = lines[0] if len(lines) == 1 else tirx.SeqStmt(lines)
    return tirx.For(step, 0, live, tirx.ForKind.SERIAL, body)


def request(buffer: ir.Var, indices: list[Expr], *, write: bool = False) -> tirx.Stmt:
    """Ask for the line of one element, to read it or to ``write`` it."""
    address = tirx.address_of(tirx.BufferLoad(buffer, indices))
    return tirx.Evaluate(
        tirx.call_intrin("void", "tirx.prefetch", address, int(write), _ALL_CACHES, _DATA)
    )


def replaced(part: Any, values: Mapping[ir.Var, Expr]) -> Any:
    """An expression or a statement with ``values`` in place of variables."""
    return tvm_ffi.structural_map(part, [(ir.Var, lambda v: values.get(v, v))])
