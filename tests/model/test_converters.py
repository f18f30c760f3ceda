"""Operators that the importer takes over from TVM's, in whole models against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pit_tvm.errors import ShapeError
from pit_tvm.model import CompiledModel, compile

WIDTH, ROWS = 8, 30
Forward = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], Any]


class Small(nn.Module):
    """Embeddings, a linear layer, and whatever comes then."""

    def __init__(self, rest: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.conv = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.rest = rest

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """What ``rest`` makes of values ``[batch, tokens, WIDTH]``, ids and mask."""
        return self.rest(self, self.up(self.table(input_ids)), input_ids, attention_mask)


def inputs(mask: Any) -> dict[str, torch.Tensor]:
    """Random ids and ``mask`` ``[batch, tokens]``."""
    mask = np.asarray(mask)
    ids = np.random.default_rng(0).integers(0, ROWS, mask.shape)
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
    }


def both(rest: Forward) -> tuple[nn.Module, CompiledModel]:
    """A model for inference, and what is compiled of it."""
    model = Small(rest).eval()
    return model, compile(model, inputs(np.ones((3, 6))))


MASKS = [
    [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [0, 1, 0, 0, 1]],
    [[1] * 9],
]


def operators(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    live, sequences = mask.unsqueeze(-1), torch.arange(x.shape[0])
    last = mask.sum(1) - 1
    return {
        "means, by whole numbers": (x * live).sum(1) / mask.sum(1, keepdim=True).clamp(min=1),
        "numbers between": self.table(ids.clamp(min=2, max=20)),
        "numbers below": self.table(ids.clamp(max=7)),
        "numbers that become real": ids.clamp(min=0.5),
        "values between tensors": x.clamp(min=torch.tensor(-0.5), max=torch.tensor(0.25)),
        "bounds of another type": x.half().clamp(min=-mask[0, 0].float(), max=mask[0, 0].double()),
        "any of all": x.isinf().any() | (ids == 7).any(),
        "any number": (x * live).relu().any(),
        "any of a sequence": ((ids == 3) * mask).any(1),
        "any along axes": (ids * live.squeeze(-1) % 3).unsqueeze(-1).any((1, 2)),
        "any column, kept": (x - x.amax(-1, keepdim=True)).any(-1, keepdim=True),
        "all of a sequence": ((ids > 3) | (mask == 0)).all(1),
        "all columns": x.where(x > -0.5, 0.0).all(-1),
        "largest of a sequence": nn.functional.adaptive_max_pool1d((x * live).mT, 1),
        "largest of parts": nn.functional.adaptive_max_pool1d(x, 4),
        "of two tokens": nn.functional.bilinear(
            x, self.down(x), self.table.weight[:24].view(3, WIDTH, WIDTH), self.table.weight[0, :3]
        ),
        "of pairs": torch.einsum("bij,dc->bcij", x @ x.mT, self.up.weight) * live[:, None],
        "largest of all": (x * live).amax((1, 2)),
        "smallest, kept": x.amin(-1, keepdim=True),
        "rows from the end": self.table.weight[ids % 5 - 5] * live,
        "last column": x[:, :, -1],
        "last live token": x[sequences, last] * mask[sequences, last, None],
        "columns from the end": x.narrow(-1, 2, 5),
        "differences of columns": x.diff(dim=-1),
        "columns backwards": x[..., torch.arange(WIDTH - 1, -1, -1)],
        "in steps down": x * torch.arange(2.5, 2.5 - WIDTH, -1),
        "in real steps down": x * torch.arange(x.shape[1], -x.shape[1], -2.0)[:, None],
        "rows from further on": x + self.table.weight[2 : x.shape[1] + 2],
        "as many rows from the end": x + self.table.weight[ROWS - x.shape[1] :],
        "as many tokens from the end": nn.functional.pad(x, (0, 0, 2, 0))[:, -x.shape[1] :] * live,
        "all tokens from the end": x * mask[:, -x.shape[1] :, None],
        "with positions, convolved": self.conv(
            (x * live + self.table.weight[: x.shape[1]]).transpose(1, 2)
        ).transpose(1, 2),
        "with positions, by parts": (x + self.table.weight[: x.shape[1]])
        .view(*x.shape[:2], -1, 2)
        .sum(-1),
        "places from the end": x * torch.arange(2 * x.shape[1] - 1, -1, -2)[None, :, None],
        "first token for all": (x * live)[:, :1].expand_as(x) + x,
        "first of the tokens, from the end": (x * live).narrow(-2, 0, 1).expand_as(x),
        "first token, and all": x[:, :1] * mask[:, :1, None] + x,
        "all, and the first token": x - 2 * self.down(x)[:, :1],
        "more than the first token": x > self.down(x)[:, :1],
        "last token": x[sequences, -1] * mask[:, -1, None],
        "repeated": (x * live).sum(1).repeat(2, 1, 3),
        "so often as there are sequences": self.table.weight[:3].repeat(x.shape[0], 1),
        "so often as there are tokens": (x * live).sum(1)[:, None].repeat(1, x.shape[1], 2),
    }


def test_operators_are_torchs() -> None:
    model, ours = both(operators)
    for mask in MASKS:
        given = inputs(mask)
        with torch.no_grad():
            expected = model(**given)
        found = ours(**given)
        assert found.keys() == expected.keys()
        live = given["attention_mask"].bool()
        for name, one in expected.items():
            assert found[name].dtype == one.dtype, name
            rows = live if one.shape[:2] == live.shape else ...
            torch.testing.assert_close(found[name][rows], one[rows], rtol=1e-5, atol=1e-6)


def parts(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    scores, both = x[:, :-1].log_softmax(-1), (mask[:, 1:] * mask[:, :-1]).bool()
    said = scores.gather(-1, ids[:, 1:, None] % WIDTH).squeeze(-1)
    return {
        "what follows each": (said * both).sum(1),
        "steps": ((x[:, 1:] - x[:, :-1]) * both[..., None]).abs().sum(1),
        "pairs": (self.table.weight[ids[:, :-1], ids[:, 1:] % WIDTH] * both).sum(1),
        "without the first": (x[:, 1:] * mask[:, 1:, None]).sum(1),
    }


def inner(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    return {"without ends": (x[:, 1:-1] * mask[:, 1:-1, None]).sum(1)}


@pytest.mark.parametrize(("rest", "least"), [(parts, 3), (inner, 4)])
def test_parts_that_torch_takes_for_constants_where_they_are_of_one_token(
    rest: Forward, least: int
) -> None:
    model, ours = both(rest)
    rng = np.random.default_rng(0)
    for length in (least, 9):
        given = inputs(rng.random((4, length)) < 0.7)
        with torch.no_grad():
            torch.testing.assert_close(ours(**given), model(**given), rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match=f"attention_mask: expected at least {least} tokens"):
        ours(**inputs(np.ones((2, least - 1))))


def first_for_all(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    return (x * mask.unsqueeze(-1))[:, :1].expand_as(x)


def test_the_first_of_no_tokens_is_nothing() -> None:
    model, ours = both(first_for_all)
    for shape in ((2, 0), (0, 4)):
        assert ours(**inputs(np.ones(shape))).shape == (*shape, WIDTH)
    given = inputs([[0, 1, 1], [1, 1, 0]])
    live = given["attention_mask"].bool()
    with torch.no_grad():
        torch.testing.assert_close(ours(**given)[live], model(**given)[live])


def squeezed(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    x = x * mask.unsqueeze(-1)
    return {
        "no dimension of one": x.squeeze(),
        "batch stays": x.squeeze(0),
        "tokens stay": x.squeeze(1),
        "both stay": x.squeeze((0, 1)),
        "the last goes": x.unsqueeze(-1).squeeze((-1, 0)),
        "all of one go": x[:, None, :, :, None].squeeze(),
    }


def test_squeeze_keeps_batch_and_tokens() -> None:
    model, ours = both(squeezed)
    for mask in MASKS[:2]:
        given = inputs(mask)
        with torch.no_grad():
            torch.testing.assert_close(ours(**given), model(**given), rtol=0, atol=1e-6)
    # A program for every batch keeps the dimension of a batch of one, too.
    assert ours(**inputs(MASKS[2]))["no dimension of one"].shape == (1, 9, WIDTH)


def infinite(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    tokens, live = x.shape[1], mask.unsqueeze(-1) > 0
    scores = x.mean(-1, keepdim=True)
    filled = torch.full((tokens, tokens), float("-inf"))
    return {
        "causal": scores + torch.triu(filled, 1),
        "torch's causal mask": scores + nn.Transformer.generate_square_subsequent_mask(tokens),
        "like": torch.where(live, x, torch.full_like(x, float("-inf"))),
        "new": torch.where(live, x, x.new_full((x.shape[0], tokens, 1), float("inf"))),
        "finite": ids + torch.full((tokens,), 3),
    }


def test_infinite_fill() -> None:
    model, ours = both(infinite)
    for batch, tokens in ((2, 5), (3, 7)):
        given = inputs(np.ones((batch, tokens)))
        with torch.no_grad():
            torch.testing.assert_close(ours(**given), model(**given), rtol=0, atol=1e-6)


def test_last_token_of_a_sequence_without_any_is_zero() -> None:
    model, ours = both(lambda self, x, ids, mask: x[torch.arange(x.shape[0]), mask.sum(1) - 1])
    given = inputs([[0, 0, 0], [1, 1, 0]])
    with torch.no_grad():
        expected = model(**given) * torch.tensor([[0], [1]])
    torch.testing.assert_close(ours(**given), expected, rtol=0, atol=1e-6)


def test_last_token_is_picked() -> None:
    model, ours = both(lambda self, x, ids, mask: self.down(x[:, -1]))
    given = inputs(MASKS[1])
    with torch.no_grad():
        torch.testing.assert_close(ours(**given), model(**given), rtol=0, atol=1e-6)
    assert any(d.reason == "picks a token of each sequence" for d in ours.decisions)


def test_values_of_an_extent_that_only_the_run_tells() -> None:
    model, ours = both(lambda self, x, ids, mask: torch.masked_select(x, mask.bool().unsqueeze(-1)))
    for mask in MASKS:
        given = inputs(mask)
        with torch.no_grad():
            torch.testing.assert_close(ours(**given), model(**given), rtol=0, atol=1e-6)


def convolved(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    y = torch.relu(self.conv(x.transpose(1, 2)).transpose(1, 2))
    return self.norm(self.down(y) + x)


def sorted_values(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    return self.norm(self.down(torch.sort(x, 1)[0]) + x)


def summed(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    return self.norm(self.down(torch.cumsum(x, 1)) + x)


STOPS = {
    "convolution": (convolved, "nn.conv1d", "does not follow the tokens"),
    "sort": (sorted_values, "argsort", "orders tokens"),
    "sums": (summed, "cumsum", "cumsum is not lowered to one loop nest"),
}


@pytest.mark.parametrize("name", STOPS)
def test_operator_in_the_way_in_the_middle_of_a_model(name: str) -> None:
    rest, operator, reason = STOPS[name]
    model, ours = both(rest)
    for mask in MASKS:
        given = inputs(mask)
        live = given["attention_mask"].bool()
        with torch.no_grad():
            expected = model(**given)
        found = ours(**given)
        torch.testing.assert_close(found[live], expected[live], rtol=0, atol=1e-5)
        assert not found[~live].any()
    lines = ours.explain().splitlines()
    assert any(line.startswith(f"  {operator} -> ") and reason in line for line in lines)
    # What follows is on live tokens again.
    (norm,) = (d for d in ours.decisions if d.operator == "nn.layer_norm")
    assert norm.live and not norm.whole
