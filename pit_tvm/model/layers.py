"""The linear layers of a compiled model, as operators of pit-tvm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..api import Operator
from ..api import compile as compile_operator
from ..op.linear import linear
from ..runtime.kernel_cache import KernelCache
from ..structs import Lengths, SparsitySpec, Values
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .activity import Activity
from .experts import GroupedLayer, GroupedLayers
from .gathered import GatheredLayer
from .linear import LinearForm, LinearLayer
from .threshold import Threshold

# Numbers of rows whose plans `Layers.prepare` looks at: so many while they double, up to this many
# and up to products of so many operations.
_PER_OCTAVE = 16
_MOST_ROWS = 8192
_MOST_FLOP = 4e10
# Activations are gathered in micro-tiles of 32 rows, and of these: few tokens share few columns.
_LOW_ROWS = 8


def linear_operator(
    form: LinearForm,
    target: TargetInfo,
    store: TileStore,
    kernels: KernelCache | None = None,
    *,
    sparse: SparsitySpec | None = None,
    library: bool = True,
) -> Operator:
    """The operator of linear layers of this form. ``sparse``: what is known of rows (None: which
    exist); ``library``: whether the dense product of numpy or torch is a candidate."""
    bias, activation = form.bias, form.activation or None
    return compile_operator(
        linear(None, form.n, form.k, dtype=form.dtype, bias=bias, activation=activation),
        sparse={"lhs": sparse or Lengths()},
        target=target.tvm_target,
        library=library,
        database=store,
        cache=kernels,
    )


class StoredLayers:
    """What a model's layers are made of, as a saved model keeps it: compiled kernels, and the
    records that tiles are chosen by."""

    _cache: KernelCache
    _store: TileStore

    @property
    def kernels(self) -> dict[str, bytes]:
        """The compiled kernels that calls have needed so far, by key."""
        return self._cache.libraries()

    @property
    def tiles(self) -> str:
        """The records that tiles are chosen by, one JSON object per line, as a database's file."""
        return self._store.text


class Layers(StoredLayers):
    """``layers(number, x, out)`` runs one of ``found``: every weight packed once, one operator for
    all layers of a shape and form. ``layers.grouped`` has those of experts.

    ``kernels`` are those that `kernels` gave elsewhere: they are not compiled again. Layers on
    activations of ReLU gather what is not zero where that is faster; with a ``threshold`` those on
    any activation, of which what is not above it counts as zero.
    """

    def __init__(
        self,
        found: Sequence[LinearLayer],
        target: TargetInfo,
        database: str | Path | TileStore | None = None,
        kernels: Mapping[str, bytes] | None = None,
        threshold: float | None = None,
        grouped: Sequence[GroupedLayer] = (),
    ) -> None:
        self.found, self.target, self.threshold = tuple(found), target, threshold
        self._store = TileStore.over_shipped(database, device=target.device, isa=target.isa)
        self._cache = KernelCache()
        self._cache.adopt(kernels or {})

        @cache
        def operator(form: LinearForm, sparse: SparsitySpec) -> Operator:
            store, kernels = self._store, self._cache
            return linear_operator(form, target, store, kernels, sparse=sparse, library=False)

        self._operator = operator
        self._layers = [self._packed(layer) for layer in found]
        self._gathered = {
            number: self._on_activation(number, layer)
            for number, layer in enumerate(found)
            if layer.after == "relu" or (layer.after and threshold is not None)
        }
        self.grouped = GroupedLayers(grouped, target, self._store, self._cache)

    def __call__(self, number: int, x: Any, out: Any) -> None:
        """``out[:] = activation(x @ weight.T + bias)``; all rows are live."""
        gathered = self._gathered.get(number)
        if gathered is None:
            self._dense(number, x, out)
        else:
            gathered(x, out)

    @property
    def activity(self) -> list[Activity]:
        """What layers on activations did so far."""
        return [one for layer in self._gathered.values() for one in layer.report()]

    def prepare(self) -> None:
        """Compile what calls of 1 to 8192 rows need, by running each kernel that plans choose."""
        forms = {number: LinearForm.of(layer) for number, layer in enumerate(self.found)}
        for number in {form: number for number, form in forms.items()}.values():
            layer = self.found[number]
            n, k = layer.weight.shape
            for rows in _numbers_of_rows(self._layers[number][0], _most_rows(layer)):
                x, out = (np.zeros((rows, extent), layer.weight.dtype) for extent in (k, n))
                self._dense(number, x, out)
        for number in {forms[number]: number for number in self._gathered}.values():
            most = _most_rows(self.found[number])
            self._gathered[number].prepare([2**i for i in range(most.bit_length())])
        self.grouped.prepare()

    def _packed(self, layer: LinearLayer) -> tuple[Operator, list[Any]]:
        """A layer's operator where all rows are live, and its constants."""
        dense = self._operator(LinearForm.of(layer), Lengths())
        packed = dense.pack(rhs=layer.weight)
        return dense, [packed] if layer.bias is None else [packed, layer.bias]

    def _on_activation(self, number: int, layer: LinearLayer) -> GatheredLayer:
        form, dense = LinearForm.of(layer), self._layers[number]
        packed, *bias = dense[1]
        sparse = self._operator(form, Values(_LOW_ROWS, 1))
        threshold = None
        if self.threshold is not None:
            threshold = Threshold(self.threshold, layer.dtype, self.target, self._cache)
        return GatheredLayer(
            number,
            form,
            str(layer.after),
            dense,
            (sparse, [sparse.pack(rhs=packed), *bias]),
            threshold,
        )

    def _dense(self, number: int, x: Any, out: Any) -> None:
        operator, constants = self._layers[number]
        rows = np.array([x.shape[0]], np.int32)
        operator(x, *constants, sparsity=rows, out=out)


def _most_rows(layer: LinearLayer) -> int:
    return min(_MOST_ROWS, int(_MOST_FLOP / (2.0 * layer.weight.size)))


def _numbers_of_rows(operator: Operator, most: int) -> list[int]:
    """The fewest and the most rows, up to ``most``, for which each tile is chosen; few may run on
    one thread."""
    grid = sorted({round(2 ** (i / _PER_OCTAVE)) for i in range(1 + 13 * _PER_OCTAVE)})
    ends: dict[object, list[int]] = {}
    for rows in (rows for rows in grid if rows <= most):
        choice = operator.explain(sparsity=[rows], sizes={"m": rows}).choice
        ends.setdefault((choice.kind, choice.tile), []).append(rows)
    return sorted({rows for found in ends.values() for rows in (found[0], found[-1])})
