"""Calls of the GPU's products with a sparse output: live rows of every slot of columns.

The rows family computes them: a slot takes the place of a group, with weights of its own out of the
one dense operand. Dense is a candidate for new outputs, whose dead part may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import ShapeError, mismatch
from ..schedules.hopper_space import GROUP_STEPS, output_tiles
from ..selection.gpu_outputs import OutputsWork, select_outputs
from ..structs import Candidate, Plan, Tile
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .bind import Layout
from .cuda_arrays import zero
from .cuda_bind import CudaBound
from .cuda_dispatch import CudaDispatcher
from .cuda_form import RowsForm, dtype_of, epilogue_of, unsupported
from .cuda_planner import BandPlanner
from .cuda_rows import RowsKernels
from .cuda_workspace import CudaIndex
from .kernel_cache import KernelCache
from .program import Program

SLOTS = (128, 64)  # columns of a slot, the widest first


@dataclass(frozen=True)
class OutputsForm(RowsForm):
    """A program as ``out[i, s] = act(lhs[i] @ rhs[s] + bias[s])`` over the live rows i of slots s
    of ``slot`` columns. ``route`` is the axis of rows, in pieces of a slot."""

    slot: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Options of `pit_tvm.schedules.hopper_rows.rows_kernel`."""
        return {**super().options, "slot": self.slot}


def outputs_form(program: Program) -> OutputsForm | None:
    """What a kernel has to do for a program; None if its output is not what is sparse.

    Raises
    ------
    UnsupportedTarget
        Blocks of the output, operands or epilogue are none that the family computes.
    """
    con, product = program.contraction, program.product
    if not program.writes or con is None:
        return None
    if con.batch or product is None:
        raise unsupported("a sparse output of a product without batches")
    if product.left != con.sparse:
        expected = f"blocks of the output in {SLOTS[-1]} columns or a multiple"
        raise unsupported(expected, program.spec)
    if con.sparse_axes != (con.row, con.reduce):
        raise unsupported("a sparse output of lhs stored [m, k]")
    width = (getattr(program.spec, "extents", ()) or (1, 1))[con.out_axes.index(con.column)]
    slot = next((slot for slot in SLOTS if width % slot == 0), SLOTS[-1])
    extents = tuple(slot if axis == con.column else 1 for axis in con.out_axes)
    route = program.routes[0]
    route = replace(route, micro_tile=replace(route.micro_tile, extents=extents))
    layout = "nk" if product.transpose_right else "kn"
    act, bias = epilogue_of(program, con, layout)
    dtype = dtype_of(program, con)
    return OutputsForm(product.left, product.right, bias, layout, act, dtype, 0, route, slot=slot)


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
        work = OutputsWork(m, n, k, form.slot, counts, index, clears, form.act)
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
        return layout.shapes[names.index(self.form.lhs)][1]


class OutputsDispatcher(CudaDispatcher):
    """Runs one program of the family on one GPU target; threads may share it."""

    form: OutputsForm

    def _prepare(self, store: TileStore, cache: KernelCache) -> None:
        self.planner = OutputsPlanner(self.program, self.form, self.target, store, self.dead)
        self.kernels = RowsKernels(cache, self.target.isa)

    def _product(self, choice: Candidate, index: CudaIndex, bound: CudaBound) -> None:
        if self.dead == "zero":
            zero(bound[3])
        super()._product(choice, index, bound)
