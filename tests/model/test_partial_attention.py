"""Attention whose mask lets no dead key be seen, and of which nothing else is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pit_tvm.model import CompiledModel, compile
from pit_tvm.model.propagate import ALL
from tests.model.together import Together

WIDTH, HEADS, PLACES = 8, 2, 16
LOWEST = torch.finfo(torch.float32).min
# What becomes of ``scores [batch, heads, tokens, tokens]`` of ``queries [batch, heads, tokens, 4]``
# where keys are ``live [batch, 1, 1, tokens]``, given a table of numbers for each distance.
Scored = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, nn.Embedding], torch.Tensor]


def apart(scores: torch.Tensor) -> torch.Tensor:
    """Key's place less the query's."""
    places = torch.arange(scores.shape[-1])
    return places[None, :] - places[:, None]


def by_distance(scores: torch.Tensor, table: nn.Embedding) -> torch.Tensor:
    return table(apart(scores).clamp(-PLACES, PLACES - 1) + PLACES).permute(2, 0, 1)[None]


def others(scores: torch.Tensor) -> torch.Tensor:
    """1 for all keys but the query's own, and for that of the first, 0 for the rest."""
    places = torch.arange(scores.shape[-1])
    return ((apart(scores) != 0) | (places == 0)).float()


def lengths(rows: torch.Tensor) -> torch.Tensor:
    """Squares of them, for each query and key multiplied."""
    squares = (rows * rows) @ torch.ones(rows.shape[-1], 1)
    return squares @ squares.transpose(-1, -2)


def disentangled(rows: torch.Tensor, table: nn.Embedding) -> torch.Tensor:
    """A bias of every row for each distance, picked by that of each other token."""
    factors = rows @ table.weight.T[:, None, :].expand(-1, rows.shape[-1], -1)
    ids = apart(rows @ rows.transpose(-1, -2)).clamp(-PLACES, PLACES - 1) + PLACES
    return factors.gather(-1, ids.expand(*factors.shape[:3], -1))


def excluded(live: torch.Tensor) -> torch.Tensor:
    return (1.0 - live.float()) * LOWEST


class Attention(nn.Module):
    """Layers of self-attention."""

    def __init__(self, scored: Scored, layers: int = 1) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.outer = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.table, self.scored = nn.Embedding(2 * PLACES, HEADS), scored

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, WIDTH]``."""
        live = attention_mask.bool()[:, None, None, :]
        for inner, outer in zip(self.inner, self.outer, strict=True):
            heads = inner(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
            scores = self.scored(heads @ heads.transpose(-1, -2) / 2, heads, live, self.table)
            summed = (scores.softmax(-1) @ heads).transpose(1, 2).reshape(x.shape)
            x = x + torch.relu(outer(summed))
        return x


class Folded(Attention):
    """The same with batch and heads as one dimension, and slopes that products are added to, a row
    of them for every head, or, ``alike``, one for all."""

    def __init__(self, alike: bool) -> None:
        super().__init__(lambda scores, *others: scores, layers=2)
        self.alike = alike

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, WIDTH]``."""
        batch, tokens, _ = x.shape
        counted = ((attention_mask.cumsum(-1) - 1) * attention_mask)[:, None, :]
        slopes = (torch.tensor([[0.5], [0.25]]) * counted).reshape(batch * HEADS, 1, tokens)
        if self.alike:
            slopes = 0.25 * torch.arange(tokens)[None, None, :]
        slopes = slopes.to(x.dtype)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            heads = inner(x).view(batch, tokens, HEADS, -1).transpose(1, 2)
            folded = heads.reshape(batch * HEADS, tokens, -1)
            turned = folded.transpose(-1, -2)
            scores = torch.baddbmm(slopes, folded, turned, beta=1.0, alpha=0.5)
            scores = scores.view(batch, HEADS, tokens, tokens)
            dead = ~attention_mask.bool()[:, None, None, :]
            least = x.new_zeros(()).masked_fill(dead, torch.finfo(x.dtype).min)
            weights = (scores + least).softmax(-1)
            summed = torch.bmm(weights.view(batch * HEADS, tokens, tokens), folded)
            summed = summed.view(batch, HEADS, tokens, -1).transpose(1, 2).reshape(x.shape)
            x = x + torch.relu(outer(summed))
        return x


class Sunk(Attention):
    """With a column behind the scores that takes its part of the weight: of numbers of the heads
    and, ``by_keys``, of what all keys make."""

    def __init__(self, by_keys: bool, shifted: bool = True) -> None:
        super().__init__(lambda scores, *others: scores)
        self.sinks, self.by_keys, self.shifted = nn.Parameter(torch.randn(HEADS)), by_keys, shifted

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, WIDTH]``."""
        live = attention_mask.bool()[:, None, None, :]
        heads = self.inner[0](x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        scores = heads @ heads.transpose(-1, -2) / 2 + excluded(live)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], -1)
        if self.by_keys:
            sinks = sinks + heads.cumsum(-2)[..., :1]
        joined = torch.cat([scores, sinks], -1)
        if self.shifted:
            joined = joined - joined.max(-1, keepdim=True).values
        weights = joined.softmax(-1)[..., :-1]
        summed = (weights @ heads).transpose(1, 2).reshape(x.shape)
        return x + torch.relu(self.outer[0](summed))


def checked(model: nn.Module, dtype: torch.dtype = torch.float32) -> CompiledModel:
    """Compiled, and compared on live tokens, at another batch and length than it was compiled."""
    torch.manual_seed(0)
    model = model.eval().to(dtype)
    rounding, dead = (1e-4, 1e4) if dtype == torch.float32 else (8 * torch.finfo(dtype).eps, 10.0)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [1, 1, 0, 0, 0]])
    compiled = compile(model, {"x": torch.randn(3, 5, WIDTH).to(dtype), "attention_mask": mask})
    for batch, tokens in ((3, 5), (2, 9), (1, 1)):
        mask = torch.rand(batch, tokens) < 0.6
        mask[:, tokens // 2] = True
        x = torch.where(mask[..., None], torch.randn(batch, tokens, WIDTH), dead)
        given = {"x": x.to(dtype), "attention_mask": mask.long()}
        with torch.no_grad():
            found, expected = compiled(**given), model(**given)
        torch.testing.assert_close(found[mask], expected[mask], rtol=rounding, atol=rounding / 10)
        assert not found[~mask].any()
    return compiled


PARTIAL: dict[str, Scored] = {
    "biases by distance": lambda s, q, live, table: s + by_distance(s, table) + excluded(live),
    "biases with the mask in": lambda s, q, live, table: (
        s + (by_distance(s, table) + excluded(live))
    ),
    "biases where keys are live": lambda s, q, live, table: (
        s + by_distance(s, table).masked_fill(~live, LOWEST)
    ),
    "capped scores": lambda s, q, live, table: (
        3.0 * torch.tanh(s * 2.0 / 3.0) + excluded(live & (apart(s) <= 0))
    ),
    "slopes": lambda s, q, live, table: (
        s + apart(s).abs() * torch.tensor([-0.5, -0.25])[None, :, None, None] + excluded(live)
    ),
    "biases by query and distance": lambda s, q, live, table: (
        s + disentangled(q, table) / 3.0 + excluded(live)
    ),
    "biases by key and query": lambda s, q, live, table: (
        s + (disentangled(q, table) + disentangled(q, table).transpose(-1, -2))
    ).masked_fill(~(live & live.transpose(-1, -2)), LOWEST),
    "slopes of counted tokens": lambda s, q, live, table: (
        s + 0.5 * (live.long().cumsum(-1) * live) + excluded(live)
    ),
}


@pytest.mark.parametrize(
    ("names", "layers"),
    [(list(PARTIAL)[:4], 1), (list(PARTIAL)[4:], 1), (["biases by distance"], 2)],
    ids=["some", "others", "layers"],
)
def test_layers_around_it_run_on_live_tokens(names: list[str], layers: int) -> None:
    parts = [Attention(PARTIAL[name], layers) for name in names]
    decisions, count = checked(Together(*parts)).decisions, layers * len(parts)
    inside = [d for d in decisions if d.reason.startswith(ALL)]
    assert len(inside) > 4 * count and sum(d.operator == "nn.softmax" for d in inside) == count
    products = [d for d in decisions if d.operator in ("matmul", "linear")]
    assert products and all(d.live or d.reason.startswith(ALL) or not d.whole for d in products)


WINDOWS: dict[str, tuple[Scored, str]] = {
    "to either side": (
        lambda s, q, live, table: s.masked_fill(~(live & (apart(s).abs() < 2)), LOWEST),
        "within 1 position",
    ),
    "causal": (
        lambda s, q, live, table: (
            s + torch.zeros(()).masked_fill(~(live & (apart(s) <= 0) & (apart(s) > -3)), LOWEST)
        ),
        "causal within 2 positions",
    ),
}


def test_windows_go_by_positions_of_live_tokens() -> None:
    parts = [Attention(scored) for scored, _ in WINDOWS.values()]
    reasons = [d.reason for d in checked(Together(*parts)).decisions]
    for _, kind in WINDOWS.values():
        assert reasons.count(f"attention, {kind}, over live tokens") == 1
    assert not any(reason.startswith(ALL) for reason in reasons)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_and_batch_may_be_one_dimension(dtype: torch.dtype) -> None:
    decisions = checked(Together(Folded(False), Folded(True)), dtype).decisions
    inside = [d for d in decisions if d.reason.startswith(ALL)]
    assert len(inside) > 16 and sum(d.operator == "nn.softmax" for d in inside) == 4
    assert all(d.live for d in decisions if d.operator == "linear")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scores_by_a_number_of_another_type(dtype: torch.dtype) -> None:
    def scored(s: torch.Tensor, q: torch.Tensor, live: torch.Tensor, table: nn.Embedding) -> Any:
        by = torch.sqrt(torch.tensor(4, dtype=torch.float32) * 3.0).to(s.dtype)
        biases = (disentangled(q, table) / by).to(s.dtype)
        return (s / by + biases).masked_fill(~live, torch.finfo(s.dtype).min)

    decisions = checked(Attention(scored), dtype).decisions
    assert sum(d.reason.startswith(ALL) for d in decisions) > 4
    assert all(d.live for d in decisions if d.operator == "linear")


@pytest.mark.parametrize("by_keys", [False, True])
def test_sinks_take_their_part_of_the_weight(by_keys: bool) -> None:
    parts = [Sunk(by_keys)] if by_keys else [Sunk(by_keys, False), Sunk(by_keys)]
    decisions = checked(Together(*parts)).decisions
    attended = [d.reason for d in decisions if d.reason.startswith("attention, full")]
    assert len(attended) == (0 if by_keys else 2)
    assert by_keys or all(d.live for d in decisions if d.operator == "linear")
    assert not any(d.reason.startswith(ALL) for d in decisions)


def test_numbers_that_are_infinite_in_the_type_of_scores() -> None:
    def scored(s: torch.Tensor, q: torch.Tensor, live: torch.Tensor, table: nn.Embedding) -> Any:
        window = torch.where(others(s) > 0, 0.0, -1e5).to(s.dtype)
        return s + window + (1 - live.to(s.dtype)) * torch.finfo(s.dtype).min

    decisions = checked(Attention(scored), torch.float16).decisions
    assert not any(d.reason.startswith(ALL) for d in decisions)


OTHERS: dict[str, Scored] = {
    "biases by a part of the query": lambda s, q, live, table: (
        s + q[..., :1] * by_distance(s, table) + excluded(live)
    ),
    "sums of scores": lambda s, q, live, table: s + (s * live).cumsum(-1) / 9 + excluded(live),
    "scores of the next head": lambda s, q, live, table: (
        s + torch.cat([s[:, 1:], s[:, :1]], 1) + excluded(live)
    ),
    "scores of scores": lambda s, q, live, table: s + s.softmax(-1) @ s + excluded(live),
    "a window without oneself": lambda s, q, live, table: s.masked_fill(
        ~(live & ((apart(s) == 1) | (apart(s) == -1))), -1e9
    ),
    "biases that exclude": lambda s, q, live, table: (
        s + torch.where(apart(s) % 3 == 0, 0.0, LOWEST) + excluded(live)
    ),
    "a window by logarithms": lambda s, q, live, table: s + others(s).log() + excluded(live),
    "a window by quotients": lambda s, q, live, table: s + -1 / others(s) + excluded(live),
    "a window by powers": lambda s, q, live, table: s + -1 * others(s) ** -1.5 + excluded(live),
    "scores over lengths": lambda s, q, live, table: s + s / lengths(q) + excluded(live),
}


@pytest.mark.parametrize("names", [list(OTHERS)[::2], list(OTHERS)[1::2]], ids=["some", "others"])
def test_what_is_not_proven_is_as_the_model_computes_it(names: list[str]) -> None:
    compiled = checked(Together(*(Attention(OTHERS[name]) for name in names)))
    assert not any(d.reason.startswith(ALL) for d in compiled.decisions)
