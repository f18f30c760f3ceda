"""The linear layers of a compiled model, as operators of pit-tvm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ..api import Operator
from ..api import compile as compile_operator
from ..op.linear import linear
from ..structs import Lengths
from ..target import TargetInfo
from .linear import LinearLayer


class Layers:
    """``layers(number, x, out)`` runs one of ``found``: every weight packed once, one operator for
    all layers of a shape and form."""

    def __init__(self, found: Sequence[LinearLayer], target: TargetInfo, database: Any) -> None:
        @cache
        def operator(n: int, k: int, dtype: str, bias: bool, activation: str | None) -> Operator:
            tensors = linear(None, n, k, dtype=dtype, bias=bias, activation=activation)
            return compile_operator(
                tensors, sparse={"lhs": Lengths()}, target=target.tvm_target, database=database
            )

        self._layers: list[tuple[Operator, list[Any]]] = []
        for layer in found:
            biased = layer.bias is not None
            made = operator(*layer.weight.shape, layer.dtype, biased, layer.activation)
            packed = made.pack(rhs=layer.weight)
            self._layers.append((made, [packed, layer.bias] if biased else [packed]))

    def __call__(self, number: int, x: Any, out: Any) -> None:
        """``out[:] = activation(x @ weight.T + bias)``; all rows are live."""
        operator, constants = self._layers[number]
        rows = np.array([x.shape[0]], np.int32)
        operator(x, *constants, sparsity=rows, out=out)
