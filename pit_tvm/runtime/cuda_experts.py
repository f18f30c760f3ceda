"""Experts on a GPU, each token with several choices: routing ids in, rows or their sums out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

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
from .cuda_arrays import check_devices, check_tensor, dtype_name, empty, signature
from .cuda_bind import aligned
from .cuda_columns import MOST_ELEMENTS, ColumnsKernels
from .cuda_detect import CudaDetector
from .cuda_fill import CudaFill
from .cuda_modules import cached_modules
from .cuda_rows import ROW_STEP, RowsKernels, rates_of
from .cuda_watch import CountWatch
from .cuda_workspace import CudaWorkspace
from .kernel_cache import KernelCache
from .promise import asked_for
from .torch_arrays import stored_weight

_MICRO_TILE = MicroTile("x", "m", 0, (1, 0))


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
        key = (*_signature((x, ids, weights), (up, down)), gated)
        watch = self._watches.get(key)
        if watch is None:
            _check(x, ids, weights, up, down, gated)
            watch = remember(self._watches, key, CountWatch(x.get_device()))
        tokens, top_k = ids.shape
        out = empty(x, x.shape)
        if 0 in (tokens, top_k, up.shape[0]):
            return out.zero_()
        # Products read 16 bytes at once; ids and weights are read one by one.
        x, up, down = aligned(x), aligned(up), aligned(down)
        index = self._index(x, ids, up.shape[0], watch)
        counts = watch.counts()
        inner = {"act": activation, "share": top_k, "gated": "halves" if gated else "none"}
        middle = self._product(
            x, index, up, empty(x, (tokens * top_k, down.shape[2])), counts, inner
        )
        rows = self._product(
            middle, index, down, empty(x, (tokens * top_k, x.shape[1])), counts, {}
        )
        combine = self.kernels.combine_kernel(dtype_name(x), dtype_name(ids))
        partial = rows.view(tokens, top_k, x.shape[1])
        combine(partial, weights.float(), ids, up.shape[0], out)
        return out

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
        self.fill.clear_ungrouped(out, ids, rhs.shape[0])
        index = self._index(x, ids, rhs.shape[0], watch)
        return self._product(x, index, rhs, out, watch.counts(), options, bias)

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

    def _product(
        self,
        lhs: Any,
        index: Index,
        rhs: Any,
        out: Any,
        counts: tuple[int, ...] | None,
        options: dict[str, Any],
        bias: Any = None,
    ) -> Any:
        stored, layout = stored_weight(rhs)
        if layout == "kn":
            options = options | {"rhs_layout": layout}
        tile = self._tile(lhs, rhs, out.shape[0], counts, options)
        rest = (stored, out) if bias is None else (stored, bias, out)
        self.kernels.product(tile, rhs.shape[0], **options)(lhs, index.ids, index.count, *rest)
        return out

    def _tile(
        self,
        lhs: Any,
        rhs: Any,
        rows: int,
        counts: tuple[int, ...] | None,
        options: dict[str, Any],
    ) -> Tile:
        """The cheapest tile for counts of an earlier call, or for an even routing."""
        alike = None
        if counts:
            live = max(sum(counts), 1)
            alike = bucket(live / rows), bucket(max(counts) / live)
        key = (lhs.dtype, tuple(rhs.shape), rows, alike, *options.values())
        tile = self._tiles.get(key)
        if tile is None:
            groups, n, k = rhs.shape
            total = float(sum(counts) if counts else rows)
            share = options.get("share", 1)
            work = GpuWork(total, int(n), int(k), int(groups), counts or (), share=share)
            rates = self._rates_of(dtype_name(lhs), options)
            plan = select_gpu(GROUPS, _MICRO_TILE, work, None, rates, rows)
            tile = plan.choice.tile
            if tile is None:
                raise ShapeError(mismatch("plan", "a tile", plan.choice))
            remember(self._tiles, key, tile)
        return tile

    def _rates_of(self, dtype: str, options: dict[str, Any]) -> GpuRates:
        key = (dtype, *options.items())
        if key not in self._rates:
            self._rates[key] = rates_of(self.store, dtype, self.target.isa, "torch", options)
        return self._rates[key]


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
