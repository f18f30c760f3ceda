"""Sum along the last dimension: ReduceSum of PIT, SOSP'23, section 3."""

from __future__ import annotations

from tvm import te

from .arguments import Extent, resolve_dtypes, resolve_extent
from .contraction import reduce_and_finish


def reduce_sum(
    p: Extent,
    l: Extent,  # noqa: E741
    *,
    dtype: str = "float32",
    out_dtype: str | None = None,
) -> list[te.Tensor]:
    """``out[p] = sum_l data[p, l]``; axes p, l.

    Parameters
    ----------
    p, l
        Extents; None is symbolic. ``l`` is at least 1.
    dtype, out_dtype
        Types of the operand and of the result (`arguments.resolve_dtypes` has the table).

    Returns
    -------
    [data, out], of shapes [p, l] and [p].

    Raises
    ------
    ShapeError, DTypeError
        An extent or type is not one of those above.
    """
    dtypes = resolve_dtypes(dtype, out_dtype)
    rows, depth = resolve_extent("p", p), resolve_extent("l", l, 1)
    data = te.placeholder((rows, depth), dtype, "data")
    r = te.reduce_axis((0, depth), "l")
    out = reduce_and_finish(
        (rows,), lambda p: te.sum(data[p, r].astype(dtypes.accumulator), axis=r), dtypes
    )
    return [data, out]
