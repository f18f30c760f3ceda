"""The linear layers of a model on a GPU: rows one after another, so no index is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..remember import remember
from ..runtime.arrays import as_numpy, as_torch
from ..runtime.cuda_arrays import dense_product, dtype_name, is_capturing
from ..runtime.cuda_few_rows import MOST_ROWS, CudaFewRows, tile_for
from ..runtime.cuda_modules import cached_modules
from ..runtime.cuda_planner import dense_of
from ..runtime.cuda_rows import ROW_STEP, RowsKernels, rates_of
from ..runtime.kernel_cache import KernelCache
from ..schedules.hopper_space import ROWS
from ..selection.gpu_cost import GpuRates, GpuWork, select_gpu
from ..structs import MicroTile, Plan, Tile
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .activity import Activity
from .cuda_active import ActiveRows
from .cuda_experts import CudaGroupedLayers
from .experts import GroupedLayer
from .layers import StoredLayers
from .linear import LinearForm, LinearLayer

_MICRO_TILE = MicroTile("lhs", "m", 0, (1, 0))
# Numbers of rows that share a plan, and the most that have one of their own: products of more are
# so many waves of tiles that they may go by its plan.
_ALIKE, _MOST = 64, 65536
# Numbers of rows that plans are decided for.
_NUMBERS_OF_ROWS = (*range(1, _ALIKE), *range(_ALIKE, _MOST + 1, _ALIKE))

Run = Callable[[torch.Tensor, torch.Tensor], None]  # x, out
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]  # ids, count


@dataclass(frozen=True, eq=False)
class _Layer:
    """``weight`` is ``[n, k]``, or ``[k, n]`` where rows of it may be gathered (``turned``)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    act: str
    turned: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """n and k."""
        first, second = self.weight.shape
        return (second, first) if self.turned else (first, second)

    @property
    def form(self) -> tuple[object, ...]:
        """What layers have in common that share a plan."""
        return (*self.sizes, self.weight.dtype, self.bias is not None, self.act, self.turned)

    def dense(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """By cuBLAS."""
        dense_product(x, self.weight, self.bias, self.act, out, transpose_rhs=not self.turned)


class CudaLayers(StoredLayers):
    """``layers(number, x, out)`` runs one of ``found`` on the current stream.

    For each number of rows the cheaper of cuBLAS, with a pass for an activation, and the family's
    tiles, which end with it; and for a few rows of ReLU's results a product that reads the weights
    of what is not 0 (`ActiveRows`). Weights stay as they are stored, but for layers behind ReLU.
    ``in_place``: numbers of the layers that `placed` is called for. ``layers.grouped`` has those of
    experts.
    """

    threshold = None  # only zeros are skipped

    def __init__(
        self,
        found: Sequence[LinearLayer],
        target: TargetInfo,
        device: torch.device,
        cache: KernelCache,
        database: str | Path | TileStore | None = None,
        in_place: Collection[int] = (),
        grouped: Sequence[GroupedLayer] = (),
    ) -> None:
        self._store = TileStore.over_shipped(database, device=target.device, isa=target.isa)
        self.target, self.device, self._cache = target, device, cache
        self._kernels = RowsKernels(cache, target.isa)
        self._few = CudaFewRows(cached_modules(cache, target.isa))
        self._layers = [_on(layer, device) for layer in found]
        self._forms = [LinearForm.of(layer) for layer in found]
        self._after, self._in_place = [layer.after for layer in found], frozenset(in_place)
        self._rates: dict[object, GpuRates] = {}
        self._plans: dict[object, Plan] = {}
        self._runs: dict[tuple[int, int], Run] = {}
        self._placed: dict[tuple[int, int], Product] = {}
        self._numbers = Numbers(device)
        self.grouped = CudaGroupedLayers(grouped, target, device, self._store, cache)

    def __call__(self, number: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out[:] = act(x @ weight.T + bias)``, at least one row."""
        rows = x.shape[0]
        key = (number, _alike(rows))
        run = self._runs.get(key)
        if run is None:
            run = remember(self._runs, key, self._runner(number, rows))
        run(x, out)

    def placed(
        self,
        number: int,
        x: torch.Tensor,
        row: torch.Tensor,
        starts: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """``out[row[i]] = act(x[i] @ weight.T + bias)`` for the live tokens, 0 elsewhere.

        ``x`` is ``[rows, k]`` and ``out`` ``[batch * tokens, n]``; ``row`` names a token for each
        row, first the live ones, whose number is the last of ``starts``. The layer `has_tiles`.
        """
        out.zero_()
        rows = len(row)
        if rows:
            key = (number, _alike(rows))
            run = self._placed.get(key)
            if run is None:
                run = self._product(number, self._best_tile(number, rows))
                remember(self._placed, key, run)
            run(x, row.view(1, rows), starts[-1:], out)

    def _runner(self, number: int, rows: int) -> Run:
        """The layer for about so many rows."""
        layer, tile = self._layers[number], self.plan(number, rows).choice.tile
        if layer.turned and rows <= MOST_ROWS:
            return self._active_rows(number, rows)
        if tile is None:
            return layer.dense
        product = self._product(number, tile)
        numbers = self._numbers
        return lambda x, out: product(x, numbers.below(len(x)), numbers.one(len(x)), out)

    def _active_rows(self, number: int, rows: int) -> ActiveRows:
        layer, plan = self._layers[number], self.plan(number, rows)
        weight, bias = layer.weight, layer.bias
        return ActiveRows(
            number,
            self._forms[number],
            rows,
            layer.dense,
            lambda x, out: self._few(x, weight, bias, out),
            plan.candidates[-1].cost_us,
        )

    @property
    def activity(self) -> list[Activity]:
        """What layers behind ReLU did with a few rows so far."""
        return [run.report() for run in self._runs.values() if isinstance(run, ActiveRows)]

    @property
    def found(self) -> list[LinearLayer]:
        """The layers with their weights on the host, as they were given."""
        parts = zip(self._layers, self._forms, self._after, strict=True)
        return [_on_host(layer, form, after) for layer, form, after in parts]

    def prepare(self) -> None:
        """Compile what calls of any number of rows need."""
        kinds = {(layer.form, i in self._in_place): i for i, layer in enumerate(self._layers)}
        for number in kinds.values():
            layer = self._layers[number]
            tiles = {self.plan(number, rows).choice.tile for rows in _NUMBERS_OF_ROWS}
            if number in self._in_place:
                tiles.update(self._best_tile(number, rows) for rows in _NUMBERS_OF_ROWS)
            for tile in tiles:
                if tile is not None:
                    self._product(number, tile)
            if layer.turned:
                dtype, has_bias = dtype_name(layer.weight), layer.bias is not None
                for rows in range(1, MOST_ROWS + 1):
                    self._few.kernel(tile_for(dtype, rows, layer.sizes[0]), has_bias, "none")
        self.grouped.prepare()

    def _best_tile(self, number: int, rows: int) -> Tile:
        """The fastest tile, also where cuBLAS is faster."""
        found = (each.tile for each in self.plan(number, rows).candidates)
        return next(tile for tile in found if tile is not None)

    def _product(self, number: int, tile: Tile) -> Product:
        """The layer by a tile."""
        layer = self._layers[number]
        kernel = self._kernels.product(tile, 0, **_options(layer), packed=True)
        operands = [part.unsqueeze(0) for part in (layer.weight, layer.bias) if part is not None]
        return lambda x, ids, count, out: kernel(x, ids, count, *operands, out)

    def plan(self, number: int, rows: int) -> Plan:
        """How a layer is computed for so many rows, and why; decided for the number of rows that
        stands for all that share the plan, so that `prepare` sees whatever calls will run."""
        layer, rows = self._layers[number], _alike(rows)
        key = (layer.form, rows)
        plan = self._plans.get(key)
        if plan is None:
            plan = remember(self._plans, key, self._decide(layer, rows))
        return plan

    def _decide(self, layer: _Layer, rows: int) -> Plan:
        n, k = layer.sizes
        dense = dense_of(rows, n, k, layer.act)
        work = GpuWork(live=float(rows), n=n, k=k, act=layer.act)
        plan = select_gpu(ROWS, _MICRO_TILE, work, dense, self._rates_for(layer), rows)
        if _whole_pieces(n, k):
            return plan
        library = plan.candidates[-1]
        return Plan(library, (library,), "its rows are no whole pieces of 16 bytes", plan.tuned)

    def _rates_for(self, layer: _Layer) -> GpuRates:
        key = layer.form[2:]
        if key not in self._rates:
            dtype = dtype_name(layer.weight)
            self._rates[key] = rates_of(
                self._store, dtype, self.target.isa, "torch", _options(layer)
            )
        return self._rates[key]


def has_tiles(layer: LinearLayer) -> bool:
    """Whether tiles can compute a layer."""
    return _whole_pieces(*layer.weight.shape)


def _whole_pieces(n: int, k: int) -> bool:
    return n % ROW_STEP == 0 and k % ROW_STEP == 0


def _options(layer: _Layer) -> dict[str, Any]:
    layout = "kn" if layer.turned else "nk"
    return {"bias": layer.bias is not None, "act": layer.act, "rhs_layout": layout}


def _on(layer: LinearLayer, device: torch.device) -> _Layer:
    weight = as_torch(layer.weight).to(device)
    bias = None if layer.bias is None else as_torch(layer.bias).to(device)
    gathers = layer.after == "relu" and layer.activation is None
    turned = gathers and _whole_pieces(*weight.shape)
    weight = weight.t().contiguous() if turned else weight
    return _Layer(weight, bias, layer.activation or "none", turned)


def _on_host(layer: _Layer, form: LinearForm, after: str | None) -> LinearLayer:
    weight = (layer.weight.t() if layer.turned else layer.weight).cpu().contiguous()
    bias = None if layer.bias is None else as_numpy(layer.bias.cpu())
    return LinearLayer(as_numpy(weight), bias, form.activation or None, form.dtype, after)


def _alike(rows: int) -> int:
    """The largest of the numbers of rows that share a plan; `_MOST` stands for more."""
    return min(-(-rows // _ALIKE) * _ALIKE, _MOST) if rows > _ALIKE else rows


class Numbers:
    """0, 1, 2 and so on, int32, on ``device``, for kernels that read ids and counts there.

    Recorded graphs read them where they were when they were recorded, so memory that has become
    too short is kept beside the next, which is twice as long at least.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[torch.Tensor] = []

    def below(self, end: int) -> torch.Tensor:
        """``[1, end]``: the numbers below ``end``."""
        return self._at_least(end)[:end].view(1, end)

    def one(self, number: int) -> torch.Tensor:
        """``[1]``: ``number``."""
        return self._at_least(number + 1)[number : number + 1]

    def _at_least(self, size: int) -> torch.Tensor:
        if self._made and len(self._made[-1]) >= size:
            return self._made[-1]
        # Powers of two, so that what is asked for next is usually there.
        made = torch.arange(1 << size.bit_length(), dtype=torch.int32, device=self._device)
        if not is_capturing(self._device.index):  # what is recorded is written when it is replayed
            self._made.append(made)
        return made
