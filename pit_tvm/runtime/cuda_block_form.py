"""Which programs the GPU's family of live blocks along k computes, on either side of a product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import UnsupportedTarget
from ..schedules.hopper_block_parts import HEIGHTS, LHS_HEIGHTS
from ..schedules.hopper_knobs import TILE_K
from ..structs import BlockMask
from .cuda_form import RowsForm, dtype_of, epilogue_of
from .program import Program

COVERED = 32  # of k in blocks that whole ones cover


@dataclass(frozen=True)
class BlocksForm(RowsForm):
    """A program as ``out = act(lhs @ rhs + bias)`` over live blocks of one operand.

    ``side`` names that operand, lhs or rhs; its bands are ``height`` rows of lhs or columns of rhs,
    and its blocks `TILE_K` of k. ``route`` is the axis k.
    """

    side: str = "lhs"
    lhs_layout: str = "mk"
    height: int = 0

    @property
    def transposed(self) -> bool:
        """Whether lhs is stored [k, m]."""
        return self.lhs_layout == "km"

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
    con, product, spec = program.contraction, program.product, program.spec
    if con is None or product is None or con.batch or con.sparse != program.operand:
        return None
    side = "lhs" if product.left == con.sparse else "rhs"
    route = next((r for r in program.routes if r.micro_tile.axis == con.reduce), None)
    height = _height(program, side)
    if route is None or not height or not spec.promises_zero or program.mask:
        return None
    rhs_layout = "nk" if product.transpose_right else "kn"
    lhs_layout = "km" if product.transpose_left else "mk"
    try:
        dtype = dtype_of(program, con)
        act, bias = epilogue_of(program, con, rhs_layout)
    except UnsupportedTarget:  # another family's
        return None
    extents = tuple(1 if axis == con.reduce else height for axis in con.sparse_axes)
    route = replace(route, micro_tile=replace(route.micro_tile, extents=extents))
    form = (product.left, product.right, bias, rhs_layout, act, dtype, 0, route)
    return BlocksForm(*form, side=side, lhs_layout=lhs_layout, height=height)


def _height(program: Program, side: str) -> int:
    """The largest height of a band that fits the blocks of zeros; 0 if none does."""
    con, spec = program.contraction, program.spec
    extents = getattr(spec, "extents", ())
    if con is None or len(extents) != 2:
        return 0
    along, across = (extents[con.sparse_axes.index(axis)] for axis in (con.reduce, con.row))
    # No other tensor cores' family takes a sparse right operand, so whole blocks cover its half
    # ones; a block mask is read as it is.
    covers = side == "rhs" and not isinstance(spec, BlockMask)
    heights = LHS_HEIGHTS if side == "lhs" else HEIGHTS
    fit = [height for height in heights if across % height == 0]
    return max(fit) if fit and along % (COVERED if covers else TILE_K) == 0 else 0
