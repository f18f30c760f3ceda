"""Operators that read sequences, masks and weights in unusual ways, against torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from pit_tvm.model import CompiledModel, compile

WIDTH = 8
# ``forward(x [batch, tokens, WIDTH], mask [batch, tokens])``; values of live tokens are compared.
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Module(nn.Module):
    """A linear layer, and what comes then."""

    def __init__(self, forms: Mapping[str, Forward]) -> None:
        super().__init__()
        self.linear, self.forms = nn.Linear(WIDTH, WIDTH), forms

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each of the forms returns."""
        x = self.linear(x)
        return {name: form(x, attention_mask) for name, form in self.forms.items()}


def inputs(batch: int, tokens: int, dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, tokens, dtype=dtype)
    return {"x": torch.randn(batch, tokens, WIDTH), "attention_mask": mask}


def check(forms: Mapping[str, Forward], dtype: torch.dtype = torch.int64) -> CompiledModel:
    """Compare on sequences that are full, so that nothing is left out."""
    torch.manual_seed(0)
    model, found = Module(forms).eval(), inputs(3, 5, dtype)
    compiled = compile(model, inputs(2, 6, dtype))
    with torch.no_grad():
        torch.testing.assert_close(compiled(**found), model(**found), rtol=1e-4, atol=1e-5)
    return compiled


def peak(x: torch.Tensor) -> torch.Tensor:
    """One value for each sequence, ``[batch, 1, WIDTH]``."""
    return x.amax(1, keepdim=True)


# One row for each sequence stands where another operand's tokens are, and is no value of theirs.
OF_SEQUENCES: dict[str, Forward] = {
    "gathered": lambda x, _: torch.gather(peak(x), 1, torch.zeros_like(x, dtype=torch.int64)),
    "indexed": lambda x, _: peak(x)[:, torch.zeros(x.shape[1], dtype=torch.int64)],
    "selected": lambda x, _: peak(x).index_select(1, torch.arange(x.shape[1]) * 0),
    "depth of a product": lambda x, _: torch.bmm(x[..., :1].sigmoid(), peak(x)),
    "depth of a product, turned": lambda x, _: (
        peak(x).transpose(1, 2) @ x[..., :1].transpose(1, 2)
    ).transpose(1, 2),
}


def test_an_extent_of_one_that_is_not_repeated_for_tokens() -> None:
    check(OF_SEQUENCES)


def test_values_of_sequences_that_are_repeated_for_tokens_run_on_live_ones() -> None:
    compiled = check({"": lambda x, _: x * peak(x) + x.amax(1)[:, None]})
    products = [d for d in compiled.decisions if d.operator == "multiply"]
    assert [d.live for d in products] == [True]


ROLLED: dict[str, Forward] = {
    "all": lambda x, mask: (torch.relu(x).roll(1, 1) * mask[..., None]).sum((0, 1)),
    "of a sequence": lambda x, mask: (x.roll(1, 1) * mask[..., None]).sum(1),
}


def test_sums_of_rolled_tokens_under_the_mask() -> None:
    check(ROLLED)


def attention(
    weights: Forward, added: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Forward:
    """Attention of one head; ``weights(scores, values)`` gives its result."""

    def rest(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads, lowest = x[:, None], torch.finfo(torch.float32).min
        more = (1.0 - mask[:, None, None, :]) * lowest if added is None else added(mask)
        return weights(heads @ heads.transpose(-1, -2) + more, heads)[:, 0]

    return rest


CASTS: dict[str, Forward] = {
    "whole scores": lambda a, v: a.clamp(-9, 9).int().float().softmax(-1) @ v,
    "whole weights": lambda a, v: (a.softmax(-1) * 4).int().float() @ v,
    "weights of integers": lambda a, v: a.softmax(-1).int().float() @ v,
    "weights as conditions": lambda a, v: a.softmax(-1).bool().float() @ v,
    "wider weights": lambda a, v: (a.double().softmax(-1).float()) @ v,
}


def test_casts_within_attention_change_its_weights() -> None:
    check({name: attention(weights) for name, weights in CASTS.items()})


ADDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rolled keys": lambda mask: (1.0 - mask.roll(1, 1)[:, None, None, :]) * -1e36,
    "rolled sequences": lambda mask: (1.0 - mask.roll(1, 0)[:, None, None, :]) * -1e36,
}


def test_masks_that_are_rolled_run_on_all_tokens() -> None:
    def rest(added: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
        return attention(lambda a, v: a.softmax(-1) @ v, added)

    compiled = check({name: rest(added) for name, added in ADDED.items()})
    assert not any(d.live and "attention" in d.reason for d in compiled.decisions)


def test_a_mask_whose_numbers_wrap_is_not_read() -> None:
    rest = attention(
        lambda a, v: a.softmax(-1) @ v, lambda mask: ((mask - 1).float() * 1e36)[:, None, None, :]
    )
    check({"": rest}, torch.uint8)
