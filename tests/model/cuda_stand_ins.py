"""What a GPU's graph calls, as torch functions on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from pit_tvm.model.cuda_attention import ANY
from pit_tvm.model.experts import GroupedLayer
from pit_tvm.model.linear import LinearLayer
from pit_tvm.reference import attention as reference
from pit_tvm.runtime.live_tokens import live_tokens
from pit_tvm.torch import host
from pit_tvm.windows import Window

ACTIVATIONS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda x: x,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def layers_of(found: Sequence[LinearLayer]) -> Callable[..., None]:
    """`CudaLayers` of these layers."""

    def run(number: int, x: torch.Tensor, out: torch.Tensor) -> None:
        layer = found[number]
        bias = None if layer.bias is None else torch.from_numpy(layer.bias)
        whole = functional.linear(x, torch.from_numpy(layer.weight), bias)
        out.copy_(ACTIVATIONS[layer.activation](whole))

    return run


def grouped_of(found: Sequence[GroupedLayer]) -> Callable[..., None]:
    """`CudaGroupedLayers` of these layers."""

    def run(number: int, x: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        layer = found[number]
        parts = (None if p is None else torch.from_numpy(p) for p in (layer.weight, layer.bias))
        out.copy_(host.grouped_rows(x, ids, *parts, layer.activation))

    return run


def placed_by(run: Callable[..., None]) -> Callable[..., None]:
    """``placed`` of `CudaLayers`; what ``row`` names beyond the live tokens is not touched."""

    def placed(number: int, x: torch.Tensor, row: Any, starts: Any, out: torch.Tensor) -> None:
        out.zero_()
        assert len(x) == len(row)
        live = row[: int(starts[-1])].long()
        some = out.new_empty(len(live), out.shape[1])
        run(number, x[: len(live)], some)
        out[live] = some

    return placed


def norm_of(eps: float, terms: int, stores_sum: bool) -> Callable[..., None]:
    """A kernel of `CudaKernels`: terms, scale, shift, result, and their sum where it is stored."""

    def run(*given: torch.Tensor) -> None:
        *added, scale, shift, out = given[: terms + 3]
        whole = sum(added[1:], added[0])
        wide = (one.float() for one in (whole, scale, shift))
        out.copy_(functional.layer_norm(next(wide), whole.shape[-1:], *wide, eps))
        if stores_sum:
            given[-1].copy_(whole)

    return run


def attention(
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
    """`PackedAttention`."""
    assert max(np.diff(starts.tolist()), default=0) <= longest
    window = Window(*(None if far == ANY else far for far in (before, after)))
    more = {"sinks": sinks} if len(sinks) else {}
    given = (one.double() for one in (query, keys, values))
    found = reference.attention(*given, starts, scale, window=window, position=position, **more)
    return torch.from_numpy(found).to(values.dtype)


def index_of(mask: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`CudaIndex`."""
    return tuple(torch.from_numpy(part) for part in live_tokens(mask.numpy()))
