"""Results that are constants, as copies: a caller may change what a call returns."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, relax, te

from .rebuild import values_of


def copy_constants(module: tvm.IRModule) -> tvm.IRModule:
    """``main`` with a copy of each result that is a constant; for a graph that is lowered, because
    folding would make the copy a constant again."""
    return _Copies(module).result()


class _Copies:
    def __init__(self, module: tvm.IRModule) -> None:
        self.module, self.main = module, module["main"]
        self.values = values_of(self.main)
        self.builder = relax.BlockBuilder(module)
        self.bindings: list[relax.VarBinding] = []
        self.copied = False

    def result(self) -> tvm.IRModule:
        """The module, the same if no result is a constant."""
        seq = self.main.body
        body = self._own(seq.body)
        if not self.copied:
            return self.module
        blocks = [*seq.blocks, relax.BindingBlock(self.bindings)]
        main = relax.Function(
            self.main.params,
            relax.SeqExpr(blocks, body),
            self.main.ret_ty,
            self.main.is_pure,
            self.main.attrs,
        )
        made = self.builder.get()
        made[made.get_global_var("main")] = main
        return relax.transform.Normalize()(made)

    def _own(self, expr: relax.Expr) -> relax.Var:
        """A variable of what ``expr`` is, its constants copied."""
        value = expr
        while isinstance(value, relax.Var) and value in self.values:
            value = self.values[value]
        if isinstance(value, relax.Tuple):
            return self._bind(relax.Tuple([self._own(f) for f in value.fields]), value.ty)
        if not isinstance(value, ir.GenericConst):
            return expr
        self.copied = True
        copy = self.builder.add_func(_copy(value.ty), "copy_constant")
        return self._bind(relax.call_tir(copy, [value], value.ty), value.ty)

    def _bind(self, value: relax.Expr, ty: Any) -> relax.Var:
        var = relax.Var(f"result_{len(self.bindings)}", ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var


def _copy(ty: Any) -> Any:
    data = te.placeholder([int(e) for e in ty.shape.values], str(ty.dtype), "data")
    copied = te.compute(data.shape, lambda *at: data(*at), "copied")
    return te.create_prim_func([data, copied])
