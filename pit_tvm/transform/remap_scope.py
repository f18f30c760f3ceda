"""The new iterators of one block, and the expressions of the original over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import TensorLoad

from ..analysis.access import Access, BlockInfo
from .axis_map import AxisMap, Expr, Part, Remap


@dataclass
class Buffers:
    """Buffers of the rewritten function: parameters, and intermediates in list order."""

    params: dict[ir.Var, ir.Var]
    moved: dict[ir.Var, ir.Var] = field(default_factory=dict)
    axes: dict[ir.Var, list[str | None]] = field(default_factory=dict)
    slots: dict[ir.Var, list[Part]] = field(default_factory=dict)
    panels: dict[str, tuple[ir.Var, list[str]]] = field(default_factory=dict)


def whole_names(spec: Remap, info: BlockInfo, classes: Mapping[ir.Var, str]) -> dict[ir.Var, str]:
    """Names of the iterators of a block that stay whole, by the original ones.

    One that follows an axis of the main block has its name. Any other has its own, with "_" behind
    where an axis that is followed, or what takes the place of one, is called so.
    """
    maps = [spec.maps[axis] for axis in classes.values() if axis in spec.maps]
    taken = {part.name for amap in maps for part in amap.parts} | set(classes.values())
    taken |= {need for amap in maps for need in amap.needs}
    names = {var: axis for var, axis in classes.items() if axis not in spec.maps}
    for var, name in info.iter_vars.items():
        if var in classes:
            continue
        while name in taken:
            name += "_"
        taken.add(name)
        names[var] = name
    return names


class Scope:
    """Translates expressions of one original block for a block over ``parts``.

    ``classes`` says which axis of the main block each original iterator follows.
    """

    def __init__(
        self,
        spec: Remap,
        buffers: Buffers,
        info: BlockInfo,
        classes: Mapping[ir.Var, str],
        parts: list[tuple[Part, bool]],
    ) -> None:
        self.spec, self.buffers, self.info = spec, buffers, info
        self.classes, self.parts = classes, parts
        self.names = whole_names(spec, info, classes)
        self.vars: dict[str, Expr] = {p.name: tirx.Var(f"v_{p.name}", "int32") for p, _ in parts}

    def map_of(self, var: ir.Var) -> AxisMap | None:
        """Axis map of an original iterator, if its axis is mapped."""
        return self.spec.maps.get(self.classes.get(var, ""))

    def over(self, parts: list[tuple[Part, bool]]) -> Scope:
        """The same block over other iterators."""
        return Scope(self.spec, self.buffers, self.info, self.classes, parts)

    def reduction_slots(self) -> list[Part]:
        """Data-parallel iterators that come from a reduction axis: slots of a split reduction."""
        return [
            part
            for var, axis in self.info.iter_vars.items()
            if self.info.kinds[axis] == "reduce" and (amap := self.map_of(var))
            for part in amap.parts
            if part.reduces is False
        ]

    def guards(self, kind: str | None = None, padded: bool = True) -> list[Expr]:
        """Conditions under which the iterators stand for a coordinate of the original.

        ``kind`` limits them to "spatial" or "reduce" axes; ``padded=False`` leaves padded ones out.
        """
        out = []
        for var, axis in self.info.iter_vars.items():
            amap = self.map_of(var)
            if amap is None or amap.guard is None or not amap.has(self.vars):
                continue
            if (kind is None or self.info.kinds[axis] == kind) and (padded or not amap.padded):
                out.append(amap.guard(self.vars))
        return out

    def guarded_update(self, update: tirx.Stmt) -> tuple[tirx.Stmt, bool]:
        """``if spatial guard: if reduction guard: update``; and whether the first may be dropped.

        Dropping it is harmless if the permuted axes reach staged or packed operands only: dead
        positions then compute on what the panel holds, and no store reads them.
        """
        padded = self.info.name != self.spec.main  # what follows reads no padded operand
        inner = guard(self.guards("reduce", padded), update)
        outer = self.guards("spatial", padded)
        safe = {*self.buffers.panels, *self.spec.packed, *self.spec.overrides}
        safe |= {a.buffer_name for a in self.info.writes}
        exposed = {a.buffer_name for a in self.info.reads if self._follows_spatial(a)} - safe
        return guard(outer, inner), bool(outer) and not exposed

    def _follows_spatial(self, access: Access) -> bool:
        return any(
            isinstance(i, ir.Var)
            and self.map_of(i) is not None
            and self.info.kinds[self.info.iter_vars[i]] == "spatial"
            for i in access.indices
        )

    def coordinate(self, index: Expr) -> Expr:
        """An original index over the new iterators; valid under :meth:`guards` only."""
        return self._substitute(index, clamp=False)

    def safe_coordinate(self, index: Expr) -> Expr:
        """Like :meth:`coordinate`, and 0 where the iterators stand for no coordinate."""
        return self._substitute(index, clamp=True)

    def positions(self, buffer: ir.Var, indices: list[Expr]) -> list[Expr]:
        """Indices into a moved intermediate: list order, no coordinates."""
        out = [self.vars[p.name] for p in self.buffers.slots[buffer]]
        for index, axis in zip(indices, self.buffers.axes[buffer], strict=True):
            amap = self.spec.maps.get(axis or "")
            out += [self.vars[p.name] for p in amap.parts] if amap else [self.coordinate(index)]
        return out

    def value(self, expr: Expr) -> Expr:
        """A value of the original over the new iterators, its loads redirected."""
        redirected = tvm_ffi.structural_map(expr, [(TensorLoad, self._load)])
        return self._substitute(redirected, clamp=True)

    def _load(self, load: TensorLoad) -> Expr:
        source, indices = load.source, list(load.indices)
        name = source.name
        if source in self.buffers.moved:
            return tirx.BufferLoad(self.buffers.moved[source], self.positions(source, indices))
        if name in self.buffers.panels:
            panel, names = self.buffers.panels[name]
            return tirx.BufferLoad(panel, [self.vars[n] for n in names])
        if name in self.spec.overrides:
            return self.spec.overrides[name](self.vars)
        if name in self.spec.packed:
            where = [self.safe_coordinate(i) for i in indices]
            return self.spec.packed[name].load(self.vars, where)
        if source in self.buffers.params:
            where = [self.safe_coordinate(i) for i in indices]
            return tirx.BufferLoad(self.buffers.params[source], where)
        return load

    def _substitute(self, expr: Expr, clamp: bool) -> Expr:
        table: dict[ir.Var, Expr] = {}
        for var, own in self.info.iter_vars.items():
            amap = self.map_of(var)
            if amap is None:
                if self.names[var] in self.vars:
                    table[var] = self.vars[self.names[var]] + self.info.domain(own).min
            elif amap.has(self.vars):
                coord = amap.coord(self.vars)
                # A reduction runs under its guard, which is never dropped without a proof.
                if clamp and amap.guard is not None and self.info.kinds[own] == "spatial":
                    coord = tirx.if_then_else(amap.guard(self.vars), coord, tirx.const(0, "int32"))
                table[var] = coord
        return tvm_ffi.structural_map(expr, [(ir.Var, lambda v: table.get(v, v))])


def guard(conditions: list[Expr], body: tirx.Stmt) -> tirx.Stmt:
    """``body`` under all ``conditions``; ``body`` itself if there are none."""
    return tirx.IfThenElse(every(conditions), body, None) if conditions else body


def every(conditions: list[Expr]) -> Expr:
    """Conjunction of at least one condition."""
    return reduce(tirx.And, conditions)
