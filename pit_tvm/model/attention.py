"""Attention in a graph: softmax(scale q k^T + mask) v, recognised from its value backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import ir, relax
from tvm.ir import prim

from ..analysis.expr import is_one, is_zero
from .excluding import excluding
from .masks import PARTIAL, Kind
from .plane import BATCH, PLAIN, TOKENS, Plane, Roles
from .rebuild import extents_of, is_op, same_extents, typed
from .tidy import widens

_HEADED = (BATCH, PLAIN, TOKENS, PLAIN)
_KEYS_LAST = (BATCH, PLAIN, PLAIN, TOKENS)


@dataclass(frozen=True)
class Attention:
    """``query`` ``[batch, heads, tokens, head_dim]``, ``keys`` with the last two swapped, and
    ``value`` of width ``value_dim``. ``added``: what is added to the scores, of this ``kind``.
    ``sinks`` ``[heads]``: scores beside those of keys, which take their part of the weight.
    ``plain``: scores are the product, scaled, and what is added to it, and nothing else.
    ``problem`` says why it may not skip dead tokens; it is empty if it may."""

    query: relax.Var
    keys: relax.Var
    value: relax.Var
    heads: int
    head_dim: int
    value_dim: int
    scale: float
    kind: Kind
    problem: str
    added: relax.Expr | None
    sinks: relax.Constant | None = None
    plain: bool = True


@dataclass(frozen=True)
class _Scores:
    """The ``product`` of queries and keys by a ``factor``, or, if ``bent``, tanh of such and a
    factor; ``terms``: what else was found on the way; ``added``: all that is added to it."""

    product: relax.Call
    factor: float
    bent: bool = False
    terms: tuple[relax.Expr, ...] = ()
    added: relax.Expr | None = None


def match_attention(
    expr: relax.Expr,
    values: Mapping[relax.Var, relax.Expr],
    plane: Plane,
    kind_of: Callable[..., tuple[Kind, str]],
) -> Attention | None:
    """The attention whose result ``expr`` is, ``[batch, heads, tokens, value_dim]``; else None.

    ``kind_of`` says what is added to the scores, as `masks.mask_kind` does, given queries and keys
    where it depends on them.
    """
    look = _Look(values, plane)
    product = look.through(expr, "reshape")
    if plane.roles(expr) != _HEADED or not is_op(product, "matmul"):
        return None
    weights = look.weights(product.args[0])
    value = look.headed(product.args[1], _HEADED)
    if weights is None or value is None:
        return None
    given, sink = weights
    scores = look.scores(given)
    if scores is None:
        return None
    inner, added = scores.product, scores.added
    by_query, query = look.scaled_operand(inner.args[0], _HEADED)
    by_keys, keys = look.scaled_operand(inner.args[1], _KEYS_LAST)
    if query is None or keys is None:
        return None
    sizes = _sizes(query, keys, value)
    if sizes is None:
        return None
    kind: Kind = ""
    problem = "it has no mask: dead keys would be seen"
    sinks = None if sink is None else look.of_heads(sink, sizes[0])
    if added is not None:
        kind, problem = kind_of(added)
        if problem:
            kind, problem = kind_of(added, query, keys, *relax.analysis.free_vars(look.made(keys)))
    if (scores.bent or (sink is not None and sinks is None)) and not problem:
        kind = PARTIAL
    return Attention(
        query,
        keys,
        value,
        *sizes,
        scores.factor * by_query * by_keys,
        kind,
        problem,
        added,
        sinks,
        not scores.bent and sink is None,
    )


def _sizes(query: relax.Expr, keys: relax.Expr, value: relax.Expr) -> tuple[int, int, int] | None:
    """Heads, and the widths of queries and of values; None if they are of other tokens than keys,
    or not known."""
    batch, heads, tokens, size = extents_of(query)
    *like_query, width = extents_of(value)
    if not same_extents(like_query, (batch, heads, tokens)):
        return None
    if not same_extents(extents_of(keys), (batch, heads, size, tokens)):
        return None
    if not all(isinstance(extent, prim.IntImm) for extent in (heads, size, width)):
        return None
    return int(heads), int(size), int(width)


def sinks_of(found: Attention) -> relax.Constant:
    """The sinks of attention, float32 ``[heads]``; ``[0]`` if it has none."""
    sinks = np.zeros(0) if found.sinks is None else found.sinks.value.numpy()
    return relax.const(sinks.reshape(-1).astype(np.float32))


class _Look:
    """Follows values backwards through what changes neither their elements nor their order."""

    def __init__(self, values: Mapping[relax.Var, relax.Expr], plane: Plane) -> None:
        self.values, self.plane = values, plane

    def made(self, expr: relax.Expr) -> relax.Expr:
        """What computes a variable; the expression itself where nothing does."""
        while isinstance(expr, relax.Var) and expr in self.values:
            expr = self.values[expr]
        return expr

    def through(self, expr: relax.Expr, *names: str) -> relax.Expr:
        """The first value backwards that none of these operators computes, where they keep its
        elements: reshapes that keep the last two dimensions (they fold batch and heads, or unfold
        them), and casts of floats to floats."""
        found = self.made(expr)
        while is_op(found, *names) and _keeps(found):
            found = self.made(found.args[0])
        return found

    def uncast(self, condition: relax.Expr) -> relax.Expr:
        """What is computed before casts, which keep whether a condition holds."""
        found = self.made(condition)
        while is_op(found, "astype"):
            found = self.made(found.args[0])
        return found

    def headed(self, expr: relax.Expr, roles: Roles) -> relax.Var | None:
        """The first variable behind reshapes, and casts to more bits, whose dimensions have these
        roles."""
        return self._headed(expr, roles, scaled=False)[1]

    def scaled(self, expr: relax.Expr) -> tuple[float, relax.Expr]:
        """A constant factor, and what it multiplies."""
        made = self.made(expr)
        if is_op(made, "multiply", "divide") and isinstance(made.args[1], ir.GenericConst):
            constant = made.args[1].value.numpy()
            if constant.size == 1:
                by = float(constant.reshape(()))
                return (by if is_op(made, "multiply") else 1.0 / by), made.args[0]
        return 1.0, made

    def scaled_operand(self, expr: relax.Expr, roles: Roles) -> tuple[float, relax.Var | None]:
        """A factor, and the variable with heads behind an operand of the first product."""
        return self._headed(expr, roles, scaled=True)

    def _headed(
        self, expr: relax.Expr, roles: Roles, scaled: bool
    ) -> tuple[float, relax.Var | None]:
        """`headed`, behind constant factors, too, if it may be ``scaled``."""
        factor = 1.0
        while isinstance(expr, relax.Var):
            by, inner = self.scaled(expr) if scaled else (1.0, expr)
            if inner is not expr and isinstance(inner, relax.Var):
                factor, expr = factor * by, inner
                continue
            if self.plane.roles(expr) == roles:
                return factor, expr
            made = self.made(expr)
            if not widens(made) and not (is_op(made, "reshape") and _folds(made)):
                break
            expr = made.args[0]
        return 1.0, None

    def scores(self, expr: relax.Expr) -> _Scores | None:
        """The product of queries and keys and what is added to it. What takes the place of some
        scores is as if added to them."""
        made = self.through(expr, "astype")
        if is_op(made, "where"):
            return self._replaced(made)
        found = self._product(made)
        return found and replace(found, added=_sum(found.terms))

    def _product(self, made: relax.Expr) -> _Scores | None:
        """The product among what is added up, and the other terms."""
        if is_op(made, "add"):
            for term, other in zip(made.args, reversed(made.args), strict=True):
                found = self._product(self.made(term))
                if found is not None:
                    return replace(found, terms=(*found.terms, other))
            return None
        factor, inner = self.scaled(made)
        product = self.through(inner, "reshape")
        if is_op(product, "matmul"):
            return _Scores(product, factor)
        summed = self.through(made, "reshape", "astype")
        if is_op(summed, "add") and summed is not made:
            return _unfolded(self._product(summed), summed, made)
        bent = is_op(product, "tanh")
        if not bent and (product is made or not is_op(product, "multiply", "divide")):
            return None
        found = self._product(self.made(product.args[0]) if bent else product)
        if found is None or found.terms:  # which would be bent, or multiplied, too
            return None
        return replace(found, factor=found.factor * factor, bent=found.bent or bent)

    def _replaced(self, choice: relax.Call) -> _Scores | None:
        """`scores` of a choice between scores and a number other than 0: that stands for scores
        that are left as they are. Of one choice, not of several in turn."""
        condition, *branches = choice.args
        for place, other in ((0, 1), (1, 0)):
            number = self.made(branches[other])
            found = self.scores(branches[place])
            if found is None or not _is_number(number) or self._is_zero(number):
                continue
            kept = relax.const(0, choice.ty.dtype) if found.added is None else found.added
            if kept.ty.dtype != choice.ty.dtype:
                continue
            terms = [number, number]
            terms[place] = kept
            chosen = relax.op.where(condition, *terms)
            return replace(found, added=typed(chosen))
        return None

    def weights(self, expr: relax.Expr) -> tuple[relax.Expr, relax.Expr | None] | None:
        """The scores whose softmax over the last axis attention weights are, and the column behind
        them, if one stood there that takes its part of the weight and is left out (a sink). Rows
        without any key may be set to 0 after it: live queries have a key, themselves."""
        found = self.through(expr, "reshape", "astype")
        if is_op(found, "strided_slice"):
            return self._beside_sink(found)
        if is_op(found, "where"):
            condition, zeros, weights = found.args
            softmax = self.through(weights, "reshape", "astype")
            if not self._is_zero(zeros):
                return None
            if not is_op(softmax, "nn.softmax"):
                return None
            without_key = self._has_no_key(condition, softmax.args[0])
            if not without_key and not self._is_nan(condition, softmax):
                return None
            found = softmax
        return (found.args[0], None) if _is_softmax(found) else None

    def _beside_sink(self, kept: relax.Call) -> tuple[relax.Expr, relax.Expr] | None:
        """`weights` of which ``kept`` are all columns but the last one."""
        softmax = self.through(kept.args[0], "reshape", "astype")
        if not _is_softmax(softmax):
            return None
        given = self.through(softmax.args[0], "astype")
        if is_op(given, "subtract") and self._is_peak(given.args[1], given.args[0]):
            given = self.through(given.args[0], "astype")
        parts = self.made(given.args[0]) if is_op(given, "concat") else None
        last = given.ty.ndim - 1
        if not isinstance(parts, relax.Tuple) or int(given.attrs.axis) not in (-1, last):
            return None
        begins = kept.args[2]
        from_first = isinstance(begins, relax.Tuple) and all(map(is_zero, begins.fields))
        scores, sink = parts.fields[0], parts.fields[-1]
        alike = same_extents(extents_of(scores), extents_of(kept))
        if len(parts.fields) != 2 or not from_first or not alike or not self._is_weight(sink):
            return None
        return scores, sink

    def of_heads(self, sink: relax.Expr, heads: int) -> relax.Constant | None:
        """The weight with an element for each head that a column ``[batch, heads, tokens, 1]``
        repeats; None if it differs otherwise."""
        found = self.made(sink)
        while is_op(found, "broadcast_to", "astype"):
            found = self.made(found.args[0])
        *others, _, high, wide = extents_of(found) if found.ty.ndim > 2 else (0, 0, 0)
        while is_op(found, "reshape", "astype"):
            found = self.made(found.args[0])
        of_model = isinstance(found, ir.GenericConst) and found.value.numpy().size == heads
        return found if of_model and all(map(is_one, (*others, high, wide))) else None

    def _is_weight(self, expr: relax.Expr) -> bool:
        """Whether an expression is a weight of the model, repeated or not."""
        found = self.made(expr)
        while is_op(found, "reshape", "broadcast_to", "astype"):
            found = self.made(found.args[0])
        return isinstance(found, ir.GenericConst)

    def _is_peak(self, expr: relax.Expr, scores: relax.Expr) -> bool:
        """Whether an expression is the largest of each row of scores, which changes no weight."""
        found = self.made(expr)
        if not is_op(found, "max") or not found.args[0].same_as(scores):
            return False
        return [int(axis) % scores.ty.ndim for axis in found.attrs.axis] == [scores.ty.ndim - 1]

    def _is_zero(self, expr: relax.Expr) -> bool:
        made = self.made(expr)
        constant = isinstance(made, ir.GenericConst) and not made.value.numpy().any()
        return constant or is_op(made, "full_like", "zeros_like", "full", "zeros")

    def _is_nan(self, condition: relax.Expr, softmax: relax.Call) -> bool:
        """Whether a condition is true where these weights are NaN, as those of no key are."""
        found = self.made(condition)
        return is_op(found, "isnan") and self.made(found.args[0]).same_as(softmax)

    def _has_no_key(self, condition: relax.Expr, scores: relax.Expr) -> bool:
        """Whether a condition is true where all scores of a row are excluded, and only there."""
        found = condition
        for name in ("logical_not", "max", "logical_not"):
            found = self.uncast(found)
            if not is_op(found, name):
                return False
            found = found.args[0]
        found = self.uncast(found)
        if not is_op(found, "equal") or not found.args[0].same_as(scores):
            return False
        limit = found.args[1]
        if not isinstance(limit, ir.GenericConst):
            return False
        return bool((limit.value.numpy() < excluding(limit.ty.dtype)).all())


def _sum(terms: Sequence[relax.Expr]) -> relax.Expr | None:
    """Terms added up; None if there are none."""
    if not terms:
        return None
    total, *others = terms
    for term in others:
        total = typed(relax.op.add(total, term))
    return total


def _unfolded(found: _Scores | None, folded: relax.Call, scores: relax.Call) -> _Scores | None:
    """What was found of ``folded``, of which ``scores`` has the elements, in another type or with
    batch and heads told apart: its terms as they are added to those."""
    if found is None or scores.ty.ndim != 4:
        return None
    batch, heads, *_ = extents_of(scores)
    terms = []
    for term in found.terms:
        *before, high, wide = extents_of(term)
        if folded.ty.ndim == 3 and same_extents(before, extents_of(folded)[:1]):
            term = typed(relax.op.reshape(term, (batch, heads, high, wide)))
        elif folded.ty.ndim != 4 and not all(map(is_one, before)):
            return None
        cast = term.ty.dtype != scores.ty.dtype
        terms.append(typed(relax.op.astype(term, scores.ty.dtype)) if cast else term)
    return replace(found, terms=tuple(terms))


def _keeps(call: relax.Call) -> bool:
    """Whether what `_Look.through` looks through keeps elements."""
    if is_op(call, "reshape"):
        return _folds(call)
    before, after = str(call.args[0].ty.dtype), str(call.ty.dtype)
    return before == "bool" or ("float" in before and "float" in after)


def _is_softmax(expr: relax.Expr) -> bool:
    return is_op(expr, "nn.softmax") and int(expr.attrs.axis) in (-1, expr.ty.ndim - 1)


def _is_number(expr: relax.Expr) -> bool:
    return isinstance(expr, ir.GenericConst) and expr.value.numpy().size == 1


def _folds(reshape: relax.Call) -> bool:
    before, after = extents_of(reshape.args[0]), extents_of(reshape)
    return same_extents(before[-2:], after[-2:])
