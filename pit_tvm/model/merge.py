"""Linear layers that share their input, as one: a wider product fills a GPU better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from .linear import LinearLayer
from .rebuild import bindings_of, extents_of, is_op, rebuild


def merge_linear(
    module: tvm.IRModule,
    layers: Sequence[LinearLayer],
    call: str,
    takes_slices: Callable[[relax.Call], bool],
) -> tuple[tvm.IRModule, list[LinearLayer]]:
    """Merge calls of `extract_linear` on the same rows, where all users of their results, behind
    reshapes, take slices of columns; the results are such slices then."""
    main = module["main"]
    graph = _Graph(main, takes_slices)
    groups: dict[relax.Var, list[relax.Var]] = {}
    for var, value in graph.values.items():
        if is_op(value, "call_dps_packed") and value.args[0].global_symbol == call:
            number, rows = value.args[1].fields
            if layers[int(number)].activation is None and graph.sliceable(var):
                groups.setdefault(rows, []).append(var)
    merged: list[LinearLayer] = []
    place: dict[relax.Var, tuple[relax.Var, int]] = {}
    numbers: dict[relax.Var, list[LinearLayer]] = {}
    for members in groups.values():
        found = [layers[int(graph.values[m].args[1].fields[0])] for m in members]
        same = len({(layer.bias is None, layer.dtype) for layer in found}) == 1
        if len(members) > 1 and same:
            numbers[members[0]] = found
            starts = np.cumsum([0, *(len(layer.weight) for layer in found)])
            place |= {m: (members[0], int(s)) for m, s in zip(members, starts, strict=False)}
    made: dict[relax.Var, relax.Var] = {}

    def rule(builder: relax.BlockBuilder, expr: relax.Call, var: relax.Var) -> relax.Expr:
        if not (is_op(expr, "call_dps_packed") and expr.args[0].global_symbol == call):
            return expr
        number, rows = expr.args[1].fields
        first, start = place.get(var, (var, 0))
        if first.same_as(var):
            layer = _one(numbers[var]) if var in numbers else layers[int(number)]
            merged.append(layer)
            ty = relax.TensorType([extents_of(rows)[0], len(layer.weight)], layer.dtype)
            given = [relax.prim_value(len(merged) - 1), rows]
            made[var] = builder.emit(relax.op.call_dps_packed(call, given, ty))
        if var not in place:
            return made[var]
        width = int(extents_of(expr)[1])
        return relax.op.strided_slice(
            made[first], [1], [start], [start + width], assume_inbound=True
        )

    return rebuild(module, rule), merged


def _one(layers: Sequence[LinearLayer]) -> LinearLayer:
    weight = np.concatenate([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return LinearLayer(weight, np.concatenate(biases) if biases else None, None, layers[0].dtype)


class _Graph:
    def __init__(self, main: relax.Function, takes_slices: Callable[[relax.Call], bool]) -> None:
        self.takes_slices = takes_slices
        self.values = {b.var: b.value for b in bindings_of(main)}
        self.users: dict[Any, list[relax.Var]] = {}
        for var, value in self.values.items():
            for used in relax.analysis.free_vars(value):
                self.users.setdefault(used, []).append(var)
        self.returned = set(relax.analysis.free_vars(main.body.body))

    def sliceable(self, var: relax.Var) -> bool:
        """Whether all that reads a tensor reads slices as well."""
        users = self.users.get(var, [])
        if var in self.returned or not users:
            return False
        return all(
            self.sliceable(user) if is_op(self.values[user], "reshape") else self._takes(user)
            for user in users
        )

    def _takes(self, user: relax.Var) -> bool:
        value = self.values[user]
        return isinstance(value, relax.Call) and self.takes_slices(value)
