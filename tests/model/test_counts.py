"""Sizes that divide each other in an example and need not in a call."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

from pit_tvm.errors import PitError, ShapeError, UnsupportedModel
from pit_tvm.model import compile

WIDTH = 8


class Turned(nn.Module):
    """The rows of tokens first, read as if sequences were."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, WIDTH]``."""
        return self.linear(x.transpose(0, 1).reshape(x.shape))


def inputs(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    return {"x": torch.randn(batch, tokens, WIDTH), "attention_mask": mask}


@pytest.mark.parametrize("example", [(3, 6), (4, 4)])
def test_examples_of_any_sizes_give_one_model(example: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Turned().eval()
    compiled = compile(model, inputs(*example))
    for sizes in ((6, 10), (4, 6), (7, 3)):
        given = inputs(*sizes)
        with torch.no_grad():
            torch.testing.assert_close(compiled(**given), model(**given), rtol=1e-4, atol=1e-5)


BATCH, TOKENS = Dim("batch"), Dim("tokens")


class TurnedInPlace(Turned):
    """The same, a part of it changed in place, so that torch traces its program as a whole."""

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, WIDTH]``."""
        found = x * 1
        found[..., :2] += 1
        return super().forward(found, attention_mask)


def test_programs_whose_example_has_multiples_hold_for_all_sizes() -> None:
    torch.manual_seed(0)
    model, given = Turned().eval(), inputs(3, 6)
    shapes = dict.fromkeys(given, {0: BATCH, 1: TOKENS})
    compiled = compile(torch.export.export(model, (), given, dynamic_shapes=shapes), given)
    for sizes in ((6, 10), (4, 6), (7, 3), (5, 5)):
        given = inputs(*sizes)
        with torch.no_grad():
            torch.testing.assert_close(compiled(**given), model(**given), rtol=1e-4, atol=1e-5)


EXPORTED: dict[str, tuple[Turned, tuple[int, int], tuple[Dim, Dim], type[PitError], str]] = {
    "multiples": (
        TurnedInPlace(),
        (3, 6),
        (BATCH, TOKENS),
        UnsupportedModel,
        "all elements of any batch and length",
    ),
    "squares": (Turned(), (4, 4), (BATCH, BATCH), ShapeError, "got a length that is its batch"),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_programs_that_hold_for_some_sizes_only_are_refused(name: str) -> None:
    model, example, sizes, error, said = EXPORTED[name]
    given = inputs(*example)
    shapes = dict.fromkeys(given, dict(enumerate(sizes)))
    program = torch.export.export(model.eval(), (), given, dynamic_shapes=shapes)
    with pytest.raises(error, match=f"{said}.*do not divide each other"):
        compile(program, given)
