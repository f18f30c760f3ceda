"""Layers of experts of a graph, handed to pit-tvm's own operators: of every group of rows the
product with its weight, packed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, sym
from tvm.ir import prim

from ..api import Operator
from ..api import compile as compile_operator
from ..op.grouped_matmul import grouped_matmul
from ..runtime.kernel_cache import KernelCache
from ..structs import Groups
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .grouped import grouped_parts
from .linear import LinearForm
from .rebuild import extents_of, flat_rows, is_op, permutation_of, rebuild, values_of

#: The name by which a graph calls its grouped products.
GROUPED = "pit_tvm.model.grouped_linear"
_MOST_ROWS, _MOST_FLOP = 8192, 2e10  # of calls that `GroupedLayers.prepare` looks at


@dataclass(frozen=True)
class GroupedForm:
    """``activation(x @ weight[g].T + bias[g])`` with ``weight`` ``[groups, n, k]``; "" for no
    activation; of every row for so many ``choices`` of a group."""

    groups: int
    n: int
    k: int
    dtype: str
    bias: bool
    activation: str
    choices: int = 1

    def __str__(self) -> str:
        one = LinearForm(self.n, self.k, self.dtype, self.bias, self.activation)
        return f"{self.groups} x {one}"


@dataclass(frozen=True, eq=False)
class GroupedLayer:
    """``activation(x @ weight[g].T + bias[g])``: ``weight`` ``[groups, n, k]``, ``bias``
    ``[groups, n]`` or None; of every row of ``x`` for so many ``choices`` of a group."""

    weight: np.ndarray
    bias: np.ndarray | None
    activation: str | None
    dtype: str
    choices: int = 1

    @property
    def form(self) -> GroupedForm:
        """What layers of one operator share."""
        groups, n, k = map(int, self.weight.shape)
        ends = self.bias is not None, self.activation or "", self.choices
        return GroupedForm(groups, n, k, self.dtype, *ends)


def extract_grouped(module: tvm.IRModule, shares: bool) -> tuple[tvm.IRModule, list[GroupedLayer]]:
    """Replace every product of `grouped.grouped_linear` with constant weights by a call of
    `GROUPED` ``(layer, x, ids, out)``, where ``layer`` is a position in the list that is returned.

    With ``shares`` these are ``[m, k]``, int32 ``[m, choices]`` and ``[m * choices, n]``; else rows
    are repeated for their choices, and ids are ``[m]``.
    """
    values = values_of(module["main"])
    layers: list[GroupedLayer] = []
    numbers: dict[Any, int] = {}  # a product may be there of live tokens and of all

    def rule(builder: relax.BlockBuilder, expr: relax.Call, var: relax.Var) -> relax.Expr:
        parts, old = grouped_parts(expr), grouped_parts(values[var])
        if parts is None or old is None:
            return expr
        x, ids, activation = parts[0], parts[1], parts[4]
        rows = flat_rows(builder, x if shares else _repeated(builder, x, ids))
        *outer, width = extents_of(expr)
        out_rows = sym.Analyzer().simplify(prod(outer, start=prim.IntImm("int64", 1)))
        choices = int(outer[-1]) if shares and ids.ty.ndim == x.ty.ndim else 1
        key = (*old[2:4], activation, choices)
        if key not in numbers:
            weight, bias = (e if e is None else _constant(e, values) for e in old[2:4])
            if weight is None or (bias is None) != (old[3] is None):
                return expr
            numbers[key] = len(layers)
            layers.append(GroupedLayer(weight, bias, activation, str(x.ty.dtype), choices))
        groups = [extents_of(rows)[0], choices] if shares else [out_rows]
        narrow = relax.op.astype(builder.emit(relax.op.reshape(ids, groups)), "int32")
        ty = relax.TensorType([out_rows, width], expr.ty.dtype)
        given = [relax.prim_value(numbers[key]), rows, builder.emit(narrow)]
        out = builder.emit(relax.op.call_dps_packed(GROUPED, given, ty))
        return relax.op.reshape(out, list(extents_of(expr)))

    return rebuild(module, rule), layers


def _constant(expr: relax.Expr, values: Any) -> np.ndarray | None:
    """A constant, or one whose last two dimensions are swapped."""
    made = values.get(expr, expr) if isinstance(expr, relax.Var) else expr
    if is_op(made, "permute_dims") and permutation_of(made) == [0, 2, 1]:
        stored = _constant(made.args[0], values)
        return None if stored is None else np.ascontiguousarray(stored.swapaxes(1, 2))
    return made.value.numpy() if isinstance(made, ir.GenericConst) else None


def _repeated(builder: relax.BlockBuilder, x: relax.Expr, ids: relax.Expr) -> relax.Expr:
    """Every row of ``x`` as often as it has ids."""
    if ids.ty.ndim < x.ty.ndim:
        return x
    *rows, depth = extents_of(x)
    one = builder.emit(relax.op.expand_dims(x, -2))
    return builder.emit(relax.op.broadcast_to(one, [*rows, extents_of(ids)[-1], depth]))


def grouped_operator(
    form: GroupedForm, target: TargetInfo, store: TileStore, kernels: KernelCache | None = None
) -> Operator:
    """The operator on a CPU of products of this form."""
    bias, activation = form.bias, form.activation or None
    how: dict[str, Any] = {"dtype": form.dtype, "bias": bias, "activation": activation}
    return compile_operator(
        grouped_matmul(None, form.n, form.k, form.groups, transpose_rhs=True, **how),
        sparse={"lhs": Groups(form.groups)},
        dead="zero",
        target=target.tvm_target,
        library=False,
        database=store,
        cache=kernels,
    )


class GroupedLayers:
    """``layers(number, x, ids, out)`` runs one of ``found``: one operator for all of a form."""

    def __init__(
        self,
        found: Sequence[GroupedLayer],
        target: TargetInfo,
        store: TileStore,
        kernels: KernelCache,
    ) -> None:
        self.found = tuple(found)

        operators = {
            form: grouped_operator(form, target, store, kernels)
            for form in {layer.form for layer in found}
        }
        self._layers = []
        for layer in found:
            made = operators[layer.form]
            packed = made.pack(rhs=layer.weight)
            self._layers.append((made, [packed] if layer.bias is None else [packed, layer.bias]))

    def __call__(self, number: int, x: Any, ids: Any, out: Any) -> None:
        """``out[:] = activation(x @ weight[g].T + bias[g])``, zeros where the id ``g`` is -1."""
        operator, constants = self._layers[number]
        operator(x, *constants, ids, sparsity=ids, out=out)

    def prepare(self) -> None:
        """Compile what calls of up to 8192 rows need whose groups are about equally large."""
        for number in {layer.form: number for number, layer in enumerate(self.found)}.values():
            layer = self.found[number]
            groups, n, k = layer.weight.shape
            most = min(_MOST_ROWS, int(_MOST_FLOP / (2.0 * n * k)))
            for rows in (2**i for i in range(most.bit_length())):
                x, out = (np.zeros((rows, extent), layer.weight.dtype) for extent in (k, n))
                self(number, x, np.arange(rows, dtype=np.int32) % groups, out)
