"""Which programs the GPU's family of live rows and live columns computes, on either side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..structs import Grid, MicroTile
from .cuda_form import SidedForm, sided_parts
from .program import Program


@dataclass(frozen=True)
class GridForm(SidedForm):
    """A program over what lives along both axes of an operand: ``both``. ``route`` is the axis of
    its rows, those of lhs or columns of rhs."""

    both: MicroTile | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of `pit_tvm.schedules.hopper_rows.rows_kernel`."""
        bias, own = bool(self.bias), {"act": self.act, "rhs_layout": self.beside}
        if self.flip:
            return {**own, "row_bias": bias}
        return {"bias": bias, **own}  # in the order of `RowsForm`: they are its kernels

    @property
    def turns(self) -> bool:
        """Whether the sparse operand is stored [k, m] or [k, n], so that what lives is turned."""
        return self.route.micro_tile.dim == 1


def grid_form(program: Program) -> GridForm | None:
    """What a kernel has to do for a program; None where its pattern is no `Grid`, or types or
    epilogue are none that the family computes."""
    con = program.contraction
    both = next((r.micro_tile for r in program.routes if r.micro_tile.also), None)
    if con is None or both is None or not isinstance(program.spec, Grid):
        return None
    parts = sided_parts(program, con.row, {con.row: 1, con.reduce: 0})
    return GridForm(**parts, both=both) if parts else None
