"""The token plane: which dimensions of a tensor run over the batch and over its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, sym, tirx

from ..analysis.expr import is_zero, replace_vars, uses
from ..errors import ShapeError, mismatch
from .rebuild import shape_of

PLAIN, BATCH, TOKENS, BOTH = "", "batch", "tokens", "batch x tokens"
Roles = tuple[str, ...]
#: The least and the most that a model admits of an extent (None: any).
Bound = tuple[int, int | None]


@dataclass(frozen=True)
class Plane:
    """The symbolic extents of the batch and of its tokens; no other extent may contain them."""

    batch: tirx.Var
    tokens: tirx.Var

    def roles(self, expr: relax.Expr) -> Roles | None:
        """What each dimension of a tensor runs over.

        None for what is no tensor, has an unknown shape, no elements, an extent that mixes batch
        or tokens with something else, or one of them twice, as scores of all pairs of tokens have.
        """
        extents = shape_of(expr)
        # No elements: in a reshape of Relax an extent of 0 means the operand's own.
        if extents is None or any(is_zero(e) for e in extents):
            return None
        found = tuple(self.role(e) for e in extents)
        names = [part for role in found if role for part in role.split(" x ")]
        if "?" in names or len(set(names)) != len(names):
            return None
        return found

    def known(self, expr: relax.Expr) -> Roles:
        """`roles` of a tensor that has some; ShapeError if it has none."""
        found = self.roles(expr)
        if found is None:
            raise ShapeError(mismatch("model", "batch and tokens as axes", str(expr.ty)))
        return found

    def is_token_wise(self, roles: Roles | None) -> bool:
        """Whether a tensor has elements of every token: both axes, apart or as one."""
        return roles is not None and (BOTH in roles or {BATCH, TOKENS} <= set(roles))

    def has_tokens(self, ty: ir.Type) -> bool:
        """Whether a tensor, or any of several, may have elements of different tokens."""
        if isinstance(ty, relax.TupleType):
            return any(map(self.has_tokens, ty.fields))
        if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
            return True
        return any(uses(extent, self.tokens) for extent in ty.shape.values)

    def occurs_in(self, number: Any) -> bool:
        """Whether a symbolic number depends on the batch or on its tokens."""
        return any(uses(number, v) for v in (self.batch, self.tokens))

    def role(self, extent: Any) -> str:
        """What a dimension of this extent runs over; "?" for a mixture."""
        if not self.occurs_in(extent):
            return PLAIN
        if isinstance(extent, tirx.Var):
            return BATCH if extent.same_as(self.batch) else TOKENS
        prove = sym.Analyzer().can_prove_equal
        for role, whole in (
            (BATCH, self.batch),
            (TOKENS, self.tokens),
            (BOTH, self.batch * self.tokens),
        ):
            if prove(extent, whole):
                return role
        return "?"

    def packed(self, live: tirx.Var) -> Any:
        """A function on extents: one sequence that holds all ``live`` tokens."""
        analyzer = sym.Analyzer()
        sizes = {self.batch: tirx.IntImm("int64", 1), self.tokens: live}
        return lambda extent: analyzer.simplify(replace_vars(extent, sizes))


def tokens_place(roles: Roles, result: Roles) -> int | None:
    """The dimension of an operand with one value for each sequence that stands where the tokens of
    ``result`` are, if both are aligned at their last dimensions; None for other operands, or where
    there is none."""
    if BATCH not in roles or TOKENS in roles or TOKENS not in result:
        return None
    place = result.index(TOKENS) - (len(result) - len(roles))
    return place if place >= 0 else None


def segments(extents: Sequence[Any], roles: Roles) -> list[Any] | None:
    """Products of the extents before, between and after the axes of the plane, in that order.

    None where a batch axis does not come before its tokens.
    """
    order = [role for role in roles if role]
    if order not in ([BATCH, TOKENS], [BOTH], [BATCH], [TOKENS], []):
        return None
    one = tirx.IntImm("int64", 1)
    products = [one]
    for extent, role in zip(extents, roles, strict=True):
        if role:
            products += [one, one] if role == BOTH else [one]
        else:
            products[-1] = products[-1] * extent
    return products
