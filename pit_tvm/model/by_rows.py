"""Whether scores depend on queries and keys row by row: on those of their own two tokens."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax

from .rebuild import extents_of, is_op, permutation_of, same_extents

ROWS, COLUMNS = -2, -1  # axes of a matrix on which its tokens are

_NONE: frozenset[int] = frozenset()
_ELEMENTWISE = ("add", "subtract", "multiply", "divide", "negative", "astype", "where", "tanh")


class ByRows:
    """Follows values back to ``operands``, and says which of their last two axes are tokens:
    operand's rows, each on its own. ``values``: what is bound to variables."""

    def __init__(
        self, values: Mapping[relax.Var, relax.Expr], operands: Mapping[relax.Var, int]
    ) -> None:
        self.values = values
        self.known: dict[relax.Var, frozenset[int] | None] = {
            var: frozenset([axis]) for var, axis in operands.items()
        }

    def holds(self, expr: relax.Expr) -> bool:
        """Whether every element ``[.., i, j]`` depends on rows i and j of operands alone."""
        return self._axes(expr) is not None

    def _axes(self, expr: relax.Expr) -> frozenset[int] | None:
        """Axes that are tokens, none where nothing depends on operands; None if anything else is
        the case, or not known."""
        if isinstance(expr, relax.Var):
            if expr not in self.known:
                self.known[expr] = self._axes(self.values[expr]) if expr in self.values else _NONE
            return self.known[expr]
        if not isinstance(expr, relax.Call):
            return _NONE
        given = [self._axes(a) for a in expr.args if isinstance(a.ty, relax.TensorType)]
        if all(axes == _NONE for axes in given):
            return _NONE
        if None in given:
            return None
        return self._of_call(expr, [axes or _NONE for axes in given])

    def _of_call(self, call: relax.Call, given: list[frozenset[int]]) -> frozenset[int] | None:
        if is_op(call, *_ELEMENTWISE):
            return frozenset().union(*given)
        if is_op(call, "matmul"):
            left, right = given
            return left | right if left <= {ROWS} and right <= {COLUMNS} else None
        if is_op(call, "gather_elements"):
            data, ids = given
            last = int(call.attrs.axis) in (-1, call.ty.ndim - 1)
            return data if last and data <= {ROWS} and not ids else None
        if is_op(call, "reshape"):
            kept = same_extents(extents_of(call.args[0])[-2:], extents_of(call)[-2:])
            return given[0] if kept else None
        if is_op(call, "permute_dims"):
            *before, high, wide = permutation_of(call)
            swapped = {ROWS: COLUMNS, COLUMNS: ROWS}
            if before != list(range(len(before))):
                return None
            return given[0] if high < wide else frozenset(swapped[axis] for axis in given[0])
        return None
