"""Attention and norms over live rows on a GPU, for a graph on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from ..schedules.cuda_norm import norm_rows
from .attention import Attention
from .cuda_attention import ANY, ATTENTION, MOST_DIM, PADDED, WINDOWED
from .kernels import Kernels, RowNorm
from .plane import Plane
from .wide import NARROW


class CudaKernels(Kernels):
    """Norms are kernels of ours, attention is torch's."""

    shares_rows = True

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._norms: dict[tuple[object, ...], str] = {}
        #: The norms that the graph calls, to be compiled.
        self.module = tvm.IRModule()

    def attends(self, head_dim: int, dtype: str) -> bool:
        """As `Kernels.attends`."""
        return head_dim <= MOST_DIM and dtype in NARROW

    def attention(
        self,
        builder: relax.BlockBuilder,
        found: Attention,
        operands: Sequence[relax.Expr],
        ty: relax.TensorType,
    ) -> relax.Call:
        """As `Kernels.attention`; no sequence is longer than the plane."""
        window: Any = found.kind
        far = (ANY if far is None else far for far in (window.before, window.after))
        form = (self._plane.tokens, *far, float(found.scale))
        given = [*operands, *map(relax.prim_value, form)]
        name = ATTENTION if window.by_order else WINDOWED
        return relax.op.call_pure_packed(name, *given, ty_args=[ty])

    def padded_attention(
        self, found: Attention, operands: Sequence[relax.Expr], added: relax.Expr
    ) -> relax.Call | None:
        """As `Kernels.padded_attention`, of operands of one type of 16 bits."""
        query, *_, values = operands
        dtype = str(query.ty.dtype)
        alike = {str(one.ty.dtype) for one in (*operands, added)} == {dtype}
        widest = max(found.head_dim, found.value_dim)
        if not (found.plain and alike and self.attends(widest, dtype)):
            return None
        given = [*operands, added, relax.prim_value(float(found.scale))]
        return relax.op.call_pure_packed(PADDED, *given, ty_args=[values.ty])

    def norm(
        self,
        builder: relax.BlockBuilder,
        terms: Sequence[relax.Expr],
        how: RowNorm,
        stores_sum: bool = False,
    ) -> relax.Call | None:
        """As `Kernels.norm`."""
        ty = terms[0].ty
        if str(ty.dtype) not in NARROW:
            return None
        form = (int(ty.shape.values[-1]), str(ty.dtype), how.eps, len(terms))
        key = (*form, stores_sum)
        name = self._norms.get(key)
        if name is None:
            name = self._norms[key] = f"norm_{len(self._norms)}"
            func = norm_rows(*form, stores_sum=stores_sum)
            self.module[name] = func.with_attr("global_symbol", name)
        given = [*terms, how.scale, how.shift]
        return relax.op.call_dps_packed(name, given, [ty, ty] if stores_sum else ty)
