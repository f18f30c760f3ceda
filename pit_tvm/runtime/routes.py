"""The micro-tiles on which an operator can be run, by the sparse operand's axes and pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from ..analysis.access import BlockInfo, block_infos
from ..analysis.contraction import Contraction, contraction_of
from ..analysis.pit_axis import pit_axes
from ..errors import AxisError, mismatch
from ..schedules.contraction_space import BLOCKS, DEPTH, MICRO_DEPTH, MICRO_ROWS, ROWS
from ..structs import BitMask, BlockMask, Grid, Mask, MicroTile, SparsitySpec
from ..transform.insert_sread_swrite import operand_axes
from ..transform.unalign import is_buffer

GENERIC = ""
_ROW_STEPS = range(8, 129, 8)  # extents of k-axis micro-tiles that register blocks divide
_DEPTH_STEPS = range(16, 513, 16)
_MICRO_COLUMNS = 64
_COLUMN_STEP, _MOST_COLUMNS = 32, 512  # of an output's micro-tiles: whole panels of columns


@dataclass(frozen=True)
class Route:
    """A micro-tile on a PIT axis, and the family of tiles that runs it (GENERIC: none)."""

    micro_tile: MicroTile
    family: str
    reduces: bool


def read_routes(
    func: tirx.PrimFunc, info: BlockInfo, con: Contraction | None, operand: str, spec: SparsitySpec
) -> list[Route]:
    """Routes of an input that the block ``info`` reads; none if no axis admits its pattern."""
    accepted = pit_axes(func).accepted[info.name]
    axes = operand_axes(func, info, operand)
    infos = block_infos(func)
    later = infos[[i.name for i in infos].index(info.name) + 1 :]
    read_again = any(a.buffer_name == operand for i in later for a in i.reads)
    reduced_again = any(i.block.init is not None for i in later)
    out: list[Route] = []
    for dim, axis in enumerate(axes):
        if axis is None or axis not in accepted or axes.count(axis) > 1:
            continue
        if not spec.promises_zero and dim != spec.dim:  # type: ignore[attr-defined]
            continue
        reduces = info.kinds[axis] == "reduce"
        # Another reader of the operand would see all of the axis; a later reduction over the
        # output's axis would miss what dead slices contribute.
        if (reduces and read_again) or (spec.promises_zero and not reduces and reduced_again):
            continue
        for family, extents in _micro_tiles(con, spec, dim, axis, len(axes)):
            out.append(Route(MicroTile(operand, axis, dim, extents), family, reduces))
    if isinstance(spec, Grid) and con is not None:
        out += _both_axes(con, out)
    return out


def _both_axes(con: Contraction, routes: list[Route]) -> list[Route]:
    """Rows and depth gathered at once, each by one list, of an operand of these two axes."""
    along = {route.micro_tile.axis for route in routes}
    if not {con.row, con.reduce} <= along:
        return []
    depth, row = con.sparse_axes.index(con.reduce), con.sparse_axes.index(con.row)
    whole = tuple(int(dim == depth) for dim in range(2))
    also = MicroTile(con.sparse, con.reduce, depth, whole)
    return [Route(MicroTile(con.sparse, con.row, row, whole[::-1], also), ROWS, False)]


def output_contraction(func: tirx.PrimFunc, spec: SparsitySpec) -> Contraction:
    """The product whose result is the output, seen from the operand whose rows are gathered for
    pieces of the output's other axis: the first, unless blocks fit the second only.

    Raises
    ------
    AxisError
        The output is that of no product without groups, or the pattern is no mask.
    """
    name = str(func.params[-1].name)
    if not isinstance(spec, (Mask, BitMask, BlockMask)):
        expected = "Mask, BitMask or BlockMask for an output"
        raise AxisError(mismatch(f"sparse[{name!r}]", expected, type(spec).__name__))
    sides = [contraction_of(func, str(p.name)) for p in func.params[:-1] if is_buffer(p)]
    found = [con for con in sides if con and not con.group and "" not in con.out_axes]
    if not found:
        expected = "an input, or the output of matmul, linear or batch_matmul"
        raise AxisError(mismatch(f"sparse[{name!r}]", expected, "another output"))
    return next((con for con in found if _fits(func, con, spec)), found[0])


def output_routes(func: tirx.PrimFunc, con: Contraction, spec: SparsitySpec) -> list[Route]:
    """Routes of the output of ``con``: live rows for every piece of its columns. Pieces divide the
    pattern's blocks where they can."""
    param = func.params[-1]
    row, column = con.out_axes.index(con.row), con.out_axes.index(con.column)
    sliced = [1 if axis in (con.row, *con.batch) else 0 for axis in con.out_axes]
    width = _granularity(spec, len(sliced))[column]
    steps = [0]
    if not _spans(param.shape[column], width):
        given = {_MICRO_COLUMNS, width} & set(range(_COLUMN_STEP, _MOST_COLUMNS + 1, _COLUMN_STEP))
        least = _MICRO_COLUMNS if width % _COLUMN_STEP else _COLUMN_STEP
        steps = sorted(s for s in given if width % s == 0) or [least]
    name = str(param.name)
    tiles = (MicroTile(name, con.row, row, _with(sliced, column, step)) for step in steps)
    return [Route(tile, ROWS, False) for tile in tiles]


def _fits(func: tirx.PrimFunc, con: Contraction, spec: SparsitySpec) -> bool:
    """Whether blocks are so wide along the output's columns that pieces of them divide them."""
    column = con.out_axes.index(con.column)
    width = _granularity(spec, len(con.out_axes))[column]
    return width % _COLUMN_STEP == 0 or _spans(func.params[-1].shape[column], width)


def _spans(extent: object, width: int) -> bool:
    return isinstance(extent, int | tirx.IntImm) and int(extent) <= width


def _granularity(spec: SparsitySpec, rank: int) -> Sequence[int]:
    return getattr(spec, "extents", ()) or (1,) * rank


def _micro_tiles(
    con: Contraction | None, spec: SparsitySpec, dim: int, axis: str, rank: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Families and extents of the micro-tiles on one axis."""
    whole = tuple(1 if d == dim else 0 for d in range(rank))
    if con is None:
        return [(GENERIC, whole)]
    family = DEPTH if axis == con.reduce else ROWS
    if not spec.promises_zero or axis in con.batch:
        return [(family, whole)]
    sliced = [1 if d == dim or a in con.batch else 0 for d, a in enumerate(con.sparse_axes)]
    granularity = _granularity(spec, rank)
    if axis == con.reduce:
        row = con.sparse_axes.index(con.row)
        steps = {MICRO_ROWS} | {granularity[row]} & set(_ROW_STEPS)
        return [(DEPTH, _with(sliced, row, step)) for step in sorted(steps)]
    depth = con.sparse_axes.index(con.reduce)
    steps = {MICRO_DEPTH} | {granularity[depth]} & set(_DEPTH_STEPS)
    split = [(BLOCKS, _with(sliced, depth, step)) for step in sorted(steps)]
    return [(ROWS, tuple(sliced)), *split]


def _with(extents: list[int], position: int, value: int) -> tuple[int, ...]:
    return tuple(value if d == position else e for d, e in enumerate(extents))
