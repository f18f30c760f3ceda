"""Experts on a GPU, each token with several choices: routing ids in, rows or their sums out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import is_
from typing import Any, NamedTuple

from ..errors import ShapeError, mismatch
from ..remember import remember
from ..schedules.hopper_bands import starting_ranges
from ..schedules.hopper_combine import CHUNK, MOST_CHUNKS
from ..schedules.hopper_space import DTYPES, GROUP_STEPS, GROUPS
from ..selection.cover import bucket
from ..selection.gpu_columns import outer_tile
from ..selection.gpu_cost import GpuRates, GpuWork, select_gpu
from ..structs import Groups, Index, MicroTile, Tile
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .cuda_arrays import check_devices, check_tensor, dtype_name, empty, empty_of, signature
from .cuda_bind import aligned
from .cuda_columns import MOST_ELEMENTS, ColumnsKernels
from .cuda_detect import CudaDetector
from .cuda_fill import CudaFill
from .cuda_modules import cached_modules
from .cuda_repeat import CudaRepeats
from .cuda_rows import ROW_STEP, RowsKernels, rates_of
from .cuda_watch import CountWatch
from .cuda_workspace import CudaWorkspace
from .kernel_cache import KernelCache
from .promise import asked_for
from .torch_arrays import stored_weight

_MICRO_TILE = MicroTile("x", "m", 0, (1, 0))
_SMALL = 1 << 20  # bytes between the products of a layer whose calls are repeated by CUDA graphs


@dataclass(frozen=True)
class _Product:
    """``rows`` rows by the weights [groups, n, k] of their groups; the kernel's options."""

    dtype: str
    rows: int
    groups: int
    n: int
    k: int
    options: tuple[tuple[str, Any], ...]


class _Tiles(NamedTuple):
    """Of both products of a layer."""

    up: Tile
    down: Tile

    @property
    def way(self) -> tuple[object, ...]:
        """What is launched."""
        return ("pit", *self)


class _Layer:
    """What calls of a layer with the same signature share. ``tiles``: those for ``counts``."""

    def __init__(self, device: int, up: _Product, down: _Product) -> None:
        self.device, self.watch = device, CountWatch(device)
        self.products = up, down
        self.small = 2 * up.rows * (down.k + down.n) <= _SMALL
        self.counts: tuple[int, ...] | None = None
        self.tiles: _Tiles | None = None


class CudaExperts:
    """``out[t] = sum over choices c of weights[t, c] * down[e](act(up[e](x[t])))``, e = ids[t, c].

    Three products of rows and no permutation of any operand: the first gathers tokens and leaves
    one row for each choice, the second works on those in place, and the choices of a token are
    summed in fixed order, so the result is the same at every call. Threads may share it.
    """

    def __init__(self, target: TargetInfo, store: TileStore, cache: KernelCache) -> None:
        self.target, self.store = target, store
        self.kernels = RowsKernels(cache, target.isa)
        self.columns = ColumnsKernels(cache, target.isa)
        modules = cached_modules(cache, target.isa)
        self.detector, self.fill = CudaDetector(modules, checked=asked_for()), CudaFill(modules)
        self.memory = CudaWorkspace()
        self._rates: dict[object, GpuRates] = {}
        self._tiles: dict[object, Tile] = {}
        self._watches: dict[object, CountWatch] = {}
        self._layers: dict[object, _Layer] = {}
        self._cache = cache
        self._repeats: dict[object, CudaRepeats] | None = None if asked_for() else {}

    def run(
        self,
        x: Any,
        ids: Any,
        weights: Any,
        up: Any,
        down: Any,
        *,
        activation: str = "silu",
        gated: bool = True,
    ) -> Any:
        """The layer's output.

        Parameters
        ----------
        x
            [tokens, hidden], float16 or bfloat16.
        ids, weights
            [tokens, top_k]: experts, int32 or int64 (-1 for none), and their floating-point
            weights.
        up, down
            [experts, inter, hidden], or with ``gated`` [experts, 2 * inter, hidden] with all gates
            first; [experts, hidden, inter]; contiguous, or ``.mT`` of what is. ``inter`` and
            ``hidden`` are multiples of 8, not 0.
        activation
            Of ``up``'s result, or with ``gated`` of the gates, which multiply the other half.

        Returns
        -------
        [tokens, hidden]

        Raises
        ------
        ShapeError, DTypeError
            An argument does not fit.
        """
        given, form = (x, ids, weights, up, down), (activation, gated)
        repeats = self._repeats_of(form)
        made, repeat = repeats.run(given, None, None) if repeats else (None, None)
        if repeat is not None:
            return made
        layer = self._layer(given, form)
        out = empty(x, x.shape)
        if 0 in (*ids.shape, up.shape[0]):
            return out.zero_()
        # Products read 16 bytes at once; ids and weights are read one by one.
        ready = aligned(x), ids, weights, aligned(up), aligned(down)
        tiles = self.plan_of(layer)
        counts = self._run(layer, tiles, ready, out)
        if repeats and layer.small and all(map(is_, ready, given)):
            again = partial(self._run, layer, tiles, ready, out)
            repeats.keep(given, None, (None, out), (layer, tiles, counts), again)
        return out

    def plan_of(self, layer: _Layer) -> _Tiles:
        """The tiles for what is known now of such calls."""
        counts, tiles = layer.watch.counts(), layer.tiles
        if tiles is None or counts is not layer.counts:
            tiles = _Tiles(*(self._tile(product, counts) for product in layer.products))
            layer.counts, layer.tiles = counts, tiles
        return tiles

    def _repeats_of(self, form: tuple[str, bool]) -> CudaRepeats | None:
        """Of layers with such gates; None where calls are checked."""
        if self._repeats is None:
            return None
        found = self._repeats.get(form)
        if found is None:
            made = CudaRepeats(self._cache, self.detector.report, self)
            found = self._repeats.setdefault(form, made)
        return found

    def _layer(self, given: Sequence[Any], form: tuple[str, bool]) -> _Layer:
        """What calls like this one share; checks the first of them."""
        x, ids, weights, up, down = given
        key = (*_signature((x, ids, weights), (up, down)), *form)
        layer = self._layers.get(key)
        if layer is None:
            activation, gated = form
            _check(x, ids, weights, up, down, gated)
            inner = {
                "act": activation,
                "share": ids.shape[1],
                "gated": "halves" if gated else "none",
            }
            both = _product(x, ids, up, inner), _product(x, ids, down, {})
            layer = remember(self._layers, key, _Layer(x.get_device(), *both))
        return layer

    def _run(self, layer: _Layer, tiles: _Tiles, given: Sequence[Any], out: Any) -> Any:
        """Launch a layer; returns how many rows each expert has, a CUDA tensor."""
        x, ids, weights, up, down = given
        (first, second), top_k = layer.products, ids.shape[1]
        index = self._index(x, ids, first.groups, layer.watch)
        middle, rows = (
            self._between(layer, x, role, (first.rows, size))
            for role, size in (("middle", second.k), ("rows", second.n))
        )
        self._launch(first, tiles.up, (x, up, middle), index)
        self._launch(second, tiles.down, (middle, down, rows), index)
        combine = self.kernels.combine_kernel(first.dtype, dtype_name(ids))
        combine(rows.view(-1, top_k, second.n), _as_float(weights), ids, first.groups, out)
        return index.count

    def _between(self, layer: _Layer, like: Any, role: str, shape: tuple[int, int]) -> Any:
        """Memory between products: small one is used again by the next call in the stream."""
        if not layer.small:
            return empty(like, shape)
        return self.memory.keep(_memory, like, role, like.dtype, *shape)

    def grouped(self, x: Any, ids: Any, rhs: Any, bias: Any, activation: str) -> Any:
        """``act(x[t] @ rhs[e].T + bias[e])`` for each choice ``e = ids[t, c]``; zeros where it is
        no expert.

        ``x`` [tokens, k], ``ids`` [tokens, top_k], ``rhs`` [experts, n, k], ``bias`` [experts, n]
        or None; returns [tokens * top_k, n]. Errors as `run`.
        """
        key = _signature((x, ids) if bias is None else (x, ids, bias), (rhs,))
        watch = self._watches.get(key)
        if watch is None:
            _check_product(x, ids, rhs, bias)
            watch = remember(self._watches, key, CountWatch(x.get_device()))
        out = empty(x, (ids.numel(), rhs.shape[1]))
        if 0 in (out.shape[0], rhs.shape[0]):
            return out.zero_()
        x, rhs, bias = aligned(x), aligned(rhs), None if bias is None else aligned(bias)
        options = {"act": activation, "share": ids.shape[1], "bias": bias is not None}
        product = _product(x, ids, rhs, options)
        self.fill.clear_ungrouped(out, ids, rhs.shape[0])
        index = self._index(x, ids, rhs.shape[0], watch)
        rest = (out,) if bias is None else (bias, out)
        self._launch(product, self._tile(product, watch.counts()), (x, rhs, *rest), index)
        return out

    def outer(self, left: Any, right: Any, ids: Any, groups: int) -> Any:
        """``out[g] = sum of left[t, c, :, None] * right[t]`` where ``ids[t, c] == g``: of `grouped`
        the gradient of the weights.

        ``left`` [tokens * top_k, n], ``right`` [tokens, k], ``ids`` [tokens, top_k]; returns
        [groups, n, k]. Errors as `run`.
        """
        key = (*signature((left, right, ids)), groups)
        watch = self._watches.get(key)
        if watch is None:
            _check_outer(left, right, ids, groups)
            watch = remember(self._watches, key, CountWatch(left.get_device()))
        (rows, n), k = left.shape, right.shape[1]
        out = empty(left, (groups, n, k))
        if 0 in (rows, groups):
            return out.zero_()
        left, right = aligned(left), aligned(right)
        index = self._index(right, ids, groups, watch)
        kernel = self.columns.product(_outer_tile(dtype_name(left), k), share=ids.shape[1])
        kernel(left, index.ids, index.count, right.unsqueeze(0), out.view(groups * n, k))
        return out

    def _index(self, x: Any, ids: Any, experts: int, watch: CountWatch) -> Index:
        shape, take = tuple(x.shape), self.memory.take
        index = self.detector.detect(Groups(experts), ids, shape, _MICRO_TILE, take=take)
        if watch.due():
            watch.report(index.count, self.detector.report)
        return index

    def _launch(self, product: _Product, tile: Tile, arrays: Sequence[Any], index: Index) -> None:
        """``arrays``: rows, weights, a bias if there is one, and the result."""
        lhs, rhs, *rest = arrays
        kernel = self.kernels.product(tile, product.groups, **dict(product.options))
        kernel(lhs, index.ids, index.count, stored_weight(rhs)[0], *rest)

    def _tile(self, product: _Product, counts: tuple[int, ...] | None) -> Tile:
        """The cheapest tile for counts of an earlier call, or for an even routing."""
        alike = None
        if counts:
            live = max(sum(counts), 1)
            alike = bucket(live / product.rows), bucket(max(counts) / live)
        tile = self._tiles.get((product, alike))
        if tile is None:
            total = float(sum(counts) if counts else product.rows)
            sizes, options = (product.n, product.k, product.groups), dict(product.options)
            work = GpuWork(total, *sizes, counts or (), share=options.get("share", 1))
            rates = self._rates_of(product.dtype, options)
            plan = select_gpu(GROUPS, _MICRO_TILE, work, None, rates, product.rows)
            tile = plan.choice.tile
            if tile is None:
                raise ShapeError(mismatch("plan", "a tile", plan.choice))
            remember(self._tiles, (product, alike), tile)
        return tile

    def _rates_of(self, dtype: str, options: dict[str, Any]) -> GpuRates:
        key = (dtype, *options.items())
        if key not in self._rates:
            self._rates[key] = rates_of(self.store, dtype, self.target.isa, "torch", options)
        return self._rates[key]


def _product(x: Any, ids: Any, rhs: Any, options: dict[str, Any]) -> _Product:
    """The product of a row for each of ``ids`` by its group of ``rhs``."""
    layout = stored_weight(rhs)[1]
    chosen = options if layout == "nk" else options | {"rhs_layout": layout}
    groups, n, k = map(int, rhs.shape)
    return _Product(dtype_name(x), ids.numel(), groups, n, k, tuple(chosen.items()))


def _memory(like: Any, role: str, dtype: Any, *shape: int) -> Any:
    return empty(like, shape)


def _as_float(weights: Any) -> Any:
    """Weights in float32, in memory that a recording knows of."""
    if dtype_name(weights) == "float32":
        return weights
    made = empty_of("float32", weights, tuple(weights.shape))
    made.copy_(weights)
    return made


@cache
def _outer_tile(dtype: str, columns: int) -> Tile:
    return outer_tile(starting_ranges(dtype), columns)


def _signature(tensors: Sequence[Any], weights: Sequence[Any]) -> tuple[object, ...]:
    """`signature`, also of how weights are stored."""
    stored, layouts = zip(*map(stored_weight, weights), strict=True)
    return (*signature((*tensors, *stored)), layouts)


def _check(x: Any, ids: Any, weights: Any, up: Any, down: Any, gated: bool) -> None:
    _check_product(x, ids, up, None)
    experts, wide, hidden = up.shape
    if gated and wide % 2:
        raise ShapeError(mismatch("up", "an even number of columns, gates and others", wide))
    inter = wide // 2 if gated else wide
    _check_weight("down", down, x, (experts, hidden, inter))
    check_tensor("weights", weights, ("float32", *DTYPES), tuple(ids.shape))
    _check_sizes(inter=inter)
    check_devices("x", x, {"weights": weights, "down": down})
    if x.numel() // CHUNK > MOST_CHUNKS:
        expected = f"at most {MOST_CHUNKS} pieces of {CHUNK} elements"
        raise ShapeError(mismatch("x", expected, f"shape {list(x.shape)}"))


def _check_outer(left: Any, right: Any, ids: Any, groups: int) -> None:
    if [len(each.shape) for each in (left, right, ids)] != [2, 2, 2]:
        expected = "left [tokens * top_k, n], right [tokens, k], ids [tokens, top_k]"
        got = (tuple(left.shape), tuple(right.shape), tuple(ids.shape))
        raise ShapeError(mismatch("left, right, ids", expected, got))
    if not 0 <= groups <= GROUP_STEPS[-1]:
        raise ShapeError(mismatch("groups", f"at most {GROUP_STEPS[-1]}", groups))
    (tokens, k), top_k = right.shape, ids.shape[1]
    check_tensor("right", right, DTYPES, (tokens, k))
    check_tensor("left", left, (dtype_name(right),), (tokens * top_k, left.shape[1]))
    check_tensor("ids", ids, ("int32", "int64"), (tokens, top_k))
    _check_sizes(n=left.shape[1], k=k)
    for name, each in (("left", left), ("right", right)):
        if each.numel() >= MOST_ELEMENTS:
            expected = f"fewer than {MOST_ELEMENTS} elements"
            raise ShapeError(mismatch(name, expected, f"shape {list(each.shape)}"))
    check_devices("right", right, {"left": left, "ids": ids})


def _check_product(x: Any, ids: Any, rhs: Any, bias: Any) -> None:
    check_tensor("x", x, DTYPES)
    if len(x.shape) != 2 or len(rhs.shape) != 3 or len(ids.shape) != 2:
        expected = "x [tokens, k], ids [tokens, top_k], weight [experts, n, k]"
        got = (tuple(x.shape), tuple(ids.shape), tuple(rhs.shape))
        raise ShapeError(mismatch("x, ids, weight", expected, got))
    tokens, depth = x.shape
    if rhs.shape[0] > GROUP_STEPS[-1]:
        raise ShapeError(mismatch("experts", f"at most {GROUP_STEPS[-1]}", rhs.shape[0]))
    check_tensor("x", x, (dtype_name(x),), (tokens, depth))
    _check_weight("weight", rhs, x, (rhs.shape[0], rhs.shape[1], depth))
    check_tensor("ids", ids, ("int32", "int64"), (tokens, ids.shape[1]))
    others = {"ids": ids, "weight": rhs}
    if bias is not None:
        check_tensor("bias", bias, (dtype_name(x),), tuple(rhs.shape[:2]))
        others["bias"] = bias
    _check_sizes(n=rhs.shape[1], k=depth)
    check_devices("x", x, others)


def _check_weight(name: str, weight: Any, x: Any, shape: tuple[int, int, int]) -> None:
    stored, layout = stored_weight(weight)
    groups, n, k = shape
    check_tensor(name, stored, (dtype_name(x),), shape if layout == "nk" else (groups, k, n))


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size % ROW_STEP or not size:
            expected = f"a multiple of {ROW_STEP}, at least {ROW_STEP}"
            raise ShapeError(mismatch(name, expected, size))
