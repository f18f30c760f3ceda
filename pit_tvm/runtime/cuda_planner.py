"""Plans for one program on a GPU: what selection needs to know, and a cache of decisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..remember import remember
from ..schedules.hopper_space import GROUPS, ROWS
from ..selection.cover import bucket
from ..selection.gpu_cost import GpuDense, GpuRates, GpuWork, select_gpu
from ..selection.gpu_host import launched_by_host
from ..structs import Plan, Tile
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .bind import Layout
from .cuda_arrays import is_capturing, is_rehearsed
from .cuda_call import CudaCall
from .cuda_form import RowsForm
from .cuda_rows import rates_of
from .planner import pattern_bytes
from .program import Program

LIBRARY = "torch"
UNKNOWN_SHARE = 0.5  # of rows that live, before any count has arrived
# Live rows of one group that share a plan: tiles come in whole bands and whole waves, so a few
# percent more rows can want another tile. So many rows are few, and share it more narrowly.
_ALIKE, _FEW, _FEW_ALIKE = 64, 1024, 8


def dense_of(m: int, n: int, k: int, act: str, **load: Any) -> GpuDense:
    """The library's product, with a pass over its output for an activation: 16 bits read, and
    written. ``load``: as `GpuDense` names it."""
    return GpuDense(m, n, k, extra_bytes=0.0 if act == "none" else 4.0 * m * n, **load)


class CudaPlanner:
    """Chooses plans for one program on one GPU."""

    def __init__(
        self, program: Program, form: RowsForm, target: TargetInfo, store: TileStore, dead: str
    ) -> None:
        self.program, self.form, self.target, self.store = program, form, target, store
        self.fills = program.spec.promises_zero or dead == "zero"
        # Whether a kernel of rows zeroes the dead ones, unless each becomes a bias.
        biased = program.spec.promises_zero and bool(form.bias)
        self.zeroes = self.fills and not form.groups and not biased
        # Whether dead rows are overwritten after a dense product.
        self.dense_fills = dead == "zero" and not program.spec.promises_zero
        self._rates: GpuRates | None = None
        self._plans: dict[object, Plan] = {}

    def plan_of(self, call: CudaCall) -> Plan:
        """The plan for what is known now of such calls."""
        counts, tf32, hosted = call.watch.counts(), self.tf32(), self.hosted(call.device)
        plan, seen = call.plan, (call.tf32, call.hosted)
        if plan is None or counts is not call.counts or seen != (tf32, hosted):
            plan = self.plan(call.layout, counts, call.fresh, hosted)
            call.counts, call.tf32, call.hosted, call.plan = counts, tf32, hosted, plan
        return plan

    def hosted(self, device: int) -> bool:
        """Whether the host launches a call now, and the time that takes it may decide: not while
        a CUDA graph is captured or rehearsed on a device."""
        return self.dense_fills and not (is_capturing(device) or is_rehearsed())

    def plan(
        self,
        layout: Layout,
        counts: tuple[int, ...] | None,
        fresh: bool = True,
        hosted: bool = False,
    ) -> Plan:
        """The plan for counts of an earlier call (None: unknown), or for counts much like them.

        ``fresh``: the output is new, so its dead rows may hold anything. ``hosted``: as `hosted`
        says.
        """
        rows = self._rows(layout)
        if counts is not None:
            counts = self._most_alike(rows, counts)
        key = (layout.key, self._alike(rows, counts), fresh, self.tf32(), hosted)
        plan = self._plans.get(key)
        if plan is None:
            if counts is None:
                plan = self._guessed(layout, fresh)
            else:
                plan = self.decide(layout, counts, fresh)
            plan = remember(self._plans, key, launched_by_host(plan) if hosted else plan)
        return plan

    def _guessed(self, layout: Layout, fresh: bool) -> Plan:
        """The plan before any count has arrived."""
        return self.decide(layout, self._assumed(layout, UNKNOWN_SHARE), fresh)

    def tf32(self) -> bool:
        """Whether plans may use tensor cores for float32 now, as torch's products may."""
        return False

    def _most_alike(self, rows: int, counts: tuple[int, ...]) -> tuple[int, ...]:
        """The counts that a plan is decided for: without groups the most that share it, so that the
        first of them to arrive does not choose a tile that `likely_tiles` leaves out."""
        if self.form.groups:
            return counts
        live = sum(counts)
        step = _ALIKE if live > _FEW else _FEW_ALIKE
        return (min(-(-live // step) * step, rows),)

    def _alike(self, rows: int, counts: tuple[int, ...] | None) -> object:
        """What counts have in common that share a plan."""
        if counts is None or not self.form.groups:
            return counts
        live = sum(counts)
        # Whether groups are even or skewed decides as much as how much is live.
        return bucket(live / max(rows, 1)), bucket(max(counts, default=0) / max(live, 1))

    def decide(self, layout: Layout, counts: tuple[int, ...], fresh: bool = True) -> Plan:
        """Algorithm 1 for live counts of each group, without the cache; ``fresh`` as in `plan`."""
        form, work = self.form, self._rows_work(layout, counts)
        dense = self._library(layout, counts, fresh)
        family = GROUPS if form.groups else ROWS
        micro, rows = form.route.micro_tile, self._rows(layout)
        return select_gpu(family, micro, work, dense, self.rates(), rows)

    def _library(self, layout: Layout, counts: tuple[int, ...], fresh: bool) -> GpuDense | None:
        """The product of every row, None where it may not stand for that of live rows."""
        sizes = self._rows(layout), *self._sizes(layout)
        if self.program.spec.promises_zero:
            return self._dense(*sizes, fresh, zeros=1.0 - self._share(layout, counts))
        return self._dense(*sizes, fresh, steady=True)

    def _share(self, layout: Layout, counts: tuple[int, ...]) -> float:
        """Of the sparse operand that may live."""
        return sum(counts) / max(self._rows(layout), 1)

    def _rows_work(self, layout: Layout, counts: tuple[int, ...]) -> GpuWork:
        """The product of these live rows."""
        form, live = self.form, sum(counts)
        n, k = self._sizes(layout)
        return GpuWork(
            live=float(live),
            n=n,
            k=k,
            groups=max(1, form.groups),
            counts=counts if form.groups else (),
            index_bytes=self._index_bytes(layout),
            splits=self.program.spec.promises_zero,
            extra_bytes=2.0 * (self._rows(layout) - live) * n if self.fills else 0.0,
            hides=self.zeroes,
            act=form.act,
        )

    def _dense(self, rows: int, n: int, k: int, fresh: bool, **load: Any) -> GpuDense | None:
        """The product of every row, unless there are groups or dead rows must stay as they are: it
        is as promised where a mask has nothing live, may be anything in a new output, and is
        overwritten where zeros are asked for. ``load``: as `GpuDense` names it."""
        if self.form.groups or not (self.fills or fresh):
            return None
        return dense_of(max(rows, 1), n, k, self.form.act, fills=self.dense_fills, **load)

    def rates(self) -> GpuRates:
        """Rates of the operator's data type on this GPU."""
        if self._rates is None:
            self._rates = rates_of(
                self.store, self.form.dtype, self.target.isa, LIBRARY, self.form.options
            )
        return self._rates

    def likely_tiles(self, layout: Layout) -> tuple[Tile, ...]:
        """Tiles that plans choose, whatever lives; all that there are for groups, whose counts are
        too many to go through."""
        if self.form.groups:
            return self.rates().families[GROUPS].tiles
        plans = (self.decide(layout, live) for live in self._likely_counts(layout))
        found = [next((c.tile for c in p.candidates if c.tile is not None), None) for p in plans]
        return tuple(dict.fromkeys(tile for tile in found if tile is not None))

    def _likely_counts(self, layout: Layout) -> Iterable[tuple[int, ...]]:
        """All counts of rows that plans are decided for, without groups, also where a planner
        counts more than rows."""
        rows = self._rows(layout)
        lives = range(0, rows + _FEW_ALIKE, _FEW_ALIKE)
        counts = dict.fromkeys(CudaPlanner._most_alike(self, rows, (live,)) for live in lives)
        return (*counts, CudaPlanner._assumed(self, layout, UNKNOWN_SHARE))

    def _assumed(self, layout: Layout, share: float) -> tuple[int, ...]:
        """Live counts where a share of all lives, even over the groups."""
        groups = max(1, self.form.groups)
        each, rest = divmod(round(share * self._rows(layout)), groups)
        return tuple(each + (g < rest) for g in range(groups))

    def _rows(self, layout: Layout) -> int:
        return layout.operand[0]

    def _sizes(self, layout: Layout) -> tuple[int, int]:
        return layout.output[-1], layout.operand[-1]

    def _index_bytes(self, layout: Layout) -> float:
        if not self.program.spec.promises_zero:
            return 8.0 * self._rows(layout)
        return pattern_bytes(self.program, layout.operand)


class BandPlanner(CudaPlanner):
    """Chooses plans for a program whose sparse operand is cut into bands along the axis k, each
    with a count of its own; tiles of every band are written, full or empty."""

    tiles: tuple[Tile, ...]

    def __init__(
        self, program: Program, form: RowsForm, target: TargetInfo, store: TileStore, dead: str
    ) -> None:
        super().__init__(program, form, target, store, dead)
        self.fills = self.zeroes = self.dense_fills = False

    def rates(self) -> GpuRates:
        """Rates of the operator's data type on this GPU: those of dense products count."""
        if self._rates is None:
            form, isa = self.form, self.target.isa
            self._rates = rates_of(self.store, form.dtype, isa, LIBRARY, {})
        return self._rates

    def likely_tiles(self, layout: Layout) -> tuple[Tile, ...]:
        """All of the few that there are."""
        return self.tiles

    def _whole(self, layout: Layout) -> GpuDense:
        """The dense product."""
        m, n = layout.output
        return dense_of(m, n, self._depth(layout), self.form.act)

    def _most_alike(self, rows: int, counts: tuple[int, ...]) -> tuple[int, ...]:
        """The counts as they are: `likely_tiles` leaves none out."""
        return counts

    def _alike(self, rows: int, counts: tuple[int, ...] | None) -> object:
        if counts is None:
            return None
        most = max(counts, default=0)
        return bucket(sum(counts) / max(len(counts) * rows, 1)), bucket(most / max(rows, 1))

    def _assumed(self, layout: Layout, share: float) -> tuple[int, ...]:
        micro_tile = self.form.route.micro_tile
        beside = 1 - micro_tile.dim
        height = micro_tile.extents[beside]
        bands = -(-layout.operand[beside] // height) if height else 1
        return (round(share * self._rows(layout)),) * bands

    def _rows(self, layout: Layout) -> int:
        """What the count of a band is at most."""
        return self._depth(layout)

    def _depth(self, layout: Layout) -> int:
        """The extent of k."""
        return layout.operand[self.form.route.micro_tile.dim]
