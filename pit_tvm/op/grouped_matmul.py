"""Product of every row with the matrix of the row's group, as in a mixture of experts."""

from __future__ import annotations

from tvm import te

from ..structs import check_flags
from .arguments import Extent, resolve_dtypes, resolve_extent
from .contraction import reduce_and_finish


def grouped_matmul(
    m: Extent,
    n: Extent,
    k: Extent,
    num_groups: Extent,
    *,
    dtype: str = "float32",
    out_dtype: str | None = None,
    transpose_rhs: bool = False,
    bias: bool = False,
    activation: str | None = None,
) -> list[te.Tensor]:
    """``out[m, n] = activation(sum_k lhs[m, k] * rhs[g, k, n] + bias[g, n])``, g = group_ids[m].

    Axes m, n, k. Every group id must lie in [0, num_groups): the expression itself has no dead
    rows and no check.

    Parameters
    ----------
    m, n, k, num_groups
        Extents; None is symbolic. ``k`` is at least 1.
    dtype, out_dtype
        Types of the operands and of the result (`arguments.resolve_dtypes` has the table).
    transpose_rhs
        ``rhs`` is [num_groups, n, k] instead of [num_groups, k, n].
    bias
        Add an operand ``bias`` [num_groups, n].
    activation
        None, "relu", "relu2", "gelu", "gelu_tanh" or "silu".

    Returns
    -------
    [lhs, rhs, group_ids, out] or [lhs, rhs, bias, group_ids, out]; ``group_ids`` is int32 [m],
    ``out`` is [m, n].

    Raises
    ------
    ShapeError, DTypeError
        An extent, flag, type or activation is not one of those above.
    """
    check_flags(transpose_rhs=transpose_rhs, bias=bias)
    dtypes = resolve_dtypes(dtype, out_dtype)
    rows, columns = resolve_extent("m", m), resolve_extent("n", n)
    depth, groups = resolve_extent("k", k, 1), resolve_extent("num_groups", num_groups)
    rhs_shape = (groups, columns, depth) if transpose_rhs else (groups, depth, columns)
    lhs = te.placeholder((rows, depth), dtype, "lhs")
    rhs = te.placeholder(rhs_shape, dtype, "rhs")
    offsets = [te.placeholder((groups, columns), dtypes.bias, "bias")] if bias else []
    group_ids = te.placeholder((rows,), "int32", "group_ids")
    r = te.reduce_axis((0, depth), "k")

    def product(m, n):  # type: ignore[no-untyped-def]
        group = group_ids[m]
        right = rhs[group, n, r] if transpose_rhs else rhs[group, r, n]
        return te.sum(
            lhs[m, r].astype(dtypes.accumulator) * right.astype(dtypes.accumulator), axis=r
        )

    out = reduce_and_finish(
        (rows, columns),
        product,
        dtypes,
        bias=(lambda m, n: offsets[0][group_ids[m], n]) if bias else None,
        activation=activation,
    )
    return [lhs, rhs, *offsets, group_ids, out]
