"""Linear layers that share their input, as one: a wider product fills a GPU better."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax

from .linear import LinearLayer, called_layer, emit_layer
from .rebuild import extents_of, is_op, readers_of, rebuild, values_of


def merge_linear(
    module: tvm.IRModule,
    layers: Sequence[LinearLayer],
    takes_slices: Callable[[relax.Call], bool],
) -> tuple[tvm.IRModule, list[LinearLayer]]:
    """Merge calls of `extract_linear` on the same rows, where all users of their results, behind
    reshapes, take slices of columns; the results are such slices then."""
    graph = _Graph(module["main"], takes_slices)
    groups: dict[relax.Var, list[tuple[relax.Var, LinearLayer]]] = {}
    for var, value in graph.values.items():
        called = called_layer(value)
        if called is not None:
            layer = layers[called[0]]
            if layer.activation is None and graph.sliceable(var):
                groups.setdefault(called[1], []).append((var, layer))
    merged: list[LinearLayer] = []
    place: dict[relax.Var, tuple[relax.Var, int]] = {}
    wide: dict[relax.Var, LinearLayer] = {}
    for members in groups.values():
        found = [layer for _, layer in members]
        if len(members) > 1 and len({(each.bias is None, each.dtype) for each in found}) == 1:
            first, start = members[0][0], 0
            wide[first] = _one(found)
            for var, layer in members:
                place[var] = first, start
                start += len(layer.weight)
    made: dict[relax.Var, relax.Var] = {}

    def rule(builder: relax.BlockBuilder, expr: relax.Call, var: relax.Var) -> relax.Expr:
        called = called_layer(expr)
        if called is None:
            return expr
        first, start = place.get(var, (var, 0))
        if first.same_as(var):
            merged.append(wide[var] if var in wide else layers[called[0]])
            made[var] = emit_layer(builder, len(merged) - 1, called[1], merged[-1])
        if var not in place:
            return made[var]
        end = start + int(extents_of(expr)[1])
        return relax.op.strided_slice(made[first], [1], [start], [end], assume_inbound=True)

    return rebuild(module, rule), merged


def _one(layers: Sequence[LinearLayer]) -> LinearLayer:
    weight = np.concatenate([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return LinearLayer(weight, np.concatenate(biases) if biases else None, None, layers[0].dtype)


class _Graph:
    def __init__(self, main: relax.Function, takes_slices: Callable[[relax.Call], bool]) -> None:
        self.takes_slices = takes_slices
        self.values, self.readers = values_of(main), readers_of(main)

    def sliceable(self, var: relax.Var) -> bool:
        """Whether all that reads a tensor reads slices as well."""
        readers = self.readers.get(var, [])
        return bool(readers) and all(map(self._takes, readers))

    def _takes(self, reader: relax.Var | None) -> bool:
        value = self.values.get(reader)
        if is_op(value, "reshape"):
            return self.sliceable(reader)
        return isinstance(value, relax.Call) and self.takes_slices(value)
