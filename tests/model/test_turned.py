"""Tokens put before sequences and flattened: rows of another order are no tokens of the mask's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pit_tvm.model import compile

WIDTH = 8
MODELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": lambda x: x.transpose(0, 1).reshape(-1, WIDTH),
    "used": lambda x: x.transpose(0, 1).reshape(-1, WIDTH) * 2 + 1,
    "back": lambda x: (x.transpose(0, 1).reshape(-1, WIDTH) * 2).reshape(x.shape[1], -1, WIDTH),
}


class Flat(nn.Module):
    """Rows of words, in another order."""

    def __init__(self, order: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.words, self.order = nn.Embedding(30, WIDTH), order

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """All rows; the mask is an input only."""
        return self.order(self.words(input_ids))


@pytest.mark.parametrize("name", MODELS)
def test_live_rows_stay_where_they_are(name: str) -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    given = {"input_ids": torch.arange(12).reshape(3, 4), "attention_mask": mask}
    model = Flat(MODELS[name]).eval()
    found, wanted = compile(model, given)(**given), model(**given)
    live = mask.t().reshape(-1).bool()
    rows = found.reshape(-1, WIDTH), wanted.reshape(-1, WIDTH)
    torch.testing.assert_close(rows[0][live], rows[1][live])


def turned_twice(x: torch.Tensor) -> torch.Tensor:
    batch, tokens, width = x.shape
    return x.reshape(tokens, batch, width).transpose(0, 1).reshape(tokens, batch, width)


def test_rows_of_another_order_do_not_come_back_transposed() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    given = {"input_ids": torch.arange(8).reshape(2, 4), "attention_mask": mask}
    model = Flat(turned_twice)
    torch.testing.assert_close(compile(model.eval(), given)(**given), model(**given))
