"""The statements inside a block, read as stores; what is no store is kept as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx
from tvm.ir import prim
from tvm.s_tir import SBlockRealize
from tvm.tirx import stmt as st

from .expr import (
    Access,
    PrimExpr,
    Substitution,
    distinct,
    impure_calls,
    loads_in,
    one_line,
    replace_vars,
)


@dataclass(frozen=True, eq=False)
class Store:
    """``target = value``, run only where all ``conditions`` hold.

    The conditions are those of ``if`` statements inside the block, and the bounds of its inner
    loops if they are no constants.
    """

    target: Access
    value: PrimExpr
    conditions: tuple[PrimExpr, ...]


def loads_of(store: Store) -> list[Access]:
    """Distinct loads of a store: of its conditions, its target's indices and its value."""
    parts = (*store.conditions, *store.target.indices, store.value)
    return distinct(load for part in parts for load in loads_in(part))


@dataclass
class Body:
    """Collects the stores of one block's init or body."""

    stores: list[Store] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)

    def visit(self, stmt: Any, env: Substitution, conditions: tuple[PrimExpr, ...]) -> Substitution:
        """Adds the stores under ``stmt``; returns ``env`` with the statement's own bindings."""
        if isinstance(stmt, st.SeqStmt):
            inner = env
            for part in stmt.seq:
                inner = self.visit(part, inner, conditions)
        elif isinstance(stmt, st.Bind):
            return {**env, stmt.var: self._expr(stmt.value, env)}
        elif isinstance(stmt, st.BufferStore):
            self._store(stmt, env, conditions)
        elif isinstance(stmt, st.IfThenElse):
            condition = self._expr(stmt.condition, env)
            self.visit(stmt.then_case, env, (*conditions, condition))
            if stmt.else_case is not None:
                self.visit(stmt.else_case, env, (*conditions, prim.Not(condition)))
        elif isinstance(stmt, st.For):
            bounds = [self._expr(e, env) for e in (stmt.min, stmt.extent)]
            self.visit(stmt.body, env, (*conditions, *not_constant(bounds)))
        elif isinstance(stmt, SBlockRealize):
            self._nested(stmt, env, conditions)
        elif isinstance(stmt, st.Evaluate):
            self._expr(stmt.value, env)
        else:
            self.opaque.append(f"{type(stmt).__name__} of {one_line(stmt)}")
        return env

    def _expr(self, expr: PrimExpr, env: Substitution) -> PrimExpr:
        self.opaque += [t for t in impure_calls(expr) if t not in self.opaque]
        return replace_vars(expr, env)

    def _store(
        self, stmt: st.BufferStore, env: Substitution, conditions: tuple[PrimExpr, ...]
    ) -> None:
        indices = tuple(self._expr(i, env) for i in stmt.indices)
        target = Access(stmt.buffer, stmt.buffer.name, indices)
        self.stores.append(Store(target, self._expr(stmt.value, env), conditions))

    def _nested(
        self, realize: SBlockRealize, env: Substitution, conditions: tuple[PrimExpr, ...]
    ) -> None:
        block = realize.block
        if block.match_buffers:
            self.opaque.append(f"T.match_buffer in block {block.name_hint}")
        values = [self._expr(v, env) for v in realize.iter_values]
        inner = {**env, **{iv.var: v for iv, v in zip(block.iter_vars, values, strict=True)}}
        conditions = (*conditions, *not_constant([self._expr(realize.predicate, env)]))
        if block.init is not None:
            first = tuple(
                prim.EQ(value, iv.dom.min)
                for iv, value in zip(block.iter_vars, values, strict=True)
                if iv.iter_type == tirx.IterVar.CommReduce
            )
            self.visit(block.init, inner, (*conditions, *first))
        self.visit(block.body, inner, conditions)


def not_constant(exprs: Sequence[PrimExpr]) -> list[PrimExpr]:
    """The expressions that are no integer constants."""
    return [e for e in exprs if not isinstance(e, prim.IntImm)]
