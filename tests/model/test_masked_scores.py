"""Attention that replaces the scores of dead keys, as ``masked_fill`` does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pit_tvm.model import CompiledModel, compile

WIDTH, HEADS = 8, 2
LOWEST, INFINITE = torch.finfo(torch.float32).min, float("-inf")
# ``weights(scores [batch, heads, tokens, tokens], live [batch, 1, 1, tokens])``, before softmax.
Masked = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def causal(scores: torch.Tensor) -> torch.Tensor:
    places = torch.arange(scores.shape[-1])
    return places[:, None] >= places


class Attention(nn.Module):
    """Self-attention whose scores ``masked`` changes."""

    def __init__(self, masked: Masked) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.masked = masked

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, WIDTH]``."""
        heads = self.inner(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        scores = heads @ heads.transpose(-1, -2) / 2
        weights = self.masked(scores, attention_mask.bool()[:, None, None, :]).softmax(-1)
        return self.outer((weights @ heads).transpose(1, 2).reshape(x.shape))


def checked(masked: Masked) -> CompiledModel:
    """Compiled, and compared on live tokens."""
    torch.manual_seed(0)
    model = Attention(masked).eval()
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [1, 1, 0, 0, 0]])
    given = {"x": torch.randn(3, 5, WIDTH), "attention_mask": mask}
    compiled = compile(model, given)
    live = mask.bool()
    with torch.no_grad():
        found, expected = compiled(**given), model(**given)
    torch.testing.assert_close(found[live], expected[live], rtol=1e-4, atol=1e-5)
    return compiled


ON_LIVE_TOKENS: dict[str, tuple[Masked, str]] = {
    "dead keys filled": (lambda s, live: s.masked_fill(~live, INFINITE), "full"),
    "live keys chosen": (lambda s, live: torch.where(live, s, LOWEST), "full"),
    "by several factors": (lambda s, live: (s * 3 * 0.5).masked_fill(~live, INFINITE), "full"),
    "causal": (lambda s, live: torch.where(live & causal(s), s, INFINITE), "causal"),
    "an inverse that is added": (
        lambda s, live: s + torch.zeros(()).masked_fill(~live, INFINITE),
        "full",
    ),
}


@pytest.mark.parametrize("name", ON_LIVE_TOKENS)
def test_replaced_scores_are_left_out(name: str) -> None:
    masked, kind = ON_LIVE_TOKENS[name]
    compiled = checked(masked)
    assert f"attention, {kind}, over live tokens" in [d.reason for d in compiled.decisions]


ON_ALL_TOKENS: dict[str, Masked] = {
    "zeros": lambda s, live: torch.where(live, s, 0.0),
    "a mask that is multiplied": lambda s, live: (s + (~live).float() * LOWEST) * 1e-30,
    "a mask that is capped": lambda s, live: 2 * torch.tanh(s + (~live).float() * LOWEST),
    "numbers that are not low": lambda s, live: s.masked_fill(~live, -9.0),
    "scores in a wider type": lambda s, live: torch.where(
        live, (s.half() + (1.0 - live.half()) * -6e4).float(), LOWEST
    ),
}


@pytest.mark.parametrize("name", ON_ALL_TOKENS)
def test_what_is_not_proven_runs_on_all_tokens(name: str) -> None:
    compiled = checked(ON_ALL_TOKENS[name])
    assert not any(d.live and d.reason.startswith("attention") for d in compiled.decisions)
