"""Calls of the GPU's k-axis family: lists of what lives along k for every band, then one product.

Bands are rows of lhs or columns of rhs. A mask over an operand whose rows are k becomes lists at
once; of another one live columns are packed first, and a dense operand like that is turned, so that
a gathered micro-tile is contiguous. Rows of k that exist, of both operands, are one list for all
bands. Dense is a candidate as on every target, but not for these: what does not exist may hold
anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import ShapeError, mismatch
from ..schedules.cuda_pack import pack_columns
from ..schedules.hopper_bands import columns_tile, starting_columns, starting_ranges
from ..schedules.hopper_columns import columns_kernel
from ..selection.gpu_columns import ColumnsWork, select_columns
from ..structs import Candidate, Plan, Tile
from ..tile_db.store import TileStore
from .bind import Layout
from .cuda_arrays import empty, empty_of, zero
from .cuda_bands import BandDispatcher
from .cuda_form import ColumnsForm
from .cuda_modules import Kernel
from .cuda_planner import BandPlanner
from .cuda_rows import FamilyKernels
from .cuda_view import CudaView, view_of
from .kernel_cache import KernelCache
from .program import Program

MOST_ELEMENTS = 2**33  # padding included, kernels count 16 bytes of an operand in 32 bits


class ColumnsKernels(FamilyKernels):
    """Kernels of the family."""

    def product(self, tile: Tile, groups: int = 0, **options: Any) -> Kernel:
        """lhs, ids, count, rhs, [bias,] out; ``options`` are those of `columns_kernel`."""
        knobs = columns_tile(tile)
        key = ("hopper-columns", knobs, tile.dtype, tuple(options.items()))
        return self._get(key, lambda: columns_kernel(tile.dtype, knobs, **options))

    def pack(self, dtype: str, height: int) -> Kernel:
        """lhs, ids, count, packed; see `pack_columns`."""
        key = ("cuda-pack", dtype, height)
        return self._get(key, lambda: pack_columns(dtype, height))


class ColumnsPlanner(BandPlanner):
    """Chooses plans for one program of the family on one GPU."""

    form: ColumnsForm

    def __init__(self, program: Program, form: ColumnsForm, *others: Any) -> None:
        super().__init__(program, form, *others)
        banded = (form.dtype, form.height, form.flip)
        self.tiles = starting_ranges(form.dtype) if form.common else starting_columns(*banded)

    def decide(self, layout: Layout, counts: tuple[int, ...], fresh: bool = True) -> Plan:
        """Algorithm 1 for what lives along k in each band, without the cache."""
        form, k = self.form, self._depth(layout)
        m, n = layout.output[::-1] if form.flip else layout.output
        if k * max(m, n) >= MOST_ELEMENTS:
            expected = f"operands of fewer than {MOST_ELEMENTS} elements"
            raise ShapeError(mismatch("lhs, rhs", expected, f"k {k}, m {m}, n {n}"))
        index = self._index_bytes(layout)
        moved = {"packed": form.packed, "turns": form.turns, "common": form.common}
        work = ColumnsWork(m, n, k, form.height, counts, index, **moved)
        chosen = (form.route.micro_tile, work, self.tiles)
        dense = None if form.common else self._whole(layout)
        return select_columns(*chosen, dense, self.rates())


class ColumnsDispatcher(BandDispatcher):
    """Runs one program of the family on one GPU target; threads may share it."""

    form: ColumnsForm
    kernels: ColumnsKernels

    def _prepare(self, store: TileStore, cache: KernelCache) -> None:
        form = self.form
        self.flip, self.packed = form.flip, form.packed
        self.turns = self.matrix = form.turns
        self.planner = ColumnsPlanner(self.program, self.form, self.target, store, self.dead)
        self.kernels = ColumnsKernels(cache, self.target.isa)

    def build_moving(self) -> None:
        """Compile what packs and turns operands."""
        if self.form.packed:
            self._pack()
        if self.form.turns:
            self._turn()

    def _pack(self) -> Kernel:
        """What packs what lives in the sparse operand: source, ids, count, packed."""
        return self.kernels.pack(self.form.dtype, self.form.height)

    def _turn(self) -> Kernel:
        """What turns the dense operand, beside what packs the other one: source, turned."""
        return self.kernels.turn(self.form.dtype, beside=self.form.packed)

    def _kernel(self, choice: Candidate) -> Kernel:
        kernel, form, tile = super()._kernel(choice), self.form, choice.tile
        if form.packed or form.turns:
            return self._moving(kernel)
        if not form.common or tile is None:
            return kernel
        shape = columns_tile(tile).parts_shape

        def launch(lhs: Any, *others: Any) -> None:
            shared = self.memory.keep(_new_sums, lhs, shape)
            kernel(lhs, *others[:-1], *shared.views, others[-1])

        return launch

    def _moving(self, kernel: Kernel) -> Kernel:
        """The same kernel for operands of which one is packed or the other turned first."""
        form = self.form
        pack = self._pack() if form.packed else None
        turn = self._turn() if form.turns else None

        def launch(sparse: Any, ids: Any, count: Any, dense: Any, *rest: Any) -> None:
            own, turned = sparse, None
            if turn is not None:
                # Before anything is packed: while that is done it must be nobody else's.
                turned = empty(sparse, dense.shape[::-1])
            if pack is not None:
                own = empty(sparse, (math.prod(ids.shape), form.height))
                pack(sparse, ids, count, own)
            if turn is not None and turned is not None:
                turn(dense, turned)
                dense = view_of(turned, form.dtype, (1, *turned.shape))
            kernel(own, ids, count, dense, *rest)

        return launch


@dataclass(frozen=True)
class _Sums:
    """What CTAs exchange of their sums: memory, and it as kernels take it."""

    memory: tuple[Any, Any]
    views: tuple[CudaView, CudaView]


def _new_sums(like: Any, shape: tuple[int, int, int]) -> _Sums:
    """Sums of any contents, and a flag for each of them, 0."""
    parts, flags = empty_of("float32", like, shape), empty_of("int32", like, shape[:1])
    zero(flags)
    views = view_of(parts, "float32", shape), view_of(flags, "int32", shape[:1])
    return _Sums((parts, flags), views)
