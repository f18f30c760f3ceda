"""Elements that are no neighbours, and choices by rows, in whole models."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.model.targets import ON_CPU, ON_GPU, both  # noqa: E402

WIDTH = 64


class Shuffled(torch.nn.Module):  # type: ignore[misc]
    """Pairs that turn, as GPT-J's positions; elements backwards, shifted, and chosen by rows."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        pairs = torch.stack([-input[..., 1::2], input[..., ::2]], -1).flatten(-2)
        shifted = torch.cat([input[..., 1:], input[..., :1]], -1)
        padded = torch.nn.functional.pad(input[..., 3 : WIDTH - 4], (5, 2))
        chosen = torch.where(input[..., :1] > 0.5, shifted, padded)
        finite = torch.where(input > 0.9, float("inf"), input).isfinite()
        return torch.cat([pairs, input.flip(-1), torch.roll(input, 1, -1), chosen, finite], -1)


class Repeated(torch.nn.Module):  # type: ignore[misc]
    """Functions of an element whose results are read more than once."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        live = torch.relu(input - 0.5)
        larger = torch.maximum(live, input.flip(-1))
        chosen = torch.where(larger > 0.75, larger.clamp(0.25, 0.875), -larger)
        return torch.cat([live * live, larger - live, chosen, chosen.abs()], -1)


@pytest.mark.parametrize(("target", "dtype"), [*ON_CPU, *ON_GPU])
@pytest.mark.parametrize("model", [Shuffled, Repeated])
def test_elements_are_as_in_torch(model: Any, target: str, dtype: Any) -> None:
    x = torch.rand(2, 5, WIDTH).to(dtype)
    live = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    got, want = both(model(), target, x, live)
    # Fused operators round to 16 bits once.
    off = torch.finfo(dtype).eps if model is Repeated else 0.0
    torch.testing.assert_close(got[live > 0], want[live > 0], rtol=off, atol=off)
