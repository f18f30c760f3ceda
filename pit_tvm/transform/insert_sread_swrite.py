"""Rewrites a dense block for one sparse operand and one PIT axis: SRead, SWrite, live counts.

PIT, SOSP'23, section 3: along a permutation-invariant axis the live micro-tiles may be gathered in
any order (SRead), computed densely, and scattered back (SWrite).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import TensorLoad

from ..analysis.access import Access, BlockInfo, block_infos, same_access
from ..analysis.contraction import output_axes
from ..analysis.pit_axis import pit_axes
from ..analysis.reduction import Reducer, reducer_of
from ..errors import AxisError, ShapeError, mismatch
from ..structs import MicroTile
from .axis_map import AxisMap, Expr, Packed, Part, Remap, TileSizes, Vars, index_map, rows_map
from .remap_axes import remap_axes
from .unalign import is_buffer, parameter

GROUP = "group"


@dataclass(frozen=True)
class SparseForm:
    """How an operator is rewritten.

    ``tile``: positions on the PIT axis to a tile, ``also`` on the other axis of a micro-tile that
    has two. ``maps``: further axes that the schedule wants
    tiled or padded. ``staged`` and ``packed``: see :class:`~.axis_map.Remap`. ``groups``: number
    of groups, and the operand that holds each slice's group, whose loads become the group itself.
    ``padded``: every operand on the PIT axis is staged, so zeros stand behind the live positions.
    """

    tile: TileSizes
    maps: Mapping[str, AxisMap] = field(default_factory=dict)
    staged: tuple[str, ...] = ()
    stage_dtype: str = "float32"
    packed: Mapping[str, Packed] = field(default_factory=dict)
    groups: tuple[int, str] | None = None
    padded: bool = False
    also: TileSizes = 1


def insert_sread_swrite(
    func: tirx.PrimFunc, micro_tile: MicroTile, form: SparseForm
) -> tirx.PrimFunc:
    """The sparse form of ``func`` for the operand and axis of ``micro_tile``.

    Two parameters come before the output: ``ids`` int32 ``[*slots, capacity]`` and ``count`` int32
    ``[*slots]`` (see :class:`~pit_tvm.structs.Index`); behind them come those of a second axis, one
    list, if the micro-tile has one. Results:

    * reduction axis: every output is written, from the live terms only;
    * spatial axis: only the live slices of the output are written, and in slots along another
      axis of the output (1x64 of ``out[m, n]``) only their live pieces;
    * spatial axis in slots along a reduction (1x64 of ``lhs[m, k]``): partial results are **added**
      to the output, an array of the sums' type that the caller has cleared.

    Raises
    ------
    AxisError
        An axis is not permutation invariant, a dimension cannot be cut into slots, or a second
        axis is none of the operand's others.
    ShapeError
        The micro-tile's rank is not the operand's.
    """
    info = main_block(func, micro_tile.operand)
    _check(func, info, micro_tile)
    if micro_tile.also is not None:
        _check_also(micro_tile, micro_tile.also)
        _check(func, info, micro_tile.also)
    return _Builder(func, info, micro_tile, form).build()


def main_block(func: tirx.PrimFunc, operand: str) -> BlockInfo:
    """The first block that reads the input ``operand``, or the one that sums up for the output of
    that name; AxisError if there is none."""
    infos = block_infos(func)
    written = {access.buffer for info in infos for access in info.writes}
    names = [p.name for p in func.params if is_buffer(p) and p not in written]
    sums = operand not in names and func.params[-1].name == operand
    for info in infos:
        reads = operand in names and any(a.buffer_name == operand for a in info.reads)
        if reads or (sums and info.block.init is not None):
            return info
    if operand in names:
        expected, got = "an input that is read", "one that no block reads"
        raise AxisError(mismatch(operand, expected, got, "TVM takes 0 for its product with 0"))
    raise AxisError(mismatch("operand", f"an input, one of {names}, or the output", operand))


def operand_axes(func: tirx.PrimFunc, info: BlockInfo, operand: str) -> list[str | None]:
    """Axis of ``info`` in each dimension of ``operand``, in its first read or as the output; None
    where the index is not bare, or the axis has not all positions of the dimension."""
    if all(a.buffer_name != operand for a in info.reads):
        followed = output_axes(block_infos(func), info) or []
        return [axis or None for axis in followed]
    read = first_read(info, operand)
    axes = [info.iter_vars.get(i) if isinstance(i, ir.Var) else None for i in read.indices]
    pairs = zip(axes, read.buffer.shape, strict=True)
    return [axis if axis and info.spans(axis, extent) else None for axis, extent in pairs]


def first_read(info: BlockInfo, operand: str) -> Access:
    """The read of ``operand`` that an index is for; other reads of it see every element."""
    return next(a for a in info.reads if a.buffer_name == operand)


def is_read(load: TensorLoad, access: Access) -> bool:
    """Whether ``load`` reads what ``access`` reads."""
    return same_access(Access(load.source, access.buffer_name, tuple(load.indices)), access)


def _check(func: tirx.PrimFunc, info: BlockInfo, micro_tile: MicroTile) -> None:
    axes = operand_axes(func, info, micro_tile.operand)
    if len(axes) != len(micro_tile.extents):
        what = f"micro-tile of {micro_tile.operand}"
        raise ShapeError(mismatch(what, f"{len(axes)} extents", micro_tile.extents))
    if axes[micro_tile.dim] != micro_tile.axis:
        what = f"axis on dimension {micro_tile.dim} of {micro_tile.operand}"
        raise AxisError(mismatch(what, axes[micro_tile.dim], micro_tile.axis))
    report = pit_axes(func)
    if micro_tile.axis not in report.accepted[info.name]:
        why = report.rejected[info.name].get(micro_tile.axis, "it is no axis of this block")
        raise AxisError(mismatch(f"axis {micro_tile.axis}", "a PIT axis", f"none: {why}"))


def _check_also(micro_tile: MicroTile, also: MicroTile) -> None:
    """The second axis is another one of the same operand, with one list, and no third follows."""
    apart = also.dim != micro_tile.dim and also.axis != micro_tile.axis
    if also.operand != micro_tile.operand or not apart or sum(also.extents) > 1 or also.also:
        expected = f"one list of another axis of {micro_tile.operand}"
        raise AxisError(mismatch("micro_tile.also", expected, f"{also} on {also.axis}"))


def _lists(suffix: str, shape: list[Expr]) -> tuple[ir.Var, ir.Var]:
    """Parameters of an index: lists and how much of them lives."""
    capacity = tirx.Var(f"capacity{suffix}", "int32")
    ids = parameter(f"ids{suffix}", [*shape, capacity], "int32")
    return ids, parameter(f"count{suffix}", shape, "int32")


class _Builder:
    def __init__(
        self, func: tirx.PrimFunc, info: BlockInfo, micro_tile: MicroTile, form: SparseForm
    ) -> None:
        self.func, self.info, self.micro_tile, self.form = func, info, micro_tile, form
        self.maps: dict[str, AxisMap] = dict(form.maps)
        self.accumulate = False

    def build(self) -> tirx.PrimFunc:
        slots = self._slots()
        names = [name for name, _ in slots]
        shape = [extent for _, extent in slots] or [1]
        extra: tuple[Part, ...] = ()
        overrides = {}
        if self.form.groups is not None:
            number, operand = self.form.groups
            extra, names, shape = (Part(GROUP, number),), [GROUP], [number]
            overrides = {operand: lambda v: v[GROUP]}
        ids, count = _lists("", shape)

        def slot_of(v: Vars) -> list[Expr]:
            return [v[name] for name in names] or [tirx.const(0, "int32")]

        axis = self.micro_tile.axis
        tile, needs, padded = self.form.tile, tuple(names), self.form.padded
        self.maps[axis] = index_map(axis, ids, count, tile, slot_of, extra, needs, padded=padded)
        lists: tuple[ir.Var, ...] = (ids, count)
        if self.micro_tile.also is not None:
            lists += self._also(self.micro_tile.also.axis)
        spec = Remap(
            main=self.info.name,
            maps=self.maps,
            index_params=lists,
            staged=self.form.staged,
            stage_dtype=self.form.stage_dtype,
            packed=self.form.packed,
            overrides=overrides,
            accumulate=self.accumulate,
        )
        return remap_axes(self.func, spec)

    def _also(self, axis: str) -> tuple[ir.Var, ir.Var]:
        """One more list, of the live positions on ``axis``."""
        ids, count = _lists(f"_{axis}", [1])
        tile, padded = self.form.also, self.form.padded
        zero: list[Expr] = [tirx.const(0, "int32")]
        self.maps[axis] = index_map(axis, ids, count, tile, lambda _: zero, padded=padded)
        return ids, count

    def _slots(self) -> list[tuple[str, Expr]]:
        """Iterator and extent of every slot dimension, in the order of the operand's dimensions."""
        out: list[tuple[str, Expr]] = []
        axes = operand_axes(self.func, self.info, self.micro_tile.operand)
        for dim, (axis, extent) in enumerate(zip(axes, self.micro_tile.extents, strict=True)):
            if dim == self.micro_tile.dim or extent == 0:
                continue
            if axis is None or axis == self.micro_tile.axis:
                what = f"micro-tile {self.micro_tile}, dimension {dim}"
                why = "is not bare" if axis is None else f"is {axis} again"
                raise AxisError(mismatch(what, f"0 (the whole), its index {why}", extent))
            out.append(self._slot(axis, extent))
        return out

    def _slot(self, axis: str, extent: int) -> tuple[str, Expr]:
        size = self._extent(axis)
        crosses = self.info.kinds[axis] == "reduce" and self._spatial()
        if extent == 1 and not crosses and axis not in self.maps:
            return axis, size
        # The schedule may have cut it, in this very extent.
        amap = self.maps.get(axis) or rows_map(axis, size, extent)
        outer, *inner = amap.parts
        if crosses:
            self._check_sum(axis)
            self.accumulate = True
            outer = replace(outer, reduces=False)
            amap = replace(amap, parts=(outer, *inner))
        self.maps[axis] = amap
        return outer.name, outer.extent

    def _check_sum(self, axis: str) -> None:
        """Slots along a reduction are added up: AxisError if that is not the reduction."""
        target = self.info.updates[0].target.buffer
        reducer = reducer_of(self.info, target)
        zero = tirx.const(0, str(target.dtype))
        starts = [tvm_ffi.structural_equal(store.value, zero) for store in self.info.init]
        got = reducer.op if isinstance(reducer, Reducer) else reducer.reason
        if got != "sum" or not all(starts):
            got = got if got != "sum" else "another start"
            raise AxisError(mismatch(f"slots along axis {axis}", "a sum from zero", got))

    def _spatial(self) -> bool:
        return self.info.kinds[self.micro_tile.axis] == "spatial"

    def _extent(self, axis: str) -> Expr:
        return next(
            iv.dom.extent for iv in self.info.block.iter_vars if self.info.iter_vars[iv.var] == axis
        )
