"""Calls of the GPU's family of live blocks: a map of blocks, then one product that reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..schedules.hopper_block_parts import blocks_tile, starting_blocks
from ..schedules.hopper_blocks import blocks_kernel
from ..schedules.hopper_knobs import TILE_K
from ..selection.gpu_blocks import BlocksWork, select_blocks
from ..structs import BlockMask, MicroTile, Plan, Tile
from ..tile_db.store import TileStore
from .bind import Layout
from .cuda_bands import BandDispatcher
from .cuda_block_form import BlocksForm
from .cuda_block_map import BlockMapper, Mapper
from .cuda_call import CudaCall
from .cuda_modules import Kernel
from .cuda_planner import BandPlanner
from .cuda_rows import FamilyKernels
from .kernel_cache import KernelCache
from .program import Program


class BlocksKernels(FamilyKernels):
    """Kernels of the family."""

    def product(self, tile: Tile, groups: int = 0, **options: Any) -> Kernel:
        """lhs, map, high, deep, beside, along, rhs, [bias,] out; ``options`` are those of
        `blocks_kernel`."""
        knobs = blocks_tile(tile)
        key = ("hopper-blocks", knobs, tile.dtype, *options.items())
        return self._get(key, lambda: blocks_kernel(tile.dtype, knobs, **options))


class BlocksPlanner(BandPlanner):
    """Chooses plans for one program of the family on one GPU; counts are those of live steps."""

    form: BlocksForm

    def __init__(self, program: Program, form: BlocksForm, *others: Any) -> None:
        super().__init__(program, form, *others)
        self.tiles = starting_blocks(form.dtype, form.side, form.height)

    def decide(self, layout: Layout, counts: tuple[int, ...], fresh: bool = True) -> Plan:
        """Algorithm 1 for live steps of each band, without the cache."""
        form, (m, n), k = self.form, layout.output, self._depth(layout)
        own_map = isinstance(self.program.spec, BlockMask)
        index = 0.0 if own_map else self._index_bytes(layout)
        of_lhs = form.side == "lhs"
        work = BlocksWork(m, n, k, form.height, TILE_K, counts, of_lhs, index, form.act)
        chosen = (form.route.micro_tile, work, self.tiles)
        return select_blocks(*chosen, self._whole(layout), self.rates())

    def _rows(self, layout: Layout) -> int:
        """Steps of the whole depth."""
        return -(-self._depth(layout) // TILE_K)


class BlocksDispatcher(BandDispatcher):
    """Runs one program of the family on one GPU target; threads may share it."""

    form: BlocksForm
    mapper: Mapper
    matrix = True

    def _prepare(self, store: TileStore, cache: KernelCache) -> None:
        self.planner = BlocksPlanner(self.program, self.form, self.target, store, self.dead)
        self.kernels = BlocksKernels(cache, self.target.isa)
        self.mapper = BlockMapper(self.modules, self.program.spec, self.form.route.micro_tile)

    def _number(self, ids: npt.NDArray[np.int64]) -> int:
        return len(np.unique(ids // TILE_K))

    def _indices(self, call: CudaCall, value: Any, gathered: MicroTile | None) -> tuple[Any, None]:
        """The map of live blocks, None where nobody reads it."""
        learns = call.watch.due()  # a dense pattern may become sparser
        if gathered is None and not learns:
            return None, None
        found = self.mapper.map(value, call.layout.operand)
        if learns:
            count = self.mapper.count(found, call.layout.operand)
            call.watch.report(count, self.detector.report)
        return found, None
