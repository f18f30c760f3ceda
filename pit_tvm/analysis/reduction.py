"""Recognises how a block accumulates: ``out = op(out, term)`` and what ``op`` is.

PIT (SOSP'23, section 3.1) permutes a reduction axis only if its reducer is commutative and
associative. Anything that is not read with certainty as such a reducer is not recognised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx
from tvm.ir import prim

from .access import Access, BlockInfo, PrimExpr, Store, loads_in, loads_of, same_access
from .expr import to_access

_REDUCERS: dict[type[Any], str] = {
    prim.Add: "sum",
    prim.Mul: "prod",
    prim.Max: "max",
    prim.Min: "min",
    prim.And: "and",
    prim.BitwiseAnd: "and",
    prim.Or: "or",
    prim.BitwiseOr: "or",
    prim.Sub: "difference",
    prim.Div: "quotient",
}
_ORDERED = frozenset({"difference", "quotient"})
_HAVE_INFINITY = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True, eq=False)
class Reducer:
    """``target = op(target, *terms)``.

    ``op`` is one of sum, prod, max, min, and, or; or difference, quotient, which are neither
    commutative nor associative. ``dtype`` is the accumulator's. ``terms`` are those of all the
    stores to the buffer.
    """

    op: str
    dtype: str
    target: Access
    terms: tuple[PrimExpr, ...]

    @property
    def commutative(self) -> bool:
        return self.op not in _ORDERED

    @property
    def associative(self) -> bool:
        return self.op not in _ORDERED

    @property
    def identity(self) -> PrimExpr:
        """The element that leaves any other unchanged; KeyError for difference and quotient."""
        return identity_element(self.op, self.dtype)


@dataclass(frozen=True)
class NotAReducer:
    """Why a buffer is not accumulated by one known reducer."""

    reason: str


def identity_element(op: str, dtype: str) -> PrimExpr:
    """Identity of sum, prod, max, min, and, or as a constant of ``dtype``; KeyError otherwise.

    For max and min it is an infinity where the dtype has one (TE's own initial value is the
    largest finite number), else the end of its range.
    """
    if dtype == "bool":
        return tirx.const({"and": True, "min": True, "or": False, "max": False}[op], "bool")
    if op == "and":
        return tirx.max_value(dtype) if dtype.startswith("uint") else tirx.const(-1, dtype)
    if op in ("max", "min") and dtype in _HAVE_INFINITY:
        return tirx.FloatImm(dtype, float("-inf") if op == "max" else float("inf"))
    if op in ("max", "min"):
        return tirx.min_value(dtype) if op == "max" else tirx.max_value(dtype)
    return tirx.const({"sum": 0, "prod": 1, "or": 0}[op], dtype)


def _leaves(expr: PrimExpr, node: type[Any]) -> list[PrimExpr]:
    """Operands of a chain of one binary operator, left to right."""
    if isinstance(expr, node):
        return [*_leaves(expr.a, node), *_leaves(expr.b, node)]
    return [expr]


def _split(store: Store) -> tuple[str, tuple[PrimExpr, ...]] | NotAReducer:
    """Operator and terms of ``target = op(target, *terms)``."""
    target, value = store.target, store.value
    if type(value) not in _REDUCERS:
        return NotAReducer("its value is not an accumulation into the same element")
    op = _REDUCERS[type(value)]
    leaves = [value.a, value.b] if op in _ORDERED else _leaves(value, type(value))
    own = [i for i, leaf in enumerate(leaves) if _is_load(leaf, target)]
    if len(own) != 1 or (op in _ORDERED and own != [0]):
        return NotAReducer("its value is not an accumulation into the same element")
    return op, tuple(leaf for i, leaf in enumerate(leaves) if i != own[0])


def _is_load(expr: PrimExpr, access: Access) -> bool:
    return isinstance(expr, ir.TensorLoad) and same_access(to_access(expr), access)


def _dependence(info: BlockInfo, store: Store, terms: tuple[PrimExpr, ...]) -> str | None:
    """Why what is accumulated depends on the order: it reads something that the block writes."""
    written = [w.buffer for w in info.writes]
    for part in (*terms, *store.conditions, *store.target.indices):
        for load in loads_in(part):
            if any(load.buffer.same_as(buffer) for buffer in written):
                return f"its term reads {info.access_text(load)}, which the block writes"
    return None


def _read_elsewhere(info: BlockInfo, buffer: ir.Var) -> str | None:
    """Why partial results of ``buffer`` are visible: a store to another buffer reads it."""
    for store in (*info.init, *info.updates):
        if store.target.buffer.same_as(buffer):
            continue
        for load in loads_of(store):
            if load.buffer.same_as(buffer):
                target = info.access_text(store.target)
                return f"{target} reads the partial result {info.access_text(load)}"
    return None


def reducer_of(info: BlockInfo, buffer: ir.Var) -> Reducer | NotAReducer:
    """The one reducer by which a block's body accumulates into ``buffer``, or why there is none.

    Tuple reducers are recognised only if their components do not read one another: the sums of
    a variance are, an argmax is not (its ties depend on the order).
    """
    stores = [s for s in info.updates if s.target.buffer.same_as(buffer)]
    ops: set[str] = set()
    terms: list[PrimExpr] = []
    for store in stores:
        split = _split(store)
        if isinstance(split, NotAReducer):
            return split
        why = _dependence(info, store, split[1])
        if why is not None:
            return NotAReducer(why)
        ops.add(split[0])
        terms += split[1]
    if len(ops) != 1:
        return NotAReducer(f"it is accumulated by {' and '.join(sorted(ops)) or 'nothing'}")
    why = _read_elsewhere(info, buffer)
    if why is not None:
        return NotAReducer(why)
    return Reducer(ops.pop(), str(buffer.ty.dtype), stores[0].target, tuple(terms))
