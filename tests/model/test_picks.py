"""Calls with fewer sequences or tokens than a model picks from are refused, as torch refuses
them; others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from tvm import relax
from tvm.relax import op

from pit_tvm.errors import ShapeError
from pit_tvm.model import compile
from pit_tvm.model.picks import least_sizes
from pit_tvm.model.plane import BATCH, TOKENS
from tests.model.graphs import PLANE, B, T, graph

WIDTH = 8

Pick = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Picked(nn.Module):
    """What ``pick`` takes of rows of words, by their mask."""

    def __init__(self, pick: Pick) -> None:
        super().__init__()
        self.words, self.pick = nn.Embedding(30, WIDTH), pick

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The picked rows."""
        return self.pick(self.words(input_ids), attention_mask)


def inputs(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """Sequences without padding."""
    ids = torch.arange(batch * tokens).reshape(batch, tokens) % 30
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def last(mask: torch.Tensor) -> torch.Tensor:
    """The place of each sequence's last live token."""
    return mask.sum(1) - 1


# What is picked, and the least of batch and tokens for it.
PICKS: dict[str, tuple[Pick, int, int]] = {
    "first": (lambda x, mask: x[:, 0], 0, 1),
    "second": (lambda x, mask: x[:, 1], 0, 2),
    "third": (lambda x, mask: x[:, 2], 0, 3),
    "last": (lambda x, mask: x[:, -1], 0, 1),
    "last but one": (lambda x, mask: x[:, -2], 0, 2),
    "two": (lambda x, mask: x[:, [0, 1]], 0, 2),
    "sequence": (lambda x, mask: x[1], 2, 0),
    "of one sequence": (lambda x, mask: x[1, -2], 2, 2),
    "last live": (lambda x, mask: x[torch.arange(x.shape[0]), last(mask)], 0, 1),
    "gathered": (
        lambda x, mask: x.gather(1, last(mask)[:, None, None].expand(-1, 1, WIDTH)),
        0,
        1,
    ),
    "none by place": (lambda x, mask: x * mask.unsqueeze(-1), 0, 0),
}


@pytest.mark.parametrize("name", PICKS)
def test_places_that_are_not_there_are_refused(name: str) -> None:
    pick, batch, tokens = PICKS[name]
    torch.manual_seed(0)
    model = Picked(pick).eval()
    ours = compile(model, inputs(3, 6))
    for given in (inputs(batch, max(tokens, 3)), inputs(max(batch, 3), tokens), inputs(4, 5)):
        torch.testing.assert_close(ours(**given), model(**given))
    for least, what, few in ((batch, "sequences", (-1, 6)), (tokens, "tokens", (3, -1))):
        if not least:
            continue
        short = inputs(*(least - 1 if size < 0 else size for size in few))
        with pytest.raises((IndexError, RuntimeError)):
            model(**short)
        words = f"^attention_mask: expected at least {least} {what}, got {least - 1}$"
        with pytest.raises(ShapeError, match=words):
            ours(**short)


def number(*values: int) -> relax.Expr:
    return relax.const(list(values), "int32")


@pytest.mark.parametrize(
    "make, batch, tokens",
    [
        (lambda x: op.take(op.reshape(x, [B, T * 4]), number(0, 9), 1), 0, 3),
        (lambda x: op.take(op.reshape(x, [B * T, 4]), number(9), 0), 1, 1),
        (lambda x: op.take(x, op.astype(op.reshape(number(1, -5), [2, 1]), "int64"), 1), 0, 5),
        (lambda x: op.take(x, op.arange(0, T, 1), 1), 0, 0),
        (lambda x: op.take(x, number(3), 2), 0, 0),
        (lambda x: op.gather_elements(x, relax.const([[[1]], [[4]]], "int64"), 1), 0, 5),
        (lambda x: op.index_tensor(x, [number(2), number(1)]), 3, 2),
    ],
    ids=["widened", "flat", "reshaped", "counted", "width", "gathered", "two"],
)
def test_the_least_sizes_of_a_graph(
    make: Callable[[relax.Expr], relax.Expr], batch: int, tokens: int
) -> None:
    module = graph(make, x=(B, T, 4))
    assert least_sizes(module, PLANE) == {BATCH: batch, TOKENS: tokens}
