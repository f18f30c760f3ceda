"""The modules of the torch surface: their parameters, and what they are made of."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from pit_tvm import torch as pit
from pit_tvm.errors import DTypeError, ShapeError

N, K, GROUPS, PADDED = 40, 24, 3, 7  # columns, depth, experts, rows


def test_modules_share_the_parameters_of_torchs_own() -> None:
    linear = torch.nn.Linear(K, N)
    module = pit.LinearRows.of(linear)
    assert module.weight is linear.weight and module.bias is linear.bias
    x = torch.randn(PADDED, K)
    every = torch.arange(PADDED)
    torch.testing.assert_close(module(x, rows=every), linear(x), rtol=1e-4, atol=1e-4)
    assert "activation" in repr(module)


def test_grouped_module() -> None:
    module = pit.GroupedLinear(GROUPS, K, N, activation="silu")
    x, ids = torch.randn(PADDED, K), torch.zeros(PADDED, dtype=torch.int32)
    plain = torch.nn.functional.silu(x @ module.weight[0].T + module.bias[0])
    torch.testing.assert_close(module(x, ids), plain, rtol=1e-4, atol=1e-4)
    assert f"groups={GROUPS}" in repr(module)


def test_modules_share_the_parameters_of_linear_layers_alone() -> None:
    layer = torch.nn.Linear(K, N, bias=False)
    assert pit.LinearRows.of(layer).weight is layer.weight
    computed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(K, N))
    lazy = torch.nn.LazyLinear(N)
    others: list[tuple[Any, str]] = [
        (lazy, "linear.weight: expected a parameter of some shape, got .*; call the lazy layer"),
        (torch.nn.Conv1d(K, N, 1), "linear: expected a torch.nn.Linear, got Conv1d"),
        (computed, "linear.weight: expected a parameter, got a tensor; see"),
    ]
    for other, says in others:
        with pytest.raises(DTypeError, match=f"^{says}"):
            pit.LinearRows.of(other)
    lazy(torch.randn(PADDED, K))
    assert pit.LinearRows.of(lazy).in_features == K


@pytest.mark.parametrize("wrong", [-1, 2.0, "4", None])
def test_modules_have_lengths_for_sizes(wrong: Any) -> None:
    for module, names in (
        (pit.GroupedLinear, ("groups", "in_features", "out_features")),
        (pit.MoeFeedForward, ("experts", "hidden", "inter")),
    ):
        for name in names:
            with pytest.raises(ShapeError, match=f"^{name}: expected an integer of at least 0"):
                module(**dict.fromkeys(names, 4) | {name: wrong})


@pytest.mark.parametrize("kind", [pit.LinearRows, partial(pit.GroupedLinear, GROUPS)])
def test_modules_have_activations_that_there_are(kind: Any) -> None:
    assert kind(K, N, activation=None).activation is None
    for wrong in ("swish", 3):
        with pytest.raises(DTypeError, match="^activation: expected None or one of relu.* got "):
            kind(K, N, activation=wrong)
    with pytest.raises(DTypeError, match="^activation: expected"):
        pit.MoeFeedForward(GROUPS, K, N, activation="swish")


@pytest.mark.parametrize(
    "kind",
    [pit.LinearRows, partial(pit.GroupedLinear, GROUPS), partial(pit.MoeFeedForward, GROUPS)],
)
def test_modules_made_without_memory_can_be_started_later(kind: Any) -> None:
    module = kind(64, 16, device="meta").to_empty(device="cpu")
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    module.reset_parameters()
    for name, parameter in module.named_parameters():
        bound = (16 if name == "down" else 64) ** -0.5
        assert 0.5 * bound < parameter.abs().max() <= bound
