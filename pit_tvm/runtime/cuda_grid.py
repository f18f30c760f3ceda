"""Calls on a GPU whose zeros fill whole rows and whole columns of an operand: `Grid`.

Live rows are gathered as by the family of rows. Where few columns live too, they are packed first:
columns of the live rows, and what they meet of the other operand; the product then ends with the
number of live columns, which it reads on the device. Dense, rows alone, and both compete in every
plan. Columns of a sparse rhs are rows here: their product is computed turned, and turned back. An
operand stored the other way round is turned as it is packed, or as a whole for its rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..schedules.cuda_gather import gather_both
from ..schedules.hopper_knobs import TILE_K
from ..schedules.hopper_space import ROWS
from ..selection.gpu_cost import GpuDense, GpuWork, cheapest
from ..selection.gpu_grid import Packing, both_axes, rows_alone
from ..structs import Candidate, MicroTile, Plan, Tile
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .bind import Layout
from .cuda_arrays import empty, empty_of
from .cuda_bind import CudaBound
from .cuda_call import CudaCall
from .cuda_detect import AxesLines, axes_lines
from .cuda_dispatch import CudaDispatcher
from .cuda_fill import stepped
from .cuda_grid_form import GridForm
from .cuda_planner import UNKNOWN_SHARE, CudaPlanner
from .cuda_rows import ROW_STEP, RowsKernels
from .cuda_view import view_of
from .cuda_workspace import CudaIndex, listed
from .detect_plan import capacity_of
from .kernel_cache import KernelCache
from .program import Program

_FEW = 1024  # live columns, above which plans tell them apart less narrowly


@dataclass(frozen=True, kw_only=True)
class GridIndex(CudaIndex):
    """Live rows; live columns (``also``) and dead rows beside them, where they were looked for.
    ``counts`` are those of live rows and of live columns, as one tensor; ``axes`` the bits of what
    lives along the operand's two axes, `axes_lines`, where both were looked for."""

    also: CudaIndex
    dead: CudaIndex
    counts: Any
    axes: AxesLines


class GridKernels(RowsKernels):
    """Kernels of rows, and those that pack columns."""

    def gather(self, dtype: str, layout: str, turned: bool) -> Callable[..., Any]:
        """source, rows, lives, ids, count, dense, packed, beside; see `gather_both`."""
        asked = (dtype, layout, turned)
        return self._get(("cuda-gather-both", *asked), lambda: gather_both(*asked))


class GridPlanner(CudaPlanner):
    """Chooses plans for one program: counts are those of live rows and of live columns."""

    form: GridForm

    def __init__(
        self, program: Program, form: GridForm, target: TargetInfo, store: TileStore, dead: str
    ) -> None:
        super().__init__(program, form, target, store, dead)
        self.zeroes = self.zeroes and not form.flip  # what turns a product back does

    def decide(self, layout: Layout, counts: tuple[int, ...], fresh: bool = True) -> Plan:
        """Algorithm 1 for live rows and columns, without the cache."""
        dense = self._library(layout, counts, fresh)
        assert dense is not None  # zeros are promised
        found = (*self._both(layout, counts), *self._alone(layout, counts, dense))
        return cheapest(found, self.rates().is_tuned(ROWS))

    def _both(self, layout: Layout, counts: tuple[int, ...]) -> tuple[Candidate, ...]:
        """Candidates over live rows and columns."""
        form, work = self.form, self._rows_work(layout, counts)
        if form.both is None or not work.k:
            return ()
        columns = min(counts[1], work.k)
        return both_axes(ROWS, form.both, work, columns, self._packing(layout), self.rates())

    def _alone(
        self, layout: Layout, counts: tuple[int, ...], dense: GpuDense | None
    ) -> tuple[Candidate, ...]:
        """Candidates over live rows, and the dense one."""
        micro_tile, work = self.form.route.micro_tile, self._rows_work(layout, counts)
        return rows_alone(ROWS, micro_tile, work, dense, self._packing(layout), self.rates())

    def _packing(self, layout: Layout) -> Packing:
        form, size = self.form, 2.0 * math.prod(layout.output)
        back = size if form.flip else 0.0
        return Packing(form.beside == "kn", self._rows(layout), form.turns, back)

    def _rows_work(self, layout: Layout, counts: tuple[int, ...]) -> GpuWork:
        work = super()._rows_work(layout, counts[:1])
        # What turns a product back writes dead rows as well.
        return replace(work, splits=False, extra_bytes=0.0) if self.form.flip else work

    def _share(self, layout: Layout, counts: tuple[int, ...]) -> float:
        rows, depth = self._rows(layout), self._sizes(layout)[1]
        return counts[0] / max(rows, 1) * counts[1] / max(depth, 1)

    def _dense(self, rows: int, n: int, k: int, fresh: bool, **load: Any) -> GpuDense | None:
        m, n = (n, rows) if self.form.flip else (rows, n)
        return super()._dense(m, n, k, fresh, **load)

    def _rows(self, layout: Layout) -> int:
        return layout.operand[self.form.route.micro_tile.dim]

    def _sizes(self, layout: Layout) -> tuple[int, int]:
        """The extent beside rows, and that of k."""
        depth = layout.operand[1 - self.form.route.micro_tile.dim]
        return layout.output[0 if self.form.flip else 1], depth

    def likely_tiles(self, layout: Layout) -> tuple[Tile, ...]:
        """The best tiles of rows alone and of both axes, whatever lives."""
        found: dict[Tile, None] = {}
        lives: set[int] = set()
        for counts in self._likely_counts(layout):
            kinds = [self._both(layout, counts)]
            if counts[0] not in lives:  # no tile of rows alone depends on columns
                kinds.insert(0, self._alone(layout, counts, None))
                lives.add(counts[0])
            for candidates in kinds:
                found |= {c.tile: None for c in candidates[:1] if c.tile is not None}
        return tuple(found)

    def _likely_counts(self, layout: Layout) -> Iterable[tuple[int, ...]]:
        depth = self._sizes(layout)[1]
        columns = dict.fromkeys(_more_alike(of) for of in range(0, depth + TILE_K, TILE_K))
        for live in super()._likely_counts(layout):
            for of in (*columns, self._assumed(layout, UNKNOWN_SHARE)[1]):
                yield (live[0], of)

    def _most_alike(self, rows: int, counts: tuple[int, ...]) -> tuple[int, ...]:
        live, columns = counts
        return (*super()._most_alike(rows, (live,)), _more_alike(columns))

    def _assumed(self, layout: Layout, share: float) -> tuple[int, ...]:
        return (*super()._assumed(layout, share), round(share * self._sizes(layout)[1]))


def _more_alike(columns: int) -> int:
    """The most live columns that share a plan with so many."""
    step = TILE_K if columns <= _FEW else 4 * TILE_K
    return -(-columns // step) * step


class GridDispatcher(CudaDispatcher):
    """Runs one program of the family on one GPU target; threads may share it."""

    form: GridForm
    kernels: GridKernels

    def _prepare(self, store: TileStore, cache: KernelCache) -> None:
        self.flip, self.turns = self.form.flip, self.form.turns
        self.planner = GridPlanner(self.program, self.form, self.target, store, self.dead)
        self.kernels = GridKernels(cache, self.target.isa)

    def build_moving(self) -> None:
        """Compile what packs operands, what turns one as a whole, and what turns the product
        back."""
        self._gather()
        if self.turns:
            self.kernels.turn(self.form.dtype)
        if self.flip:
            self._turn()

    def _turn(self) -> Callable[..., Any]:
        """What turns a product of live rows back: source, alive, [bias,] turned."""
        return self.kernels.turn_rows(self.form.dtype, bool(self.form.bias), self.form.act)

    def _gather(self) -> Callable[..., Any]:
        """What packs both operands."""
        return self.kernels.gather(self.form.dtype, self.form.beside, self.form.turns)

    def _build_tile(self, tile: Tile) -> None:
        super()._build_tile(tile)
        self._deep(tile)

    def _deep(self, tile: Tile) -> Callable[..., Any]:
        """The product of a tile that ends with the live columns."""
        return self.kernels.product(tile, 0, **self.options, deep=True)

    def _kernel(self, choice: Candidate) -> Callable[..., Any]:
        if choice.tile is None or choice.micro_tile != self.form.both:
            return super()._kernel(choice)
        return self._deep(choice.tile)

    def _micro_tiles(self, layout: Layout) -> tuple[MicroTile, ...]:
        """Rows, and columns."""
        assert self.form.both is not None and self.form.both.also is not None
        return self.form.route.micro_tile, self.form.both.also

    # -- detection

    def _indices(
        self, call: CudaCall, value: Any, gathered: MicroTile | None
    ) -> tuple[GridIndex | None, CudaIndex | None]:
        """Lists of live and of dead rows, None where nobody reads them; of live columns too where
        those are gathered, or counts asked for."""
        learns = call.watch.due()
        if gathered is None and not learns:
            return None, None
        tiles, shape = self._micro_tiles(call.layout), call.layout.operand
        index = self.memory.keep(_new_index, value, shape, tiles[0].dim)
        lists = {"live": index, "dead": index.dead, "beside": index.also}
        # A dense product has what dead rows are, and they are known as bits where one is turned.
        asked, split = (self.program.spec, value, shape), gathered is not None and not self.flip

        def take(like: Any, role: str, slots: int, extent: int) -> CudaIndex:
            return lists[role]

        if learns or gathered == self.form.both or self.flip:
            self.detector.detect_axes(*asked, tiles, split=split, take=take, lines=index.axes)
        else:
            self.detector.prepared(*asked, tiles[0], self.deterministic, split)(value, take)
        if learns:
            call.watch.report(index.counts, self.detector.report)
        return index, index.dead if split else None

    # -- launch

    def _product(
        self, choice: Candidate, index: CudaIndex, bound: CudaBound, dead: CudaIndex | None = None
    ) -> None:
        alone = choice.micro_tile != self.form.both
        if alone and not self.flip:
            super()._product(choice, index, bound, dead)
            return
        assert isinstance(index, GridIndex)
        call, inputs, _, out, place = bound
        own, other = self._whole(bound, index) if alone else self._packed(call, inputs, index)
        stored = out.shape if self.flip else out.shape[1:]
        straight = place.aligned and not any(size % ROW_STEP for size in stored)
        dense = view_of(other, self.form.dtype, (1, *other.shape))
        given = (own, *listed(index, dead), *(() if alone else index.also.views[1:]), dense)
        if self.flip:
            self._turned(self._kernel(choice), given, index, inputs, out, straight)
            return
        wide, bias = out, self._bias(inputs, straight)
        if not straight:
            wide = empty(out, (out.shape[0], stepped(out.shape)[1]))
            self.fill.pad_copy(out, wide)
        self._kernel(choice)(*given, *bias, wide)
        if not straight:
            self.fill.pad_copy(wide, out)

    def _turned(
        self,
        kernel: Callable[..., Any],
        given: tuple[Any, ...],
        index: GridIndex,
        inputs: Sequence[Any],
        out: Any,
        straight: bool,
    ) -> None:
        """A product of live columns of rhs: they are rows of what is turned afterwards, of which
        nobody writes or reads the dead ones."""
        bias = [] if (row := self._beside(inputs)[1]) is None else [row]
        high, wide = stepped(out.shape)
        made = empty(out, (wide, high))
        kernel(*given, *bias, made)
        found = out if straight else empty(out, (high, wide))
        self._turn()(made, index.axes[self.form.route.micro_tile.dim], *bias, found)
        if not straight:
            self.fill.pad_copy(found[: out.shape[0]], out)

    def _bias(self, inputs: Sequence[Any], straight: bool) -> list[Any]:
        """The bias, if there is one, as kernels of rows take it."""
        bias = self._beside(inputs)[1]
        if bias is None:
            return []
        row = bias.unsqueeze(0)
        return [row if straight else self.fill.padded(row)[:1]]

    def _own(self, sparse: Any, index: CudaIndex) -> Any:
        """All rows of the sparse operand."""
        return self.kernels.turned(sparse, self.form.dtype) if self.turns else sparse

    def _whole(self, bound: CudaBound, index: CudaIndex) -> tuple[Any, Any]:
        """Both operands as they are, the sparse one turned, or padded to whole pieces of 16
        bytes."""
        _, inputs, _, _, place = bound
        own, dense = inputs[self._gathered], self._beside(inputs)[0]
        own = self._own(own, index)
        sizes = own.shape[1], *dense.shape  # also the one that is a row of the product turned
        if place.aligned and not any(size % ROW_STEP for size in sizes):
            return own, dense
        return self.fill.padded(own), self.fill.padded(dense)

    def _packed(self, call: CudaCall, inputs: Sequence[Any], index: GridIndex) -> tuple[Any, Any]:
        """Live columns of the live rows of the sparse operand, and of the dense one what they
        meet."""
        form, deep = self.form, index.also.ids.shape[1]
        sparse, dense = inputs[self._gathered], self._beside(inputs)[0]
        own = empty(sparse, (call.layout.operand[form.route.micro_tile.dim], deep))
        high, wide = stepped(dense.shape)
        other = empty(dense, (deep, wide) if form.beside == "kn" else (high, deep))
        self._gather()(sparse, *index.views, *index.also.views, dense, own, other)
        return own, other


def _new_index(like: Any, shape: tuple[int, ...], dim: int) -> GridIndex:
    """For a mask of which rows are the dimension ``dim``."""
    counts, rows, columns = empty_of("int32", like, (2,)), shape[dim], shape[1 - dim]
    live, dead, beside = (
        empty_of("int32", like, (1, capacity_of(extent))) for extent in (rows, rows, columns)
    )
    return GridIndex(
        live,
        counts[:1],
        also=CudaIndex(beside, counts[1:]),
        dead=CudaIndex(dead, empty_of("int32", like, (1,))),
        counts=counts,
        axes=axes_lines(like, shape),
    )
