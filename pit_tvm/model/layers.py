"""The linear layers of a compiled model, as operators of pit-tvm."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..api import Operator
from ..api import compile as compile_operator
from ..op.linear import linear
from ..runtime.kernel_cache import KernelCache
from ..structs import Lengths
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .linear import LinearForm, LinearLayer

# Numbers of rows whose plans `Layers.prepare` looks at: so many while they double, up to this many
# and up to products of so many operations.
_PER_OCTAVE = 16
_MOST_ROWS = 8192
_MOST_FLOP = 4e10


def linear_operator(
    form: LinearForm,
    target: TargetInfo,
    store: TileStore,
    kernels: KernelCache | None = None,
    *,
    library: bool = True,
) -> Operator:
    """The operator of linear layers of this form; ``library``: whether the dense product of numpy
    or torch is a candidate."""
    bias, activation = form.bias, form.activation or None
    return compile_operator(
        linear(None, form.n, form.k, dtype=form.dtype, bias=bias, activation=activation),
        sparse={"lhs": Lengths()},
        target=target.tvm_target,
        library=library,
        database=store,
        cache=kernels,
    )


class Layers:
    """``layers(number, x, out)`` runs one of ``found``: every weight packed once, one operator for
    all layers of a shape and form.

    ``kernels`` are those that `kernels` gave elsewhere: they are not compiled again.
    """

    def __init__(
        self,
        found: Sequence[LinearLayer],
        target: TargetInfo,
        database: str | Path | TileStore | None = None,
        kernels: Mapping[str, bytes] | None = None,
    ) -> None:
        self.found, self.target = tuple(found), target
        self._store: TileStore = (
            database
            if isinstance(database, TileStore)
            else TileStore.open(database, device=target.device, isa=target.isa)
        )
        self._cache = KernelCache()
        self._cache.adopt(kernels or {})

        @cache
        def operator(form: LinearForm) -> Operator:
            return linear_operator(form, target, self._store, self._cache, library=False)

        self._layers: list[tuple[Operator, list[Any]]] = []
        for layer in found:
            made = operator(LinearForm.of(layer))
            packed = made.pack(rhs=layer.weight)
            self._layers.append((made, [packed] if layer.bias is None else [packed, layer.bias]))

    def __call__(self, number: int, x: Any, out: Any) -> None:
        """``out[:] = activation(x @ weight.T + bias)``; all rows are live."""
        operator, constants = self._layers[number]
        rows = np.array([x.shape[0]], np.int32)
        operator(x, *constants, sparsity=rows, out=out)

    @property
    def kernels(self) -> dict[str, bytes]:
        """The compiled kernels that calls have needed so far, by key."""
        return self._cache.libraries()

    @property
    def tiles(self) -> str:
        """The records that tiles are chosen by, one JSON object per line, as a database's file."""
        return "".join(f"{json.dumps(record.to_json())}\n" for record in self._store.all())

    def prepare(self) -> None:
        """Compile what calls of 1 to 8192 rows need, by running each kernel that plans choose."""
        distinct = {id(operator): number for number, (operator, _) in enumerate(self._layers)}
        for number in distinct.values():
            layer = self.found[number]
            n, k = layer.weight.shape
            for rows in _numbers_of_rows(self._layers[number][0], 2.0 * n * k):
                x, out = (np.zeros((rows, extent), layer.weight.dtype) for extent in (k, n))
                self(number, x, out)


def _numbers_of_rows(operator: Operator, flop: float) -> list[int]:
    """The fewest and the most rows for which each tile is chosen; few may run on one thread.

    ``flop``: operations of one row.
    """
    most = min(_MOST_ROWS, int(_MOST_FLOP / flop))
    grid = sorted({round(2 ** (i / _PER_OCTAVE)) for i in range(1 + 13 * _PER_OCTAVE)})
    ends: dict[object, list[int]] = {}
    for rows in (rows for rows in grid if rows <= most):
        choice = operator.explain(sparsity=[rows], sizes={"m": rows}).choice
        ends.setdefault((choice.kind, choice.tile), []).append(rows)
    return sorted({rows for found in ends.values() for rows in (found[0], found[-1])})
