"""The two stages that every operator with a reduction is made of."""

from __future__ import annotations

from collections.abc import Callable

from tvm import te
from tvm.ir import Expr, Var

from .arguments import DTypes
from .epilogue import check_activation, epilogue


def reduce_and_finish(
    shape: tuple[int | Var | Expr, ...],
    reduction: Callable[..., Expr],
    dtypes: DTypes,
    *,
    bias: Callable[..., Expr] | None = None,
    activation: str | None = None,
) -> te.Tensor:
    """The stage ``out``, after a stage ``acc`` if something is left to do to the sums.

    ``reduction`` gives the sum for one element of ``out``, in ``dtypes.accumulator``; its
    parameter names are the axes' names. ``bias`` takes the same indices.
    """
    check_activation(activation, dtypes)
    done = bias is None and activation is None and dtypes.accumulator == dtypes.output
    acc = te.compute(shape, reduction, name="out" if done else "acc")
    if done:
        return acc

    def finish(*index: Var) -> Expr:
        offset = None if bias is None else bias(*index)
        return epilogue(acc(*index), offset, activation, dtypes)

    names = [axis.var.name for axis in acc.op.axis]
    return te.compute(shape, finish, name="out", varargs_names=names)
