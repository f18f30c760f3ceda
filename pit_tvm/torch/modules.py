"""Modules over the functions, with the parameters of their torch counterparts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import DTypeError, mismatch
from ..gates import Gate
from ..op.arguments import at_least
from .functional import checked_gate, grouped_linear, linear_rows, moe_feed_forward
from .host import activate


class LinearRows(torch.nn.Linear):
    """``torch.nn.Linear`` for padded or scattered tokens; see `linear_rows`.

    Parameters and their names are ``nn.Linear``'s, so its checkpoints load.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        activate(activation)  # a name of none is refused now
        self.activation = activation

    @classmethod
    def of(cls, linear: torch.nn.Linear, *, activation: str | None = None) -> LinearRows:
        """A module that shares the parameters of ``linear``.

        Raises
        ------
        DTypeError
            No ``torch.nn.Linear``, or one whose weight or bias is computed from other parameters,
            or has no shape yet.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise DTypeError(mismatch("linear", "a torch.nn.Linear", type(linear).__name__))
        for name in ("weight", "bias"):
            found = getattr(linear, name)
            if torch.nn.parameter.is_lazy(found):
                expected, advice = "a parameter of some shape", "call the lazy layer first"
                raise DTypeError(mismatch(f"linear.{name}", expected, type(found).__name__, advice))
            if not isinstance(found, torch.nn.Parameter | None):
                advice = "see torch.nn.utils.parametrize.remove_parametrizations"
                raise DTypeError(mismatch(f"linear.{name}", "a parameter", "a tensor", advice))
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            activation=activation,
            device="meta",
        )
        made.weight, made.bias = linear.weight, linear.bias
        return made

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        *,
        lengths: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[..., out_features]``; zeros where no token is. Errors: `linear_rows`."""
        return linear_rows(
            x,
            self.weight,
            self.bias,
            lengths=lengths,
            cu_seqlens=cu_seqlens,
            rows=rows,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        """Sizes and activation."""
        return f"{super().extra_repr()}, activation={self.activation}"


class GroupedLinear(torch.nn.Module):
    """One linear layer for each group of rows, such as an expert; see `grouped_linear`.

    Parameters: ``weight`` [groups, out_features, in_features] and ``bias`` [groups, out_features].
    ShapeError for a size that is no length, DTypeError for an activation that is none.
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        named = {"groups": groups, "out_features": out_features, "in_features": in_features}
        sizes = tuple(at_least(name, size, 0) for name, size in named.items())
        activate(activation)  # a name of none is refused now
        self.activation = activation
        self.weight = torch.nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))
        offsets = torch.empty(sizes[:2], device=device, dtype=dtype) if bias else None
        self.bias = None if offsets is None else torch.nn.Parameter(offsets)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear`` does for each group."""
        _reset(self.parameters(), self.weight.shape[2])

    def forward(self, x: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
        """``[..., out_features]``; zeros where the id is -1. Errors: `grouped_linear`."""
        return grouped_linear(x, self.weight, group_ids, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        """Sizes and activation."""
        groups, n, k = self.weight.shape
        return f"groups={groups}, in_features={k}, out_features={n}, activation={self.activation}"


class MoeFeedForward(torch.nn.Module):
    """Experts of a mixture-of-experts layer, without its router; see `moe_feed_forward`.

    Parameters: ``up`` [experts, (2 *) inter, hidden] and ``down`` [experts, hidden, inter]; with
    ``bias`` also ``up_bias`` [experts, (2 *) inter] and ``down_bias`` [experts, hidden].
    ShapeError for a size that is no length and a gate that is none, DTypeError for an activation
    that is none.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        inter: int,
        *,
        bias: bool = False,
        activation: str = "silu",
        gated: bool | Gate = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activate(activation)  # as above
        checked_gate(gated, activation)
        self.activation, self.gated = activation, gated
        for name, size in {"experts": experts, "hidden": hidden, "inter": inter}.items():
            at_least(name, size, 0)
        wide = 2 * inter if gated else inter
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.up = torch.nn.Parameter(torch.empty((experts, wide, hidden), **kind))
        self.down = torch.nn.Parameter(torch.empty((experts, hidden, inter), **kind))
        self.up_bias: torch.nn.Parameter | None = None
        self.down_bias: torch.nn.Parameter | None = None
        if bias:
            self.up_bias = torch.nn.Parameter(torch.empty((experts, wide), **kind))
            self.down_bias = torch.nn.Parameter(torch.empty((experts, hidden), **kind))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear`` does for each expert."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            _reset((weight,) if bias is None else (weight, bias), weight.shape[2])

    def forward(
        self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor
    ) -> torch.Tensor:
        """``[..., hidden]``. Errors: `moe_feed_forward`."""
        return moe_feed_forward(
            x,
            expert_ids,
            expert_weights,
            self.up,
            self.down,
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            activation=self.activation,
            gated=self.gated,
        )

    def extra_repr(self) -> str:
        """Sizes and activation."""
        experts, hidden, inter = self.down.shape
        sizes = f"experts={experts}, hidden={hidden}, inter={inter}"
        sizes += f", bias={self.up_bias is not None}"
        return f"{sizes}, activation={self.activation}, gated={self.gated}"


def _reset(parameters: Iterable[torch.nn.Parameter], depth: int) -> None:
    """New values for the parameters of layers that take so many inputs."""
    bound = 1.0 / math.sqrt(max(1, depth))
    for parameter in parameters:
        torch.nn.init.uniform_(parameter, -bound, bound)
