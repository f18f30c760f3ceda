"""Recognises how a block accumulates: ``out = op(out, term)`` and what ``op`` is.

PIT (SOSP'23, section 3.1) permutes a reduction axis only if its reducer is commutative and
associative. Anything that is not read with certainty as such a reducer is not recognised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir
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


@dataclass(frozen=True, eq=False)
class Reducer:
    """``out = op(out, *terms)``.

    ``op`` is one of sum, prod, max, min, and, or; or difference, quotient. ``terms`` are those of
    all the stores to the buffer.
    """

    op: str
    terms: tuple[PrimExpr, ...]

    @property
    def takes_any_order(self) -> bool:
        """Whether it is commutative and associative."""
        return self.op not in _ORDERED


@dataclass(frozen=True)
class NotAReducer:
    """Why a buffer is not accumulated by one known reducer."""

    reason: str


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
    return Reducer(ops.pop(), tuple(terms))
