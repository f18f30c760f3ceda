"""Lowers ``pit.even_tiles``: heights of tiles that follow from the number of live positions.

Runs before extents become dynamic, which then end with the tile as with the live positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir import prim

from ..errors import ScheduleError, mismatch
from ..primitive.checks import guards, uses_any
from ..primitive.dynamic_extent import DYNAMIC_EXTENT
from ..primitive.even_tiles import EVEN_TILES
from .axis_map import Expr, ceil_div
from .rebuild import loops_in, rebuilt, unmarked


@dataclass(frozen=True)
class _Tiles:
    """An annotated loop, its tiles' height at most, and the first position that is not live."""

    loop: tirx.For
    rows: int
    limit: Expr
    height: Expr


def lower_even_tiles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give every annotated loop tiles of the height that its live positions ask for.

    Raises
    ------
    ScheduleError
        No guard under an annotated loop tests its positions, two disagree on the limit, or the
        loop's variable tells more than positions.
    """
    # Errors inside a callback of structural_map lose their type: tiles are worked out before.
    marked = [_tiles(loop) for loop in loops_in(func.body, EVEN_TILES)]
    if not marked:
        return func
    bodies = {tiles.loop.loop_var: _lowered(tiles) for tiles in marked}
    return func.with_body(
        tvm_ffi.structural_map(
            func.body, [(tirx.For, lambda loop: bodies.get(loop.loop_var, loop))]
        )
    )


def _tiles(loop: tirx.For) -> _Tiles:
    rows, multiple, share = (int(value) for value in loop.annotations[EVEN_TILES])
    var = loop.loop_var
    limits: list[Expr] = []
    for condition in guards(loop.body):
        if isinstance(condition, prim.LT) and uses_any(condition.a, {var}):
            if not any(tvm_ffi.structural_equal(condition.b, known) for known in limits):
                limits.append(condition.b)
    if len(limits) != 1 or uses_any(limits[0], {var}):
        what = f"even_tiles: loop {var.name}"
        raise ScheduleError(mismatch(what, "one limit of its positions", [str(b) for b in limits]))
    limit = limits[0]
    number = tirx.max(tirx.min(ceil_div(limit, rows), loop.extent), 1)
    number = ceil_div(number, share) * share
    height = ceil_div(ceil_div(limit, number), multiple) * multiple
    return _Tiles(loop, rows, limit, tirx.max(tirx.min(height, rows), multiple))


def _lowered(tiles: _Tiles) -> tirx.For:
    """The loop with its tiles' first positions and ends bound to variables."""
    loop, dtype = tiles.loop, str(tiles.loop.loop_var.ty.dtype)
    first, end = tirx.Var("first", dtype), tirx.Var("end", dtype)
    bound = [
        tirx.Bind(first, loop.loop_var * tiles.height),
        tirx.Bind(end, tirx.min(tiles.limit, first + tiles.height)),
    ]
    body = _moved(loop.body, tiles, first, end)
    if uses_any(_moved(loop.body, tiles, tirx.const(0, dtype), end), {loop.loop_var}):
        what = f"even_tiles: loop {loop.loop_var.name}"
        raise ScheduleError(mismatch(what, f"positions alone, {tiles.rows} a tile", "more"))
    kept = unmarked(loop, EVEN_TILES, DYNAMIC_EXTENT)
    extent = tirx.max(ceil_div(tiles.limit, tiles.height), 0)
    return rebuilt(loop, extent=extent, body=_bound(body, bound, first), annotations=kept)


def _moved(stmt: tirx.Stmt, tiles: _Tiles, first: Expr, end: Expr) -> tirx.Stmt:
    """``stmt`` with positions from ``first`` on, alive before ``end``."""
    var, zero = tiles.loop.loop_var, tirx.const(0, str(tiles.loop.loop_var.ty.dtype))

    def on_product(product: prim.Mul) -> Expr:
        sides = (product.a, product.b)
        if not any(side.same_as(var) for side in sides):
            return product
        other = next((side for side in sides if isinstance(side, tirx.IntImm)), None)
        return first if other is not None and int(other) == tiles.rows else product

    def on_difference(difference: prim.Sub) -> Expr:
        same = difference.a.same_as(var) and difference.b.same_as(var)
        return zero if same else difference

    def on_guard(guard: prim.LT) -> Expr:
        ends = tvm_ffi.structural_equal(guard.b, tiles.limit)
        return prim.LT(guard.a, end) if ends else guard

    rules = [(prim.Mul, on_product), (prim.Sub, on_difference), (prim.LT, on_guard)]
    return tvm_ffi.structural_map(stmt, rules)


def _bound(stmt: tirx.Stmt, bound: list[tirx.Stmt], first: tirx.Var) -> tirx.Stmt:
    """``stmt`` with ``bound`` in front of what its perfect nest holds, positions not yet begun."""
    if isinstance(stmt, tirx.For):
        starts = [c.a for c in guards(stmt.body) if isinstance(c, prim.LT)]
        if not any(uses_any(a, {first}) and uses_any(a, {stmt.loop_var}) for a in starts):
            return rebuilt(stmt, body=_bound(stmt.body, bound, first))
    rest = stmt.seq if isinstance(stmt, tirx.SeqStmt) else [stmt]
    return tirx.SeqStmt([*bound, *rest])
