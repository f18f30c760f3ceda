"""Operators on a GPU through SRead, SWrite and TensorIR schedules, as on a CPU.

Contractions of any type and with either operand sparse run in tiles; any other expression that has
a PIT axis takes one thread to a result. What Hopper's own families compute goes there instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import tvm
from tvm import s_tir, tirx

from ..errors import ShapeError, mismatch
from ..schedules import cuda_generic
from ..schedules.cuda_contraction import scheduled
from ..schedules.cuda_contraction_space import starting_tiles
from ..selection.gpu_general import (
    GeneralDense,
    GeneralRates,
    GeneralWork,
    general_rates,
    select_general,
)
from ..structs import Candidate, MicroTile, Plan, Tile
from ..target import TargetInfo
from ..tile_db.store import TileStore
from ..transform.insert_sread_swrite import SparseForm, insert_sread_swrite
from ..transform.pipeline import lower
from ..transform.split_epilogue import dead_value
from ..transform.unalign import unalign
from .arrays import itemsize
from .bind import Layout
from .cuda_arrays import dense_product, zero
from .cuda_bind import ALIGNMENT, CudaBound
from .cuda_build import build_cuda
from .cuda_dispatch import CudaDispatcher
from .cuda_general_form import GeneralForm
from .cuda_planner import LIBRARY, BandPlanner, CudaPlanner
from .cuda_rows import FamilyKernels
from .cuda_workspace import CudaIndex
from .kernel_cache import KernelCache
from .program import Program

Kernel = Callable[..., Any]

MOST_ELEMENTS = 2**31  # of one array: kernels count them in 32 bits
MOST_CTAS = 2**16 - 1  # beside each other on an index of CTAs but the first


class GeneralKernels(FamilyKernels):
    """Kernels of one program."""

    def __init__(self, program: Program, form: GeneralForm, cache: KernelCache, arch: str) -> None:
        super().__init__(cache, arch)
        self.program, self.form = program, form
        self._own = ("cuda-general", program.func.script(), program.operand)

    def product(self, tile: Tile | None, groups: int = 0) -> Kernel:
        """Live positions only: inputs, ids, count, output. ``tile`` None: no contraction."""
        micro_tile = self.form.route.micro_tile
        key = (*self._own, "sparse", micro_tile, tile, groups)
        return self._get(key, lambda: self._made(micro_tile, tile))

    def dense(self, tile: Tile | None) -> Kernel:
        """All positions: inputs, output."""
        return self._get((*self._own, "dense", tile), lambda: self._made(None, tile))

    def dead(self) -> Kernel | None:
        """The output where the operand is zero: inputs that it reads, output. None if zero."""
        func = self._dead_func
        return None if func is None else self._get((*self._own, "dead"), lambda: _plain(func))

    @cached_property
    def dead_inputs(self) -> list[int]:
        """Places of the inputs that `dead` reads, in order."""
        names = [p.name for p in self.program.inputs]
        read = [] if self._dead_func is None else self._dead_func.params[:-1]
        return [names.index(str(p.name)) for p in read]

    @cached_property
    def _dead_func(self) -> tirx.PrimFunc | None:
        return dead_value(self.program.func, self.program.main, self.program.operand)

    def _build(self, func: tvm.IRModule) -> Any:
        return build_cuda(func, self.arch, pipelined=True)

    def _made(self, micro_tile: MicroTile | None, tile: Tile | None) -> tvm.IRModule:
        func, con = self.program.func, self.program.contraction
        if tile is not None and con is not None:
            return lower(scheduled(func, con, tile, micro_tile, self.program.num_groups).mod)
        if micro_tile is not None:
            func = insert_sread_swrite(func, micro_tile, SparseForm(1))
        return _plain(func)


class GeneralPlanner(BandPlanner):
    """Chooses plans for one program on one GPU."""

    form: GeneralForm  # type: ignore[assignment]

    def __init__(
        self, program: Program, form: Any, target: TargetInfo, store: TileStore, dead: str
    ) -> None:
        super().__init__(program, form, target, store, dead)
        spatial = not form.route.reduces
        # Dead slices of the output are written before live ones overwrite them.
        self.overwrites = spatial and (program.spec.promises_zero or dead == "zero")
        # A product of everything: where dead slices are zero, or nobody looks at theirs.
        self.dense_fits = program.spec.promises_zero
        self.dense_fits_new = spatial and dead != "zero"

    @property
    def _row(self) -> int:
        con = self.program.contraction
        return con.sparse_axes.index(con.row) if con else 0

    def decide(self, layout: Layout, counts: tuple[int, ...], fresh: bool = True) -> Plan:
        """Algorithm 1 for live positions of each list, without the cache."""
        self._check_sizes(layout)
        slots = max(len(counts), 1)
        covered = sum(counts) / max(slots * self._rows(layout), 1)
        output = math.prod(layout.output) * self._itemsize
        fill = float(output) if self.overwrites else 0.0
        index = self._index_bytes(layout)
        fits = self.dense_fits or (fresh and self.dense_fits_new)
        dense = self._all(layout) if fits and not self.form.groups else None
        work = self._work(layout, counts)
        micro_tile = self.form.route.micro_tile
        tiles, rates = self.likely_tiles(layout), self.own_rates
        return select_general(micro_tile, work, tiles, dense, rates, index, fill, covered)

    @cached_property
    def own_rates(self) -> GeneralRates:
        """Rates of the operator's tiles on this GPU, and of the library's products."""
        form, isa = self.form, self.target.isa
        bands = form.axis == "depth"
        height = form.route.micro_tile.extents[self._row] if bands else 0
        generic = starting_tiles(isa, form.dtype, height) if form.rhs else ()
        axis = "depth" if bands else "rows"
        return general_rates(self.store.all(), form.dtype, isa, LIBRARY, generic, axis)

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:  # type: ignore[override]
        """The tiles to choose from; none without a contraction."""
        return self.own_rates.tiles

    def likely_tiles(self, layout: Layout) -> tuple[Any, ...]:
        """All of the few that there are."""
        return self.tiles or (None,)

    def _assumed(self, layout: Layout, share: float) -> tuple[int, ...]:
        if self.form.groups:
            return CudaPlanner._assumed(self, layout, share)
        other = [e for e in self.form.route.micro_tile.extents if e > 1]
        extent = layout.operand[self._row] if other else 1
        lists = -(-extent // other[0]) if other else 1
        return (round(share * self._rows(layout)),) * lists

    def _work(self, layout: Layout, counts: tuple[int, ...]) -> GeneralWork:
        m, n, k, batch = self._extents(layout)
        shared = 1 if self.form.axis == "batch" else batch
        extent = self._rows(layout)
        return GeneralWork(counts or (0,), m, n, k, shared, self._itemsize, self.form.axis, extent)

    def _all(self, layout: Layout) -> GeneralDense:
        m, n, k, batch = self._extents(layout)
        passes = 2.0 * m * n * batch * self._itemsize if self.form.act != "none" else 0.0
        library = LIBRARY if self.form.library else ""
        return GeneralDense(m, n, k, batch, self._itemsize, library, passes)

    def _extents(self, layout: Layout) -> tuple[int, int, int, int]:
        """Rows and columns as the sparse operand has them, depth, and products beside each other;
        results, 1, terms of each and 1 where there is no contraction."""
        con = self.program.contraction
        if con is None or not self.form.rhs:
            terms = math.prod(layout.operand) // max(math.prod(layout.output), 1)
            return math.prod(layout.output), 1, max(terms, 1), 1
        names = [p.name for p in self.program.inputs]
        sparse = dict(zip(con.sparse_axes, layout.operand, strict=True))
        other = layout.shapes[names.index(con.dense)]
        dense = dict(zip(con.dense_axes, other, strict=True))
        batch = math.prod(sparse[axis] for axis in con.batch)
        return sparse[con.row], dense[con.column], sparse[con.reduce], batch

    def _check_sizes(self, layout: Layout) -> None:
        shapes = [*layout.shapes, layout.output]
        if max(map(math.prod, shapes)) >= MOST_ELEMENTS:
            expected = f"arrays of fewer than {MOST_ELEMENTS} elements"
            raise ShapeError(mismatch("inputs, output", expected, shapes))
        if self.tiles:
            _, n, _, batch = self._extents(layout)
            ctas = -(-n // min(tile.tile_n for tile in self.tiles)) * batch
            if ctas > MOST_CTAS:
                raise ShapeError(mismatch("inputs", f"at most {MOST_CTAS} tiles beside", ctas))

    @property
    def _itemsize(self) -> int:
        return itemsize(self.program.input(self.program.operand).dtype)


class GeneralDispatcher(CudaDispatcher):
    """Runs one program on one GPU target; threads may share it."""

    form: GeneralForm  # type: ignore[assignment]
    planner: GeneralPlanner
    kernels: GeneralKernels

    def _prepare(self, store: TileStore, cache: KernelCache) -> None:
        self.planner = GeneralPlanner(self.program, self.form, self.target, store, self.dead)
        self.kernels = GeneralKernels(self.program, self.form, cache, self.target.isa)

    def build(self, sizes: dict[str, int]) -> None:
        """Compile what calls may need, however much is live; needs no GPU."""
        super().build(sizes)
        self.kernels.dead()
        if not self.form.library and not self.form.groups:
            self.kernels.dense(self.planner.likely_tiles(self.binder.layout_of(sizes, "torch"))[0])

    def _dense(self, inputs: Any, out: Any) -> None:
        product = self.program.product
        if product is None or not self.form.library:
            tiles = self.planner.tiles
            self.kernels.dense(tiles[0] if tiles else None)(*map(_aligned, inputs), out)
            return
        named = dict(zip((p.name for p in self.program.inputs), inputs, strict=True))
        left, right = named[product.left], named[product.right]
        dense_product(
            left.mT if product.transpose_left else left,
            right,
            named.get(self.form.bias),
            self.form.act,
            out,
            transpose_rhs=product.transpose_right,
        )

    def _product(self, choice: Candidate, index: CudaIndex, bound: CudaBound) -> None:
        call, inputs, _, out, _ = bound
        if self.planner.overwrites:
            self._write_dead(inputs, out)
        kernel = self._known_kernel(call, choice)
        kernel(*(_aligned(inputs[place]) for place in self._read), *index.views, out)

    def _kernel(self, choice: Candidate) -> Kernel:
        return self.kernels.product(choice.tile, self.form.groups)

    @cached_property
    def _read(self) -> list[int]:
        """Places of the inputs that products read: in tiles a list stands for its group."""
        group = self.program.contraction.group if self.program.contraction else ""
        tiles = bool(self.planner.tiles)
        return [at for at, p in enumerate(self.program.inputs) if not (tiles and p.name == group)]

    def _write_dead(self, inputs: Any, out: Any) -> None:
        """The output as the pattern promises it where nothing lives, before the rest."""
        kernel = self.kernels.dead() if self.program.spec.promises_zero else None
        if kernel is None:
            zero(out)
            return
        kernel(*(inputs[place] for place in self.kernels.dead_inputs), out)


def _plain(func: tirx.PrimFunc) -> tvm.IRModule:
    """A function under the generic schedule, lowered, as ``main``."""
    sch = s_tir.Schedule(unalign(func).with_attr("global_symbol", "main"))
    cuda_generic.apply(sch)
    return lower(sch.mod)


def _aligned(array: Any) -> Any:
    """The array where kernels may read it in vectors: a copy of one that begins elsewhere."""
    return array.clone() if array.data_ptr() & ALIGNMENT else array
