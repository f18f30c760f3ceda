"""A graph on live tokens in three parts: its index, what runs on live tokens, what is returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax

from .packing import index_parts, is_index
from .rebuild import bindings_of, is_op, values_of

#: Operators that are views of their operand.
VIEWS = ("reshape", "strided_slice")


@dataclass(frozen=True)
class ProgramParts:
    """Bindings of a function in an order that its own dependencies admit.

    ``index``: the call that makes the index, None if there is none. ``names``: what names its
    tensors. ``tail``: what makes the results and stands behind the index, and what depends on them.
    ``body``: the rest. ``kept``: what the tail reads of the body.
    """

    index: relax.Binding | None
    names: list[relax.Binding]
    body: list[relax.Binding]
    tail: list[relax.Binding]
    kept: list[relax.Var]


def split(main: relax.Function) -> ProgramParts:
    """The parts of a function without control flow."""
    numbers, values = index_parts(main), values_of(main)
    parts = ProgramParts(None, [], [], [], [])
    index: relax.Binding | None = None
    late = {_maker(var, values) for var in _results(main.body.body, values)}
    for binding in bindings_of(main):
        var, value = binding.var, binding.value
        read = set(relax.analysis.free_vars(value))
        if is_index(value):
            index = binding
        elif var in numbers:
            parts.names.append(binding)
        elif var not in late and late.isdisjoint(read) and not isinstance(value, relax.Tuple):
            parts.body.append(binding)
        else:
            parts.tail.append(binding)
            late.add(var)
    made = {binding.var for binding in parts.body}
    exprs = [*(binding.value for binding in parts.tail), main.body.body]
    wanted = [var for expr in exprs for var in relax.analysis.free_vars(expr) if var in made]
    return replace(parts, index=index, kept=list(dict.fromkeys(wanted)))


def _results(expr: relax.Expr, values: Mapping[relax.Var, relax.Expr]) -> Iterator[relax.Var]:
    """The tensors that a function returns."""
    if isinstance(expr, relax.Tuple):
        for part in expr.fields:
            yield from _results(part, values)
    elif isinstance(values.get(expr), relax.Tuple | relax.Var):
        yield from _results(values[expr], values)
    elif isinstance(expr, relax.Var):
        yield expr


def _maker(var: relax.Var, values: Mapping[relax.Var, Any]) -> relax.Var:
    """What a tensor is a view or a part of."""
    value = values.get(var)
    if isinstance(value, relax.TupleGetItem):
        return _maker(value.tuple_value, values)
    if isinstance(value, relax.Call) and is_op(value, *VIEWS):
        return _maker(value.args[0], values)
    return var
