"""Calls of the GPU's products with a sparse output: live rows of every slot of columns.

The rows family computes them: a slot takes the place of a group, with weights of its own out of the
one dense operand. An lhs stored [k, m] is turned first. Dense is a candidate for new outputs,
whose dead part may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ShapeError, UnsupportedTarget, mismatch
from ..schedules.hopper_space import GROUP_STEPS, output_tiles
from ..selection.gpu_outputs import OutputsWork, select_outputs
from ..structs import Candidate, Plan, Tile
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .bind import Layout
from .cuda_arrays import zero
from .cuda_bind import CudaBound
from .cuda_dispatch import CudaDispatcher
from .cuda_form import RowsForm, dtype_of, epilogue_of, slotted
from .cuda_planner import BandPlanner
from .cuda_rows import RowsKernels
from .cuda_workspace import CudaIndex
from .kernel_cache import KernelCache
from .program import Program


@dataclass(frozen=True)
class OutputsForm(RowsForm):
    """A program as ``out[i, s] = act(lhs[i] @ rhs[s] + bias[s])`` over the live rows i of slots s
    of ``slot`` columns. ``route`` is the axis of rows, in pieces of a slot. ``turns``: lhs is
    stored [k, m]."""

    slot: int = 0
    turns: bool = False

    @property
    def transposed(self) -> bool:
        """Whether lhs is stored [k, m]."""
        return self.turns

    @property
    def options(self) -> dict[str, Any]:
        """Options of `pit_tvm.schedules.hopper_rows.rows_kernel`."""
        return {**super().options, "slot": self.slot}


def outputs_form(program: Program) -> OutputsForm | None:
    """What a kernel has to do for a program; None if its output is not what is sparse, or blocks of
    that, types or epilogue are none that the family computes."""
    con, product = program.contraction, program.product
    if not program.writes or con is None or con.batch or product is None:
        return None
    if product.left != con.sparse:  # only columns fit the blocks
        return None
    slot, route = slotted(program, con)
    layout = "nk" if product.transpose_right else "kn"
    try:
        act, bias = epilogue_of(program, con, layout)
        dtype = dtype_of(program, con)
    except UnsupportedTarget:  # another family's
        return None
    form = (product.left, product.right, bias, layout, act, dtype, 0, route)
    return OutputsForm(*form, slot=slot, turns=product.transpose_left)


class OutputsPlanner(BandPlanner):
    """Chooses plans for one program of the family on one GPU: slots of columns have counts."""

    form: OutputsForm

    def __init__(
        self, program: Program, form: OutputsForm, target: TargetInfo, store: TileStore, dead: str
    ) -> None:
        super().__init__(program, form, target, store, dead)
        self.clears = dead == "zero"

    def decide(self, layout: Layout, counts: tuple[int, ...], fresh: bool = True) -> Plan:
        """Algorithm 1 for live rows of each slot, without the cache."""
        form, (m, n), index = self.form, layout.output, self._index_bytes(layout)
        k, clears = self._depth(layout), self.clears
        work = OutputsWork(m, n, k, form.slot, counts, index, clears, form.act, form.turns)
        dense = self._whole(layout) if fresh and not clears else None
        tiles = self.likely_tiles(layout)
        return select_outputs(form.route.micro_tile, work, tiles, dense, self.rates())

    def likely_tiles(self, layout: Layout) -> tuple[Tile, ...]:
        """All of the few that there are.

        Raises
        ------
        ShapeError
            The output has more slots than a kernel takes.
        """
        slot, most = self.form.slot, GROUP_STEPS[-1]
        slots = -(-layout.output[1] // slot)
        if slots > most:
            name = self.program.output.name
            expected = f"at most {most * slot} columns on a GPU"
            raise ShapeError(mismatch(f"{name}, sparse", expected, layout.output[1]))
        return output_tiles(self.form.dtype, slot, slots)

    def _rows(self, layout: Layout) -> int:
        return layout.output[0]

    def _depth(self, layout: Layout) -> int:
        names = [p.name for p in self.program.inputs]
        return layout.shapes[names.index(self.form.lhs)][0 if self.form.turns else 1]


class OutputsDispatcher(CudaDispatcher):
    """Runs one program of the family on one GPU target; threads may share it."""

    form: OutputsForm

    def _prepare(self, store: TileStore, cache: KernelCache) -> None:
        self.planner = OutputsPlanner(self.program, self.form, self.target, store, self.dead)
        self.kernels, self.turns = RowsKernels(cache, self.target.isa), self.form.turns

    def build_moving(self) -> None:
        """Compile what turns lhs."""
        if self.turns:
            self.kernels.turn(self.form.dtype)

    def _own(self, sparse: Any, index: CudaIndex) -> Any:
        """Rows of lhs; of one stored [k, m] turned."""
        return self.kernels.turned(sparse, self.form.dtype) if self.turns else sparse

    def _product(
        self, choice: Candidate, index: CudaIndex, bound: CudaBound, dead: CudaIndex | None = None
    ) -> None:
        if self.dead == "zero":
            zero(bound[3])
        super()._product(choice, index, bound, dead)
