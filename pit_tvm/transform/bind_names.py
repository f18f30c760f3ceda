"""Names inside of stored values as statements before the store.

TVM's search for common parts looks into the value of a `Let` and not into its body, but puts what
it finds in both, and so before it is defined where stages share a loop.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import prim

from ..primitive.checks import is_choice
from .axis_map import Expr


def bind_names(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """``func`` with every `Let` in a stored value as a `Bind` of a new variable, but for those in
    a choice, of which only one side may be computed."""
    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.BufferStore, _bound)]))


def _bound(store: tirx.BufferStore) -> tirx.Stmt:
    binds: list[tirx.Stmt] = []

    def on_let(let: prim.Let, mutator: Any) -> Expr:
        value = mutator.mutate(let.value)
        name = tirx.Var(let.var.name, let.var.ty)
        binds.append(tirx.Bind(name, value))
        old = let.var
        return mutator.mutate(
            tvm_ffi.structural_map(let.body, [(ir.Var, lambda v: name if v.same_as(old) else v)])
        )

    def on_call(call: ir.Call, mutator: Any) -> Expr:
        return call if is_choice(call) else mutator.default_mutate(call)

    value = tvm_ffi.structural_mutate(store.value, [(prim.Let, on_let), (ir.Call, on_call)])
    if not binds:
        return store
    return tirx.SeqStmt([*binds, tirx.BufferStore(store.buffer, value, store.indices)])
