"""Calls of the GPU's family of live pieces: bits of what lives, then one product.

A line of bits for every step of k says which rows of lhs, or columns of rhs, live in it. The
product lists them itself. Pieces of an operand whose rows are k are turned before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..schedules.hopper_knobs import TILE_K
from ..schedules.hopper_piece_parts import pieces_tile, starting_pieces
from ..schedules.hopper_pieces import pieces_kernel
from ..selection.gpu_pieces import PiecesWork, range_of, select_pieces
from ..structs import Candidate, Plan, Tile
from ..tile_db.store import TileStore
from .bind import Layout
from .cuda_arrays import empty_of
from .cuda_block_map import Mapper
from .cuda_blocks import BlocksDispatcher
from .cuda_detect import fold_lines
from .cuda_detect_plan import MaskPlan
from .cuda_modules import Kernel
from .cuda_piece_form import PiecesForm
from .cuda_planner import BandPlanner
from .cuda_rows import FamilyKernels
from .cuda_view import CudaView, view_of
from .kernel_cache import KernelCache
from .program import Program


@dataclass(frozen=True)
class PieceLines:
    """Bits on the device: a tensor (steps, words), uint32."""

    tensor: Any

    @cached_property
    def views(self) -> tuple[CudaView]:
        """What a kernel takes of it; holds as long as the bits do."""
        return (view_of(self.tensor, "uint32"),)


class LineMapper(Mapper):
    """Makes lines of bits, one for each step of k."""

    def count(self, found: PieceLines, shape: tuple[int, ...]) -> Any:
        """Live rows of every step: a CUDA tensor, int32."""
        count = empty_of("int32", found.tensor, found.tensor.shape[:1])
        self._kernels.blocks("count_lines")(*found.views, count)
        return count

    def _read(
        self, argument: str, value: Any, shape: tuple[int, ...], plan: MaskPlan
    ) -> PieceLines:
        asked = (argument, value, self._spec, self._micro_tile, plan)
        return PieceLines(fold_lines(self._kernels, *asked))


class PiecesKernels(FamilyKernels):
    """Kernels of the family."""

    def product(self, tile: Tile, groups: int = 0, **options: Any) -> Kernel:
        """lhs, lines, high, rhs, [bias,] out; ``options`` are those of `pieces_kernel`."""
        knobs = pieces_tile(tile)
        key = ("hopper-pieces", knobs, tile.dtype, *options.items())
        return self._get(key, lambda: pieces_kernel(tile.dtype, knobs, **options))


class PiecesPlanner(BandPlanner):
    """Chooses plans for one program of the family on one GPU; counts are live pieces of each
    step."""

    form: PiecesForm

    def __init__(self, program: Program, form: PiecesForm, *others: Any) -> None:
        super().__init__(program, form, *others)
        self.tiles = starting_pieces(form.dtype, form.flip)

    def decide(self, layout: Layout, counts: tuple[int, ...], fresh: bool = True) -> Plan:
        """Algorithm 1 for live pieces of each step of k, without the cache."""
        form, k = self.form, self._depth(layout)
        m, n = layout.output if not form.flip else layout.output[::-1]
        index = self._index_bytes(layout)
        work = PiecesWork(m, n, k, counts, index, form.act, form.turns, form.flip)
        tiles = self.tiles if k else ()  # nothing to walk
        chosen = (form.route.micro_tile, work, tiles)
        return select_pieces(*chosen, self._whole(layout), self.rates())

    def _rows(self, layout: Layout) -> int:
        """What the count of a step is at most."""
        return layout.operand[self.form.route.micro_tile.dim]

    def _depth(self, layout: Layout) -> int:
        """The extent of k."""
        return layout.operand[1 - self.form.route.micro_tile.dim]


class PiecesDispatcher(BlocksDispatcher):
    """Runs one program of the family on one GPU target; threads may share it."""

    form: PiecesForm  # type: ignore[assignment]

    def _prepare(self, store: TileStore, cache: KernelCache) -> None:
        form = self.form
        self.flip, self.turns = form.flip, form.turns
        self.planner = PiecesPlanner(self.program, form, self.target, store, self.dead)
        self.kernels = PiecesKernels(cache, self.target.isa)
        self.mapper: Mapper = LineMapper(self.modules, self.program.spec, form.route.micro_tile)

    def build_moving(self) -> None:
        """Compile what turns live pieces."""
        if self.form.turns:
            self.kernels.turn_live(self.form.dtype, TILE_K)

    def _number(self, ids: npt.NDArray[np.int64]) -> int:
        return len(ids)

    def _kernel(self, choice: Candidate) -> Kernel:
        kernel, form, tile = super()._kernel(choice), self.form, choice.tile
        assert tile is not None

        def launch(sparse: Any, lines: Any, *rest: Any) -> None:
            if form.turns:
                sparse = self.kernels.turned_live(sparse, form.dtype, TILE_K, lines)
            (rows, depth), wide = sparse.shape, rest[-1].shape[0 if form.flip else 1]
            kernel(sparse, lines, range_of(rows, wide, depth, tile), *rest)

        return launch
