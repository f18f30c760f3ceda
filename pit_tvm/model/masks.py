"""What an attention mask does to dead keys, read off the expression that computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax, tirx

from ..analysis.expr import is_one
from ..windows import Window
from .elements import Element, Reader
from .excluding import may_exclude
from .plane import BATCH, BOTH, TOKENS, Plane
from .rebuild import is_op

PARTIAL = "partial"
Kind = Window | str  # PARTIAL, or "" for nothing that is known


def mask_kind(
    mask: relax.Expr,
    made_by: Callable[[relax.Var], Any],
    live: relax.Var,
    operands: Sequence[relax.Var] = (),
) -> tuple[Kind, str]:
    """What ``mask``, added to the scores ``[batch, heads, query, key]``, does. Numbers that are
    made of ``operands``, as scores are, exclude no more than scores do.

    Returns
    -------
    tuple
        ``(window, "")``: of the keys that are live in ``live`` (``[batch, tokens]``, 0 or 1) those
        in the `Window` are seen by every live query, their scores as they are, and no others;
        ``(PARTIAL, "")``: no dead key is seen by a live query, which sees itself, but what else it
        sees, and what is added to those scores, is not known; ``("", reason)`` where nothing can be
        proven.
    """

    def excludes(part: relax.Expr) -> bool:
        return may_exclude(part, made_by, live, operands)

    kind, reason = _kind(mask, made_by, live, excludes)
    if kind:
        return kind, reason
    terms = _terms_of(mask, made_by)
    for one in terms:
        others = (other for other in terms if other is not one)
        if _kind(one, made_by, live, excludes)[0] and not any(map(excludes, others)):
            return PARTIAL, ""
    return kind, reason


def _terms_of(expr: relax.Expr, made_by: Callable[[relax.Var], Any]) -> list[relax.Expr]:
    """What is added up to ``expr``."""
    made = expr
    while isinstance(made, relax.Var) and made_by(made) is not None:
        made = made_by(made)
    if not is_op(made, "add"):
        return [expr]
    return [term for arg in made.args for term in _terms_of(arg, made_by)]


def _kind(
    mask: relax.Expr,
    made_by: Callable[[relax.Var], Any],
    live: relax.Var,
    excludes: Callable[[relax.Expr], bool],
) -> tuple[Kind, str]:
    """`mask_kind`, of a mask as a whole; ``excludes``: whether a part may, that is not read."""
    batch, head, query, key = (tirx.Var(n, "int64") for n in ("batch", "head", "query", "key"))
    reader = Reader(made_by, live, (batch, head, query, key))
    value = reader.element(mask, _broadcast(mask, (batch, head, query, key)))
    element = Element(value, reader, batch, query, key)
    if element.unknown:
        return "", f"the mask depends on {element.unknown}"
    if reader.problem:
        known = not any(part is None or excludes(part) for part in reader.unread)
        partial = known and element.excludes(key_live=False) and element.admits_itself()
        return (PARTIAL, "") if partial else ("", reader.problem)
    if not element.excludes(key_live=False):
        return "", f"the mask lets live queries see dead keys: {value}"
    window = element.window()
    if window is not None:
        return window, ""
    if element.admits_itself():
        return PARTIAL, ""
    return "", f"the mask is neither full, nor causal, nor a window: {value}"


def value_if_dead(
    expr: relax.Expr, made_by: Callable[[relax.Var], Any], live: relax.Var, plane: Plane
) -> float | None:
    """What ``expr`` ``[.., batch, .., tokens, ..]`` is for every dead token of ``live``; None where
    that depends on something else."""
    roles = plane.roles(expr)
    if roles is None or not plane.is_token_wise(roles) or BOTH in roles:
        return None
    batch, token = (tirx.Var(name, "int64") for name in (BATCH, TOKENS))
    others = {BATCH: batch, TOKENS: token}
    at = [others.get(role, tirx.Var("other", "int64")) for role in roles]
    reader = Reader(made_by, live, at)
    element = Element(reader.element(expr, at), reader, batch, token, token)
    return None if reader.problem or element.unknown else element.value_if(False)


def _broadcast(mask: relax.Expr, indices: Sequence[Any]) -> list[Any]:
    """Indices into a mask that is broadcast against the scores."""
    extents = mask.ty.shape.values
    own = indices[len(indices) - len(extents) :]
    zero = tirx.IntImm("int64", 0)
    return [zero if is_one(e) else i for e, i in zip(extents, own, strict=True)]
