"""Rewrites the axes of a PrimFunc: the one mechanism under SRead, SWrite and packed operands.

Inputs are read at coordinates, outputs are written at coordinates under the guards, and what lies
between lives in the space of the new iterators: dense, and in the order of the index. A chain of
blocks that shares a permuted axis has one SRead at its entry and one SWrite at its exit.
PIT, SOSP'23, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir import Range, TensorLoad
from tvm.tirx import BufferStore, IterVar

from ..analysis.access import Access, BlockInfo, block_infos, check_extents
from ..analysis.iteration import conditions_around
from ..analysis.reduction import Reducer, reducer_of
from ..errors import AxisError, mismatch
from ..primitive.checks import SPECULATIVE, SREAD, SWRITE, uses_any
from .axis_map import Part, Remap
from .remap_scope import Buffers, Scope, every, guard, whole_names
from .unalign import is_buffer, unaligned

_NO_WAY = "the permutation cannot pass through this block"


def remap_axes(func: tirx.PrimFunc, spec: Remap) -> tirx.PrimFunc:
    """Rewrite ``func``, as ``te.create_prim_func`` gives it, the way ``spec`` says.

    The index parameters come before the last parameter, the output.

    Raises
    ------
    AxisError
        There is no block ``spec.main``, a block is not one store in a plain loop nest or runs
        under a condition, a mapped axis is used as more than one bare index of an intermediate
        buffer, or in part, or reduced in order later, or a staged operand is read elsewhere too.
    ShapeError
        An axis is indexed by another type than int32.
    """
    return _Remapper(func, spec).run()


class _Remapper:
    def __init__(self, func: tirx.PrimFunc, spec: Remap) -> None:
        self.func, self.spec = func, spec
        self.infos = block_infos(func)
        if spec.main not in [info.name for info in self.infos]:
            names = [info.name for info in self.infos]
            raise AxisError(mismatch("block", f"one of {names}", spec.main))
        stored = [_store(info).buffer for info in self.infos]
        self.outputs = {buffer for buffer in stored if buffer in func.params}
        if spec.accumulate:
            self.infos = _up_to(self.infos, spec.main)
        self.buffers = Buffers({p: self._param(p) for p in func.params if is_buffer(p)})
        self.allocs: list[ir.Var] = []
        self.nests: list[tirx.Stmt] = []

    def run(self) -> tirx.PrimFunc:
        for info in self.infos:
            self._rewrite(info)
        body = self.nests[0] if len(self.nests) == 1 else tirx.SeqStmt(self.nests)
        root = s_tir.SBlock([], [], [], "root", body, alloc_buffers=self.allocs)
        realize = s_tir.SBlockRealize([], True, root)
        return tirx.PrimFunc(self._params(), realize, self.func.ret_type, self.func.attrs)

    # -- parameters

    def _param(self, param: ir.Var) -> ir.Var:
        if param.name in self.spec.packed:
            return self.spec.packed[param.name].param
        if self.spec.accumulate and param in self.outputs:
            sums = _store(self.infos[-1]).buffer
            return unaligned(param, sums.shape, str(sums.dtype))
        return unaligned(param)

    def _params(self) -> list[ir.Var]:
        read = {p for p in self.func.params if p not in self.outputs}
        if self.spec.accumulate:
            read &= {a.buffer for info in self.infos for a in info.reads}
        dropped = set(self.spec.overrides)
        kept = [p for p in self.func.params if p in read and p.name not in dropped]
        inputs = [self.buffers.params.get(p, p) for p in kept]
        outputs = [self.buffers.params[p] for p in self.func.params if p in self.outputs]
        return [*inputs, *self.spec.index_params, *outputs]

    # -- axes

    def _classes(self, info: BlockInfo) -> dict[ir.Var, str]:
        """Axis of the main block that each iterator of ``info`` follows, where there is one."""
        if info.name == self.spec.main:
            return dict(info.iter_vars)
        found: dict[ir.Var, str] = {}
        for access in (*info.reads, *info.writes):
            axes = self.buffers.axes.get(access.buffer, [])
            for index, axis, extent in zip(access.indices, axes, access.buffer.shape, strict=False):
                bare = isinstance(index, ir.Var)
                if bare and axis in self.spec.maps:
                    _check_whole(info, access, index, extent)
                if axis is None or (bare and found.get(index) == axis):
                    continue
                if bare and index not in found and axis not in found.values():
                    found[index] = axis
                elif axis in self.spec.maps or found.get(index) in self.spec.maps:
                    what = f"block {info.name}, {info.access_text(access)}"
                    expected = f"axis {axis} as one bare index"
                    raise AxisError(mismatch(what, expected, info.text(index), _NO_WAY))
        for var, axis in found.items():
            if axis in self.spec.maps and info.kinds[info.iter_vars[var]] == "reduce":
                _check_reducer(info, info.iter_vars[var])
        return found

    def _parts(self, info: BlockInfo, classes: Mapping[ir.Var, str]) -> list[tuple[Part, bool]]:
        check_extents(info)
        out: list[tuple[Part, bool]] = []
        names = whole_names(self.spec, info, classes)
        for iv in info.block.iter_vars:
            reduces = info.kinds[info.iter_vars[iv.var]] == "reduce"
            amap = self.spec.maps.get(classes.get(iv.var, ""))
            parts = amap.parts if amap else (Part(names[iv.var], iv.dom.extent),)
            out += [(p, reduces if p.reduces is None else p.reduces) for p in parts]
        self._check_parts(info, classes, out)
        return out

    def _check_parts(
        self, info: BlockInfo, classes: Mapping[ir.Var, str], parts: list[tuple[Part, bool]]
    ) -> None:
        names = [part.name for part, _ in parts]
        maps = [self.spec.maps[axis] for axis in classes.values() if axis in self.spec.maps]
        missing = {need for amap in maps for need in amap.needs} - set(names)
        if missing or len(set(names)) < len(names):
            expected = f"distinct iterators, {', '.join(sorted(missing)) or 'each once'} among them"
            raise AxisError(mismatch(f"block {info.name}", expected, names))

    # -- blocks

    def _rewrite(self, info: BlockInfo) -> None:
        classes, store = self._classes(info), _store(info)
        scope = Scope(self.spec, self.buffers, info, classes, self._parts(info, classes))
        if info.name == self.spec.main:
            for name in self.spec.staged:
                self._emit_sread(name, scope)
        if info.block.init is None and store.buffer in self.outputs:
            self._emit_swrite(info.name, scope, store, scope.value(store.value))
            return
        indices = self._move(store, scope)
        buffer = self.buffers.moved[store.buffer]
        value = scope.value(store.value)
        notes: dict[str, Any] = dict(info.block.annotations or {})
        if info.block.init is None and (guards := scope.guards()):
            # Dead positions hold anything: a gather by it, or a division, must not happen.
            value = tirx.if_then_else(every(guards), value, tirx.const(0, str(store.buffer.dtype)))
            notes[SPECULATIVE] = 1
        body: tirx.Stmt = BufferStore(buffer, value, indices)
        init = None
        if info.block.init is not None:
            body, speculative = scope.guarded_update(body)
            notes |= {SPECULATIVE: 1} if speculative else {}
            init = BufferStore(buffer, scope.value(info.block.init.value), indices)
        self._emit(info.name, scope, body, notes, init)
        added = self.spec.accumulate and info.name == self.spec.main
        if store.buffer in self.outputs or added:
            spatial = scope.over([(p, False) for p, reduces in scope.parts if not reduces])
            result = tirx.BufferLoad(buffer, spatial.positions(store.buffer, list(store.indices)))
            self._emit_swrite(f"{info.name}_swrite", spatial, store, result)

    def _move(self, store: BufferStore, scope: Scope) -> list[Any]:
        """Gives the stored buffer its new dimensions; returns the store's indices into it."""
        old = store.buffer
        axes = [scope.classes.get(i) if isinstance(i, ir.Var) else None for i in store.indices]
        slots = scope.reduction_slots()
        shape = [p.extent for p in slots]
        for axis, extent in zip(axes, old.shape, strict=True):
            amap = self.spec.maps.get(axis or "")
            shape += [p.extent for p in amap.parts] if amap else [extent]
        self.buffers.axes[old], self.buffers.slots[old] = axes, slots
        name = f"{old.name}_acc" if old in self.outputs else old.name
        self.buffers.moved[old] = tirx.decl_buffer(shape, old.dtype, name, layout=None)
        self.allocs.append(self.buffers.moved[old])
        return scope.positions(old, list(store.indices))

    def _emit_swrite(self, name: str, scope: Scope, store: BufferStore, value: Any) -> None:
        """The output at its coordinates, under every guard."""
        indices = [scope.coordinate(i) for i in store.indices]
        if self.spec.accumulate:
            target = self._params()[-1]
            value = tirx.BufferLoad(target, indices) + value
        else:
            target = self.buffers.params[store.buffer]
        body = guard(scope.guards(), BufferStore(target, value, indices))
        self._emit(name, scope, body, {SWRITE: 1})

    def _emit_sread(self, name: str, scope: Scope) -> None:
        """A block that copies one operand into list order, with zeros where there is none."""
        info = scope.info
        reads = [(i, a) for i in self.infos for a in i.reads if a.buffer_name == name]
        access = next((a for i, a in reads if i is info), None)
        bare = access is not None and all(map(self._is_known, access.indices))
        if access is None or not bare or len(reads) > 1:
            got = ", ".join(i.access_text(a) for i, a in reads) or "none"
            raise AxisError(mismatch(f"staged operand {name}", "one read by bare indices", got))
        local = scope.over(self._panel_parts(access, scope))
        where = [
            local.value(i) if isinstance(i, TensorLoad) else local.coordinate(i)
            for i in access.indices
        ]
        dtype = self.spec.stage_dtype
        value = tirx.BufferLoad(self.buffers.params[access.buffer], where).astype(dtype)
        if guards := local.guards():
            value = tirx.if_then_else(every(guards), value, tirx.const(0, dtype))
        panel = tirx.decl_buffer(
            [p.extent for p, _ in local.parts], dtype, f"{name}_panel", layout=None
        )
        self.allocs.append(panel)
        names = [p.name for p, _ in local.parts]
        self.buffers.panels[name] = (panel, names)
        store = BufferStore(panel, value, [local.vars[n] for n in names])
        self._emit(f"{name}_sread", local, store, {SREAD: name})

    def _is_known(self, index: Any) -> bool:
        """Whether an index is bare, or a load that stands for an iterator (a group)."""
        loads = isinstance(index, TensorLoad) and index.source.name in self.spec.overrides
        return loads or isinstance(index, ir.Var)

    def _panel_parts(self, access: Access, scope: Scope) -> list[tuple[Part, bool]]:
        """Iterators of a panel: those of the operand's axes, behind those that their coordinates
        need besides (the slot of a list, a group)."""
        info, own = scope.info, []
        for index in access.indices:
            for iv in info.block.iter_vars:
                if iv.var.same_as(index):
                    amap = scope.map_of(iv.var)
                    whole = (Part(info.iter_vars[iv.var], iv.dom.extent),)
                    own += [(p, False) for p in (amap.parts if amap else whole)]
        where = [scope.value(index) for index in access.indices]
        names = {p.name for p, _ in own}
        needed = [
            (p, False)
            for p, _ in scope.parts
            if p.name not in names and any(uses_any(e, {scope.vars[p.name]}) for e in where)
        ]
        return needed + own

    def _emit(
        self,
        name: str,
        scope: Scope,
        body: tirx.Stmt,
        notes: Mapping[str, Any],
        init: tirx.Stmt | None = None,
    ) -> None:
        kinds = {True: IterVar.CommReduce, False: IterVar.DataPar}
        iters = [IterVar(Range(0, p.extent), scope.vars[p.name], kinds[r]) for p, r in scope.parts]
        bare = s_tir.SBlock(iters, [], [], name, body, init, annotations=dict(notes))
        known = {b: b for b in (*self._params(), *self.allocs) if is_buffer(b)}
        reads, writes, _ = s_tir.analysis.get_sblock_access_region(bare, known)
        # An accumulating store reads its target too; to declare it would forbid every schedule.
        reads = [r for r in reads if all(not r.source.same_as(w.source) for w in writes)]
        block = s_tir.SBlock(iters, reads, writes, name, body, init, annotations=dict(notes))
        loops = [tirx.Var(p.name, "int32") for p, _ in scope.parts]
        nest: tirx.Stmt = s_tir.SBlockRealize(loops, True, block)
        zero = tirx.const(0, "int32")
        for loop, (part, _) in zip(reversed(loops), reversed(scope.parts), strict=True):
            nest = tirx.For(loop, zero, part.extent, tirx.ForKind.SERIAL, nest)
        self.nests.append(nest)


def _up_to(infos: list[BlockInfo], main: str) -> list[BlockInfo]:
    """The block ``main``, last, and those before it that it needs."""
    names = [info.name for info in infos]
    kept = [infos[names.index(main)]]
    for info in reversed(infos[: names.index(main)]):
        needed = {access.buffer for later in kept for access in later.reads}
        if any(access.buffer in needed for access in info.writes):
            kept.insert(0, info)
    return kept


def _check_whole(info: BlockInfo, access: Access, index: ir.Var, extent: Any) -> None:
    """The permutation names positions on all of the axis: AxisError if a block has fewer."""
    name = info.iter_vars[index]
    if not info.spans(name, extent):
        what = f"block {info.name}, axis {name} of {info.access_text(access)}"
        dom = info.domain(name)
        got = f"{dom.min} to {dom.min + dom.extent}"
        raise AxisError(mismatch(what, f"0 to {extent}", got, _NO_WAY))


def _check_reducer(info: BlockInfo, axis: str) -> None:
    """Positions come in any order: AxisError if a block reduces over them in the axis's own."""
    found = reducer_of(info, _store(info).buffer)
    if isinstance(found, Reducer) and found.takes_any_order:
        return
    what, got = (
        f"block {info.name}, axis {axis}",
        getattr(found, "reason", "a difference or quotient"),
    )
    raise AxisError(mismatch(what, "a commutative and associative reduction", got, _NO_WAY))


def _store(info: BlockInfo) -> BufferStore:
    body = info.block.body
    if not isinstance(body, BufferStore):
        raise AxisError(mismatch(f"block {info.name}", "one store", type(body).__name__))
    for condition in conditions_around(info):
        advice = "put the condition into its value"
        raise AxisError(mismatch(f"block {info.name}", "to run always", condition, advice))
    return body
