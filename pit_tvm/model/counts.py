"""Whether the reshapes of a graph keep all elements, whatever the batch and the length."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tvm import relax, sym, tirx
from tvm.ir import prim

from ..analysis.expr import replace_vars
from ..errors import UnsupportedModel, mismatch
from .plane import Bound
from .rebuild import bindings_of, is_op, shape_of

#: What helps where torch took one extent for another, or for a multiple of it.
TOLD_APART = "export it with an example whose batch and length do not divide each other"

# Batches and lengths of which none divides the other.
_SAMPLES = ((2, 5), (5, 3), (7, 11))


def check_counts(main: relax.Function, bounds: Mapping[tirx.Var, Bound]) -> None:
    """See that reshapes keep their elements; ``bounds``: of the batch and of the tokens.

    torch exports what divides another extent in its example, or equals it, as if it always did.

    Raises
    ------
    UnsupportedModel
        A reshape has more or fewer elements than its operand at some sizes.
    """
    for sizes in _SAMPLES:
        given = {
            var: prim.IntImm("int64", max(size if most is None else min(size, most), least))
            for (var, (least, most)), size in zip(bounds.items(), sizes, strict=True)
        }
        for binding in bindings_of(main):
            if not is_op(binding.value, "reshape"):
                continue
            source = binding.value.args[0]
            before, after = (_count(tensor, given) for tensor in (source, binding.var))
            if None not in (before, after) and before != after:
                expected = "reshapes that keep all elements of any batch and length"
                got = f"one of {source.ty} to {binding.var.ty}"
                raise UnsupportedModel(mismatch("model", expected, got, TOLD_APART))


def _count(tensor: relax.Expr, given: Mapping[tirx.Var, prim.IntImm]) -> int | None:
    """How many elements a tensor has at these sizes; None if they do not tell."""
    extents = shape_of(tensor)
    if extents is None:
        return None
    whole = replace_vars(prod(extents, start=prim.IntImm("int64", 1)), given)
    found = sym.Analyzer().simplify(whole)
    return int(found) if isinstance(found, prim.IntImm) else None
