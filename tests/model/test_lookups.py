"""Ids that a graph computes: calls that exceed a table of positions are refused, and no other
id reads outside of its table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pit_tvm.errors import ShapeError
from pit_tvm.model import CompiledModel, compile

VOCABULARY, PLACES, WIDTH = 30, 12, 8

Ids = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Placed(nn.Module):
    """Rows of words, and of places by the ids that ``ids`` makes of the words' and the mask."""

    def __init__(self, ids: Ids) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.ids = ids

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The sum of both rows, 0 for dead tokens."""
        x = self.words(input_ids) + self.places(self.ids(input_ids, attention_mask))
        return x * attention_mask.unsqueeze(-1)


def inputs(tokens: int, live: int, word: int = 3) -> dict[str, torch.Tensor]:
    """Two sequences of one word, padded on the right."""
    mask = (torch.arange(tokens) < torch.tensor([[live], [1]])).long()
    return {"input_ids": torch.full((2, tokens), word), "attention_mask": mask}


def made(ids: Ids) -> tuple[nn.Module, CompiledModel]:
    torch.manual_seed(0)
    model = Placed(ids).eval()
    return model, compile(model, inputs(6, 6))


# Ids, the most tokens and live tokens of a call, and what one more than that is told.
POSITIONS: dict[str, tuple[Ids, int, int, str]] = {
    "counted": (lambda ids, mask: torch.arange(ids.shape[1]), 12, 12, "at most 12 tokens"),
    "after two": (lambda ids, mask: torch.arange(ids.shape[1]) + 2, 10, 10, "at most 10 tokens"),
    "from two": (
        lambda ids, mask: torch.arange(2, ids.shape[1] + 2).expand(ids.shape[0], -1),
        10,
        10,
        "at most 10 tokens",
    ),
    "live": (
        lambda ids, mask: (mask.cumsum(1) * mask - 1).long() + 2,
        30,
        10,
        "at most 10 live tokens of a sequence",
    ),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_beyond_their_table_are_refused(name: str) -> None:
    ids, tokens, live, words = POSITIONS[name]
    model, ours = made(ids)
    most = inputs(tokens, live)
    torch.testing.assert_close(ours(**most), model(**most))
    with pytest.raises(ShapeError, match=f"attention_mask: expected {words}, got {live + 1}"):
        ours(**inputs(max(tokens, live + 1), live + 1))
    assert ours(**inputs(0, 0)).shape == (2, 0, WIDTH)


@pytest.mark.parametrize("factor", [100000, -100000])
def test_computed_ids_read_inside_their_table(factor: int) -> None:
    model, ours = made(lambda ids, mask: ids * factor)
    fine: Any = inputs(6, 4, word=0)
    torch.testing.assert_close(ours(**fine), model(**fine))
    nearest = PLACES - 1 if factor > 0 else 0
    weights = model.state_dict()
    rows = weights["words.weight"][3] + weights["places.weight"][nearest]
    found = ours(**inputs(6, 4))[0]
    torch.testing.assert_close(found[:4], rows.expand(4, -1))
    assert not found[4:].any()


def test_a_mask_of_kinds_is_not_an_id_of_its_input() -> None:
    model, ours = made(lambda ids, mask: (ids > PLACES).long())
    given = inputs(6, 4, word=PLACES + 1)
    torch.testing.assert_close(ours(**given), model(**given))
