"""Linear layers of a graph, with bias and activation, handed to pit-tvm's own operators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import ir, relax

from .rebuild import (
    extents_of,
    flat_rows,
    is_op,
    permutation_of,
    readers_of,
    rebuild,
    shape_of,
    values_of,
)

#: The name by which a graph calls its linear layers, also in saved models: this module's.
LINEAR = __name__

_ACTIVATIONS = ("relu", "gelu", "silu")


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """``activation(x @ weight.T + bias)``: ``weight`` ``[n, k]``, ``bias`` ``[n]`` or None.

    ``after``: the activation that ``x`` has zeros or small values from, if any is known.
    """

    weight: np.ndarray
    bias: np.ndarray | None
    activation: str | None
    dtype: str
    after: str | None = None


@dataclass(frozen=True)
class LinearForm:
    """``activation(x @ weight.T + bias)`` with ``weight`` ``[n, k]``; "" for no activation."""

    n: int
    k: int
    dtype: str
    bias: bool
    activation: str

    @classmethod
    def of(cls, layer: LinearLayer) -> LinearForm:
        """The form of a layer."""
        n, k = (int(extent) for extent in layer.weight.shape)
        return cls(n, k, layer.dtype, layer.bias is not None, layer.activation or "")

    def __str__(self) -> str:
        ends = [" + bias"] * self.bias + [f" + {self.activation}"] * bool(self.activation)
        return f"{self.n} x {self.k} {self.dtype}{''.join(ends)}"


def extract_linear(module: tvm.IRModule) -> tuple[tvm.IRModule, list[LinearLayer]]:
    """Replace every product with a constant matrix, and the bias and activation after it.

    Each becomes ``LINEAR(layer, x, out)``, a packed function on ``x`` ``[m, k]`` and ``out``
    ``[m, n]``, where ``layer`` is a position in the list that is returned.
    """
    found = _Chains(module["main"])
    layers: list[LinearLayer] = []
    lhs: dict[relax.Var, relax.Expr] = {}

    def rule(builder: relax.BlockBuilder, expr: relax.Call, var: relax.Var) -> relax.Expr:
        if is_op(expr, "matmul"):
            lhs[var] = expr.args[0]
        chain = found.ending.get(var)
        if chain is None:
            return expr
        layers.append(chain.layer)
        rows = flat_rows(builder, lhs[chain.product])
        out = emit_layer(builder, len(layers) - 1, rows, chain.layer)
        return relax.op.reshape(out, list(extents_of(expr)))

    return rebuild(module, rule), layers


def emit_layer(
    builder: relax.BlockBuilder, number: int, rows: relax.Expr, layer: LinearLayer
) -> relax.Var:
    """``LINEAR(number, rows, out)`` for a layer."""
    ty = relax.TensorType([extents_of(rows)[0], len(layer.weight)], layer.dtype)
    return builder.emit(relax.op.call_dps_packed(LINEAR, [relax.prim_value(number), rows], ty))


def called_layer(expr: relax.Expr, call: str = LINEAR) -> tuple[int, relax.Expr] | None:
    """The layer's number and its rows, if ``expr`` is what `emit_layer` emits, or the like for
    experts; else None."""
    if not is_op(expr, "call_dps_packed") or expr.args[0].global_symbol != call:
        return None
    number, rows, *_ = expr.args[1].fields
    return int(number), rows


@dataclass
class _Chain:
    layer: LinearLayer
    product: relax.Var


class _Chains:
    """Products with constants, each with what follows it as the only use of what it follows."""

    def __init__(self, main: relax.Function) -> None:
        self.values, self.readers = values_of(main), readers_of(main)
        self.ending: dict[relax.Var, _Chain] = {}
        for var, value in self.values.items():
            if is_op(value, "matmul"):
                self._start(var, value)

    def _start(self, var: relax.Var, product: relax.Call) -> None:
        weight, start = self._weight(product.args[1]), var
        if weight is None or shape_of(var) is None:
            return
        bias, activation = None, None
        at = self._skip(var)
        following = self._only_user(at)
        if following is not None:
            bias = self._bias(self.values[following], at, weight.shape[0])
        if bias is not None:
            var = at = self._skip(following)
            following = self._only_user(at)
        if following is not None:
            activation = self._activation(self.values[following])
        if activation is not None:
            var = following
        layer = LinearLayer(weight, bias, activation, str(product.ty.dtype))
        self.ending[var] = _Chain(layer, start)

    def _weight(self, expr: relax.Expr) -> np.ndarray | None:
        made = self.values.get(expr, expr) if isinstance(expr, relax.Var) else expr
        permuted = is_op(made, "permute_dims")
        stored = made.args[0] if permuted else made
        if not isinstance(stored, ir.GenericConst) or stored.ty.ndim != 2:
            return None
        array = stored.value.numpy()
        transposed = permuted and permutation_of(made) == [1, 0]
        return array if transposed else np.ascontiguousarray(array.T)

    def _only_user(self, var: relax.Var) -> relax.Var | None:
        readers = self.readers.get(var, [])
        return readers[0] if len(readers) == 1 else None

    def _skip(self, var: relax.Var) -> relax.Var:
        """The last of the reshapes that follow, each the only use."""
        following = self._only_user(var)
        while following is not None and is_op(self.values[following], "reshape"):
            var, following = following, self._only_user(following)
        return var

    def _bias(self, value: relax.Expr, of: relax.Var, n: int) -> np.ndarray | None:
        if not is_op(value, "add"):
            return None
        others = [a for a in value.args if not a.same_as(of)]
        if len(others) != 1 or not isinstance(others[0], ir.GenericConst):
            return None
        array = others[0].value.numpy()
        last = extents_of(value)[-1]
        return array if array.shape == (n,) and getattr(last, "value", None) == n else None

    def _activation(self, value: relax.Expr) -> str | None:
        return next((name for name in _ACTIVATIONS if is_op(value, f"nn.{name}")), None)
