"""Attention that replaces the scores of dead keys, as ``masked_fill`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    """Self-attention whose scores each of ``forms`` changes."""

    def __init__(self, forms: Mapping[str, Masked]) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.forms = forms

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """``[batch, tokens, WIDTH]`` by every form."""
        return {n: self.attend(x, attention_mask, form) for n, form in self.forms.items()}

    def attend(self, x: torch.Tensor, attention_mask: torch.Tensor, masked: Masked) -> torch.Tensor:
        """``[batch, tokens, WIDTH]``."""
        heads = self.inner(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        scores = heads @ heads.transpose(-1, -2) / 2
        weights = masked(scores, attention_mask.bool()[:, None, None, :]).softmax(-1)
        return self.outer((weights @ heads).transpose(1, 2).reshape(x.shape))


def checked(forms: Mapping[str, Masked]) -> CompiledModel:
    """Compiled, and compared on live tokens."""
    torch.manual_seed(0)
    model = Attention(forms).eval()
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [1, 1, 0, 0, 0]])
    given = {"x": torch.randn(3, 5, WIDTH), "attention_mask": mask}
    compiled = compile(model, given)
    live = mask.bool()
    with torch.no_grad():
        found, expected = compiled(**given), model(**given)
    for name, one in expected.items():
        torch.testing.assert_close(
            found[name][live], one[live], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
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


def test_replaced_scores_are_left_out() -> None:
    compiled = checked({name: masked for name, (masked, _) in ON_LIVE_TOKENS.items()})
    found = sorted(d.reason for d in compiled.decisions if d.reason.startswith("attention"))
    wanted = [f"attention, {kind}, over live tokens" for _, kind in ON_LIVE_TOKENS.values()]
    assert found == sorted(wanted)


ON_ALL_TOKENS: dict[str, Masked] = {
    "zeros": lambda s, live: torch.where(live, s, 0.0),
    "a mask that is multiplied": lambda s, live: (s + (~live).float() * LOWEST) * 1e-30,
    "a mask that is capped": lambda s, live: 2 * torch.tanh(s + (~live).float() * LOWEST),
    "numbers that are not low": lambda s, live: s.masked_fill(~live, -9.0),
    "scores in a wider type": lambda s, live: torch.where(
        live, (s.half() + (1.0 - live.half()) * -6e4).float(), LOWEST
    ),
}


def test_what_is_not_proven_runs_on_all_tokens() -> None:
    compiled = checked(ON_ALL_TOKENS)
    assert not any(d.live and d.reason.startswith("attention") for d in compiled.decisions)
