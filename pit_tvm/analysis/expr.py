"""Scalar expressions of a PrimFunc: variables, loads, bare indices, calls with effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import prim

PrimExpr = Any  # tvm gives its scalar expressions no common Python type
Substitution = Mapping[ir.Var, PrimExpr]

_POINTER_OPS = frozenset({"tirx.address_of", "tirx.tvm_access_ptr", "tirx.buffer_data"})


@dataclass(frozen=True, eq=False)
class Access:
    """One distinct load or store: ``buffer[indices]``, indices over the block's iter vars."""

    buffer: ir.Var
    buffer_name: str
    indices: tuple[PrimExpr, ...]


def is_zero(expr: PrimExpr) -> bool:
    """Whether an expression is the integer 0, not one that turns out to be it."""
    return isinstance(expr, prim.IntImm) and int(expr) == 0


def is_one(expr: PrimExpr) -> bool:
    """Whether an expression is the integer 1, not one that turns out to be it."""
    return isinstance(expr, prim.IntImm) and int(expr) == 1


def replace_vars(expr: PrimExpr, values: Substitution) -> PrimExpr:
    """``expr`` with every variable of ``values`` replaced and every ``Let`` expanded."""

    def expand(let: prim.Let) -> PrimExpr:
        return replace_vars(let.body, {let.var: let.value})

    expr = tvm_ffi.structural_map(expr, [(prim.Let, expand)])
    if not values:
        return expr
    return tvm_ffi.structural_map(expr, [(ir.Var, lambda v: values.get(v, v))])


def uses(expr: PrimExpr, var: ir.Var) -> bool:
    """Whether ``var`` occurs anywhere in ``expr``, an access's indices included."""
    found: list[ir.Var] = []
    tvm_ffi.structural_walk(expr, (ir.Var, lambda v: found.append(v) if v.same_as(var) else None))
    return bool(found)


def same(left: PrimExpr, right: PrimExpr) -> bool:
    """Whether two expressions are equal symbol by symbol, over the same variables."""
    return bool(tvm_ffi.structural_equal(left, right, map_free_vars=False))


def same_access(left: Access, right: Access) -> bool:
    """Whether two accesses touch the same element of the same buffer, symbol by symbol."""
    return (
        left.buffer.same_as(right.buffer)
        and len(left.indices) == len(right.indices)
        and all(same(a, b) for a, b in zip(left.indices, right.indices, strict=True))
    )


def strip_widening(index: PrimExpr) -> PrimExpr:
    """``index`` without integer casts that lose no value."""
    while isinstance(index, prim.Cast):
        source, target = index.value.ty, index.ty
        if source.dtype[:3] != "int" or target.dtype[:3] != "int":
            return index
        if int(source.dtype[3:]) > int(target.dtype[3:]):
            return index
        index = index.value
    return index


def is_bare(access: Access, dim: int, var: ir.Var) -> bool:
    """Whether dimension ``dim`` of an access is exactly ``var`` (an int64 cast of it counts)."""
    index = strip_widening(access.indices[dim])
    return isinstance(index, ir.Var) and index.same_as(var)


def bare_dims(access: Access, var: ir.Var) -> frozenset[int]:
    """The dimensions of an access whose index is exactly ``var``."""
    return frozenset(d for d in range(len(access.indices)) if is_bare(access, d, var))


def to_access(load: ir.TensorLoad) -> Access:
    """The access of one load."""
    return Access(load.source, load.source.name, tuple(load.indices))


def loads_in(expr: PrimExpr) -> list[Access]:
    """Distinct loads of an expression, inner ones first (``idx[i]`` before ``A[idx[i]]``)."""
    found: list[ir.TensorLoad] = []
    tvm_ffi.structural_walk(expr, (ir.TensorLoad, found.append))
    return distinct(to_access(load) for load in found)


def distinct(accesses: Iterable[Access]) -> list[Access]:
    """The accesses without repeats, first occurrences in order."""
    out: list[Access] = []
    for access in accesses:
        if not any(same_access(access, seen) for seen in out):
            out.append(access)
    return out


@dataclass(frozen=True, eq=False)
class StrayUse:
    """A use of an axis that is no bare index: in dimension ``dim`` of ``access``, or in a value.

    ``expr`` is that index, or the part of the value that uses the axis (``access`` is None then);
    ``is_predicate`` tells whether that part is a comparison.
    """

    access: Access | None
    dim: int
    expr: PrimExpr
    is_predicate: bool = False


def outside_loads(expr: PrimExpr, var: ir.Var) -> bool:
    """Whether ``var`` occurs in ``expr`` elsewhere than inside the indices of loads."""
    return uses(_without_loads(expr), var)


def _without_loads(expr: PrimExpr) -> PrimExpr:
    def blank(load: ir.TensorLoad) -> PrimExpr:
        return tirx.Var("load", load.ty)

    return tvm_ffi.structural_map(expr, [(ir.TensorLoad, blank)])


def stray_index(access: Access, var: ir.Var) -> StrayUse | None:
    """The first dimension of one access whose index uses ``var`` without being bare."""
    for dim, index in enumerate(access.indices):
        if not is_bare(access, dim, var) and outside_loads(index, var):
            return StrayUse(access, dim, index)
    return None


def stray_use(expr: PrimExpr, var: ir.Var) -> StrayUse | None:
    """The first use of ``var`` in ``expr`` that is not the bare index of a load, if any."""
    for load in loads_in(expr):
        found = stray_index(load, var)
        if found is not None:
            return found
    if not outside_loads(expr, var):
        return None
    parts = [part for part in _parts(expr) if outside_loads(part, var)]
    compared = [part for part in parts if isinstance(part, prim.CmpExpr)]
    part = (compared or parts)[-1]
    return StrayUse(None, 0, part, bool(compared))


def _parts(expr: PrimExpr) -> list[PrimExpr]:
    """``expr`` and its operations outside loads, enclosing ones first; no plain variables."""
    found: list[PrimExpr] = [expr]

    def visit(node: Any) -> Any:
        if isinstance(node, ir.TensorLoad):
            return tvm_ffi.WalkResult.SKIP
        if not isinstance(node, ir.Var):
            found.append(node)
        return tvm_ffi.WalkResult.ADVANCE

    tvm_ffi.structural_walk(expr, (ir.Expr, visit), order="pre")
    return found


def impure_calls(expr: PrimExpr) -> list[str]:
    """Texts of calls that have effects, read state, or take a buffer as a pointer."""
    found: list[str] = []

    def visit(call: ir.Call) -> None:
        pure = isinstance(call.op, ir.Op) and call.op.name not in _POINTER_OPS
        if pure:
            effect = call.op.get_attr("TCallEffectKind")
            pure = effect is not None and int(effect) <= tirx.CallEffectKind.Pure.value
        if not pure:
            found.append(one_line(call))

    tvm_ffi.structural_walk(expr, (ir.Call, visit), order="pre")
    return found


def one_line(node: Any) -> str:
    """Text of a node without the definitions that are printed before it, at most 80 characters."""
    lines = [line.strip() for line in str(node).splitlines() if line.strip()]
    return (lines[-1] if lines else type(node).__name__)[:80]
