"""Models are called by the names of their own parameters, whatever torch makes of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.export import Dim

from pit_tvm.errors import DTypeError, ShapeError, UnsupportedModel
from pit_tvm.model import compile
from pit_tvm.model.importer import import_model

WIDTH = 8


class Named(nn.Module):
    """Parameters by names of Python's functions, and with capitals."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, input: torch.Tensor, Scale: torch.Tensor, M: torch.Tensor) -> torch.Tensor:
        """Scaled rows."""
        return self.linear(input) * Scale


def inputs(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    return {"input": torch.randn(batch, tokens, WIDTH), "Scale": torch.randn(1), "M": mask}


def test_names_are_kept() -> None:
    model, found = Named().eval(), inputs(3, 5)
    compiled = compile(model, inputs(2, 6), mask="M")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**found), model(**found), rtol=1e-4, atol=1e-5)
    with pytest.raises(ShapeError, match=r"inputs: expected \['M', 'Scale', 'input'\], got"):
        compiled(**{name.lower(): value for name, value in found.items()})


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (torch.zeros(2, 6, WIDTH).to_sparse(), DTypeError, "a strided tensor as 'input'"),
        (torch.zeros(2, 6, WIDTH, dtype=torch.complex64), UnsupportedModel, "complex64"),
    ],
    ids=["sparse", "complex"],
)
def test_examples_that_no_model_takes(
    wrong: torch.Tensor, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        compile(Named().eval(), inputs(2, 6) | {"input": wrong}, mask="M")


class Words(nn.Module):
    """Ids that come as numbers of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Rows of words."""
        return self.words(ids.long())


def test_ids_that_are_no_numbers_are_outside_of_tables() -> None:
    mask = torch.ones(2, 6, dtype=torch.int64)
    compiled = compile(Words().eval(), {"ids": torch.zeros(2, 6), "attention_mask": mask})
    for wrong in (float("nan"), float("inf"), -1.0, 10.0):
        with pytest.raises(ShapeError, match="ids: expected ids of 0 to 9, got"):
            compiled(ids=torch.full((2, 6), wrong), attention_mask=mask)


def test_threads_may_import_models() -> None:
    def names(batch: int) -> tuple[str, ...]:
        return import_model(Named().eval(), inputs(batch, 6), "M").inputs

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(names, range(2, 6))) == {("input", "Scale", "M")}


class Scaled(nn.Module):
    """Rows times something of another shape."""

    def forward(
        self, rows: torch.Tensor, other: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """The mask is an input only."""
        return rows * other.reshape(other.shape[0], -1).sum(1)[:, None, None]


@pytest.mark.parametrize("extents", [(3,), (3, 4, WIDTH)])
def test_an_input_that_ties_the_batch_is_named(extents: tuple[int, ...]) -> None:
    mask = torch.ones(3, 6, dtype=torch.int64)
    example = {"rows": torch.ones(3, 6, WIDTH), "other": torch.ones(extents)}
    words = "got a batch of 3; .* or it is that of other, while .*: export it with dynamic_shapes"
    with pytest.raises(ShapeError, match=words):
        compile(Scaled(), example | {"attention_mask": mask})


def test_an_input_of_pairs_of_tokens_is_named() -> None:
    mask = torch.ones(3, 6, dtype=torch.int64)
    rows, other = torch.ones(3, 6, WIDTH), torch.ones(3, 6, 6)
    example = {"rows": rows, "other": other, "attention_mask": mask}
    sizes = dict(enumerate((Dim("batch"), Dim("tokens"), Dim("more"))))
    shapes = {n: {d: sizes[d] for d in range(2)} for n in ("rows", "attention_mask")}
    shapes["other"] = {0: sizes[0], 1: sizes[1], 2: sizes[1]}
    program = torch.export.export(Scaled(), (), example, dynamic_shapes=shapes)
    words = "^other: expected batch and tokens once at most, each as a dimension of its own, got"
    with pytest.raises(ShapeError, match=words):
        compile(program, example)
