"""The forms of a contraction that the CUDA family schedules, one for each sparse axis and none.

Both operands are staged in tiles of whole size, zeros where nothing lives, so the kernel between
has no guard. Tiles are cut into pieces for threads here already: a schedule that split them later
would let every thread keep what lies between its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx

from pit_tvm.analysis.contraction import Contraction
from pit_tvm.structs import MicroTile
from pit_tvm.transform.axis_map import AxisMap, Remap, TileSizes, rows_map
from pit_tvm.transform.insert_sread_swrite import SparseForm, insert_sread_swrite
from pit_tvm.transform.remap_axes import remap_axes

from .contraction_forms import axis_extents


def cuda_form(
    func: tirx.PrimFunc,
    con: Contraction,
    pieces: Mapping[str, TileSizes],
    micro_tile: MicroTile | None,
    num_groups: int,
) -> tirx.PrimFunc:
    """``func`` rewritten for one micro-tile (None: the dense form).

    ``pieces`` cuts the tiles of the axes row, column and reduce; see `tile_parts`. Batch axes stay
    as they are unless one is the sparse one. ``num_groups`` is 0 without groups.
    """
    sizes = axis_extents(func, con)
    axis = micro_tile.axis if micro_tile else ""
    maps: dict[str, AxisMap] = {
        name: rows_map(name, sizes[name], tile, padded=True)
        for name, tile in pieces.items()
        if name != axis
    }
    staged, dtype = (con.sparse, con.dense), stored_dtype(func, con)
    if micro_tile is None:
        return remap_axes(func, Remap(con.block, maps, staged=staged, stage_dtype=dtype))
    groups = (num_groups, con.group) if con.group else None
    form = SparseForm(pieces.get(axis, 1), maps, staged, dtype, {}, groups, padded=True)
    return insert_sread_swrite(func, micro_tile, form)


def stored_dtype(func: tirx.PrimFunc, con: Contraction) -> str:
    """The operands' own type, in which shared memory holds them too."""
    return next(str(p.dtype) for p in func.params if p.name == con.sparse)
