"""One token of each sequence, picked of anything: the model's own value, but 0 for the hidden state
of a dead token. Against torch in float64, under padding of every form."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pit_tvm.model import CompiledModel, compile

WIDTH, WORDS, PLACES = 8, 30, 40
PATTERNS = ("right", "left", "holes", "one empty", "all")


class Parts(nn.Module):
    """Hidden states of words, and what is picked of them or of anything else."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("order", torch.arange(PLACES)[None])

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, floats: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Every pick by its name."""
        x = self.norm(self.inner(self.words(input_ids)))
        return {n: FORMS[n](self, x, input_ids, attention_mask, floats) for n in self.names}


Form = Callable[[Parts, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def real(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The mask as numbers ``[batch, tokens, 1]``."""
    return mask[..., None].to(x.dtype)


def last_live(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The row of each sequence's last live token where padding is on the right."""
    return x[torch.arange(x.shape[0]), (count - 1).clamp(min=0)]


def by_highest_word(x: torch.Tensor, i: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """The row of the live token with the highest id, 0 if none lives."""
    sequences, highest = torch.arange(x.shape[0]), (i * m).argmax(1)
    return x[sequences, highest] * m[sequences, highest][:, None].to(x.dtype)


def attended(s: Parts, x: torch.Tensor, m: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Attention of one head to live tokens."""
    scores = s.inner(query)[:, None] @ s.outer(x)[:, None].transpose(-1, -2)
    hidden = (1.0 - m[:, None, None, :].to(x.dtype)) * -1e38
    return ((scores + hidden).softmax(-1) @ x[:, None])[:, 0]


# What is the model's own, whatever is dead.
EXACT: dict[str, Form] = {
    "count": lambda s, x, i, m, f: m.cumsum(1)[:, -1],
    "count of what positions read": lambda s, x, i, m, f: (
        m.cumsum(1)[:, -1] + 0 * s.outer(x + s.places(m.cumsum(1))).sum((1, 2)).long()
    ),
    "mean by that count": lambda s, x, i, m, f: (
        (x * real(m, x)).sum(1) / m.cumsum(1)[:, -1][:, None].clamp(min=1)
    ),
    "position of the last": lambda s, x, i, m, f: s.places(m.cumsum(1))[:, -1],
    "positions to the end": lambda s, x, i, m, f: (
        (m.cumsum(1)[:, -1][:, None] - m.cumsum(1)).sum(1)
    ),
    "side of padding": lambda s, x, i, m, f: (1 - m)[:, 0],
    "side as a condition": lambda s, x, i, m, f: (m == 0)[:, -1],
    "side as a number": lambda s, x, i, m, f: (1.0 - m.to(x.dtype))[:, 0],
    "id": lambda s, x, i, m, f: ((i + 1) % WORDS)[:, 0],
    "id as a condition": lambda s, x, i, m, f: (i != 1)[:, 0],
    "id as a number": lambda s, x, i, m, f: (i * 2).to(x.dtype)[:, 0],
    "word of an id that was picked": lambda s, x, i, m, f: s.words(((i + 1) % WORDS)[:, 0]),
    "count of a word": lambda s, x, i, m, f: s.places((i == 3).long().cumsum(1)[:, -1]),
    "largest feature": lambda s, x, i, m, f: s.outer(x).argmax(-1)[:, 0],
    "sign": lambda s, x, i, m, f: (s.outer(x) > 0)[:, -1],
    "input": lambda s, x, i, m, f: f[:, 0],
    "running sum": lambda s, x, i, m, f: (x * real(m, x)).cumsum(1)[:, -1],
    "running sum that a layer reads": lambda s, x, i, m, f: s.outer(
        (x * real(m, x)).cumsum(1)
    )[:, -1],
    "reversed": lambda s, x, i, m, f: s.outer(x.flip(1))[:, 0],
    "shifted": lambda s, x, i, m, f: s.outer(x.roll(1, 1))[:, 0],
    "sequence, spread": lambda s, x, i, m, f: (x.mean(1, keepdim=True).expand(x.shape) + 0)[:, 0],
    "sequence, by a layer": lambda s, x, i, m, f: s.outer(
        x.mean(1, keepdim=True).expand(x.shape) + s.places(m.cumsum(1))
    )[:, 0],
    "sequence, added to zeros": lambda s, x, i, m, f: (
        s.outer((x * real(m, x)).sum(1))[:, None] + torch.zeros_like(x)
    )[:, -1],
    "sequence, added to what is masked": lambda s, x, i, m, f: (
        (x * real(m, x)) + x.mean(1)[:, None]
    )[:, -1],
    "sequence where dead": lambda s, x, i, m, f: torch.where(
        m[..., None] == 0, x.mean(1)[:, None], x
    )[:, -1],
    "a number where dead": lambda s, x, i, m, f: x.masked_fill(m[..., None] == 0, 2.5)[:, -1],
    "zero where dead": lambda s, x, i, m, f: x.masked_fill(m[..., None] == 0, 0.0)[:, -1],
    "masked": lambda s, x, i, m, f: (s.outer(x) * real(m, x))[:, 0],
    "layer of what is masked": lambda s, x, i, m, f: s.outer(x * real(m, x))[:, -1],
    "norm of what is masked": lambda s, x, i, m, f: s.norm(x.relu() * real(m, x))[:, -1],
    "words of masked ids": lambda s, x, i, m, f: s.words(i * m)[:, -1],
    "beside positions": lambda s, x, i, m, f: torch.cat([x, s.places(m.cumsum(1))], -1)[:, -1],
    "or a position, by the word": lambda s, x, i, m, f: torch.where(
        i[..., None] > 9, x, s.places(m.cumsum(1))
    )[:, -1],
    "attention by position": lambda s, x, i, m, f: attended(s, x, m, s.places(m.cumsum(1)))[:, -1],
    "added to its tokens": lambda s, x, i, m, f: (
        (s.outer(x + x[:, 0][:, None]) * real(m, x)).sum(1)
    ),
    "compared with tokens": lambda s, x, i, m, f: (
        (x @ x[:, 0][:, :, None])[..., 0].masked_fill(m == 0, -1e30).softmax(1)
        * m.to(x.dtype)
    ),
    "highest word, with positions that are cut": lambda s, x, i, m, f: by_highest_word(
        x + s.places(s.order[:, : i.shape[1]]), i, m
    ),
    "two of them": lambda s, x, i, m, f: s.outer(x)[:, [0, 1]].mean(1),
}  # fmt: skip


def last(m: torch.Tensor) -> torch.Tensor:
    """Where the last live token of each sequence is if padding is on the right."""
    return (m.sum(1) - 1).clamp(min=0)


# The hidden state of the token itself: 0 where it is dead. With the token that is picked, or what
# the mask makes it.
HIDDEN: dict[str, tuple[int | Callable[[torch.Tensor], torch.Tensor], Form]] = {
    "last live by a count": (
        last,
        lambda s, x, i, m, f: last_live(s.outer(x), m.cumsum(1)[:, -1]),
    ),
    "last live, from words": (
        last,
        lambda s, x, i, m, f: last_live(s.words(i), m.sum(1)),
    ),
    "chosen by the side": (
        lambda m: torch.where(m[:, -1] == 0, last(m), m.shape[1] - 1),
        lambda s, x, i, m, f: torch.where(
            (m == 0)[:, -1][:, None], last_live(s.outer(x), m.sum(1)), s.outer(x)[:, -1]
        ),
    ),
    "first": (0, lambda s, x, i, m, f: s.outer(x)[:, 0]),
    "last": (-1, lambda s, x, i, m, f: s.outer(x)[:, -1]),
    "word": (0, lambda s, x, i, m, f: s.words(i)[:, 0]),
    "word and position": (0, lambda s, x, i, m, f: (s.words(i) + s.places(m.cumsum(1)))[:, 0]),
    "layer of an input": (0, lambda s, x, i, m, f: s.inner(f)[:, 0]),
    "activation of an input": (0, lambda s, x, i, m, f: f.exp()[:, 0]),
    "norm": (-1, lambda s, x, i, m, f: s.norm(x + s.outer(x).relu())[:, -1]),
    "attention": (0, lambda s, x, i, m, f: s.outer(attended(s, x, m, x) + x)[:, 0]),
    "attention of masked words": (
        0,
        lambda s, x, i, m, f: attended(s, x, m, s.norm(x) * real(m, x))[:, 0],
    ),
    "layer of words beside positions": (
        -1,
        lambda s, x, i, m, f: (
            torch.cat([x, s.places(m.cumsum(1))], -1) @ torch.cat([s.inner.weight] * 2)
        )[:, -1],
    ),
}  # fmt: skip
FORMS = EXACT | {name: form for name, (_, form) in HIDDEN.items()}


def inputs(mask: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Words, the mask, and floats for every token."""
    ids = torch.randint(0, WORDS, mask.shape, generator=rng)
    floats = torch.randn(*mask.shape, WIDTH, generator=rng)
    return {"input_ids": ids, "attention_mask": mask, "floats": floats}


def mask_of(pattern: str, batch: int, tokens: int, rng: torch.Generator) -> torch.Tensor:
    """A mask ``[batch, tokens]``."""
    lengths = torch.randint(1, tokens + 1, (batch, 1), generator=rng)
    places = torch.arange(tokens)[None]
    if pattern == "right":
        return (places < lengths).long()
    if pattern == "left":
        return (places >= tokens - lengths).long()
    if pattern == "all":
        return torch.ones(batch, tokens, dtype=torch.long)
    found = torch.randint(0, 2, (batch, tokens), generator=rng)
    found[:, tokens // 2] = 1
    if pattern == "one empty":
        found[0] = 0
    return found


def compiled(names: list[str]) -> tuple[Parts, CompiledModel]:
    torch.manual_seed(len(names))
    model = Parts(names).eval()
    mask = torch.ones(3, 6, dtype=torch.long)
    return model, compile(model, inputs(mask, torch.Generator()))


@pytest.fixture(scope="module")
def together() -> tuple[Parts, CompiledModel]:
    """All picks in one model, whose values thus have all sorts of other readers."""
    return compiled(list(FORMS))


def compare(model: Parts, ours: CompiledModel, pattern: str) -> None:
    rng = torch.Generator().manual_seed(7)
    for batch, tokens in ((3, 7), (1, 5), (5, 2), (2, 12)):
        given = inputs(mask_of(pattern, batch, tokens, rng), rng)
        live = given["attention_mask"].bool()
        wide = {n: v.double() if v.is_floating_point() else v for n, v in given.items()}
        found = ours(**given)
        with torch.no_grad():
            wanted = copy.deepcopy(model).double()(**wide)
        for name in model.names:
            expected = wanted[name].double()
            if name in HIDDEN:
                pick = HIDDEN[name][0]
                place = pick if isinstance(pick, int) else pick(live.long())
                expected = expected * live[torch.arange(batch), place][:, None]
            torch.testing.assert_close(
                found[name].double(),
                expected,
                rtol=1e-4,
                atol=1e-4,
                msg=lambda m, n=name: f"{n}: {m}",
            )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pick_is_the_models_own_value(
    together: tuple[Parts, CompiledModel], pattern: str
) -> None:
    compare(*together, pattern)


@pytest.mark.parametrize(
    "names",
    [
        ["count of what positions read"],
        ["first", "added to its tokens", "attention"],
        ["sequence where dead", "id as a number", "largest feature"],
    ],
    ids=lambda names: names[0],
)
def test_a_pick_does_not_depend_on_other_outputs(names: list[str]) -> None:
    model, ours = compiled(names)
    for pattern in PATTERNS:
        compare(model, ours, pattern)


def test_only_live_tokens_are_computed_for_a_token_by_its_id() -> None:
    _, ours = compiled(["last live by a count", "chosen by the side"])
    whole = [d for d in ours.decisions if d.whole]
    assert all("float" not in d.result for d in whole), whole  # sums of the mask
    picks = [d for d in ours.decisions if d.reason == "picks a token of each sequence"]
    assert len(picks) >= 2
