"""Plans of programs on CUDA cores: what their tiles cost on one GPU, and what else they write."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..errors import ShapeError, mismatch
from ..schedules.cuda_contraction_space import PIECES, ROWS, TF32, starting_tiles
from ..selection.gpu_general import (
    GeneralDense,
    GeneralRates,
    GeneralWork,
    general_rates,
    select_general,
)
from ..selection.gpu_turn import live_us, whole_us
from ..structs import Plan, Tile
from ..target import TargetInfo
from ..tile_db.store import TileStore
from ..transform.lower_atomic_adds import VECTORS
from .argument import MOST_ELEMENTS
from .arrays import itemsize
from .bind import Layout
from .cuda_arrays import tf32_allowed
from .cuda_general_form import GeneralForm, banded
from .cuda_planner import LIBRARY, BandPlanner, CudaPlanner
from .detect_plan import capacity_of
from .program import Program

_SECTOR = 32  # bytes that memory gives at once
MOST_CTAS = 2**16 - 1  # beside each other on an index of CTAs but the first


class GeneralPlanner(BandPlanner):
    """Chooses plans for one program on one GPU."""

    form: GeneralForm  # type: ignore[assignment]

    def __init__(
        self, program: Program, form: Any, target: TargetInfo, store: TileStore, dead: str
    ) -> None:
        super().__init__(program, form, target, store, dead)
        spatial = not form.route.reduces
        # Dead slices of the output are written before live ones overwrite them, or add to them.
        writes = spatial and (program.zero_outside or dead == "zero")
        self.overwrites = writes and not form.apart
        # A product of everything: where dead slices are zero, or nobody looks at theirs.
        self.dense_fits = program.zero_outside
        self.dense_fits_new = spatial and dead != "zero"
        # By whether tensor cores may compute float32; made when first asked for.
        self._own_rates: dict[bool, GeneralRates] = {}

    @property
    def _row(self) -> int:
        con = self.program.contraction
        return con.sparse_axes.index(con.row) if con else 0

    def decide(self, layout: Layout, counts: tuple[int, ...], fresh: bool = True) -> Plan:
        """Algorithm 1 for live positions of each list, without the cache."""
        self._check_sizes(layout)
        slots = max(len(counts), 1)
        covered = sum(counts) / max(slots * self._rows(layout), 1)
        fits = self.dense_fits or (fresh and self.dense_fits_new)
        zeros = 1.0 - covered if self.program.spec.promises_zero else 0.0
        dense = self._all(layout, zeros) if fits and not self.form.groups else None
        work = self._work(layout, counts)
        micro_tile = self.form.route.micro_tile
        rates = self.own_rates()
        tiles = self._fitting(layout, rates.tiles) or (None,)
        index = rates.base.index_us(self._index_bytes(layout))
        fill = rates.base.store_us(float(self._output_bytes(layout)))
        beside = (index, self._turning_us(layout, covered), fill)
        return select_general(micro_tile, work, tiles, dense, rates, beside, covered)

    def tf32(self) -> bool:
        return self.form.dtype == "float32" and bool(self.form.rhs) and tf32_allowed()

    def own_rates(self) -> GeneralRates:
        """Rates of the operator's tiles on this GPU, and of the library's products, in the
        precision that torch is set to."""
        tf32 = self.tf32()
        rates = self._own_rates.get(tf32)
        if rates is None:
            rates = self._own_rates[tf32] = self._rates_in(tf32)
        return rates

    def _rates_in(self, tf32: bool) -> GeneralRates:
        form, isa = self.form, self.target.isa
        dtype = TF32 if tf32 else form.dtype
        bands = form.axis == "depth"
        height = form.route.micro_tile.extents[self._row] if bands else 0
        family = PIECES if form.axis == "pieces" else ROWS
        generic = starting_tiles(isa, dtype, height, family) if form.rhs else ()
        if family == PIECES:  # two steps at least: copies of one are awaited at once
            steps = max(form.route.micro_tile.extents) // 2
            generic = tuple(replace(t, tile_k=min(t.tile_k, steps)) for t in generic)
        records = list(self.store.all())
        if form.slot:
            generic = tuple(tile for tile in generic if tile.tile_n == form.slot)
            records = [r for r in records if r.tile is None or r.tile.tile_n == form.slot]
        # Neighbours in a row of what tiles add to, the product or that turned.
        wide = self.program.output.shape[0 if form.flips else -1]
        pairs = isinstance(wide, int) and wide % max(VECTORS) == 0
        rates = general_rates(records, dtype, isa, LIBRARY, generic, form.axis, pairs)
        if tf32 and form.slot and not rates.terms:  # no tile of tensor cores is as narrow
            return replace(self._rates_in(tf32=False), base=rates.base)
        return rates

    @property
    def tiles(self) -> tuple[Tile, ...]:  # type: ignore[override]
        """The tiles to choose from, in the precision that torch is set to; none without a
        contraction. May be set to some of them."""
        return self.own_rates().tiles

    @tiles.setter
    def tiles(self, some: tuple[Tile, ...]) -> None:
        rates = self.own_rates()
        terms = {tile: rates.terms[tile] for tile in some}
        self._own_rates[self.tf32()] = replace(rates, terms=terms)

    def likely_tiles(self, layout: Layout) -> tuple[Any, ...]:
        """All of the few that there are."""
        self._check_sizes(layout)
        return self._fitting(layout, self.tiles) or (None,)

    def _assumed(self, layout: Layout, share: float) -> tuple[int, ...]:
        if self.form.groups:
            return CudaPlanner._assumed(self, layout, share)
        cut = ((dim, e) for dim, e in enumerate(self.form.route.micro_tile.extents) if e > 1)
        lists = next((-(-layout.operand[dim] // extent) for dim, extent in cut), 1)
        return (round(share * self._rows(layout)),) * lists

    def _work(self, layout: Layout, counts: tuple[int, ...]) -> GeneralWork:
        m, n, k, batch = self._extents(layout)
        shared = 1 if self.form.axis == "batch" else batch
        extent = self._rows(layout)
        k = max(self.form.route.micro_tile.extents) if self.form.axis == "pieces" else k
        sizes = (counts or (0,), m, self.form.slot or n, k, shared, self._itemsize)
        return GeneralWork(*sizes, self.form.axis, extent, self._scattered)

    def _turning_us(self, layout: Layout, covered: float) -> float:
        """Time in which operands are turned, and the product back: matrices, beside no others."""
        (m, n, k, _), form = self._extents(layout), self.form
        us = whole_us(self._itemsize * m * n) if form.flips else 0.0
        for name in form.turns:
            size = self._itemsize * (m if name == form.lhs else n) * k
            if name == form.lhs and banded(form):
                extents, dim = getattr(self.program.spec, "extents", ()), form.route.micro_tile.dim
                us += live_us(size, covered, self._itemsize, extents[dim] if extents else 1)
            else:
                us += whole_us(size)
        return us

    @property
    def _scattered(self) -> tuple[float, float]:
        """How much of the operands is gathered by elements: where lists are along an operand's last
        axis. Live neighbours come together, a sector of memory at once.
        """
        con, turned = self.program.contraction, self.form.turns
        if con is not None and self.form.axis == "pieces":
            return float(con.sparse_axes[-1] == con.row and con.sparse not in turned), 0.0
        if con is None or self.form.axis != "depth":
            return 0.0, 0.0
        extents = getattr(self.program.spec, "extents", ())
        together = extents[con.sparse_axes.index(con.reduce)] if extents else 1
        near = min(together, _SECTOR // self._itemsize)
        sides = ((con.sparse, con.sparse_axes), (con.dense, con.dense_axes))
        own, other = (axes[-1] == con.reduce and name not in turned for name, axes in sides)
        return own / near, other / near

    def _all(self, layout: Layout, zeros: float) -> GeneralDense:
        m, n, k, batch = self._extents(layout)
        passes = 2.0 * m * n * batch * self._itemsize if self.form.act != "none" else 0.0
        library = LIBRARY if self.form.library else ""
        product = self.program.product
        first = product is not None and product.transpose_left and not product.transpose_right
        return GeneralDense(m, n, k, batch, self._itemsize, library, passes, zeros, first)

    def _output_bytes(self, layout: Layout) -> int:
        """What is written before the tiles' results, and after them where their sums are apart."""
        output = math.prod(layout.output) * self._itemsize
        if not self.form.apart:
            return output if self.overwrites else 0
        return 2 * math.prod(layout.sums) * itemsize(self.program.sums.dtype) + output

    def _extents(self, layout: Layout) -> tuple[int, int, int, int]:
        """Rows and columns as the sparse operand has them, depth, and products beside each other;
        results, 1, terms of each and 1 where there is no contraction."""
        con = self.program.contraction
        if con is None or not self.form.rhs:
            terms = math.prod(layout.operand) // max(math.prod(layout.output), 1)
            return math.prod(layout.output), 1, max(terms, 1), 1
        names = [p.name for p in self.program.inputs]
        own, other = (layout.shapes[names.index(name)] for name in (con.sparse, con.dense))
        sparse = dict(zip(con.sparse_axes, own, strict=True))
        dense = dict(zip(con.dense_axes, other, strict=True))
        batch = math.prod(sparse[axis] for axis in con.batch)
        return sparse[con.row], dense[con.column], sparse[con.reduce], batch

    def _check_sizes(self, layout: Layout) -> None:
        shapes = [*layout.shapes, layout.output]
        if max(map(math.prod, shapes)) >= MOST_ELEMENTS:
            expected = f"arrays of fewer than {MOST_ELEMENTS} elements"
            raise ShapeError(mismatch("inputs, output", expected, shapes))
        tiles = self.tiles
        results = 0 if tiles else self._results(layout)
        if results >= MOST_ELEMENTS:
            expected = f"fewer than {MOST_ELEMENTS} results for a list with room for all positions"
            raise ShapeError(mismatch("inputs, output", expected, results, "pass fewer at once"))
        if tiles and not self._fitting(layout, tiles):
            ctas = max(self._beside(layout, tile) for tile in tiles)
            raise ShapeError(mismatch("inputs", f"at most {MOST_CTAS} tiles beside", ctas))

    def _fitting(self, layout: Layout, tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
        """Those of ``tiles`` whose CTAs an index of the grid holds; without groups all or none,
        since a dense product takes the first."""
        found = tuple(tile for tile in tiles if self._beside(layout, tile) <= MOST_CTAS)
        return found if self.form.groups or len(found) == len(tiles) else ()

    def _beside(self, layout: Layout, tile: Tile) -> int:
        """CTAs beside each other: those of the columns of every product and group or, on an index
        of their own, those of a list of products."""
        _, n, _, batch = self._extents(layout)
        listed = capacity_of(self._rows(layout)) if self.form.axis == "batch" else 0
        return max(-(-n // tile.tile_n) * batch * max(self.form.groups, 1), listed)

    def _results(self, layout: Layout) -> int:
        """What kernels without tiles count: results at every place of a list, live or not."""
        results, rows = math.prod(layout.output), self._rows(layout)
        return results if self.form.route.reduces else results // max(rows, 1) * capacity_of(rows)

    @property
    def _itemsize(self) -> int:
        return itemsize(self.program.input(self.program.gathered).dtype)
