"""The schedule of functions without sums on a GPU: whole vectors for each thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import prim
from tvm.s_tir.dlight import ScheduleRule

from pit_tvm.analysis.expr import uses
from pit_tvm.primitive.checks import is_choice

THREADS = 256
BYTES = 16  # that a thread moves at once
_OF_CONDITIONS = 32  # bits that one takes: TVM's code for CUDA has vectors of up to four
_GATHERED = 4  # elements that are no neighbours: it has vectors of up to four indices


class Vectorised(ScheduleRule):  # type: ignore[misc]  # TVM has no types
    """For functions whose results, behind what can be computed in place, are one block of spatial
    iterators: gathered and scattered rows, sums of tensors, transpositions. Element by element, as
    TVM's own rules, where the last extent is not one of whole vectors. `dlight.gpu.Transpose` is no
    alternative: it takes comparisons of indices for truth values."""

    def apply(self, func: Any, target: tvm.target.Target, tunable: bool) -> Any:
        """The schedule of ``func``; None if it is another kind of function."""
        sch = s_tir.Schedule(func)
        *before, last = sch.get_child_blocks(sch.get_sblock("root"))
        try:
            for block in before:
                sch.compute_inline(block)
        except s_tir.ScheduleError:
            return None
        inlined = _named_apart(sch.mod["main"])
        sch = s_tir.Schedule(_with_choices(inlined, sch.get(last).iter_vars))
        (last,) = sch.get_child_blocks(sch.get_sblock("root"))
        block, loops = sch.get(last), sch.get_loops(last)
        if not loops or any(iv.iter_type != tirx.IterVar.DataPar for iv in block.iter_vars):
            return None
        extent, lanes = sch.get(loops[-1]).extent, _lanes(block)
        if not isinstance(extent, prim.IntImm) or int(extent) % lanes:
            lanes = 1
        outer, vector = sch.split(loops[-1], [None, lanes])
        grid, thread = sch.split(sch.fuse(*loops[:-1], outer), [None, THREADS])
        sch.bind(grid, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
        if lanes > 1:
            sch.vectorize(vector)
        return sch


def _named_apart(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function without a name for two values, as what is computed where it is read, twice, leaves
    behind: TVM has no schedules of such functions."""

    def rename(let: prim.Let) -> prim.Let:
        var = tirx.Var(let.var.name, let.var.ty)
        value, body = (tvm_ffi.structural_map(part, rules) for part in (let.value, let.body))
        own = [(ir.Var, lambda found: var if found.same_as(let.var) else found)]
        return tirx.Let(var, value, tvm_ffi.structural_map(body, own))

    rules = [(prim.Let, rename)]
    return tvm_ffi.structural_map(func, rules)


def _with_choices(func: tirx.PrimFunc, iters: Sequence[tirx.IterVar]) -> tirx.PrimFunc:
    """A function that takes one side where a condition is alike for a whole vector: TVM makes a
    vector of such a condition, of what is selected's type, which does not compile."""
    own = _own(func.body, iters)

    def choose(select: prim.Select) -> Any:
        given = [
            tvm_ffi.structural_map(part, [(prim.Select, choose)])
            for part in (select.condition, select.true_value, select.false_value)
        ]
        return (tirx.Select if _varies(own, select.condition) else tirx.if_then_else)(*given)

    return tvm_ffi.structural_map(func, [(prim.Select, choose)])


def _own(body: tirx.Stmt, iters: Sequence[tirx.IterVar]) -> list[ir.Var]:
    """Variables that may differ for every element of a vector: the last iterator of a block, and
    names of values."""
    named: list[prim.Let] = []
    tvm_ffi.structural_walk(body, (prim.Let, named.append))
    return [*(iv.var for iv in iters[-1:]), *(let.var for let in named)]


def _varies(own: Sequence[ir.Var], *exprs: Any) -> bool:
    """Whether any of these may differ for every element of a vector."""
    return any(uses(expr, var) for expr in exprs for var in own)


def _lanes(block: s_tir.SBlock) -> int:
    """Elements in one vector of the widest type that a block computes with: TVM's code for wider
    vectors of a converted type does not compile. Indices are not counted, nor conditions that are
    alike for a whole vector."""
    widest, own = 8, _own(block.body, block.iter_vars)

    def look(value: ir.Expr) -> Any:
        nonlocal widest
        if is_choice(value) and not _varies(own, value.args[0]):
            for choice in value.args[1:]:
                tvm_ffi.structural_walk(choice, (ir.Expr, look), order="pre")
            return tvm_ffi.WalkResult.SKIP
        if isinstance(value.ty, ir.PrimType):
            name = str(value.ty.dtype)
            bits = _OF_CONDITIONS if name == "bool" else tvm.DataType(name).bits
            widest = max(widest, bits)
        return tvm_ffi.WalkResult.SKIP if isinstance(value, ir.TensorLoad) else None

    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(block.body, (tirx.BufferStore, stores.append))
    loads: list[ir.TensorLoad] = []
    for store in stores:
        tvm_ffi.structural_walk(store.value, (ir.Expr, look), order="pre")
        tvm_ffi.structural_walk(store.value, (ir.TensorLoad, loads.append))
    moved = [load for load in loads if _varies(own, *load.indices)]
    types = {
        str(place.dtype) for place in (*(s.buffer for s in stores), *(m.source for m in moved))
    }
    # In TVM's vectors of conditions each takes two bytes, in memory one.
    if "bool" in types or _gathers_elements(loads, own):
        return 1
    lanes = 8 * BYTES // widest
    return lanes if all(_is_vector(load, own, lanes) for load in moved) else min(lanes, _GATHERED)


def _is_vector(load: ir.TensorLoad, own: Sequence[ir.Var], lanes: int) -> bool:
    """Whether ``lanes`` elements along the first of ``own`` are neighbours that begin at a multiple
    of them."""
    *before, place = load.indices
    first = sym.Analyzer().simplify(place - own[0])
    strides = [first, *(load.source.shape[-1:] if before else ())]
    return not _varies(own, *before, first) and all(
        sym.Analyzer().can_prove(tirx.floormod(stride, lanes) == 0) for stride in strides
    )


def _gathers_elements(loads: Sequence[ir.TensorLoad], own: Sequence[ir.Var]) -> bool:
    """Whether something is read by an index that is itself read for every element of a vector: TVM
    has no vectors of such indices."""
    inner: list[ir.TensorLoad] = []
    for place in (index for load in loads for index in load.indices):
        tvm_ffi.structural_walk(place, (ir.TensorLoad, inner.append))
    return any(_varies(own, *load.indices) for load in inner)
