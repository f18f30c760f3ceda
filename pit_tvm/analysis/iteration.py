"""How the loops around a block drive its axes: bindings, predicates, loops shared by blocks.

An axis can be permuted only if its block runs exactly once for every element of it, whatever the
other axes do, and if no other block waits for one element of it inside the same loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import mul

from tvm import ir, sym, tirx
from tvm.ir import prim
from tvm.sym.iter_affine_map import IterMapLevel

from .access import Access, BlockInfo, Loop, PrimExpr, loads_in, same, uses
from .expr import replace_vars, stray_use, strip_widening


def _bare_loop(info: BlockInfo, axis: str) -> Loop | None:
    """The loop that an axis is bound to bare."""
    value = strip_widening(info.bindings[axis])
    for loop in info.loops:
        if isinstance(value, ir.Var) and value.same_as(loop.var):
            return loop
    return None


def _loops_of(info: BlockInfo, expr: PrimExpr) -> list[Loop]:
    return [loop for loop in info.loops if uses(expr, loop.var)]


def _over_axes(info: BlockInfo, expr: PrimExpr) -> PrimExpr:
    """``expr`` with loop variables replaced by the iter vars that are bound to them bare."""
    values = {}
    for axis in info.axes:
        loop = _bare_loop(info, axis)
        if loop is not None:
            values[loop.var] = info.var(axis)
    return replace_vars(expr, values)


# --------------------------------------------------------------------------------------------
# Predicates


def _conjuncts(expr: PrimExpr) -> list[PrimExpr]:
    if isinstance(expr, prim.And):
        return [*_conjuncts(expr.a), *_conjuncts(expr.b)]
    return [expr]


def _is_domain_guard(info: BlockInfo, condition: PrimExpr) -> bool:
    """Whether a condition only cuts an imperfect split: ``binding < extent`` of one axis."""
    return isinstance(condition, prim.LT) and any(
        same(condition.a, info.bindings[axis]) and same(condition.b, iv.dom.extent)
        for axis, iv in zip(info.axes, info.block.iter_vars, strict=True)
    )


def _predicates(info: BlockInfo) -> list[PrimExpr]:
    return [part for predicate in info.predicates for part in _conjuncts(predicate)]


def conditions_around(info: BlockInfo) -> list[PrimExpr]:
    """Conditions under which a block runs, but the guards of imperfect splits."""
    return [part for part in _predicates(info) if not _is_domain_guard(info, part)]


def predicate_reason(info: BlockInfo, axis: str) -> str | None:
    """Why a condition or a loop bound around the block ties its runs to elements of ``axis``."""
    own = _reads_own_output(info)
    if own is not None:
        return f"whether the block runs depends on its own output {info.access_text(own)}"
    mine = _loops_of(info, info.bindings[axis])
    bare = _bare_loop(info, axis)
    for condition in conditions_around(info):
        if not any(uses(condition, loop.var) for loop in mine):
            continue
        text = info.text(_over_axes(info, condition))
        # A mask operand indexed by the axis alone is an operand like any other ...
        if bare is None or stray_use(condition, bare.var) is not None:
            return f"the block runs only under the predicate {text}"
        # ... but it must not decide whether the reduction is initialised.
        if info.init and info.kinds[axis] == "reduce":
            return f"the block is initialised only where {text} holds for the first {axis}"
    for loop in info.loops:
        bounds = (loop.begin, loop.extent)
        driving = [x for x in info.loops if any(uses(bound, x.var) for bound in bounds)]
        involved = [loop, *driving] if driving else []
        if any(x.var.same_as(y.var) for x in involved for y in mine):
            return f"the bounds of loop {loop.var.name} depend on loop {driving[0].var.name}"
    return None


def _reads_own_output(info: BlockInfo) -> Access | None:
    """A load of what the block writes in its predicates, bindings or loop bounds."""
    bounds = [bound for loop in info.loops for bound in (loop.begin, loop.extent)]
    for expr in (*info.predicates, *info.bindings.values(), *bounds):
        for load in loads_in(expr):
            if any(load.buffer.same_as(w.buffer) for w in info.writes):
                return load
    return None


# --------------------------------------------------------------------------------------------
# Bindings


def _equal(left: PrimExpr, right: PrimExpr) -> bool:
    return bool(sym.Analyzer().can_prove_equal(left, right))


def binding_reason(info: BlockInfo, axis: str) -> str | None:
    """Why the loops do not visit every element of ``axis`` once for each of the other axes.

    A block that initialises what it reduces must not do so twice, so all its axes count then.
    """
    why = _own_binding_reason(info, axis) or _used_beside(info, axis)
    if why is not None or not (info.init and info.kinds[axis] == "reduce"):
        return why
    for other in info.axes:
        why = _own_binding_reason(info, other)
        if why is not None:
            return f"{why}, and initialises the reduction again"
    mine = _loops_of(info, info.bindings[axis])
    for loop in info.loops[info.loops.index(mine[0]) :] if mine else ():
        if not any(uses(value, loop.var) for value in info.bindings.values()):
            return f"loop {loop.var.name} runs the block again and initialises the reduction again"
    return None


def _own_binding_reason(info: BlockInfo, axis: str) -> str | None:
    dom = info.block.iter_vars[info.axes.index(axis)].dom
    if _equal(dom.extent, 1):
        return None
    loop = _bare_loop(info, axis)
    if loop is not None and not _bound_elsewhere(info, axis, loop):
        if _equal(loop.begin, dom.min) and _equal(loop.extent, dom.extent):
            return None
    if _is_bijection(info):
        return None
    return f"{axis} is bound to {info.bindings[axis]}, which does not visit each element once"


def _used_beside(info: BlockInfo, axis: str) -> str | None:
    """Why a block that uses the loops of an axis beside the axis itself is no function of it."""
    mine = _loops_of(info, info.bindings[axis])
    for store in (*info.init, *info.updates):
        for part in (*store.target.indices, *store.conditions, store.value):
            for loop in mine:
                if uses(part, loop.var):
                    return f"loop {loop.var.name}, which drives {axis}, occurs in {info.text(part)}"
    return None


def _bound_elsewhere(info: BlockInfo, axis: str, loop: Loop) -> bool:
    return any(uses(v, loop.var) for other, v in info.bindings.items() if other != axis)


def _is_bijection(info: BlockInfo) -> bool:
    """Whether the bindings map the loops that they use one to one onto the axes' domains."""
    values = list(info.bindings.values())
    loops = [loop for loop in info.loops if any(uses(v, loop.var) for v in values)]
    ranges = {x.var: ir.Range.from_min_extent(x.begin, x.extent) for x in loops}
    guards = [part for part in _predicates(info) if _is_domain_guard(info, part)]
    predicate = tirx.all(*guards) if guards else tirx.const(True, "bool")
    found = sym.detect_iter_map(values, ranges, predicate, IterMapLevel.Bijective)
    if len(found.indices) != len(values):
        return False
    # One to one is not yet onto: the loops' runs must be at least as many as the elements.
    runs = reduce(mul, (x.extent for x in loops), prim.IntImm("int64", 1))
    elements = reduce(mul, (iv.dom.extent for iv in info.block.iter_vars), prim.IntImm("int64", 1))
    return bool(sym.Analyzer().can_prove(runs >= elements))


# --------------------------------------------------------------------------------------------
# Several blocks in one loop


def shared_loop_reason(info: BlockInfo, axis: str, blocks: Sequence[BlockInfo]) -> str | None:
    """Why permuting ``axis`` in this block alone disturbs another block inside the same loop.

    Both touch one buffer and one of them writes it: a recurrence spread over several blocks, or
    a consumer that would find its element not yet computed.
    """
    mine = _loops_of(info, info.bindings[axis])
    for other in blocks:
        if other is info or _nested(info, other):
            continue
        shared = [x for x in mine if any(x.var.same_as(y.var) for y in other.loops)]
        clash = _clash(info, other) if shared else None
        if clash is not None:
            return f"{clash} inside the same loop {shared[0].var.name}"
    return None


def _nested(first: BlockInfo, second: BlockInfo) -> bool:
    """Whether one of two blocks is inside the other."""
    return any(
        loop.var.same_as(var)
        for inner, outer in ((first, second), (second, first))
        for var in outer.iter_vars
        for loop in inner.loops
    )


def _clash(info: BlockInfo, other: BlockInfo) -> str | None:
    """Accesses of two blocks to one buffer that at least one of them writes, in words."""
    for own in _accesses(info):
        if not any(w.buffer.same_as(own.buffer) for w in (*info.writes, *other.writes)):
            continue
        for its in _accesses(other):
            if own.buffer.same_as(its.buffer):
                return (
                    f"{info.access_text(own)} is also accessed by block {other.name}, "
                    f"as {other.access_text(its)},"
                )
    return None


def _accesses(info: BlockInfo) -> list[Access]:
    around = [load for condition in info.predicates for load in loads_in(condition)]
    return [*info.reads, *info.writes, *around]
