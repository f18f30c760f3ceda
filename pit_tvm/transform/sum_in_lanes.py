"""Sums and maxima along rows as those of several lanes, which are vectors.

One after the other each waits for the one before; LLVM may not change their order.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, sym, tirx
from tvm.ir import TensorLoad, prim

from ..analysis.expr import is_zero, same, uses
from .axis_map import Expr

LANES = 16
_SHORT = 4 * LANES  # known extents below stay as they are
_TYPE = "float32"


def sum_in_lanes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """``func`` with every loop that adds up float32 elements beside each other, or takes the
    largest, in `LANES` lanes. Of NaN and numbers the largest is either, as it was."""
    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.For, _in_lanes)]))


def _in_lanes(loop: tirx.For) -> tirx.Stmt:
    store, k = loop.body, loop.loop_var
    if loop.kind != tirx.ForKind.SERIAL or loop.annotations or not is_zero(loop.min):
        return loop
    if not isinstance(store, tirx.BufferStore) or not _accumulates(store, k):
        return loop
    if isinstance(loop.extent, tirx.IntImm) and int(loop.extent) < _SHORT:
        return loop
    return _Lanes(loop, store).result()


def _accumulates(store: tirx.BufferStore, k: ir.Var) -> bool:
    """Whether a store adds to an element what is along a row, or takes the larger of both."""
    value = store.value
    if not isinstance(value, prim.Add | prim.Max) or not isinstance(value.a, TensorLoad):
        return False
    if str(value.ty.dtype) != _TYPE or any(uses(index, k) for index in store.indices):
        return False
    total, element = value.a, value.b
    own = zip(total.indices, store.indices, strict=False)
    if not total.source.same_as(store.buffer) or not all(same(a, b) for a, b in own):
        return False
    loads: list[TensorLoad] = []
    others: list[object] = []
    tvm_ffi.structural_walk(element, (TensorLoad, loads.append))
    for node in (ir.Call, prim.Let, prim.Select, prim.Cast):
        tvm_ffi.structural_walk(element, (node, others.append))
    read = any(uses(element, k) and load.source.same_as(store.buffer) for load in loads)
    along = [load for load in loads if any(uses(index, k) for index in load.indices)]
    return bool(along) and not others and not read and all(_is_row(load, k) for load in along)


def _is_row(load: TensorLoad, k: ir.Var) -> bool:
    *outer, last = load.indices
    beside = sym.Analyzer().simplify(last - k)
    return str(load.ty.dtype) == _TYPE and not any(uses(e, k) for e in (*outer, beside))


class _Lanes:
    def __init__(self, loop: tirx.For, store: tirx.BufferStore) -> None:
        self.loop, self.store, self.node = loop, store, type(store.value)
        self.dtype = str(loop.loop_var.ty.dtype)
        self.buffer = tirx.decl_buffer((LANES,), _TYPE, "lanes")

    def result(self) -> tirx.Stmt:
        """Whole vectors, then their lanes, then the elements that fill none."""
        lanes, zero = tirx.const(LANES, self.dtype), tirx.const(0, self.dtype)
        whole = tirx.truncdiv(self.loop.extent, lanes)
        first = tirx.const(0.0, _TYPE) if self.node is prim.Add else tirx.min_value(_TYPE)
        vector, lane = tirx.Var("vector", self.dtype), tirx.Var("lane", self.dtype)
        at, last = tirx.Var("lane", self.dtype), tirx.Var("lane", self.dtype)
        more = self.node(self._lane(lane), self._element(vector * lanes + lane))
        total = self.store.value.a
        return tirx.SeqStmt(
            [
                tirx.AllocBuffer(self.buffer),
                self._each(at, tirx.BufferStore(self.buffer, first, [at]), vector=True),
                tirx.For(
                    vector,
                    zero,
                    whole,
                    tirx.ForKind.SERIAL,
                    self._each(lane, tirx.BufferStore(self.buffer, more, [lane]), vector=True),
                ),
                self._each(last, self._stored(self.node(total, self._lane(last))), vector=False),
                tirx.For(
                    self.loop.loop_var,
                    whole * lanes,
                    self.loop.extent - whole * lanes,
                    tirx.ForKind.SERIAL,
                    self.store,
                ),
            ]
        )

    def _each(self, lane: ir.Var, body: tirx.Stmt, *, vector: bool) -> tirx.For:
        kind = tirx.ForKind.VECTORIZED if vector else tirx.ForKind.SERIAL
        zero, lanes = (tirx.const(n, self.dtype) for n in (0, LANES))
        return tirx.For(lane, zero, lanes, kind, body)

    def _lane(self, lane: Expr) -> Expr:
        return tirx.BufferLoad(self.buffer, [lane])

    def _stored(self, value: Expr) -> tirx.Stmt:
        return tirx.BufferStore(self.store.buffer, value, self.store.indices)

    def _element(self, k: Expr) -> Expr:
        old = self.loop.loop_var
        return tvm_ffi.structural_map(
            self.store.value.b, [(ir.Var, lambda v: k if v.same_as(old) else v)]
        )
