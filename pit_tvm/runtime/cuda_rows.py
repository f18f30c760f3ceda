"""Kernels of the GPU's m-axis family, each built when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import tvm

from ..errors import ScheduleError, UnsupportedTarget, mismatch
from ..schedules.cuda_choices import ChoicesTile, choices_kernel
from ..schedules.cuda_turn import AT_ONCE, turn_kernel, turn_rows_kernel
from ..schedules.cuda_turn_live import turn_live_kernel
from ..schedules.hopper_combine import combine_rows
from ..schedules.hopper_knobs import RowsOptions
from ..schedules.hopper_rows import rows_kernel
from ..schedules.hopper_space import FAMILIES, ISA, for_groups, rows_tile, starting_tiles
from ..selection.gpu_cost import GpuRates, gpu_rates
from ..structs import Tile
from ..tile_db.record import TileRecord
from ..tile_db.store import TileStore
from .content_keys import content_key
from .cuda_arrays import empty
from .cuda_bind import ALIGNMENT
from .cuda_build import build_cuda
from .cuda_modules import Kernel
from .kernel_cache import KernelCache

ROW_STEP = 8  # elements of 16 bits in the 16 bytes that rows are moved by


def fits(tile: Tile | None, dtype: str, options: dict[str, Any]) -> bool:
    """Whether the kernel of a tile can be built with these options; True without a tile."""
    if tile is None:
        return True
    try:
        RowsOptions(dtype, **options).check(rows_tile(tile))
    except ScheduleError:
        return False
    return True


def rates_of(
    store: TileStore, dtype: str, isa: str, library: str, options: dict[str, Any]
) -> GpuRates:
    """Rates of the family's tiles that can be built with these options."""
    return _rates(_Records(store.all()), dtype, isa, library, tuple(sorted(options.items())))


class _Records:
    """Records of a store, equal to others if they are the same ones: those of one file are made
    once, and to compare what they say would take longer than their rates."""

    def __init__(self, records: Sequence[TileRecord]) -> None:
        self.records = records
        self._ids = tuple(map(id, records))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Records) and self._ids == other._ids

    def __hash__(self) -> int:
        return hash(self._ids)


@lru_cache(maxsize=16)  # every operator that is compiled asks, of hundreds of tiles
def _rates(
    known: _Records, dtype: str, isa: str, library: str, options: tuple[tuple[str, Any], ...]
) -> GpuRates:
    given = dict(options)
    generic = [t for t in starting_tiles(isa, dtype) if fits(t, dtype, given)]
    records = [
        r
        for r in known.records
        if r.tile is None or r.tile.family in FAMILIES and fits(r.tile, r.tile.dtype, given)
    ]
    return gpu_rates(records, dtype, isa, library, generic)


class FamilyKernels:
    """Kernels of a family, each built when it is first needed. Threads may share it."""

    def __init__(self, cache: KernelCache, arch: str) -> None:
        self.cache, self.arch = cache, arch
        self._known: dict[object, Kernel] = {}

    def _get(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Kernel:
        """The kernel that ``key`` tells from all others, of what ``make()`` gives to build."""
        kernel = self._known.get(key)
        if kernel is None:
            content = content_key(*key, self.arch)
            kernel = self._known[key] = self.cache.get(content, lambda: self._build(make()))
        return kernel

    def combine_kernel(self, dtype: str, ids: str, factors: str = "float32") -> Kernel:
        """partial (tokens, choices, n), weights and ids (tokens, choices), groups, out (tokens, n).

        ``ids`` and ``factors``: the types of ids and weights; see `combine_rows`.
        """
        key = ("hopper-combine", dtype, ids, factors)
        return self._get(key, lambda: combine_rows(dtype, factors=factors, ids=ids))

    def choices(self, tile: ChoicesTile) -> Kernel:
        """x, ids, [factors,] weight, [bias,] out; see `choices_kernel`."""
        return self._get(("cuda-choices", tile), lambda: choices_kernel(tile))

    def turn(self, dtype: str, beside: bool = False) -> Kernel:
        """source, turned; see `turn_kernel`."""
        key = ("cuda-turn", dtype, beside)
        return self._get(key, lambda: turn_kernel(dtype, beside))

    def turn_live(self, dtype: str, band: int) -> Kernel:
        """source, lines, grain, turned; see `turn_live_kernel`."""
        key = ("cuda-turn-live", dtype, band)
        return self._get(key, lambda: turn_live_kernel(dtype, band))

    def turn_rows(self, dtype: str, bias: bool, act: str) -> Kernel:
        """source, alive, [bias,] turned; see `turn_rows_kernel`."""
        asked = (dtype, bias, act)
        return self._get(("cuda-turn-rows", *asked), lambda: turn_rows_kernel(*asked))

    def turned(self, array: Any, dtype: str) -> Any:
        """A copy with its two dimensions exchanged, by torch where `turn_kernel` cannot read or
        write whole vectors."""
        if not in_vectors(array, dtype):
            return array.t().contiguous()
        found = empty(array, array.shape[::-1])
        if array.numel():
            self.turn(dtype)(array, found)
        return found

    def turned_live(self, array: Any, dtype: str, band: int, bits: Any, grain: int = 1) -> Any:
        """The same of what ``bits`` say of bands of rows, see `turn_live_kernel`; other places hold
        anything. Both dimensions of ``array`` are whole vectors."""
        found = empty(array, array.shape[::-1])
        if array.numel():
            self.turn_live(dtype, band)(array, bits, grain, found)
        return found

    def _build(self, func: tvm.tirx.PrimFunc) -> Any:
        return build_cuda(tvm.IRModule({"main": func}), self.arch, tirx=True)


def in_vectors(array: Any, dtype: str) -> bool:
    """Whether both dimensions of a matrix are whole vectors, and it begins at one."""
    step = AT_ONCE[dtype]
    return not (array.data_ptr() & ALIGNMENT or any(size % step for size in array.shape))


class RowsKernels(FamilyKernels):
    """Kernels of the m-axis family. One serves every shape: sizes are run-time values.

    UnsupportedTarget for another architecture than Hopper's.
    """

    def __init__(self, cache: KernelCache, arch: str) -> None:
        super().__init__(cache, arch)
        if arch != ISA:
            advice = "operators run on other GPUs, whole models and experts' layers do not"
            raise UnsupportedTarget(mismatch("target -arch", ISA, arch, advice))

    def product(self, tile: Tile, groups: int, **options: Any) -> Kernel:
        """lhs, ids, count, [dead, deads,] [depth,] rhs, [bias,] [scale,] out of ``tile.dtype``, for
        at most ``groups`` groups; ``options`` are those of
        `pit_tvm.schedules.hopper_rows.rows_kernel`.

        Raises
        ------
        TileNotFound
            No kernel takes so many groups.
        """
        key = (tile, groups, *options.items())
        kernel = self._known.get(key)
        if kernel is None:
            knobs, dtype = rows_tile(tile), tile.dtype
            if knobs.most_groups < groups:
                knobs = for_groups(knobs, groups)
            content = ("hopper-rows", knobs, dtype, *options.items())
            kernel = self._get(content, lambda: rows_kernel(dtype, knobs, **options))
            self._known[key] = kernel
        return kernel
