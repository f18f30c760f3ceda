"""What the values of dead tokens come from: their own hidden states, or something else.

A dead token's hidden state is documented to be 0. What else stands at its place (the mask, a
position, a running sum, a value of its sequence) is as good as a live token's.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from tvm import ir, relax

from ..runtime.arrays import as_numpy
from .masks import value_if_dead
from .plane import Plane
from .rebuild import is_op, values_of

_MOVED = ("reshape", "permute_dims", "expand_dims", "squeeze")  # every element as it is
_CONSTANT = ("zeros_like", "ones_like", "full_like")


class Origin(IntEnum):
    """What the value of a dead token comes from. Of several operands the largest counts."""

    OTHERS = 0  # nothing of its own
    IDS = 1  # integers of its own
    GATED = 2  # something of its own was in it, and the mask took that out
    MIXED = 3  # in some elements its own hidden state
    OWN = 4  # its own hidden state


class Origins:
    """The origins of values that are computed token by token, noted in their order."""

    def __init__(self, main: relax.Function, plane: Plane, mask: relax.Var) -> None:
        self.made, self.plane, self.mask = values_of(main), plane, mask
        self.fills: dict[relax.Expr, float] = {}
        self.known: dict[relax.Expr, Origin] = {
            p: Origin.OWN if _is_float(p) else Origin.IDS
            for p in main.params
            if not p.same_as(mask) and plane.is_token_wise(plane.roles(p))
        }

    def is_own(self, var: relax.Var) -> bool:
        """Whether dead tokens have nothing but hidden states of their own in ``var``."""
        return self._of(var) is Origin.OWN and _is_float(var)

    def fill(self, var: relax.Var) -> float | None:
        """The number that ``var`` is for every dead token, because the mask makes it so; None where
        it is not."""
        return self.fills.get(var)

    def attended(self, var: relax.Var, query: relax.Var) -> None:
        """Note that ``var`` is attention over live tokens by ``query``."""
        own = self._of(query) is not Origin.OTHERS
        self.known[var] = Origin.OWN if own else Origin.OTHERS

    def by_token(self, var: relax.Var, value: relax.Call) -> None:
        """Note that ``value`` gives ``var`` token by token."""
        if is_op(value, "multiply") and any(map(self._is_zero, value.args)):
            self.fills[var] = 0.0
            self.known[var] = self._gated(relax.analysis.free_vars(value))
        elif is_op(value, "where"):
            self.known[var] = self._chosen(var, value)
        elif is_op(value, "concat"):
            self.known[var] = _mixed([self._of(field) for field in value.args[0].fields])
        else:
            self.known[var] = self._computed(value)
            if is_op(value, *_MOVED) and value.args[0] in self.fills:
                self.fills[var] = self.fills[value.args[0]]

    def _of(self, expr: relax.Expr) -> Origin:
        return self.known.get(expr, Origin.OTHERS)

    def _computed(self, value: relax.Call) -> Origin:
        """Of an operator whose every element reads all of its operands."""
        if is_op(value, *_CONSTANT):
            return Origin.OTHERS
        found = max(map(self._of, relax.analysis.free_vars(value)), default=Origin.OTHERS)
        features = is_op(value, "matmul", "take") and found in (Origin.IDS, Origin.MIXED)
        return Origin.OWN if features else found

    def _chosen(self, var: relax.Var, choice: relax.Call) -> Origin:
        condition, *branches = choice.args
        found = [self._of(branch) for branch in branches]
        known = None if self._of(condition) else self._value(condition)
        if known is None:
            asked = self._of(condition)
            return asked if asked is Origin.OWN else max(asked, _mixed(found))
        taken = 0 if known else 1
        filled = 0.0 if self._is_zero(branches[taken]) else self._number(branches[taken])
        if filled is not None:
            self.fills[var] = filled
        return max(found[taken], self._gated(branches))

    def _gated(self, operands: Sequence[relax.Expr]) -> Origin:
        """Of what the mask keeps from dead tokens."""
        return Origin.GATED if any(map(self._of, operands)) else Origin.OTHERS

    def _is_zero(self, expr: relax.Expr) -> bool:
        return self.fills.get(expr) == 0.0 or not self._of(expr) and self._value(expr) == 0.0

    def _number(self, expr: relax.Expr) -> float | None:
        """One number for every dead token."""
        if expr in self.fills:
            return self.fills[expr]
        return _constant(self.made.get(expr, expr))

    def _value(self, expr: relax.Expr) -> float | None:
        return value_if_dead(expr, self.made.get, self.mask, self.plane)


def _mixed(parts: Sequence[Origin]) -> Origin:
    """Of elements side by side, or one or the other."""
    most = max(parts, default=Origin.OTHERS)
    return Origin.MIXED if most is Origin.OWN and min(parts) is not Origin.OWN else most


def _is_float(var: relax.Var) -> bool:
    return "float" in str(var.ty.dtype)


def _constant(expr: relax.Expr | None) -> float | None:
    """The one number of a constant."""
    if not isinstance(expr, ir.GenericConst):
        return None
    numbers = np.unique(as_numpy(expr.value))
    if numbers.size != 1:
        return None
    return int(numbers[0]) if numbers.dtype.kind in "iub" else float(numbers[0])
