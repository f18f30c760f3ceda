"""Elements that a graph picks by their places, and how few sequences or tokens leave one out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, sym
from tvm.ir import prim

from ..analysis.expr import is_one, replace_vars, uses
from ..runtime.arrays import as_numpy
from .plane import BATCH, TOKENS, Plane
from .rebuild import bindings_of, extents_of, is_op, same_extents, shape_of

# Operators that hand constant places on, in another shape or width.
_SAME_PLACES = ("reshape", "expand_dims", "squeeze", "broadcast_to", "astype")
#: Types of ids.
ID_TYPES = ("int32", "int64")
# Extents are tried one by one up to here: torch itself bounds those that a model needs more of.
_TRIED = 4096

#: Numbers of the constants among variables, in any order.
Places = dict[relax.Expr, np.ndarray]


def picks(value: relax.Expr) -> list[tuple[relax.Expr, int]]:
    """The ids by which ``value`` picks, each with the dimension of the data that they count."""
    if is_op(value, "take", "gather_elements"):
        return [(value.args[1], _axis(value))]
    if is_op(value, "index_tensor") and isinstance(value.args[1], relax.Tuple):
        return [(ids, axis) for axis, ids in enumerate(value.args[1].fields)]
    return []


def takes_a_token(value: relax.Expr, plane: Plane, made: Mapping[relax.Var, relax.Expr]) -> bool:
    """Whether ``value`` takes one token of each sequence, by a constant position or by an id for
    each, of a tensor whose dimensions are known to ``plane``. ``made`` as in `range_of`."""
    if is_op(value, "index_tensor"):
        return _takes_by_ids(value, plane, made)
    if is_op(value, "take"):
        tokens = plane.known(value.args[0])
        ids, axis = value.args[1], _axis(value)
        one = isinstance(ids, ir.GenericConst) and ids.value.numpy().size == 1
        return one and tokens[axis] == TOKENS
    left = plane.roles(value)
    if not is_op(value, "strided_slice") or left is None:
        return False
    tokens = plane.known(value.args[0])
    dims = [d for d, role in enumerate(tokens) if role != left[d]]
    return bool(dims) and all(tokens[d] == TOKENS and is_one(extents_of(value)[d]) for d in dims)


def _takes_by_ids(value: relax.Call, plane: Plane, made: Mapping[relax.Var, relax.Expr]) -> bool:
    """Whether the first ids are the sequences in order, and the second one token of each."""
    roles, ids = plane.known(value.args[0]), value.args[1]
    if not isinstance(ids, relax.Tuple) or len(ids.fields) != 2:
        return False
    sequences, each = range_of(ids.fields[0], made), [shape_of(field) for field in ids.fields]
    if list(roles[:2]) != [BATCH, TOKENS] or sequences is None:
        return False
    analyzer = sym.Analyzer()
    in_order = all(map(analyzer.can_prove_equal, sequences, (0, plane.batch)))
    return in_order and all(e is not None and same_extents(e, [plane.batch]) for e in each)


def least_sizes(module: tvm.IRModule, plane: Plane) -> dict[str, int]:
    """The least of batch and of tokens that have every place which ``main`` picks from."""
    found, known = {BATCH: 0, TOKENS: 0}, Places()
    for binding in bindings_of(module["main"]):
        value = binding.value
        numbers = _numbers(value, known)
        if numbers is not None:
            known[binding.var] = numbers
        for ids, axis in picks(value):
            extents = shape_of(value.args[0])
            if extents:
                for role, least in _demand(ids, extents[axis], known, plane).items():
                    found[role] = max(found[role], least)
    return found


def range_of(ids: relax.Expr, made: Mapping[relax.Var, relax.Expr]) -> tuple[Any, Any] | None:
    """The first of ids that count one by one, and the one after the last; None for others.
    ``made``: what computes each variable."""
    value: Any = made.get(ids) if isinstance(ids, relax.Var) else None
    if is_op(value, "arange"):
        first, end, step = value.args
        return (first, end) if is_one(step) else None
    if is_op(value, *_SAME_PLACES):
        return range_of(value.args[0], made)
    if is_op(value, "add", "subtract"):
        return _shifted(value, made)
    if is_op(value, "minimum", "maximum"):
        return _within(value, made)
    return _from_start(value, made) if is_op(value, "where") else None


def _shifted(total: relax.Call, made: Mapping[relax.Var, relax.Expr]) -> tuple[Any, Any] | None:
    """The range of ids and one constant, added or subtracted."""
    found, beyond = range_of(total.args[0], made), shift_of(total)
    if found is None or beyond is None:
        return None
    return found[0] + beyond, found[1] + beyond


def _within(bounded: relax.Call, made: Mapping[relax.Var, relax.Expr]) -> tuple[Any, Any] | None:
    """The range of ids that a bound leaves as they are."""
    found, bound = range_of(bounded.args[0], made), bounded.args[1]
    if not isinstance(bound.ty, ir.PrimType):
        numbers = _numbers(bound, {})
        if numbers is None or numbers.size != 1:
            return None
        bound = int(numbers.item())
    if found is None:
        return None
    first, end = found
    inside = end - 1 <= bound if is_op(bounded, "minimum") else first >= bound
    return found if sym.Analyzer().can_prove(inside) else None


def shift_of(total: relax.Call) -> int | None:
    """The one constant that a sum or a difference moves ids by; None for others."""
    numbers = _numbers(total.args[1], {})
    if numbers is None or numbers.size != 1:
        return None
    return int(numbers.item()) if is_op(total, "add") else -int(numbers.item())


def _from_start(choice: relax.Call, made: Mapping[relax.Var, relax.Expr]) -> tuple[Any, Any] | None:
    """The range of ids that are chosen unless negative, if none is."""
    condition, _, ids = choice.args
    found = range_of(ids, made)
    test: Any = made.get(condition)
    if found is None or not is_op(test, "less") or not test.args[0].same_as(ids):
        return None
    zero = _numbers(test.args[1], {})
    never = zero is not None and not zero.any() and sym.Analyzer().can_prove(found[0] >= 0)
    return found if never else None


def roles_in(extent: Any, plane: Plane) -> dict[str, Any]:
    """Which of batch and tokens an extent depends on."""
    roles = {BATCH: plane.batch, TOKENS: plane.tokens}
    return {role: var for role, var in roles.items() if uses(extent, var)}


def _axis(pick: relax.Call) -> int:
    """The dimension that is picked from; what has one only may leave it out."""
    axis = pick.attrs.axis
    return 0 if axis is None else int(axis) % int(pick.args[0].ty.ndim)


def _demand(ids: relax.Expr, extent: Any, known: Places, plane: Plane) -> dict[str, int]:
    """The least of each role in ``extent`` with which that has the places of ``ids``; where they
    are computed, one place, unless there are no ids either without it."""
    roles = roles_in(extent, plane)
    places = _numbers(ids, known)
    if places is not None:
        need = max(int(places.max()) + 1, -int(places.min())) if places.size else 0
    else:
        sizes = shape_of(ids) or ()
        need = int(not any(uses(size, var) for size in sizes for var in roles.values()))
    if len(roles) != 1:  # products of both: which of them is too small, a call cannot tell
        return dict.fromkeys(roles, min(need, 1))
    ((role, var),) = roles.items()
    return {role: _least(extent, var, need)}


def _least(extent: Any, var: Any, need: int) -> int:
    """The smallest value of ``var`` with which ``extent`` is ``need``; 0 if none is known."""
    analyzer = sym.Analyzer()
    for number in range(_TRIED if need else 0):
        size = analyzer.simplify(replace_vars(extent, {var: prim.IntImm("int64", number)}))
        if not isinstance(size, prim.IntImm):
            return 0
        if int(size) >= need:
            return number
    return 0


def _numbers(value: relax.Expr, known: Mapping[relax.Expr, np.ndarray]) -> np.ndarray | None:
    """What a constant holds, or a variable or call that hands one on."""
    if isinstance(value, ir.GenericConst):
        return as_numpy(value.value) if str(value.ty.dtype) in ID_TYPES else None
    if isinstance(value, relax.Var):
        return known.get(value)
    if is_op(value, *_SAME_PLACES):
        return _numbers(value.args[0], known)
    return None
