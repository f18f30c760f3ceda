"""Rows of tables that a graph picks by ids: what a call must keep to, and no read outside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from tvm import ir, relax, sym, tirx
from tvm.ir import prim

from ..runtime.arrays import as_numpy
from .picks import ID_TYPES, picks, range_of, roles_in, shift_of
from .plane import Plane
from .rebuild import bindings_of, extents_of, is_op, rebuild, shape_of, values_of, without_weights

# Operators that hand ids on unchanged, as casts to these types do.
_SAME_IDS = ("reshape", "expand_dims", "squeeze", "broadcast_to")
# What the largest id is counted from: an input's values, the number of tokens, or that of the live
# tokens of a sequence.
_GIVEN, _TOKENS, _LIVE = "given", "tokens", "live"


@dataclass(frozen=True)
class _Ids:
    """Ids of at most ``most`` plus ``offset``; ``name``: the input that they are."""

    most: str
    offset: int = 0
    name: str = ""


@dataclass
class Lookups:
    """How many rows the smallest table has that each input's values pick from; and for how many
    tokens, and live tokens of a sequence, tables of positions have rows (None: any)."""

    rows: dict[str, int] = field(default_factory=dict)
    tokens: int | None = None
    live: int | None = None

    @classmethod
    def of(cls, module: tvm.IRModule, plane: Plane, mask: str) -> Lookups:
        """What the tables of ``main`` demand."""
        found, main = cls(), module["main"]
        known = _known(main, plane, mask)
        for call in _lookups(main).values():
            ids, rows = known.get(call.args[1]), _rows(call)
            if ids is None or rows is None:
                continue
            most = rows - 1 - ids.offset
            if ids.most == _GIVEN:
                found.rows[ids.name] = min(found.rows.get(ids.name, rows), rows)
            elif ids.most == _TOKENS:
                found.tokens = most if found.tokens is None else min(found.tokens, most)
            else:
                found.live = most if found.live is None else min(found.live, most)
        return found


def read_inside(module: tvm.IRModule, plane: Plane, mask: str) -> tvm.IRModule:
    """``main`` with computed ids held to their tensors: only those that are an input's values, or
    count live tokens, are checked in every call."""
    known, made = _known(module["main"], plane, mask), values_of(module["main"])
    loose = {
        var
        for var, value in made.items()
        if any(not _is_inside(ids, extent, plane, made) for ids, extent in _picked(value))
        and not _is_checked(value, known)
    }

    def rule(builder: relax.BlockBuilder, call: relax.Call, var: relax.Var) -> relax.Expr:
        return held(builder, call) if var in loose else call

    if not loose:
        return module
    return without_weights(rebuild(module, rule), relax.transform.CanonicalizeBindings())


def _picked(value: relax.Expr) -> list[tuple[relax.Expr, Any]]:
    """Ids with the extents that they must stay in, if the operator does not keep them there."""
    if not picks(value) or is_op(value, "take") and str(value.attrs.mode) != "fast":
        return []
    extents = extents_of(value.args[0])
    return [(ids, extents[axis]) for ids, axis in picks(value)]


def _is_inside(
    ids: relax.Expr, extent: Any, plane: Plane, made: Mapping[relax.Var, relax.Expr]
) -> bool:
    """Whether ids are constants that ``extent`` has, as long as calls keep to the least sizes, or
    count inside of it."""
    counted = range_of(ids, made)
    if counted is not None:
        first, end = counted
        return bool(sym.Analyzer().can_prove(tirx.all(first >= 0, end <= extent)))
    if not isinstance(ids, ir.GenericConst):
        return False
    numbers = ids.value.numpy()
    if not isinstance(extent, prim.IntImm):
        return bool((numbers >= 0).all()) and len(roles_in(extent, plane)) == 1
    return bool(((numbers >= 0) & (numbers < int(extent))).all())


def held(builder: relax.BlockBuilder, call: relax.Call) -> relax.Call:
    """A pick with the nearest place for every one that is outside; one that wraps stays."""
    if not _picked(call):
        return call
    if is_op(call, "take"):
        return relax.op.take(*call.args, call.attrs.axis, "clip")
    same = _only_number(builder, call.args[0])
    if same is not None:
        return relax.op.broadcast_to(same, list(extents_of(call)))
    inside = [_clipped(builder, ids, extent) for ids, extent in _picked(call)]
    if is_op(call, "gather_elements"):
        return relax.op.gather_elements(call.args[0], inside[0], call.attrs.axis)
    return relax.op.index_tensor(call.args[0], inside)


def _only_number(builder: relax.BlockBuilder, data: relax.Expr) -> relax.Expr | None:
    """What all elements of a constant are, as RoBERTa's kinds of tokens; None if they differ."""
    value = builder.lookup_binding(data) if isinstance(data, relax.Var) else data
    value = value.args[0] if is_op(value, "broadcast_to") else value
    if not isinstance(value, ir.GenericConst):
        return None
    numbers = as_numpy(value.value)
    uniform = numbers.size > 0 and bool((numbers == numbers.flat[0]).all())
    return relax.const(numbers.flat[0].item(), str(value.ty.dtype)) if uniform else None


def _clipped(builder: relax.BlockBuilder, ids: relax.Expr, extent: Any) -> relax.Expr:
    """Ids of 0 to ``extent - 1``; calls see to it that there is one (`least_sizes`)."""
    if str(ids.ty.dtype) != "int64":
        ids = builder.emit(relax.op.astype(ids, "int64"))
    fixed = isinstance(extent, prim.IntImm)
    most = relax.const(int(extent) - 1, "int64") if fixed else extent - 1
    lowest = builder.emit(relax.op.maximum(ids, relax.const(0, "int64")))
    return builder.emit(relax.op.minimum(lowest, most))


def _lookups(main: relax.Function) -> dict[relax.Var, relax.Call]:
    """The calls that pick by ids, along one dimension, which are no constants."""
    return {
        b.var: b.value
        for b in bindings_of(main)
        if is_op(b.value, "take", "gather_elements") and isinstance(b.value.args[1], relax.Var)
    }


def _rows(lookup: relax.Call) -> int | None:
    """How many places ids have, if that is constant; of ``take`` only where whole rows are
    picked."""
    extents, ((_, axis),) = shape_of(lookup.args[0]), picks(lookup)
    if not extents or is_op(lookup, "take") and axis:
        return None
    return int(extents[axis]) if isinstance(extents[axis], prim.IntImm) else None


def _is_checked(lookup: relax.Expr, known: Mapping[relax.Var, _Ids]) -> bool:
    """Whether calls are refused whose ids are outside: an input's, or those of live tokens."""
    if not is_op(lookup, "take", "gather_elements") or _rows(lookup) is None:
        return False
    ids = known.get(lookup.args[1])
    if ids is None:
        return False
    # To hold ``take`` needs no other operators.
    live = is_op(lookup, "gather_elements") and ids.most == _LIVE and ids.offset >= 0
    return ids.most == _GIVEN or live


def _known(main: relax.Function, plane: Plane, mask: str) -> dict[relax.Var, _Ids]:
    """The integers of ``main`` whose largest is known."""
    known = {p: _Ids(_GIVEN, name=p.name) for p in main.params}
    for binding in bindings_of(main):
        found = _result(binding.value, known, plane, mask)
        if found is not None:
            known[binding.var] = found
    return known


def _result(
    value: relax.Expr, known: Mapping[relax.Var, _Ids], plane: Plane, mask: str
) -> _Ids | None:
    if is_op(value, "arange"):
        return _counted(value, plane)
    operands = [known.get(a) if isinstance(a, relax.Var) else None for a in _arguments(value)]
    first = operands[0] if operands else None
    if first is None:
        return None
    of_mask = [ids is not None and ids.name == mask for ids in operands]
    if is_op(value, *_SAME_IDS) or is_op(value, "astype") and _is_id(value):
        return first
    if is_op(value, "cumsum") and of_mask[0] and _is_id(value) and _along_tokens(value, plane):
        return _Ids(_LIVE)
    if is_op(value, "multiply") and first.most == _LIVE and of_mask[1]:
        return first
    if is_op(value, "add", "subtract") and first.most != _GIVEN:
        beyond = shift_of(value)
        return None if beyond is None else replace(first, offset=first.offset + beyond)
    return None


def _arguments(value: relax.Expr) -> list[relax.Expr]:
    return list(value.args) if isinstance(value, relax.Call) else []


def _counted(value: relax.Call, plane: Plane) -> _Ids | None:
    """Integers one after the other, as many as tokens but for a constant."""
    _, end, step = value.args
    if not _is_id(value) or not isinstance(step, prim.IntImm) or int(step) != 1:
        return None
    beyond = sym.Analyzer().simplify(end - plane.tokens)
    return _Ids(_TOKENS, int(beyond) - 1) if isinstance(beyond, prim.IntImm) else None


def _along_tokens(cumsum: relax.Call, plane: Plane) -> bool:
    extents, axis = shape_of(cumsum.args[0]), cumsum.attrs.axis
    if extents is None or axis is None:
        return False
    return bool(extents[int(axis)].same_as(plane.tokens))


def _is_id(value: relax.Expr) -> bool:
    return str(value.ty.dtype) in ID_TYPES
