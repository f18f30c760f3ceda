"""Waits of software pipelines over loops whose end is known at run time only."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import sym, tirx
from tvm.ir import prim

IN_FLIGHT = "async_wait_inflight_count"


def fold_waits(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Numbers of copies in flight as constants, which is how an instruction takes them: they depend
    on whether a loop's variable is below its end."""
    ends: list[Any] = []
    known = sym.Analyzer()

    def below(loop: tirx.For) -> None:
        extent = known.simplify(loop.extent)
        if isinstance(extent, prim.Max):
            ends.append(loop.loop_var < extent.a)

    def hold(condition: prim.LT) -> Any:
        certain = any(tvm_ffi.structural_equal(condition, end) for end in ends)
        return tirx.const(True, "bool") if certain else condition

    def fold(attr: tirx.AttrStmt) -> tirx.AttrStmt:
        if attr.attr_key != IN_FLIGHT:
            return attr
        both = (prim.BitwiseAnd, lambda pair: tirx.And(pair.a, pair.b))
        value = known.simplify(tvm_ffi.structural_map(attr.value, [(prim.LT, hold), both]))
        return tirx.AttrStmt(attr.node, attr.attr_key, value, attr.body)

    tvm_ffi.structural_walk(func.body, (tirx.For, below))
    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.AttrStmt, fold)]))
