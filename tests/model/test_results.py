"""Results that are constants: callers may change what they get."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pit_tvm.model import compile
from pit_tvm.model.lowering import copy_constants
from tests.model.graphs import B, T, graph

IDS = torch.ones(3, 6, dtype=torch.int64)


class Constants(nn.Module):
    """Embeddings beside what does not depend on any input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
        """Constants of one dimension and of none, folded and as they are."""
        folded = torch.arange(3.0) + 0
        return {
            "x": self.table(input_ids),
            "all": [self.table.weight, folded],
            "one": torch.ones(()) * 3,
        }


def leaves(found: dict[str, Any]) -> list[torch.Tensor]:
    return [found["x"], *found["all"], found["one"]]


def test_callers_may_change_what_they_get() -> None:
    model = Constants().eval()
    ours, given = compile(model, {"input_ids": IDS, "attention_mask": IDS}), torch.ones_like(IDS)
    with torch.no_grad():
        expected = leaves(model(given, given))
    for _ in range(2):
        for got, wanted in zip(
            leaves(ours(input_ids=given, attention_mask=given)), expected, strict=True
        ):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
            got.add_(5)


def test_other_results_are_not_copied() -> None:
    module = graph(lambda x: x, x=(B, T, 8))
    assert copy_constants(module) is module
