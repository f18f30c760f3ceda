"""Attention of packed sequences on a GPU: torch's kernels, and one of ours behind them where
tokens are missing between others and a window goes by positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tvm

from ..runtime.cuda_modules import cached_modules, named_module
from ..runtime.kernel_cache import KernelCache
from ..schedules.cuda_attention import MOST_DIM, QUERIES, attention_of_holed
from .wide import NARROW

__all__ = [
    "ANY",
    "ATTENTION",
    "MOST_DIM",
    "PADDED",
    "WINDOWED",
    "PackedAttention",
    "kernels_of_holed",
    "padded_attention",
]

ATTENTION = "pit_tvm.model.attention"
WINDOWED = "pit_tvm.model.attention_by_position"
PADDED = "pit_tvm.model.padded_attention"
ANY = 1 << 30  # a distance between positions that none has

_NAMES = {getattr(torch, name): name for name in NARROW}
_HEAD_STEP = 8  # heads of torch's kernels have whole pieces of so many elements
# Tiles of flash attention have 128 queries, those of torch's other kernel 64: it takes 0.6 to 0.8
# of the time where sequences have at most so many tokens on average and heads are this narrow.
_SHORT_SEQUENCE, _SLIM_HEAD = 48, 64


class PackedAttention:
    """Attention of sequences one after another.

    ``holed``: the kernels of `kernels_of_holed`, where windows go by positions. Order tells how far
    tokens are apart where none is missing between the first and the last one of a sequence; other
    sequences are computed once more.

    Torch's kernels are the operators behind ``torch.nn.attention.varlen``, which takes the host
    twice as long and in torch 2.11 has another name for each of its options than in 2.13, and
    behind torch's memory-efficient attention.
    """

    def __init__(self, holed: Any = None) -> None:
        self._holed = holed

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts: torch.Tensor,
        position: torch.Tensor,
        sinks: torch.Tensor,
        longest: int,
        before: int,
        after: int,
        scale: float,
    ) -> torch.Tensor:
        """Queries and keys ``[live, heads, head_dim]``, values ``[live, heads, value_dim]``,
        ``position`` ``[live]`` of every token, ``sinks`` float32 ``[heads]`` or ``[0]``. A query
        sees the keys of at most so many positions ``before`` its own and ``after`` it."""
        given, form = _whole(query, keys, values), _Form.of(longest, before, after, scale)
        out = _attend(given, starts, sinks, form)
        if self._holed is not None and query.numel() and not form.by_order:
            strides = [step for one in given for step in one.stride()[:-1]]
            how = form.before, form.after, form.scale, -(-longest // QUERIES)
            kernel = self._holed[f"holed_{_NAMES[query.dtype]}"]
            kernel(*map(_flat, given), starts, position, sinks, out, *strides, *how)
        width = values.shape[-1]
        return out if out.shape[-1] == width else out[..., :width].contiguous()


def kernels_of_holed(arch: str, cache: KernelCache) -> Any:
    """Attention by positions of sequences with a token missing in between, for each type."""
    return cached_modules(cache, arch)("cuda-attention-of-holed", _module)


def padded_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    added: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of all tokens: operands ``[batch, heads, tokens, dim]``, and what is added to
    scores. Rows that see no key may be NaN."""
    if not query.numel():
        return torch.empty_like(values)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, keys, values, added, scale=scale).contiguous()


@dataclass(frozen=True)
class _Form:
    """As `PackedAttention` has them; distances that no two tokens are apart are `ANY`."""

    longest: int
    before: int
    after: int
    scale: float

    @classmethod
    def of(cls, longest: int, before: int, after: int, scale: float) -> _Form:
        before, after = (ANY if far >= longest - 1 else far for far in (before, after))
        return cls(longest, before, after, scale)

    @property
    def by_order(self) -> bool:
        """Whether only the order of tokens matters, which torch's kernels know as causal."""
        return self.before == ANY and self.after in (0, ANY)


def _attend(
    given: Sequence[torch.Tensor], starts: torch.Tensor, sinks: torch.Tensor, form: _Form
) -> torch.Tensor:
    """Attention by order, of operands as wide as torch's kernels take them."""
    rows, _, width = given[0].shape
    if not given[0].numel():
        return torch.empty_like(given[2])
    short = rows <= _SHORT_SEQUENCE * (len(starts) - 1) and width <= _SLIM_HEAD
    if short and form.by_order and not sinks.numel():
        return _efficient(given, starts, form)
    out, weight = _flash(given, starts, form)
    if sinks.numel():
        out *= torch.sigmoid(weight - sinks[:, None]).t()[..., None]
    return out


def _whole(*operands: torch.Tensor) -> list[torch.Tensor]:
    """Operands ``[live, heads, dim]`` of one width, as torch's kernels take them."""
    widest = max(one.shape[-1] for one in operands)
    return [_of_width(one, widest + -widest % _HEAD_STEP) for one in operands]


def _of_width(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows ``[live, heads, dim]`` as wide as heads of torch's kernels, and beginning where whole
    pieces do: zeros change no score, and give columns of zeros."""
    rest = width - rows.shape[-1]
    places = (*rows.stride()[:-1], rows.storage_offset())
    if rest or any(place % _HEAD_STEP for place in places):
        return torch.nn.functional.pad(rows, (0, rest)).contiguous()
    return rows


def _flat(rows: torch.Tensor) -> torch.Tensor:
    """All that lies between the first element and the last one."""
    last = sum((size - 1) * step for size, step in zip(rows.shape, rows.stride(), strict=True))
    return rows.as_strided((last + 1,), (1,))


def _flash(
    operands: Sequence[torch.Tensor], starts: torch.Tensor, form: _Form
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithm of what weights were divided by, ``[heads, live]``."""
    attend: Any = torch.ops.aten._flash_attention_forward.default
    bounds = starts, starts, form.longest, form.longest
    far = (None if far == ANY else far for far in (form.before, form.after))
    sides = dict(zip(("window_size_left", "window_size_right"), far, strict=True))
    causal = form.after == 0
    out, weight, *_ = attend(*operands, *bounds, 0.0, causal, False, scale=form.scale, **sides)
    return out, weight


def _efficient(operands: Sequence[torch.Tensor], starts: torch.Tensor, form: _Form) -> torch.Tensor:
    attend: Any = torch.ops.aten._efficient_attention_forward.default
    one = [operand.unsqueeze(0) for operand in operands]
    bounds = starts, starts, form.longest, form.longest
    causal = int(form.after == 0)
    out: torch.Tensor = attend(*one, None, *bounds, 0.0, causal, scale=form.scale)[0]
    return out.squeeze(0)


def _module() -> tvm.IRModule:
    return named_module({f"holed_{dtype}": attention_of_holed(dtype) for dtype in NARROW})
