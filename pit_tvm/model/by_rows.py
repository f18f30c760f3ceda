"""Whether scores depend on queries and keys row by row: on those of their own two tokens."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax

from .rebuild import extents_of, is_op, permutation_of, same_extents

ROWS, COLUMNS = -2, -1  # axes of a matrix on which its tokens are

_NONE: frozenset[int] = frozenset()
_ELEMENTWISE = ("add", "subtract", "multiply", "negative", "astype", "where", "tanh")


class ByRows:
    """Says which of the last two axes of values are tokens: rows of ``operands``, each on its own.

    ``steps``: what computes values from operands, in the order of the graph; whatever else is read
    depends on none of them.
    """

    def __init__(
        self, steps: Mapping[relax.Var, relax.Expr], operands: Mapping[relax.Var, int]
    ) -> None:
        self.known: dict[relax.Var, frozenset[int] | None] = {
            var: frozenset([axis]) for var, axis in operands.items()
        }
        for var, value in steps.items():
            self.known[var] = self._axes(value)

    def holds(self, expr: relax.Expr) -> bool:
        """Whether every element ``[.., i, j]`` depends on rows i and j of operands alone."""
        return self._axes(expr) is not None

    def _axes(self, expr: relax.Expr) -> frozenset[int] | None:
        """Axes that are tokens, none where nothing depends on operands; None if anything else is
        the case, or not known."""
        if isinstance(expr, relax.Var):
            return self.known.get(expr, _NONE)
        if all(self.known.get(var, _NONE) == _NONE for var in relax.analysis.free_vars(expr)):
            return _NONE
        if not isinstance(expr, relax.Call):
            return None
        given = [self._axes(arg) for arg in expr.args if isinstance(arg.ty, relax.TensorType)]
        known = [axes for axes in given if axes is not None]
        return self._of_call(expr, known) if len(known) == len(given) else None

    def _of_call(self, call: relax.Call, given: list[frozenset[int]]) -> frozenset[int] | None:
        if is_op(call, *_ELEMENTWISE):
            return frozenset().union(*given)
        if is_op(call, "divide"):  # by rows of dead tokens, which are 0, it would give NaN
            return None if given[1] else given[0]
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
