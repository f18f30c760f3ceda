"""Calls of the GPU's k-axis family: lists of live columns for every band, then one product.

A mask over an lhs stored [k, m] becomes lists at once; of one stored [m, k] the live columns are
packed first, so that a gathered micro-tile is contiguous. Rows of k that exist, of both operands,
are one list for all bands. Dense is a candidate as on every target, but not for these: what does
not exist may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable
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
from .cuda_dispatch import CudaDispatcher
from .cuda_form import ColumnsForm
from .cuda_planner import BandPlanner
from .cuda_rows import ROW_STEP, FamilyKernels
from .cuda_view import CudaView
from .cuda_workspace import CudaIndex
from .kernel_cache import KernelCache
from .program import Program

Kernel = Callable[..., Any]

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
        dtype = form.dtype
        self.tiles = starting_ranges(dtype) if form.common else starting_columns(dtype, form.height)

    def decide(self, layout: Layout, counts: tuple[int, ...], fresh: bool = True) -> Plan:
        """Algorithm 1 for live columns of each band, without the cache."""
        m, n = layout.output
        k = self._depth(layout)
        if k * max(m, n) >= MOST_ELEMENTS:
            expected = f"operands of fewer than {MOST_ELEMENTS} elements"
            raise ShapeError(mismatch("lhs, rhs", expected, f"k {k}, m {m}, n {n}"))
        index = self._index_bytes(layout)
        form = self.form
        work = ColumnsWork(m, n, k, form.height, counts, index, form.packed, form.common)
        chosen = (form.route.micro_tile, work, self.tiles)
        dense = None if form.common else self._whole(layout)
        return select_columns(*chosen, dense, self.rates())


class ColumnsDispatcher(CudaDispatcher):
    """Runs one program of the family on one GPU target; threads may share it."""

    form: ColumnsForm
    kernels: ColumnsKernels

    def _prepare(self, store: TileStore, cache: KernelCache) -> None:
        self.planner = ColumnsPlanner(self.program, self.form, self.target, store, self.dead)
        self.kernels = ColumnsKernels(cache, self.target.isa)

    def build(self, sizes: dict[str, int]) -> None:
        """Compile what calls of these sizes may need, however much is live; needs no GPU."""
        super().build(sizes)
        if self.form.packed:
            self.kernels.pack(self.form.dtype, self.form.height)

    def _lhs(self, inputs: Any, index: CudaIndex) -> Any:
        """What the kernel gathers: lhs as it is, or its live columns."""
        lhs = inputs[self._lhs_place]
        if not self.form.packed:
            return lhs
        packed = empty(lhs, (index.ids.shape[0] * index.ids.shape[1], self.form.height))
        self.kernels.pack(self.form.dtype, self.form.height)(lhs, *index.views, packed)
        return packed

    def _kernel(self, choice: Candidate) -> Kernel:
        kernel = super()._kernel(choice)
        if not self.form.common or choice.tile is None:
            return kernel
        shape = columns_tile(choice.tile).parts_shape

        def launch(lhs: Any, *others: Any) -> None:
            shared = self.memory.keep(_new_sums, lhs, shape)
            kernel(lhs, *others[:-1], *shared.views, others[-1])

        return launch

    def _unaligned(self, kernel: Kernel, index: CudaIndex, inputs: Any, out: Any) -> None:
        """Rows that do not begin at 16 bytes: through padded copies."""
        lhs, rhs, bias = self._operands(inputs)
        n, m = (-(-size // ROW_STEP) * ROW_STEP for size in (out.shape[1], out.shape[0]))
        wide, padded = empty(out, (out.shape[0], n)), empty(rhs, (1, rhs.shape[0], n))
        self.fill.pad_copy(rhs.unsqueeze(0), padded)
        rest = [padded]
        if bias is not None:
            rest.append(empty(bias, (1, n)))
            self.fill.pad_copy(bias.unsqueeze(0), rest[1])
        gathered = self._lhs(inputs, index)
        if not self.form.packed:
            gathered = empty(lhs, (lhs.shape[0], m))
            self.fill.pad_copy(lhs, gathered)
        kernel(gathered, *index.views, *rest, wide)
        self.fill.pad_copy(wide, out)


@dataclass(frozen=True)
class _Sums:
    """What CTAs exchange of their sums: memory, and it as kernels take it."""

    memory: tuple[Any, Any]
    views: tuple[CudaView, CudaView]


def _new_sums(like: Any, shape: tuple[int, int, int]) -> _Sums:
    """Sums of any contents, and a flag for each of them, 0."""
    parts, flags = empty_of("float32", like, shape), empty_of("int32", like, shape[:1])
    zero(flags)
    device = like.get_device()
    views = (
        CudaView(parts.data_ptr(), shape, "float32", device),
        CudaView(flags.data_ptr(), shape[:1], "int32", device),
    )
    return _Sums((parts, flags), views)
