"""One matrix product per batch element."""

from __future__ import annotations

from tvm import te

from ..structs import check_flags
from .arguments import Extent, resolve_dtypes, resolve_extent
from .contraction import reduce_and_finish


def batch_matmul(
    b: Extent,
    m: Extent,
    n: Extent,
    k: Extent,
    *,
    dtype: str = "float32",
    out_dtype: str | None = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    activation: str | None = None,
) -> list[te.Tensor]:
    """``out[b, m, n] = activation(sum_k lhs[b, m, k] * rhs[b, k, n])``; axes b, m, n, k.

    Parameters
    ----------
    b, m, n, k
        Extents; None is symbolic. ``k`` is at least 1.
    dtype, out_dtype
        Types of the operands and of the result (`arguments.resolve_dtypes` has the table).
    transpose_lhs, transpose_rhs
        ``lhs`` is [b, k, m] instead of [b, m, k]; ``rhs`` is [b, n, k] instead of [b, k, n].
    activation
        None, "relu", "relu2", "gelu", "gelu_tanh" or "silu".

    Returns
    -------
    [lhs, rhs, out], ``out`` being [b, m, n].

    Raises
    ------
    ShapeError, DTypeError
        An extent, flag, type or activation is not one of those above.
    """
    check_flags(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    dtypes = resolve_dtypes(dtype, out_dtype)
    batch, depth = resolve_extent("b", b), resolve_extent("k", k, 1)
    rows, columns = resolve_extent("m", m), resolve_extent("n", n)
    lhs_shape = (batch, depth, rows) if transpose_lhs else (batch, rows, depth)
    rhs_shape = (batch, columns, depth) if transpose_rhs else (batch, depth, columns)
    lhs = te.placeholder(lhs_shape, dtype, "lhs")
    rhs = te.placeholder(rhs_shape, dtype, "rhs")
    r = te.reduce_axis((0, depth), "k")

    def product(b, m, n):  # type: ignore[no-untyped-def]
        left = lhs[b, r, m] if transpose_lhs else lhs[b, m, r]
        right = rhs[b, n, r] if transpose_rhs else rhs[b, r, n]
        return te.sum(left.astype(dtypes.accumulator) * right.astype(dtypes.accumulator), axis=r)

    out = reduce_and_finish((batch, rows, columns), product, dtypes, activation=activation)
    return [lhs, rhs, out]
