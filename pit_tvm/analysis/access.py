"""Blocks of a PrimFunc as lists of loads and stores over the axes of the tensor expression.

Bindings (``T.let``) are replaced by their values and nested blocks are expressed through the
axes of the block that encloses them, so that no use of an axis hides behind another variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from tvm import ir, sym, tirx
from tvm.ir import prim
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import stmt as st

from ..errors import ShapeError, mismatch
from .expr import (
    Access,
    PrimExpr,
    Substitution,
    bare_dims,
    distinct,
    impure_calls,
    is_bare,
    loads_in,
    one_line,
    replace_vars,
    same,
    same_access,
    uses,
)
from .stores import Body, Store, loads_of, not_constant

__all__ = [
    "Access",
    "BlockInfo",
    "Loop",
    "PrimExpr",
    "Store",
    "bare_dims",
    "block_infos",
    "check_extents",
    "is_bare",
    "loads_in",
    "loads_of",
    "same",
    "same_access",
    "uses",
]

_KINDS = {tirx.IterVar.DataPar: "spatial", tirx.IterVar.CommReduce: "reduce"}


@dataclass(frozen=True, eq=False)
class Loop:
    """What a block runs under: ``var`` takes all values of ``[begin, begin + extent)``.

    A loop, a thread index, or an iter var of a block around a nested one.
    """

    var: ir.Var
    begin: PrimExpr
    extent: PrimExpr


@dataclass(frozen=True, eq=False)
class BlockInfo:
    """What one block reads and writes.

    ``name`` is unique in the PrimFunc: a repeated name gets ``_1``, ``_2``, ... in program order.
    ``iter_vars`` maps the block's iter vars, in order, to the axis names of the tensor
    expression (``i``, not ``v_i``); ``kinds`` maps axis names to "spatial", "reduce" or "other";
    ``bindings`` maps axis names to their values over the loops. ``init`` and ``updates`` are the
    stores of the block's init and body. ``predicates`` are the conditions around the block over
    loop variables. ``opaque`` holds the text of whatever cannot be read as loads and stores.
    """

    name: str
    block: SBlock
    iter_vars: Mapping[ir.Var, str]
    kinds: Mapping[str, str]
    bindings: Mapping[str, PrimExpr]
    reads: list[Access]
    writes: list[Access]
    init: tuple[Store, ...]
    updates: tuple[Store, ...]
    loops: tuple[Loop, ...]
    predicates: tuple[PrimExpr, ...]
    opaque: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axis names in the order of the block's iter vars."""
        return tuple(self.iter_vars.values())

    def var(self, axis: str) -> ir.Var:
        """Iter var of an axis; KeyError if the block has no such axis."""
        for var, name in self.iter_vars.items():
            if name == axis:
                return var
        raise KeyError(axis)

    def domain(self, axis: str) -> ir.Range:
        """The values of an axis; KeyError if the block has no such axis."""
        var = self.var(axis)
        return next(iv.dom for iv in self.block.iter_vars if iv.var.same_as(var))

    def spans(self, axis: str, extent: PrimExpr) -> bool:
        """Whether an axis takes all values below ``extent``, and no others."""
        dom, proofs = self.domain(axis), sym.Analyzer()
        pairs = ((dom.min, 0), (dom.extent, extent))
        return all(bool(proofs.can_prove_equal(a, b)) for a, b in pairs)

    def text(self, expr: PrimExpr) -> str:
        """An expression as the tensor expression spells it."""
        renamed = {v: tirx.Var(name, v.ty) for v, name in self.iter_vars.items()}
        return str(replace_vars(expr, renamed))

    def access_text(self, access: Access) -> str:
        """``buffer[indices]`` as the tensor expression spells it."""
        return f"{access.buffer_name}[{', '.join(self.text(i) for i in access.indices)}]"


# --------------------------------------------------------------------------------------------
# The statements around the blocks


@dataclass(frozen=True)
class _Around:
    """What encloses a statement on its way from the root."""

    env: Substitution = field(default_factory=dict)
    loops: tuple[Loop, ...] = ()
    predicates: tuple[PrimExpr, ...] = ()
    opaque: tuple[str, ...] = ()
    inside: bool = False  # of a block

    def where(self, condition: PrimExpr) -> _Around:
        found = replace_vars(condition, self.env)
        return replace(self, predicates=(*self.predicates, *not_constant([found])))

    def within(self, var: ir.Var, begin: PrimExpr, extent: PrimExpr) -> _Around:
        loop = Loop(var, replace_vars(begin, self.env), replace_vars(extent, self.env))
        return replace(self, loops=(*self.loops, loop))

    def unreadable(self, what: str) -> _Around:
        return replace(self, opaque=(*self.opaque, what))


@dataclass
class _Finder:
    """Collects the blocks of a function in program order."""

    infos: list[BlockInfo] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    strays: list[str] = field(default_factory=list)  # what is done outside of all blocks

    def visit(self, stmt: Any, around: _Around) -> _Around:
        """Adds the blocks under ``stmt``; returns ``around`` with the statement's bindings."""
        if isinstance(stmt, st.SeqStmt):
            inner = around
            for part in stmt.seq:
                inner = self.visit(part, inner)
        elif isinstance(stmt, st.Bind):
            value = replace_vars(stmt.value, around.env)
            return replace(around, env={**around.env, stmt.var: value})
        elif isinstance(stmt, st.For):
            inside = around.within(stmt.loop_var, stmt.min, stmt.extent)
            if stmt.step is not None:
                inside = inside.unreadable(f"loop {stmt.loop_var.name} with a step")
            self.visit(stmt.body, inside)
        elif isinstance(stmt, st.IfThenElse):
            self.visit(stmt.then_case, around.where(stmt.condition))
            if stmt.else_case is not None:
                self.visit(stmt.else_case, around.where(prim.Not(stmt.condition)))
        elif isinstance(stmt, st.AttrStmt) and isinstance(stmt.node, tirx.IterVar):
            self.visit(stmt.body, around.within(stmt.node.var, prim.IntImm("int32", 0), stmt.value))
        elif isinstance(stmt, SBlockRealize):
            self._block(stmt, around)
        elif isinstance(stmt, st.While | st.AttrStmt):
            self.visit(stmt.body, around.unreadable(f"{type(stmt).__name__} around the block"))
        elif not (around.inside or _does_nothing(stmt)):
            self.strays.append(f"{type(stmt).__name__} outside of blocks: {one_line(stmt)}")
        return around

    def _block(self, realize: SBlockRealize, around: _Around) -> None:
        if not _is_root(realize):
            self.infos.append(_block_info(realize, around, self._unique(realize.block.name_hint)))
        inner = replace(around.where(realize.predicate), inside=not _is_root(realize))
        if realize.block.match_buffers:
            inner = inner.unreadable("T.match_buffer around the block")
        for iv in realize.block.iter_vars:
            inner = inner.within(iv.var, iv.dom.min, iv.dom.extent)
        if realize.block.init is not None:
            self.visit(realize.block.init, inner)
        self.visit(realize.block.body, inner)

    def _unique(self, hint: str) -> str:
        name, count = hint, 0
        while name in self.names:
            count += 1
            name = f"{hint}_{count}"
        self.names.add(name)
        return name


def _does_nothing(stmt: Any) -> bool:
    """Whether a statement outside of blocks neither computes anything nor names memory anew."""
    if isinstance(stmt, st.Evaluate):
        return not impure_calls(stmt.value)
    return isinstance(stmt, st.AllocBuffer)


def _is_root(realize: SBlockRealize) -> bool:
    return realize.block.name_hint == "root" and not realize.block.iter_vars


def _axis_names(realize: SBlockRealize) -> list[str]:
    """Axis names: without TE's ``v_``, else the loop that the iter var is bound to bare. One that
    has no name is ``v``, as its loop is in TE."""
    names: list[str] = []
    for iv, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
        name = iv.var.name
        if name.startswith("v_"):
            name = name[2:]
        elif isinstance(value, ir.Var):
            name = value.name
        name = hint = name or "v"
        count = 0
        while name in names:
            count += 1
            name = f"{hint}_{count}"
        names.append(name)
    return names


def _block_info(realize: SBlockRealize, around: _Around, name: str) -> BlockInfo:
    block = realize.block
    init, body = Body(), Body()
    if block.match_buffers:
        body.opaque.append("T.match_buffer")
    if block.init is not None:
        init.visit(block.init, around.env, ())
    body.visit(block.body, around.env, ())
    axes = _axis_names(realize)
    stores = (*init.stores, *body.stores)
    return BlockInfo(
        name=name,
        block=block,
        iter_vars={iv.var: axis for iv, axis in zip(block.iter_vars, axes, strict=True)},
        kinds={
            axis: _KINDS.get(int(iv.iter_type), "other")
            for axis, iv in zip(axes, block.iter_vars, strict=True)
        },
        bindings={
            axis: replace_vars(value, around.env)
            for axis, value in zip(axes, realize.iter_values, strict=True)
        },
        reads=distinct(load for store in stores for load in loads_of(store)),
        writes=distinct(store.target for store in stores),
        init=tuple(init.stores),
        updates=tuple(body.stores),
        loops=around.loops,
        predicates=around.where(realize.predicate).predicates,
        opaque=(*around.opaque, *init.opaque, *body.opaque),
    )


def check_extents(info: BlockInfo) -> None:
    """Kernels that gather count in 32 bits: ShapeError if an axis of a block is of another type."""
    for var, axis in info.iter_vars.items():
        if var.ty.dtype != "int32":
            what = f"axis {axis} of block {info.name}"
            raise ShapeError(mismatch(what, "an int32 extent", var.ty.dtype, "use te.var(name)"))


def block_infos(func: tirx.PrimFunc) -> list[BlockInfo]:
    """Every block of a PrimFunc but the root, nested ones too, in program order.

    A PrimFunc without blocks (plain loops, TIRx kernels) gives an empty list.
    """
    return list(_block_infos(func))


@lru_cache(maxsize=16)  # analyses and rewrites of a function ask one after another
def _block_infos(func: tirx.PrimFunc) -> tuple[BlockInfo, ...]:
    finder = _Finder()
    finder.visit(func.body, _Around())
    strays = tuple(finder.strays)
    return tuple(replace(info, opaque=(*info.opaque, *strays)) for info in finder.infos)
