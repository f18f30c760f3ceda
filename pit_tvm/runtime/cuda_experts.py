"""Experts on a GPU, each token with several choices: routing ids in, rows or their sums out."""

from __future__ import annotations

from functools import cache, partial
from operator import is_
from typing import Any

from ..errors import ShapeError, mismatch
from ..gates import PLAIN, Gate
from ..remember import remember
from ..schedules.hopper_bands import starting_ranges
from ..schedules.hopper_space import GROUPS
from ..selection.cover import bucket
from ..selection.gpu_columns import outer_tile
from ..selection.gpu_cost import GpuRates, GpuWork, select_gpu
from ..structs import Groups, Index, MicroTile, Tile
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .cuda_arrays import dtype_name, empty, signature
from .cuda_bind import aligned
from .cuda_columns import ColumnsKernels
from .cuda_detect import CudaDetector
from .cuda_detect_ids import Find
from .cuda_experts_call import (
    ExpertsCall,
    Form,
    Given,
    GroupedProduct,
    Launches,
    call_of,
    check_outer,
    form_of,
)
from .cuda_fill import CudaFill
from .cuda_modules import Kernel, cached_modules
from .cuda_repeat import CudaRepeats
from .cuda_rows import RowsKernels, rates_of
from .cuda_watch import CountWatch
from .cuda_workspace import CudaWorkspace
from .kernel_cache import KernelCache
from .promise import asked_for

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
        self._calls: dict[object, ExpertsCall] = {}
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
        up_bias: Any = None,
        down_bias: Any = None,
        activation: str = "silu",
        gate: Gate | None = PLAIN,
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
            [experts, wide, hidden], ``wide`` being ``inter``, or with a gate 2 * ``inter``;
            [experts, hidden, inter]; contiguous, or ``.mT`` of what is. ``inter`` and ``hidden``
            are multiples of 8, not 0.
        up_bias, down_bias
            [experts, wide], [experts, hidden], or None.
        activation, gate
            Of ``up``'s result, or with a ``gate`` of the half of its columns that are gates.

        Returns
        -------
        [tokens, hidden]

        Raises
        ------
        ShapeError, DTypeError
            An argument does not fit.
        """
        asked, raw = _layer(x, ids, weights, up, down, up_bias, down_bias, activation, gate)
        made = self._again(asked, raw)
        if made is not None:
            return made
        form, given = form_of(activation, gate, (up, up_bias), (down, down_bias))
        return self._answer(form, (x, ids, weights, *given), asked, raw)

    def repeated(self, *layer: Any) -> Any:
        """The output of `run`, whose arguments are all given in order, by the graph of a call like
        this one; None if there is none. Nothing is checked but that the call is like that one."""
        return self._again(*_layer(*layer))

    def grouped(self, x: Any, ids: Any, rhs: Any, bias: Any, activation: str) -> Any:
        """``act(x[t] @ rhs[e].T + bias[e])`` for each choice ``e = ids[t, c]``; zeros where it is
        no expert.

        ``x`` [tokens, k], ``ids`` [tokens, top_k], ``rhs`` [experts, n, k], ``bias`` [experts, n]
        or None; returns [tokens * top_k, n]. Errors as `run`.
        """
        asked, raw = ("one", activation), _present(x, ids, rhs, bias)
        made = self._again(asked, raw)
        if made is not None:
            return made
        form, given = form_of(activation, None, (rhs, bias))
        return self._answer(form, (x, ids, *given), asked, raw)

    def plan_of(self, call: ExpertsCall) -> Launches:
        """What is launched, for what is known now of such calls."""
        counts, plan = call.watch.counts(), call.plan
        if plan is None and call.choices:
            plan = call.plan = Launches(
                call.choices, tuple(map(self.kernels.choices, call.choices))
            )
        if plan is None or counts is not call.counts:
            tiles = tuple(self._tile(product, counts) for product in call.products)
            plan = Launches(tiles, tuple(map(self._kernel, call.products, tiles)))
            call.counts, call.plan = counts, plan
        return plan

    def _kernel(self, product: GroupedProduct, tile: Tile) -> Kernel:
        return self.kernels.product(tile, product.groups, **dict(product.options))

    def _again(self, asked: object, raw: Given) -> Any:
        """The result, by the graph of a call like this one; None if there is none."""
        repeats = self._repeats_of(asked)
        return None if repeats is None else repeats.run(raw, None, None)[0]

    def _answer(self, form: Form, given: Given, asked: object, raw: Given) -> Any:
        """The result, launched one by one. ``given`` is what is ``raw``, as memory has it."""
        call = self._known(form, given)
        out = empty(given[0], call.shape)
        if 0 in (*call.shape, call.products[0].rows, call.products[0].groups):
            return out.zero_()
        number = len(call.products)
        run = self._run_choices if call.choices else self._run_layer
        # Products read 16 bytes at once; ids, and weights of choices, are read one by one.
        x, alone, rest = given[0], given[1 : number + 1], given[number + 1 :]
        ready = (aligned(x), *alone, *map(aligned, rest))
        launch, plan = self._run_product if number == 1 else run, self.plan_of(call)
        counts = launch(call, plan, ready, out)
        repeats = self._repeats_of(asked)
        if repeats and call.small and all(map(is_, ready, given)):
            again = partial(launch, call, plan, ready, out)
            repeats.keep(raw, None, (None, out), (call, plan, counts), again)
        return out

    def _repeats_of(self, asked: object) -> CudaRepeats | None:
        """Of calls that ask for the same; None where calls are checked."""
        if self._repeats is None:
            return None
        found = self._repeats.get(asked)
        if found is None:
            made = CudaRepeats(self._cache, self.detector.report, self)
            found = self._repeats.setdefault(asked, made)
        return found

    def _known(self, form: Form, given: Given) -> ExpertsCall:
        """What calls like this one share; the first of them is checked."""
        key = (*signature(given), form)
        call = self._calls.get(key)
        if call is None:
            # Ids are checked where they are listed.
            call = remember(self._calls, key, call_of(form, given, self._repeats is not None))
        return call

    def _run_layer(self, call: ExpertsCall, plan: Launches, given: Given, out: Any) -> Any:
        (x, ids, weights), (up, down) = call.form.parts(given)
        index, (first, _) = self._index(call, x, ids), call.products
        middle, rows, apart = self._between(call, x)
        plan.kernels[0](x, index.ids, index.count, *up, middle)
        plan.kernels[1](middle, index.ids, index.count, *down, rows)
        kinds = dtype_name(ids), dtype_name(weights)
        self.kernels.combine_kernel(first.dtype, *kinds)(apart, weights, ids, first.groups, out)
        return index.count

    def _run_choices(self, call: ExpertsCall, plan: Launches, given: Given, out: Any) -> None:
        """A layer whose products read the ids themselves: what lives is not counted."""
        (x, ids, weights), (up, down) = call.form.parts(given)
        middle = self._between(call, x)[0]
        plan.kernels[0](x, ids, *up, middle)
        plan.kernels[1](middle, ids, weights, *down, out)

    def _between(self, call: ExpertsCall, like: Any) -> tuple[Any, Any, Any]:
        """Memory between products, what they give also by tokens and choices: small memory is used
        again by the next call in the stream."""
        (tokens, n), (first, second) = call.shape, call.products
        sizes = (first.rows, second.k), (first.rows, n), (tokens, first.rows // tokens, n)
        if not call.small:
            return _memory(like, like.dtype, *sizes)
        return self.memory.keep(_memory, like, like.dtype, *sizes)

    def _run_product(self, call: ExpertsCall, plan: Launches, given: Given, out: Any) -> Any:
        (x, ids), (operands,) = call.form.parts(given)
        self.fill.clear_ungrouped(out, ids, call.products[0].groups)
        index = self._index(call, x, ids)
        plan.kernels[0](x, index.ids, index.count, *operands, out)
        return index.count

    def outer(self, left: Any, right: Any, ids: Any, groups: int) -> Any:
        """``out[g] = sum of left[t, c, :, None] * right[t]`` where ``ids[t, c] == g``: of `grouped`
        the gradient of the weights.

        ``left`` [tokens * top_k, n], ``right`` [tokens, k], ``ids`` [tokens, top_k]; returns
        [groups, n, k]. Errors as `run`.
        """
        key = (*signature((left, right, ids)), groups)
        watch = self._watches.get(key)
        if watch is None:
            check_outer(left, right, ids, groups)
            watch = remember(self._watches, key, CountWatch(left.get_device()))
        (rows, n), k = left.shape, right.shape[1]
        out = empty(left, (groups, n, k))
        if 0 in (rows, groups):
            return out.zero_()
        left, right = aligned(left), aligned(right)
        index = self._find(right, ids, groups)(ids, self.memory.take)[0]
        self._learn(watch, index)
        kernel = self.columns.product(_outer_tile(dtype_name(left), k), share=ids.shape[1])
        kernel(left, index.ids, index.count, right.unsqueeze(0), out.view(groups * n, k))
        return out

    def _index(self, call: ExpertsCall, x: Any, ids: Any) -> Index:
        find = call.find
        if find is None:
            find = call.find = self._find(x, ids, call.products[0].groups)
        index = find(ids, self.memory.take)[0]
        self._learn(call.watch, index)
        return index

    def _find(self, x: Any, ids: Any, groups: int) -> Find:
        asked = (Groups(groups), ids, tuple(x.shape), _MICRO_TILE, False, False)
        return self.detector.prepared(*asked, top_k=True)

    def _learn(self, watch: CountWatch, index: Index) -> None:
        if watch.due():
            watch.report(index.count, self.detector.report)

    def _tile(self, product: GroupedProduct, counts: tuple[int, ...] | None) -> Tile:
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


def _layer(*layer: Any) -> tuple[object, Given]:
    """What a call of a layer asks for, and its tensors; all arguments of `CudaExperts.run`, in
    order."""
    *tensors, activation, gate = layer
    up_bias, down_bias = tensors[-2:]
    return (activation, gate, up_bias is None, down_bias is None), _present(*tensors)


def _present(*tensors: Any) -> Given:
    return tuple([each for each in tensors if each is not None])


def _memory(
    like: Any,
    dtype: Any,
    middle: tuple[int, int],
    rows: tuple[int, int],
    apart: tuple[int, int, int],
) -> tuple[Any, Any, Any]:
    made = empty(like, rows)
    return empty(like, middle), made, made.view(apart)


@cache
def _outer_tile(dtype: str, columns: int) -> Tile:
    return outer_tile(starting_ranges(dtype), columns)
