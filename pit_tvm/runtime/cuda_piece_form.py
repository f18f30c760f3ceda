"""Which programs the GPU's family of live pieces of rows computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UnsupportedTarget
from ..schedules.hopper_knobs import TILE_K
from ..structs import BlockMask
from .cuda_block_form import COVERED
from .cuda_form import LEAST_ROWS, RowsForm, dtype_of, epilogue_of
from .program import Program

MOST = 512  # of k in a block of zeros; rows of longer ones are taken to be live or dead as a whole


@dataclass(frozen=True)
class PiecesForm(RowsForm):
    """A program as ``out = act(lhs @ rhs + bias)`` over live pieces of rows of lhs, `TILE_K` of k
    each. ``lhs`` is stored [m, k], and ``route`` is the axis of rows."""


def pieces_form(program: Program) -> PiecesForm | None:
    """What a kernel has to do for a program; None where zeros are not promised in such pieces, or
    types or epilogue are none that the family computes."""
    con, product, spec = program.contraction, program.product, program.spec
    if con is None or product is None or con.batch or product.left != con.sparse:
        return None
    route = next((r for r in program.routes if r.micro_tile.axis == con.row), None)
    extents: tuple[int, ...] = getattr(spec, "extents", ())
    if route is None or not spec.promises_zero or program.mask or len(extents) != 2:
        return None
    high, deep = extents
    fits = deep % COVERED == 0 and deep <= MOST and high < LEAST_ROWS
    if con.sparse_axes != (con.row, con.reduce) or not fits:
        return None
    if isinstance(spec, BlockMask) and high > 1:  # one bit would stand for several rows
        return None
    layout = "nk" if product.transpose_right else "kn"
    try:
        dtype = dtype_of(program, con)
        act, bias = epilogue_of(program, con, layout)
    except UnsupportedTarget:  # another family's
        return None
    route = replace(route, micro_tile=replace(route.micro_tile, extents=(1, TILE_K)))
    return PiecesForm(product.left, product.right, bias, layout, act, dtype, 0, route)
