"""Which programs the GPU's family of live blocks along k computes, on either side of a product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..schedules.hopper_block_parts import HEIGHTS, LHS_HEIGHTS
from ..schedules.hopper_knobs import TILE_K
from ..structs import BlockMask
from .cuda_form import SidedForm, side_of, sided_parts
from .program import Program

COVERED = 32  # of k in blocks that whole ones cover


@dataclass(frozen=True)
class BlocksForm(SidedForm):
    """A program over live blocks: bands are ``height`` rows of lhs or columns of rhs, and blocks
    `TILE_K` of k. ``route`` is the axis k."""

    height: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Options of `pit_tvm.schedules.hopper_blocks.blocks_kernel`."""
        return {
            "side": self.side,
            "lhs_layout": self.lhs_layout,
            "rhs_layout": self.rhs_layout,
            "bias": bool(self.bias),
            "act": self.act,
        }


def blocks_form(program: Program) -> BlocksForm | None:
    """What a kernel has to do for a program; None where zeros are not promised in such blocks, or
    types or epilogue are none that the family computes."""
    con = program.contraction
    if con is None:
        return None
    height = _height(program, side_of(program))
    extents = {axis: 1 if axis == con.reduce else height for axis in con.sparse_axes}
    parts = sided_parts(program, con.reduce, extents) if height else None
    return BlocksForm(**parts, height=height) if parts else None


def _height(program: Program, side: str) -> int:
    """The largest height of a band that fits the blocks of zeros; 0 if none does."""
    con, spec = program.contraction, program.spec
    extents = getattr(spec, "extents", ())
    if con is None or not side or len(extents) != 2:
        return 0
    along, across = (extents[con.sparse_axes.index(axis)] for axis in (con.reduce, con.row))
    # No other tensor cores' family takes a sparse right operand, so whole blocks cover its half
    # ones; a block mask is read as it is.
    covers = side == "rhs" and not isinstance(spec, BlockMask)
    heights = LHS_HEIGHTS if side == "lhs" else HEIGHTS
    fit = [height for height in heights if across % height == 0]
    return max(fit) if fit and along % (COVERED if covers else TILE_K) == 0 else 0
