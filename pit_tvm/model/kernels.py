"""What a backend gives a graph over live rows: attention, norms, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

from tvm import relax, tirx

from ..schedules.cpu_attention import attention
from ..schedules.cpu_rows import embedding_norm, residual_norm
from ..target import TargetInfo
from .added import scheduled
from .attention import Attention
from .wide import NARROW, WIDE


@dataclass(frozen=True, eq=False)
class RowNorm:
    """Layer norm of rows: ``scale`` and ``shift`` ``[width]``, and what is added to a variance."""

    scale: relax.Expr
    shift: relax.Expr
    eps: float


class Kernels(Protocol):
    """Calls of a backend's own kernels, for a graph that is being built. ``shares_rows``: whether
    products of experts take a row once for several of them."""

    shares_rows: bool = False

    def attends(self, head_dim: int, dtype: str) -> bool:
        """Whether there is attention for heads of this width and type."""
        return dtype in (WIDE, *NARROW)

    def attention(
        self,
        builder: relax.BlockBuilder,
        found: Attention,
        operands: Sequence[relax.Expr],
        ty: relax.TensorType,
    ) -> relax.Call:
        """Attention over live tokens, of a kind that is a `Window`: ``operands`` are queries and
        keys ``[live, heads, head_dim]``, values ``[live, heads, value_dim]``, the starts of the
        sequences, int32 ``[batch + 1]``, every token's position, int32 ``[live]``, and the sinks,
        float32 ``[heads]``, or ``[0]`` if it has none."""

    def padded_attention(
        self, found: Attention, operands: Sequence[relax.Expr], added: relax.Expr
    ) -> relax.Call | None:
        """Attention on all tokens, with what is ``added`` to its scores: ``operands`` are queries
        and keys ``[batch, heads, tokens, head_dim]`` and values ``[batch, heads, tokens,
        value_dim]``. None, as here, if there is no such kernel."""
        return None

    def norm(
        self,
        builder: relax.BlockBuilder,
        terms: Sequence[relax.Expr],
        how: RowNorm,
        stores_sum: bool = False,
    ) -> relax.Call | None:
        """Layer norm of the sum of ``terms`` (one or two), ``[rows, width]``, or with
        ``stores_sum`` a tuple of that and the sum; None if there is no such kernel."""

    def embeddings(
        self,
        builder: relax.BlockBuilder,
        tables: Sequence[tuple[relax.Expr, relax.Expr]],
        arrays: Sequence[relax.Expr],
        how: RowNorm,
    ) -> relax.Call | None:
        """Layer norm of the sum of rows of ``tables``, each given as ids ``[rows]`` (int32 or
        int64, none outside) and ``[n, width]``, and of ``arrays`` ``[rows, width]``; at least one
        table. None, as here, if there is no such kernel."""
        return None


class CpuKernels(Kernels):
    """Scheduled functions; each is made only once: layers are alike, and parsing one is slow."""

    def __init__(self, target: TargetInfo) -> None:
        self._made = partial(_made, target)

    def attention(
        self,
        builder: relax.BlockBuilder,
        found: Attention,
        operands: Sequence[relax.Expr],
        ty: relax.TensorType,
    ) -> relax.Call:
        """As `Kernels.attention`."""
        sizes = (found.heads, found.head_dim, found.value_dim, str(ty.dtype))
        sinks = found.sinks is not None
        made = self._made(attention, *sizes, found.kind, found.scale, sinks)
        func = builder.add_func(made, "attention")
        return relax.call_tir(func, list(operands), ty)

    def norm(
        self,
        builder: relax.BlockBuilder,
        terms: Sequence[relax.Expr],
        how: RowNorm,
        stores_sum: bool = False,
    ) -> relax.Call | None:
        """As `Kernels.norm`; none stores a sum."""
        if stores_sum:
            return None
        ty = terms[0].ty
        form = (int(ty.shape.values[-1]), str(ty.dtype), how.eps, len(terms) == 2)
        func = builder.add_func(self._made(residual_norm, *form), "norm")
        return relax.call_tir(func, [*terms, how.scale, how.shift], ty)

    def embeddings(
        self,
        builder: relax.BlockBuilder,
        tables: Sequence[tuple[relax.Expr, relax.Expr]],
        arrays: Sequence[relax.Expr],
        how: RowNorm,
    ) -> relax.Call:
        """As `Kernels.embeddings`."""
        (first, table), *_ = tables
        width, dtype = int(table.ty.shape.values[-1]), str(table.ty.dtype)
        id_dtypes = tuple(str(ids.ty.dtype) for ids, _ in tables)
        func = self._made(embedding_norm, width, dtype, how.eps, id_dtypes, len(arrays))
        operands = [*(part for pair in tables for part in pair), *arrays, how.scale, how.shift]
        ty = relax.TensorType([*first.ty.shape.values, width], dtype)
        return relax.call_tir(builder.add_func(func, "embeddings"), operands, ty)


@lru_cache
def _made(target: TargetInfo, make: Callable[..., tirx.PrimFunc], *form: Any) -> tirx.PrimFunc:
    return scheduled(make(*form, target=target))
