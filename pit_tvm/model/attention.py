"""Attention in a graph: softmax(scale q k^T + mask) v, recognised from its value backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import ir, relax
from tvm.ir import prim

from .masks import excluding
from .plane import BATCH, PLAIN, TOKENS, Plane, Roles
from .rebuild import extents_of, is_op, same_extents

_HEADED = (BATCH, PLAIN, TOKENS, PLAIN)
_KEYS_LAST = (BATCH, PLAIN, PLAIN, TOKENS)


@dataclass(frozen=True)
class Attention:
    """``query`` and ``value`` ``[batch, heads, tokens, head_dim]``, ``keys`` with the last two
    swapped. ``added``: what is added to the scores, of this ``kind``. ``problem`` says why it may
    not skip dead tokens; it is empty if it may."""

    query: relax.Var
    keys: relax.Var
    value: relax.Var
    heads: int
    head_dim: int
    scale: float
    kind: str
    problem: str
    added: relax.Expr | None


def match_attention(
    expr: relax.Expr,
    values: Mapping[relax.Var, relax.Expr],
    plane: Plane,
    kind_of: Callable[[relax.Expr], tuple[str, str]],
) -> Attention | None:
    """The attention whose result ``expr`` is, ``[batch, heads, tokens, head_dim]``; else None.

    ``kind_of`` says what is added to the scores, as `masks.mask_kind` does.
    """
    look = _Look(values, plane)
    product = look.through(expr, "reshape")
    if plane.roles(expr) != _HEADED or not is_op(product, "matmul"):
        return None
    weights = look.weights(product.args[0])
    value = look.headed(product.args[1], _HEADED)
    if weights is None or value is None:
        return None
    factor, inner, added = look.scores(weights.args[0])
    if inner is None:
        return None
    by_query, query = look.scaled_operand(inner.args[0], _HEADED)
    by_keys, keys = look.scaled_operand(inner.args[1], _KEYS_LAST)
    if query is None or keys is None:
        return None
    extents = extents_of(query)
    batch, heads, tokens, size = extents
    like_query = same_extents(extents_of(value), extents)
    if not like_query or not same_extents(extents_of(keys), (batch, heads, size, tokens)):
        return None
    if not (isinstance(heads, prim.IntImm) and isinstance(size, prim.IntImm)):
        return None
    kind, problem = "", "it has no mask: dead keys would be seen"
    if added is not None:
        kind, problem = kind_of(added)
    return Attention(
        query,
        keys,
        value,
        int(heads),
        int(size),
        factor * by_query * by_keys,
        kind,
        problem,
        added,
    )


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
        """The first variable behind reshapes whose dimensions have these roles."""
        while isinstance(expr, relax.Var):
            if self.plane.roles(expr) == roles:
                return expr
            made = self.made(expr)
            if not is_op(made, "reshape") or not _folds(made):
                return None
            expr = made.args[0]
        return None

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
        var = self.headed(expr, roles)
        factor, inner = (1.0, None) if var is None else self.scaled(var)
        if isinstance(inner, relax.Var) and self.plane.roles(inner) == roles:
            return factor, inner
        return 1.0, var

    def scores(self, expr: relax.Expr) -> tuple[float, relax.Call | None, relax.Expr | None]:
        """A factor, the product of queries and keys, and what is added to it, if anything is. What
        takes the place of some scores is as if added to them."""
        made = self.through(expr, "astype")
        if is_op(made, "where"):
            return self._replaced(made)
        factor, product, others = self._product(made)
        return factor, product, _sum(others)

    def _product(self, made: relax.Expr) -> tuple[float, relax.Call | None, list[relax.Expr]]:
        """A factor and the product among what is added up, and the other terms."""
        terms = list(made.args) if is_op(made, "add") else []
        for term, other in zip(terms, reversed(terms), strict=True):
            factor, product, others = self._product(self.made(term))
            if product is not None:
                return factor, product, [*others, other]
        factor, inner = (1.0, None) if terms else self.scaled(made)
        product = self.through(inner, "reshape") if inner is not None else None
        return factor, product if is_op(product, "matmul") else None, []

    def _replaced(self, choice: relax.Call) -> tuple[float, relax.Call | None, relax.Expr | None]:
        """`scores` of a choice between scores and a number other than 0: that stands for scores
        that are left as they are. Of one choice, not of several in turn."""
        condition, *branches = choice.args
        for place, other in ((0, 1), (1, 0)):
            number = self.made(branches[other])
            factor, product, added = self.scores(branches[place])
            known = _is_number(number) and not self._is_zero(number)
            kept = relax.const(0, choice.ty.dtype) if added is None else added
            leaf = not isinstance(kept, relax.Call) and kept.ty.dtype == choice.ty.dtype
            if product is None or not known or not leaf:
                continue
            terms = [number, number]
            terms[place] = kept
            chosen = relax.op.where(condition, *terms)
            return factor, product, relax.BlockBuilder().normalize(chosen)
        return 1.0, None, None

    def weights(self, expr: relax.Expr) -> relax.Call | None:
        """The softmax over the last axis behind attention weights. Rows without any key may be
        set to 0 after it: live queries have a key, themselves."""
        found = self.through(expr, "reshape", "astype")
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
        last = is_op(found, "nn.softmax") and int(found.attrs.axis) in (-1, found.ty.ndim - 1)
        return found if last else None

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
        total = relax.BlockBuilder().normalize(relax.op.add(total, term))
    return total


def _keeps(call: relax.Call) -> bool:
    """Whether what `_Look.through` looks through keeps elements."""
    if is_op(call, "reshape"):
        return _folds(call)
    before, after = str(call.args[0].ty.dtype), str(call.ty.dtype)
    return before == "bool" or ("float" in before and "float" in after)


def _is_number(expr: relax.Expr) -> bool:
    return isinstance(expr, ir.GenericConst) and expr.value.numpy().size == 1


def _folds(reshape: relax.Call) -> bool:
    before, after = extents_of(reshape.args[0]), extents_of(reshape)
    return same_extents(before[-2:], after[-2:])
