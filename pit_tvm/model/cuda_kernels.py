"""Attention and norms over live rows on a GPU, for a graph on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import tvm
from tvm import relax

from ..schedules.cuda_norm import norm_rows
from .attention import Attention
from .kernels import Kernels, RowNorm
from .masks import CAUSAL
from .plane import Plane
from .wide import NARROW

ATTENTION = "pit_tvm.model.attention"

# Of torch's kernels: heads have whole pieces of so many elements, and at most so many.
_HEAD_STEP, _MOST_HEAD_DIM = 8, 256
# Tiles of flash attention have 128 queries, those of torch's other kernel 64: it takes 0.6 to 0.8
# of the time where sequences have at most so many tokens on average and heads are this narrow.
_SHORT_SEQUENCE, _SLIM_HEAD = 48, 64


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
        return head_dim <= _MOST_HEAD_DIM and dtype in NARROW

    def attention(
        self,
        builder: relax.BlockBuilder,
        found: Attention,
        operands: Sequence[relax.Expr],
        ty: relax.TensorType,
    ) -> relax.Call:
        """As `Kernels.attention`; no sequence is longer than the plane."""
        form = (self._plane.tokens, int(found.kind == CAUSAL), float(found.scale))
        given = [*operands, *map(relax.prim_value, form)]
        return relax.op.call_pure_packed(ATTENTION, *given, ty_args=[ty])

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


def varlen_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    causal: int,
    scale: float,
) -> torch.Tensor:
    """Attention of sequences one after another: queries and keys ``[live, heads, head_dim]``,
    values ``[live, heads, value_dim]``.

    These are the operators behind ``torch.nn.attention.varlen``, which takes the host twice as
    long and in torch 2.11 has another name for each of its options than in 2.13, and behind torch's
    memory-efficient attention.
    """
    if not query.numel():
        return torch.empty_like(values)
    given, width = [query, keys, values], values.shape[-1]
    widest = max(one.shape[-1] for one in given)
    whole = widest + -widest % _HEAD_STEP
    given = [_of_width(one, whole) for one in given]
    short = len(query) <= _SHORT_SEQUENCE * (len(starts) - 1) and widest <= _SLIM_HEAD
    attend = _efficient if short else _flash
    out = attend(given, starts, longest, bool(causal), scale)
    return out if width == whole else out[..., :width].contiguous()


def _of_width(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows ``[live, heads, dim]`` as wide as heads of torch's kernels, and beginning where whole
    pieces do: zeros change no score, and give columns of zeros."""
    rest = width - rows.shape[-1]
    places = (*rows.stride()[:-1], rows.storage_offset())
    if rest or any(place % _HEAD_STEP for place in places):
        return torch.nn.functional.pad(rows, (0, rest)).contiguous()
    return rows


def _flash(
    operands: Sequence[torch.Tensor],
    starts: torch.Tensor,
    longest: int,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    attend: Any = torch.ops.aten._flash_attention_forward.default
    bounds = starts, starts, longest, longest
    out: torch.Tensor = attend(*operands, *bounds, 0.0, causal, False, scale=scale)[0]
    return out


def _efficient(
    operands: Sequence[torch.Tensor],
    starts: torch.Tensor,
    longest: int,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    attend: Any = torch.ops.aten._efficient_attention_forward.default
    one = [operand.unsqueeze(0) for operand in operands]
    bounds = starts, starts, longest, longest
    out: torch.Tensor = attend(*one, None, *bounds, 0.0, int(causal), scale=scale)[0]
    return out.squeeze(0)
