"""The product of ``torch.nn.Linear``: weights stored [n, k]."""

from __future__ import annotations

from tvm import te

from .arguments import Extent
from .matmul import matmul


def linear(
    m: Extent,
    n: Extent,
    k: Extent,
    *,
    dtype: str = "float32",
    out_dtype: str | None = None,
    bias: bool = True,
    activation: str | None = None,
) -> list[te.Tensor]:
    """``out[m, n] = activation(sum_k lhs[m, k] * rhs[n, k] + bias[n])``; axes m, n, k.

    `matmul` with ``transpose_rhs=True`` and, unless refused, a bias: ``lhs`` [m, k] holds the
    tokens, ``rhs`` [n, k] is the weight of ``torch.nn.Linear(k, n)``. Errors are `matmul`'s.
    """
    return matmul(
        m,
        n,
        k,
        dtype=dtype,
        out_dtype=out_dtype,
        transpose_rhs=True,
        bias=bias,
        activation=activation,
    )
