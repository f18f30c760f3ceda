"""Plans for one operator: what selection needs to know of a call, and a cache of decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..remember import remember
from ..schedules.contraction_space import BLOCKS, DEPTH, ROWS, starting_tiles
from ..selection import select
from ..selection.rates import Rates, rates_from_records
from ..selection.select import Selection
from ..structs import BitMask, BlockMask, Lengths, MicroTile, Plan, Rows, Tile, Values
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .arrays import itemsize
from .bind import Layout
from .pattern import Pattern
from .program import Program
from .routes import Route

# Tiles of a family that are weighed for each of these shares of live entries.
_SHORTLIST = {ROWS: 2}
_SHARES = (1.0, 1 / 32)
_ROWS = 2048
_LEAST_ROWS = 6  # rows whose weights take as long to read as fewer rows do
_MAX_PLANS = 4096


class Planner:
    """Chooses plans for one program on one target; ``library``: whether a library's dense product
    is among them."""

    def __init__(
        self, program: Program, target: TargetInfo, store: TileStore, *, library: bool = True
    ) -> None:
        self.program, self.target, self.store = program, target, store
        self.library = library
        self._rates: dict[str, Rates] = {}
        self._plans: dict[object, Plan] = {}
        self._tiles: dict[object, tuple[Tile, ...]] = {}
        self._selections: dict[object, Selection] = {}

    def plan(self, pattern: Pattern, layout: Layout, packed: bool, loose: bool = False) -> Plan:
        """The plan of a pattern; decided once for a density bucket, then remembered.

        ``loose``: what is dead in the output may hold anything.
        """
        key = (pattern.key, layout.key, packed, loose)
        plan = self._plans.get(key)
        if plan is None:
            plan = self.decide(pattern, layout, packed, loose)
            remember(self._plans, key, plan, _MAX_PLANS)
        return plan

    def decide(self, pattern: Pattern, layout: Layout, packed: bool, loose: bool = False) -> Plan:
        """Algorithm 1 on one pattern, without the cache."""
        key = (layout.key, packed)
        prepared = self._selections.get(key)
        if prepared is None:
            prepared = remember(self._selections, key, self._selection(layout, packed))
        covered, program = pattern.covered, self.program
        whole = program.zero_outside or loose or not program.writes and min(covered) >= 1.0
        plan = prepared.plan(covered, whole=whole)
        return replace(plan, reason=f"{plan.reason}; mask applied") if program.mask else plan

    def _selection(self, layout: Layout, packed: bool) -> Selection:
        rates, facts = self.rates(layout.library), _Facts(self.program, layout, packed)
        routes = [facts.route(route) for route in self.program.routes]
        dense = facts.dense(layout.library)
        if not self.library and dense is not None and dense.note != select.GENERIC:
            dense = None
        return Selection(routes, dense, rates, self.tiles(rates, facts))

    def rates(self, library: str) -> Rates:
        """Rates of the operator's data type with one library as the dense peer."""
        if library not in self._rates:
            dtype = self.program.input(self.program.gathered).dtype
            generic = starting_tiles(self.target.isa, dtype)
            records = self.store.all()
            self._rates[library] = rates_from_records(
                records, dtype, self.target.isa, self.target.threads, library, generic
            )
        return self._rates[library]

    def tiles(self, rates: Rates, facts: _Facts) -> tuple[Tile, ...]:
        """The shortlist of each family at these column and depth sizes."""
        key = (id(rates), facts.n, facts.k)
        if key not in self._tiles:
            families: dict[str, list[Tile]] = {}
            for tile in rates.tiles:
                families.setdefault(tile.family, []).append(tile)
            chosen: dict[Tile, None] = {}
            for family, tiles in families.items():
                number = _SHORTLIST.get(family, 1)
                # Few and many live entries want different tiles.
                for share in _SHARES:
                    m = _ROWS if family == DEPTH else _ROWS * share
                    k = facts.k * share if family == DEPTH else facts.k
                    ranked = [(rates.tile_us(t, m, facts.n, k), str(t), t) for t in tiles]
                    chosen |= dict.fromkeys(t for _, _, t in sorted(ranked)[:number])
            self._tiles[key] = tuple(chosen)
        return self._tiles[key]


class _Facts:
    """Sizes of one call, as the cost model needs them."""

    def __init__(self, program: Program, layout: Layout, packed: bool) -> None:
        self.program, self.packed = program, packed
        names = [p.name for p in program.inputs]
        shapes = dict(zip(names, layout.shapes, strict=True))
        self.operand, self.output = layout.operand, layout.output
        con = program.contraction
        self.m = self.n = self.k = self.batch = 1
        if con is not None:
            gathered = dict(zip(con.sparse_axes, shapes[con.sparse], strict=True))
            self.m, self.k = gathered[con.row], gathered[con.reduce]
            self.n = shapes[con.dense][con.dense_axes.index(con.column)]
            for axis in con.batch:
                self.batch *= gathered[axis]
        self.out_bytes = 4.0 * float(math.prod(self.output))
        self._itemsize = itemsize(program.input(program.gathered).dtype)

    def route(self, route: Route) -> select.Route:
        """Slots, entries and traffic of one micro-tile."""
        micro, con = route.micro_tile, self.program.contraction
        size = self.operand[micro.dim]
        slots, piece = self._slots(micro)
        m, n, k, extra = 1.0, self.n, float(self.k), 0.0
        if route.family == DEPTH:
            m, k = float(self._row_extent(micro) or self.m), 1.0
        elif route.family == BLOCKS:
            k = float(piece)
            extra = self.out_bytes * (2 if self.program.has_epilogue else 1)
        elif self.program.zero_outside:
            extra = self.out_bytes
        elif self.program.writes:
            n = piece
        if con is None:
            m = float(math.prod(self.operand)) / max(size, 1)
            k = 1.0
        elif micro.axis in con.batch:
            m = float(self.m)
        if not self.packed and route.family:
            extra += 8.0 * self.n * self.k * self.batch
        return select.Route(
            micro_tile=micro,
            family=route.family,
            index_bytes=self._index_bytes(micro) * (1 if micro.also is None else 2),
            slots=slots,
            entries=size,
            entry_m=m,
            entry_k=k,
            n=n,
            extra_bytes=extra,
            mask_bytes=self._pattern_bytes() if self.program.reads_mask(micro) else 0.0,
            shared=con is not None and bool(con.group),
            splits=route.family == BLOCKS,
            floor_bytes=self.out_bytes if route.family == DEPTH else 0.0,
        )

    def dense(self, library: str) -> select.DenseRoute | None:
        """The dense candidate, if it ever gives the promised result: see design, section 3."""
        con = self.program.contraction
        if not self.program.has_dense:
            return None
        masked = self._pattern_bytes() if self.program.mask else 0.0
        if con is None or self.program.product is None:
            work, extra = math.prod(self.operand), self.out_bytes + masked
            return select.DenseRoute(1, self.n, work, 1, extra, select.GENERIC)
        extra = self.out_bytes if self.program.has_epilogue else 0.0
        if self.program.mask:  # the library multiplies a masked copy: read, written
            extra += masked + 2.0 * self._itemsize * math.prod(self.operand)
        return select.DenseRoute(self.m, self.n, self.k, self.batch, extra, library)

    def _row_extent(self, micro: MicroTile) -> int:
        """Rows of a micro-tile on the depth axis, or those that the operand has if it has fewer;
        0 for all."""
        con = self.program.contraction
        extent = micro.extents[con.sparse_axes.index(con.row)] if con else 0
        return min(extent, -(-self.m // _LEAST_ROWS) * _LEAST_ROWS)

    def _slots(self, micro: MicroTile) -> tuple[int, int]:
        """Number of lists, and the extent of a slot along the axis beside the rows'."""
        number, con = 1, self.program.contraction
        piece = self.n if self.program.writes else self.k
        for dim, extent in enumerate(micro.extents):
            if dim != micro.dim and extent:
                number *= -(-self.operand[dim] // extent)
                if con and con.axes_of(micro.operand)[dim] == self.program.beside:
                    piece = extent
        if con is not None and con.group:
            number = max(1, self.program.num_groups)
        return number, piece

    def _index_bytes(self, micro: MicroTile) -> float:
        spec = self.program.spec
        if not spec.promises_zero:
            return 8.0 * self.operand[micro.dim] if not isinstance(spec, (Rows, Lengths)) else 0.0
        return self._pattern_bytes()

    def _pattern_bytes(self) -> float:
        return pattern_bytes(self.program, self.operand)


def pattern_bytes(program: Program, operand: Sequence[int]) -> float:
    """Bytes of the array that tells a zero pattern of an operand of shape ``operand``."""
    spec, size = program.spec, float(math.prod(operand))
    if isinstance(spec, BitMask):
        return size / 8
    if isinstance(spec, BlockMask):
        return size / math.prod(spec.extents)
    if isinstance(spec, Values):
        return size * itemsize(program.input(program.operand).dtype)
    return size
