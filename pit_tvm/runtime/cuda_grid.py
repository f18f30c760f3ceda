"""Calls on a GPU whose zeros fill whole rows and whole columns of lhs: `Grid`.

Live rows are gathered as by the family of rows. Where few columns live too, they are packed first:
columns of the live rows of lhs, and what they meet of rhs; the product then ends with the number of
live columns, which it reads on the device. Dense, rows alone, and both compete in every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedTarget
from ..schedules.cuda_gather import gather_columns, gather_rows
from ..schedules.hopper_knobs import TILE_K
from ..schedules.hopper_space import ROWS
from ..selection.gpu_cost import cheapest
from ..selection.gpu_grid import both_axes
from ..structs import Candidate, Grid, MicroTile, Plan, Tile
from ..tile_db.store import TileStore
from .bind import Layout
from .cuda_arrays import empty, empty_of
from .cuda_bind import CudaBound
from .cuda_call import CudaCall
from .cuda_detect_plan import capacity_of
from .cuda_dispatch import CudaDispatcher
from .cuda_fill import stepped
from .cuda_form import RowsForm, rows_form
from .cuda_planner import UNKNOWN_SHARE, CudaPlanner
from .cuda_rows import ROW_STEP, RowsKernels
from .cuda_view import CudaView
from .cuda_workspace import CudaIndex
from .kernel_cache import KernelCache
from .program import Program

_FEW = 1024  # live columns, above which plans tell them apart less narrowly


@dataclass(frozen=True)
class GridForm(RowsForm):
    """A program over live rows, and as it is cheaper over live columns too: ``both``."""

    both: MicroTile | None = None


def grid_form(program: Program) -> GridForm | None:
    """What a kernel has to do for a program; None where its pattern is no `Grid` of an lhs stored
    [m, k], or types or epilogue are none that the family computes."""
    route = next((r for r in program.routes if r.micro_tile.also), None)
    if not isinstance(program.spec, Grid) or route is None:
        return None
    try:
        form = rows_form(program)
    except UnsupportedTarget:  # another family's
        return None
    if form.groups:
        return None
    return GridForm(**vars(form), both=route.micro_tile)


@dataclass(frozen=True)
class GridIndex(CudaIndex):
    """Live rows, and live columns beside them where they were looked for too."""

    columns: CudaIndex | None = None


@dataclass(frozen=True)
class _Lists:
    """Memory of lists along both axes, ``of`` rows and ``of`` columns, and of their counts, which
    are neighbours."""

    counts: Any
    of: tuple[CudaIndex, ...]


class GridKernels(RowsKernels):
    """Kernels of rows, and those that pack columns."""

    def columns(self, dtype: str, rows: bool) -> Callable[..., Any]:
        """source, ids, count, [rows, lives,] packed; see `gather_columns`."""
        return self._get(("cuda-gather-columns", dtype, rows), lambda: gather_columns(dtype, rows))

    def rows(self, dtype: str) -> Callable[..., Any]:
        """source, ids, count, packed; see `gather_rows`."""
        return self._get(("cuda-gather-rows", dtype), lambda: gather_rows(dtype))


class GridPlanner(CudaPlanner):
    """Chooses plans for one program: counts are those of live rows and of live columns."""

    form: GridForm

    def decide(self, layout: Layout, counts: tuple[int, ...], fresh: bool = True) -> Plan:
        """Algorithm 1 for live rows and columns, without the cache."""
        form, rates = self.form, self.rates()
        plan, work = super().decide(layout, counts[:1], fresh), self._rows_work(layout, counts[:1])
        if form.both is None or not work.k:
            return plan
        columns, rows = min(counts[1], work.k), self._rows(layout)
        asked = (ROWS, form.both, work, columns, form.rhs_layout == "kn", rates, rows)
        candidates = (*both_axes(*asked), *plan.candidates)
        return cheapest(candidates, rates.is_tuned(ROWS))

    def likely_tiles(self, layout: Layout) -> tuple[Tile, ...]:
        """The best tiles of rows alone and of both axes, whatever lives."""
        found: dict[Tile, None] = {}
        for counts in self._likely_counts(layout):
            candidates = [c for c in self.decide(layout, counts).candidates if c.tile is not None]
            for both in (False, True):
                same = [c for c in candidates if (c.micro_tile == self.form.both) == both]
                found |= {c.tile: None for c in same[:1] if c.tile is not None}
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
        self.planner = GridPlanner(self.program, self.form, self.target, store, self.dead)
        self.kernels = GridKernels(cache, self.target.isa)

    def build(self, sizes: dict[str, int]) -> None:
        """Compile what calls of these sizes may need, however much is live; needs no GPU."""
        super().build(sizes)
        dtype = self.form.dtype
        self.kernels.columns(dtype, True)
        if self.form.rhs_layout == "kn":
            self.kernels.rows(dtype)
        else:
            self.kernels.columns(dtype, False)

    def _build_tile(self, tile: Tile) -> None:
        super()._build_tile(tile)
        self._deep(tile)

    def _deep(self, tile: Tile) -> Callable[..., Any]:
        """The product of a tile that ends with the live columns."""
        return self.kernels.product(tile, 0, **self.options, deep=True)

    def _micro_tiles(self, layout: Layout) -> tuple[MicroTile, ...]:
        """Rows, and columns."""
        assert self.form.both is not None and self.form.both.also is not None
        return self.form.route.micro_tile, self.form.both.also

    # -- detection

    def _indices(
        self, call: CudaCall, value: Any, dense: bool
    ) -> tuple[CudaIndex | None, CudaIndex | None]:
        """Lists of live and of dead rows, None where nobody reads them; of live columns too where
        counts are asked for."""
        learns = call.watch.due()
        if dense and not learns:
            return None, None
        lists = self._lists(call, value)
        live, dead = self._found(call, value, 0, lists)
        if not learns:
            return live, dead
        columns, _ = self._found(call, value, 1, lists)
        call.watch.report(lists.counts, self.detector.report)
        return GridIndex(live.ids, live.count, columns=columns), dead

    def _found(
        self, call: CudaCall, value: Any, axis: int, lists: _Lists
    ) -> tuple[CudaIndex, CudaIndex | None]:
        """Live and dead rows (``axis`` 0), or live columns."""

        def take(like: Any, role: str, slots: int, extent: int) -> CudaIndex:
            kept = lists.of[axis]
            return kept if role == "live" else self.memory.take(like, role, slots, extent)

        micro_tile = self._micro_tiles(call.layout)[axis]
        asked = (call.layout.operand, micro_tile, self.deterministic, axis == 0)
        return self.detector.prepared(self.program.spec, value, *asked)(value, take)

    def _lists(self, call: CudaCall, value: Any) -> _Lists:
        return self.memory.keep(_new_lists, value, *call.layout.operand)

    # -- launch

    def _product(self, choice: Candidate, index: CudaIndex, bound: CudaBound) -> None:
        if choice.tile is None or choice.micro_tile != self.form.both:
            super()._product(choice, index, bound)
            return
        call, inputs, value, out, place = bound
        columns = index.columns if isinstance(index, GridIndex) else None
        if columns is None:
            columns, _ = self._found(call, value, 1, self._lists(call, value))
        kernel = self._deep(choice.tile)
        lhs, rhs, bias = self._operands(inputs)
        own, other = self._packed(lhs, rhs, index, columns)
        shape, dtype, device = (1, *other.shape), self.form.dtype, call.device
        rest: list[Any] = [CudaView(other.data_ptr(), shape, dtype, device)]
        straight = place.aligned and out.shape[1] % ROW_STEP == 0
        if bias is not None:
            row = bias.unsqueeze(0)
            rest.append(row if straight else self.fill.padded(row)[:1])
        wide = out
        if not straight:
            wide = empty(out, (out.shape[0], stepped(out.shape)[1]))
            self.fill.pad_copy(out, wide)
        kernel(own, *index.views, columns.views[1], *rest, wide)
        if not straight:
            self.fill.pad_copy(wide, out)

    def _packed(self, lhs: Any, rhs: Any, index: CudaIndex, columns: CudaIndex) -> tuple[Any, Any]:
        """Live columns of the live rows of lhs, and of rhs what they meet."""
        dtype, deep = self.form.dtype, columns.ids.shape[1]
        own = empty(lhs, (lhs.shape[0], deep))
        self.kernels.columns(dtype, True)(lhs, *columns.views, *index.views, own)
        if self.form.rhs_layout == "kn":
            other = empty(rhs, (deep, stepped(rhs.shape)[1]))
            self.kernels.rows(dtype)(rhs, *columns.views, other)
        else:
            other = empty(rhs, (stepped(rhs.shape)[0], deep))
            self.kernels.columns(dtype, False)(rhs, *columns.views, other)
        return own, other


def _new_lists(like: Any, *extents: int) -> _Lists:
    counts = empty_of("int32", like, (len(extents),))
    ids = [empty_of("int32", like, (1, capacity_of(extent))) for extent in extents]
    return _Lists(counts, tuple(CudaIndex(i, counts[a : a + 1]) for a, i in enumerate(ids)))
