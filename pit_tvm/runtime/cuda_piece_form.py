"""Which programs the GPU's family of live pieces computes, on either side of a product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..schedules.hopper_knobs import TILE_K
from ..structs import BlockMask
from .cuda_block_form import COVERED
from .cuda_form import LEAST_ROWS, SidedForm, side_of, sided_parts
from .program import Program

MOST = 512  # of k in a block of zeros; rows of longer ones are taken to be live or dead as a whole


@dataclass(frozen=True)
class PiecesForm(SidedForm):
    """A program as ``out = act(lhs @ rhs + bias)`` over live pieces, `TILE_K` of k of one row of
    lhs or of one column of rhs. ``route`` is the axis of these."""

    @property
    def turns(self) -> bool:
        """Whether the sparse operand is stored [k, m] or [k, n], so that its live pieces are turned
        before they are gathered."""
        return self.route.micro_tile.dim == 1

    @property
    def options(self) -> dict[str, Any]:
        """Options of `pit_tvm.schedules.hopper_pieces.pieces_kernel`."""
        own = {"rhs_layout": self.beside, "flip": self.flip}
        return {"bias": bool(self.bias), "act": self.act, **own}


def pieces_form(program: Program) -> PiecesForm | None:
    """What a kernel has to do for a program; None where zeros are not promised in such pieces, or
    types or epilogue are none that the family computes."""
    con, spec = program.contraction, program.spec
    given: tuple[int, ...] = getattr(spec, "extents", ())
    if con is None or not side_of(program) or len(given) != 2:
        return None
    across, along = (given[con.sparse_axes.index(axis)] for axis in (con.row, con.reduce))
    if along % COVERED or along > MOST or across >= LEAST_ROWS:
        return None
    if isinstance(spec, BlockMask) and across > 1:  # one bit would stand for several rows
        return None
    parts = sided_parts(program, con.row, {con.row: 1, con.reduce: TILE_K})
    return PiecesForm(**parts) if parts else None
