"""Embeddings of a graph: rows of tables, summed up and normalised, as one kernel.

A layer norm over the last axis is taken together with the sum before it if that has a row of a
table for every row, picked by ids; positions and kinds of tokens are tables as words are. What
something else reads as well stays as it is: it is there to be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from ..analysis.expr import is_one
from .kernels import Kernels, RowNorm
from .norms import row_norm
from .picks import ID_TYPES
from .rebuild import (
    Extent,
    extents_of,
    flat_rows,
    is_op,
    readers_of,
    rebuild,
    same_extents,
    same_shape,
    shape_of,
    values_of,
)

# What `take` does with an id outside of its table; "fast" leaves it open.
_MODES = ("fast", "clip")


@dataclass(frozen=True)
class _Picked:
    """Rows of ``table`` ``[..., n, width]`` by ``ids`` of any shape."""

    table: relax.Expr
    ids: relax.Expr


def extract_embeddings(module: tvm.IRModule, kernels: Kernels) -> tvm.IRModule:
    """Replace every layer norm of a sum with rows of tables in it by one kernel for all of that,
    if the backend has one."""
    sums = _Sums(module["main"])

    def rule(builder: relax.BlockBuilder, call: relax.Call, var: relax.Var) -> relax.Expr:
        how = row_norm(call)
        if how is None:
            return call
        terms = list(sums.terms(builder, sums.values[var].args[0], call.args[0]))
        if not any(isinstance(term, _Picked) for term in terms):
            return call
        made = _emit(builder, call, terms, how, kernels)
        return call if made is None else made

    return rebuild(module, rule)


class _Sums:
    """Follows sums backwards through what is only read there: in the function as it was, which
    knows all users, and in the one that is being built, which has what is to be read."""

    def __init__(self, main: relax.Function) -> None:
        self.values, self.readers = values_of(main), readers_of(main)

    def terms(
        self, builder: relax.BlockBuilder, old: relax.Expr, new: relax.Expr
    ) -> Iterator[relax.Expr | _Picked]:
        """What is summed up to ``old``, which is ``new`` in the builder's function."""
        made, now = self._made(builder, old, new)
        while is_op(made, "reshape") and _keeps_rows(now):
            made, now = self._made(builder, made.args[0], now.args[0])
        if is_op(made, "add") and all(same_shape(each, now) for each in now.args):
            for pair in zip(made.args, now.args, strict=True):
                yield from self.terms(builder, *pair)
        else:
            yield _picked(now) or new

    def _made(
        self, builder: relax.BlockBuilder, old: relax.Expr, new: relax.Expr
    ) -> tuple[relax.Expr, relax.Expr]:
        """What computes a value, in both functions, if nothing else reads it."""
        if len(self.readers.get(old, ())) != 1 or old not in self.values:
            return old, new
        return self.values[old], builder.lookup_binding(new)


def _keeps_rows(reshape: relax.Call) -> bool:
    """Whether rows stay whole: then they keep their order."""
    before, after = shape_of(reshape.args[0]), shape_of(reshape)
    return before is not None and after is not None and same_extents(before[-1:], after[-1:])


def _picked(expr: relax.Expr) -> _Picked | None:
    """Rows of one table, if that is what ``expr`` takes: its result is ids' extents and a row."""
    if not is_op(expr, "take") or str(expr.attrs.mode) not in _MODES:
        return None
    table, ids = expr.args
    extents = shape_of(table)
    typed = isinstance(ids.ty, relax.TensorType) and str(ids.ty.dtype) in ID_TYPES
    if extents is None or not typed or shape_of(ids) is None or expr.attrs.axis is None:
        return None
    rows = len(extents) - 2
    alone = all(is_one(extent) for extent in extents[:rows])
    if rows < 0 or not alone or int(expr.attrs.axis) % len(extents) != rows:
        return None
    return _Picked(table, ids)


def _emit(
    builder: relax.BlockBuilder,
    call: relax.Call,
    terms: Sequence[relax.Expr | _Picked],
    how: RowNorm,
    kernels: Kernels,
) -> relax.Call | None:
    arrays = [flat_rows(builder, term) for term in terms if not isinstance(term, _Picked)]
    tables = [
        (
            _reshaped(builder, term.ids, [-1]),
            _reshaped(builder, term.table, [-1, *extents_of(call)[-1:]]),
        )
        for term in terms
        if isinstance(term, _Picked)
    ]
    made = kernels.embeddings(builder, tables, arrays, how)
    if made is None:
        return None
    return relax.op.reshape(builder.emit(made), list(extents_of(call)))


def _reshaped(
    builder: relax.BlockBuilder, expr: relax.Expr, extents: Sequence[Extent]
) -> relax.Expr:
    """``expr`` with these extents, untouched if it has as many dimensions: tables are large."""
    if len(extents_of(expr)) == len(extents):
        return expr
    return builder.emit(relax.op.reshape(expr, list(extents)))
