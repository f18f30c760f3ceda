"""Matrix product with an optional bias and activation."""

from __future__ import annotations

from tvm import te

from ..structs import check_flags
from .arguments import Extent, resolve_dtypes, resolve_extent
from .contraction import reduce_and_finish


def matmul(
    m: Extent,
    n: Extent,
    k: Extent,
    *,
    dtype: str = "float32",
    out_dtype: str | None = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    bias: bool = False,
    activation: str | None = None,
) -> list[te.Tensor]:
    """``out[m, n] = activation(sum_k lhs[m, k] * rhs[k, n] + bias[n])``; axes m, n, k.

    Parameters
    ----------
    m, n, k
        Extents; None is symbolic. ``k`` is at least 1.
    dtype, out_dtype
        Types of the operands and of the result (`arguments.resolve_dtypes` has the table).
    transpose_lhs, transpose_rhs
        ``lhs`` is [k, m] instead of [m, k]; ``rhs`` is [n, k] instead of [k, n].
    bias
        Add an operand ``bias`` [n].
    activation
        None, "relu", "relu2", "gelu", "gelu_tanh" or "silu".

    Returns
    -------
    [lhs, rhs, out] or [lhs, rhs, bias, out], ``out`` being [m, n].

    Raises
    ------
    ShapeError, DTypeError
        An extent, flag, type or activation is not one of those above.
    """
    check_flags(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, bias=bias)
    dtypes = resolve_dtypes(dtype, out_dtype)
    rows, columns = resolve_extent("m", m), resolve_extent("n", n)
    depth = resolve_extent("k", k, 1)
    lhs = te.placeholder((depth, rows) if transpose_lhs else (rows, depth), dtype, "lhs")
    rhs = te.placeholder((columns, depth) if transpose_rhs else (depth, columns), dtype, "rhs")
    offsets = [te.placeholder((columns,), dtypes.bias, "bias")] if bias else []
    r = te.reduce_axis((0, depth), "k")

    def product(m, n):  # type: ignore[no-untyped-def]
        left = lhs[r, m] if transpose_lhs else lhs[m, r]
        right = rhs[n, r] if transpose_rhs else rhs[r, n]
        return te.sum(left.astype(dtypes.accumulator) * right.astype(dtypes.accumulator), axis=r)

    out = reduce_and_finish(
        (rows, columns),
        product,
        dtypes,
        bias=(lambda m, n: offsets[0][n]) if bias else None,
        activation=activation,
    )
    return [lhs, rhs, *offsets, out]
