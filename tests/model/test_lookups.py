"""Ids that a graph computes: calls that exceed a table of positions are refused, and no other
id reads outside of its table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from tvm import relax
from tvm.relax import op

from pit_tvm.errors import ShapeError
from pit_tvm.model import CompiledModel, compile
from pit_tvm.model.cuda_index import pass_ids
from pit_tvm.model.lookups import read_inside
from tests.model.graphs import PLANE, B, T, calls, graph, names

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


class Chosen(nn.Module):
    """Elements of rows of words, and of a table, that ``choose`` picks by the words' ids."""

    def __init__(self, choose: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.table = nn.Parameter(torch.randn(PLACES, WIDTH))
        self.choose = choose

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """What is picked, 0 for dead tokens."""
        found = self.choose(self.words(input_ids), self.table, input_ids)
        return found * attention_mask.unsqueeze(-1)


def chosen(choose: Callable[..., torch.Tensor]) -> tuple[nn.Module, CompiledModel]:
    torch.manual_seed(0)
    model = Chosen(choose).eval()
    return model, compile(model, inputs(6, 6))


def along_tokens(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x.gather(1, ids.unsqueeze(-1).expand(-1, -1, WIDTH))


# Elements by ids; the same by the nearest ids inside; ids that are fine, and others.
CHOICES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[int], list[int]]] = {
    "gathered along tokens": (
        lambda x, table, ids: along_tokens(x, ids - 9),
        lambda x, table, ids: along_tokens(x, (ids - 9).clamp(0, x.shape[1] - 1)),
        [9, 14],
        [8, 15, 29],
    ),
    "gathered along the width": (
        lambda x, table, ids: x.gather(2, (ids * 100000).unsqueeze(-1)),
        lambda x, table, ids: x.gather(2, (ids * 100000).clamp(0, WIDTH - 1).unsqueeze(-1)),
        [0],
        [3, 29],
    ),
    "two ids": (
        lambda x, table, ids: x * table[ids * 100000, ids - 3].unsqueeze(-1),
        lambda x, table, ids: (
            x
            * table[
                (ids * 100000).clamp(0, PLACES - 1), (ids - 3).clamp(-WIDTH, WIDTH - 1)
            ].unsqueeze(-1)
        ),
        [0],
        [1, 2, 10],
    ),
    "tokens by two ids": (
        lambda x, table, ids: x[torch.arange(x.shape[0]).unsqueeze(-1), ids - 9],
        lambda x, table, ids: along_tokens(x, (ids - 9).clamp(0, x.shape[1] - 1)),
        [9, 14, 3],
        [15, 29],
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_elements_are_picked_inside_their_tensor(name: str) -> None:
    choose, nearest, fine, others = CHOICES[name]
    model, ours = chosen(choose)
    for word in fine:
        given = inputs(6, 6, word)
        torch.testing.assert_close(ours(**given)[0], model(**given)[0])
    inside = Chosen(nearest).eval()
    inside.load_state_dict(model.state_dict())
    for word in others:
        given = inputs(6, 6, word)
        with pytest.raises((IndexError, RuntimeError)):
            model(**given)
        torch.testing.assert_close(ours(**given)[0], inside(**given)[0])


def test_inputs_that_pick_elements_are_checked() -> None:
    model, ours = chosen(lambda x, table, ids: x.gather(2, ids.unsqueeze(-1)))
    given = inputs(6, 6, WIDTH - 1)
    torch.testing.assert_close(ours(**given), model(**given))
    words = f"^input_ids: expected ids of 0 to {WIDTH - 1}, got "
    with pytest.raises(ShapeError, match=words):
        ours(**inputs(6, 6, WIDTH))


@pytest.mark.parametrize(
    "ids, held",
    [
        (lambda given: op.arange(0, T, 1), False),
        (lambda given: op.add(op.arange(0, T - 2, 1), relax.const(2, "int64")), False),
        (lambda given: op.expand_dims(op.arange(1, T, 1), 1), False),
        (lambda given: op.subtract(op.arange(0, T, 1), relax.const(1, "int64")), True),
        (lambda given: op.arange(0, T + 1, 1), True),
        (lambda given: op.arange(0, T, 2), True),
        (lambda given: given, True),
        (lambda given: relax.const([0, 1], "int64"), False),
        (lambda given: relax.const([0, -1], "int64"), True),
    ],
    ids=["all", "later", "column", "before", "beyond", "even", "given", "constant", "negative"],
)
def test_ids_that_cannot_be_outside_are_left_alone(
    ids: Callable[[relax.Expr], relax.Expr], held: bool
) -> None:
    module = graph(lambda x, given: op.index_tensor(x, [ids(given)]), x=(T, 4), given=("int64", B))
    assert ("minimum" in names(read_inside(module, PLANE, "mask"))) == held


def test_elements_of_one_number_are_not_gathered() -> None:
    zeros = op.broadcast_to(relax.const([[3] * PLACES], "int64"), [B, PLACES])
    ids: Any = ("int64", B, T)
    module = graph(lambda given: op.gather_elements(zeros, op.negative(given), 1), given=ids)
    (call,) = calls(read_inside(module, PLANE, "mask"))
    assert names(read_inside(module, PLANE, "mask")) == ["broadcast_to"]
    assert call.args[0].value.numpy() == 3


def test_recorded_graphs_read_inside_and_keep_what_wraps() -> None:
    wrapped = graph(lambda x: op.take(x, relax.const(-1, "int64"), 1, "wrap"), x=(B, T, 4))
    assert [str(c.attrs.mode) for c in calls(pass_ids(wrapped, []))] == ["wrap"]
    given: Any = ("int64", B, 1)
    taken = graph(lambda table, given: op.take(table, given, 0), table=(9, 4), given=given)
    assert [str(c.attrs.mode) for c in calls(pass_ids(taken, []))] == ["clip"]
    gathered = graph(lambda x, given: op.gather_elements(x, given, 1), x=(B, T), given=given)
    assert names(pass_ids(gathered, [])) == ["maximum", "minimum", "gather_elements"]
