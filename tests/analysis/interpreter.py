"""A small interpreter of PrimFuncs in numpy: the truth that the property tests compare with.

It can permute one axis of one block in every access: wherever that axis is the whole index of a
dimension, the permuted element is read or written instead. That is what permuting each operand
of the block along the axis, and un-permuting its output, does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import ir, tirx
from tvm.ir import prim
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import stmt as st

Env = dict[Any, Any]
Eval = Callable[[Env], Any]
Exec = Callable[[Env], None]

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    prim.Add: operator.add,
    prim.Sub: operator.sub,
    prim.Mul: operator.mul,
    prim.Div: operator.truediv,
    prim.FloorDiv: operator.floordiv,
    prim.FloorMod: operator.mod,
    prim.Max: max,
    prim.Min: min,
    prim.EQ: operator.eq,
    prim.NE: operator.ne,
    prim.LT: operator.lt,
    prim.LE: operator.le,
    prim.GT: operator.gt,
    prim.GE: operator.ge,
    prim.And: lambda a, b: bool(a) and bool(b),
    prim.Or: lambda a, b: bool(a) or bool(b),
}
_CALLS: dict[str, Callable[..., Any]] = {
    "tirx.exp": np.exp,
    "tirx.sqrt": np.sqrt,
    "tirx.rsqrt": lambda x: 1.0 / np.sqrt(x),
}


@dataclass(frozen=True)
class Permutation:
    """``order[e]`` stands for element ``e`` of iter var ``var``."""

    var: ir.Var
    order: Sequence[int]


class Interpreter:
    """Compiles the statements of one PrimFunc to Python closures, once."""

    def __init__(self, permutation: Permutation | None = None) -> None:
        self.permutation = permutation

    def expr(self, node: Any) -> Eval:
        if isinstance(node, prim.IntImm | prim.FloatImm):
            value = node.value
            return lambda env: value
        if isinstance(node, ir.Var):
            key = node.__hash__()
            return lambda env: env[key]
        if type(node) in _BINARY:
            fold, a, b = _BINARY[type(node)], self.expr(node.a), self.expr(node.b)
            return lambda env: fold(a(env), b(env))
        if isinstance(node, prim.Not):
            inner = self.expr(node.a)
            return lambda env: not inner(env)
        if isinstance(node, prim.Cast):
            inner, kind = self.expr(node.value), np.dtype(str(node.ty.dtype)).type
            return lambda env: kind(inner(env))
        if isinstance(node, ir.TensorLoad):
            key, indices = node.source.__hash__(), self.indices(node.indices)
            return lambda env: env[key][indices(env)]
        return self._choice(node)

    def _choice(self, node: Any) -> Eval:
        if isinstance(node, prim.Select):
            parts = [node.condition, node.true_value, node.false_value]
        elif isinstance(node, ir.Call) and node.op.name == "prim.if_then_else":
            parts = list(node.args)
        elif isinstance(node, ir.Call) and node.op.name in _CALLS:
            function, args = _CALLS[node.op.name], [self.expr(a) for a in node.args]
            return lambda env: function(*(a(env) for a in args))
        else:
            raise NotImplementedError(f"{type(node).__name__}: {node}")
        test, yes, no = (self.expr(p) for p in parts)
        return lambda env: yes(env) if test(env) else no(env)

    def indices(self, nodes: Sequence[Any]) -> Callable[[Env], tuple[int, ...]]:
        parts = [self.index(node) for node in nodes]
        return lambda env: tuple(part(env) for part in parts)

    def index(self, node: Any) -> Eval:
        found = self.permutation
        if found is not None and isinstance(node, ir.Var) and node.same_as(found.var):
            key, order = node.__hash__(), found.order
            return lambda env: order[env[key]]
        inner = self.expr(node)

        def checked(env: Env) -> int:
            value = int(inner(env))
            assert value >= 0, f"index {node} is negative"
            return value

        return checked

    def stmt(self, node: Any) -> Exec:
        if isinstance(node, st.SeqStmt):
            return self._sequence([self.stmt(part) for part in node.seq])
        if isinstance(node, st.For):
            return self._loop(node)
        if isinstance(node, SBlockRealize):
            return self._block(node)
        if isinstance(node, st.IfThenElse):
            no = self.stmt(node.else_case) if node.else_case is not None else _nothing
            return self._branch(self.expr(node.condition), self.stmt(node.then_case), no)
        if isinstance(node, st.Bind):
            key, value = node.var.__hash__(), self.expr(node.value)
            return lambda env: env.__setitem__(key, value(env))
        if isinstance(node, st.BufferStore):
            key, indices = node.buffer.__hash__(), self.indices(node.indices)
            value = self.expr(node.value)
            return lambda env: env[key].__setitem__(indices(env), value(env))
        raise NotImplementedError(type(node).__name__)

    @staticmethod
    def _sequence(parts: list[Exec]) -> Exec:
        def run(env: Env) -> None:
            for part in parts:
                part(env)

        return run

    @staticmethod
    def _branch(test: Eval, yes: Exec, no: Exec) -> Exec:
        return lambda env: yes(env) if test(env) else no(env)

    def _loop(self, node: st.For) -> Exec:
        begin, extent, body = self.expr(node.min), self.expr(node.extent), self.stmt(node.body)
        key = node.loop_var.__hash__()

        def run(env: Env) -> None:
            first = int(begin(env))
            for value in range(first, first + int(extent(env))):
                env[key] = value
                body(env)

        return run

    def _block(self, node: SBlockRealize) -> Exec:
        block: SBlock = node.block
        test, body = self._predicate(node), self.stmt(block.body)
        init = self.stmt(block.init) if block.init is not None else _nothing
        values = [self.expr(v) for v in node.iter_values]
        keys = [iv.var.__hash__() for iv in block.iter_vars]
        reduced = [
            (iv.var.__hash__(), int(iv.dom.min))
            for iv in block.iter_vars
            if iv.iter_type == tirx.IterVar.CommReduce
        ]
        temporary = [(b.__hash__(), tuple(b.shape), str(b.dtype)) for b in block.alloc_buffers]

        def run(env: Env) -> None:
            for key, shape, dtype in temporary:
                env[key] = np.zeros([int(s) for s in shape], dtype)
            for key, value in zip(keys, [v(env) for v in values], strict=True):
                env[key] = value
            if not test(env):
                return
            if all(env[key] == first for key, first in reduced):
                init(env)
            body(env)

        return run

    def _predicate(self, node: SBlockRealize) -> Eval:
        """The block's predicate, over loop variables: a mask in it is an operand as well."""
        found = self.permutation
        for iv, value in zip(node.block.iter_vars, node.iter_values, strict=True):
            if found is not None and iv.var.same_as(found.var) and isinstance(value, ir.Var):
                return Interpreter(Permutation(value, found.order)).expr(node.predicate)
        return self.expr(node.predicate)


def _nothing(env: Env) -> None:
    del env


def run(
    func: tirx.PrimFunc,
    arrays: Mapping[str, np.ndarray],
    permutation: Permutation | None = None,
) -> dict[str, np.ndarray]:
    """All parameters after ``func``, by name; ``arrays`` holds them before, and is not changed."""
    after = {name: array.copy() for name, array in arrays.items()}
    env: Env = {param.__hash__(): after[param.name] for param in func.params}
    with np.errstate(all="ignore"):
        Interpreter(permutation).stmt(func.body)(env)
    return after
