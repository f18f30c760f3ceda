"""Choices of experts: those without weight, and arrays of them that are views."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pit_tvm import torch as pit
from pit_tvm.torch import custom_ops

GROUPS, HIDDEN, INTER = 3, 16, 24


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("gated", [False, True])
def test_experts_without_weight_add_nothing(wrong: float, gated: bool) -> None:
    layer = pit.MoeFeedForward(GROUPS, HIDDEN, INTER, gated=gated)
    with torch.no_grad():
        layer.down[1] = wrong
    x, ids = torch.randn(5, HIDDEN), torch.tensor([[0, 1], [1, 2], [-1, 1], [2, 0], [1, 1]])
    weights = torch.rand(5, 2).masked_fill(ids == 1, 0.0)
    weights[4, 0] = -0.0
    got = layer(x, ids, weights)
    torch.testing.assert_close(got, layer(x, ids.masked_fill(ids == 1, -1), weights))
    assert got.isfinite().all() and not got[4].any()
    weights[0, 1] = 1e-3  # whoever has a weight counts
    assert not layer(x, ids, weights)[0].isfinite().any()


def test_layers_get_ids_and_weights_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on GPUs take no others."""
    seen: list[Any] = []

    def layer(x: Any, ids: Any, weights: Any, *given: Any, **named: Any) -> Any:
        seen.extend((ids, weights))
        return torch.zeros_like(x)

    def choices(x: Any, ids: Any, weight: Any, *given: Any) -> Any:
        seen.append(ids)
        return torch.zeros(ids.numel(), weight.shape[1])

    monkeypatch.setattr(custom_ops, "moe_layer", lambda device: layer)
    monkeypatch.setattr(custom_ops, "grouped_choices", choices)
    x, up, down = torch.randn(5, 16), torch.randn(GROUPS, 48, 16), torch.randn(GROUPS, 16, 24)
    ids = torch.randint(0, GROUPS, (2, 5)).t()
    weights = torch.rand(5, 4, dtype=torch.float64)[:, ::2]
    pit.moe_feed_forward(x, ids, weights, up, down)
    pit.grouped_linear(x, up, ids)
    pit.grouped_linear(x, up, torch.tensor([1]).expand(5))
    assert [each.is_contiguous() for each in seen] == [True] * 4
    assert torch.equal(seen[0], ids) and torch.equal(seen[2], ids)
    torch.testing.assert_close(seen[1], weights.float())
