"""Activations that models spell out, as operators."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.special import erf

from pit_tvm.model import compile
from pit_tvm.model.importer import import_model
from pit_tvm.model.tidy import tidy
from tests.model.graphs import names

Form = Callable[[torch.Tensor], torch.Tensor]
ROOT, WIDTH = math.sqrt(2 / math.pi), 8

TANH: dict[str, Form] = {
    "GPT-2": lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "FastGELU": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.79788456 * (1.0 + 0.044715 * x * x))),
    "Bloom": lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    "halved last": lambda x: x * (torch.tanh((x**3 * 0.044715 + x) * ROOT) + 1) / 2,
    "of a product": lambda x: TANH["GPT-2"](x * x.flip(-1)),
}
ERF: dict[str, Form] = {
    "ESM": lambda x: x * 0.5 * (1.0 + erf(x / math.sqrt(2.0))),
    "half of x first": lambda x: (x * 0.5) * (erf(x * 0.7071067811865475) + 1.0),
}
# What comes near, and the function that it has.
OTHERS: dict[str, tuple[str, Form]] = {
    "another factor": ("tanh", lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.05 * x**3)))),
    "another power": ("tanh", lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**2)))),
    "no cube": ("tanh", lambda x: 0.5 * x * (1 + torch.tanh(ROOT * x))),
    "a cube behind a minus": (
        "tanh",
        lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x - 0.044715 * x * x * x))),
    ),
    "not halved": ("erf", lambda x: x * (1.0 + erf(x / math.sqrt(2.0)))),
    "x twice": ("erf", lambda x: x * x * 0.5 * (1.0 + erf(x / math.sqrt(2.0)))),
    "two and f": ("erf", lambda x: x * 0.5 * (2.0 + erf(x / math.sqrt(2.0)))),
    "another x": ("erf", lambda x: x.flip(-1) * 0.5 * (1.0 + erf(x / math.sqrt(2.0)))),
    "an x for all rows": (
        "erf",
        lambda x: x.sum(-1, True) * 0.5 * (1.0 + erf(x / math.sqrt(2.0))),
    ),
    "x divides": ("erf", lambda x: 0.5 * (1.0 + erf(x / math.sqrt(2.0))) / x),
}


class Spelled(nn.Module):
    """Values of words, and what each form makes of them."""

    def __init__(self, forms: dict[str, Form]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.forms = forms

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """By name, ``[batch, tokens, WIDTH]``."""
        x = 3 * self.up(self.table(input_ids)) * attention_mask[..., None]
        return {name: form(x) for name, form in self.forms.items()}


def given(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """Words, all of which live."""
    ids = torch.randint(0, 30, (batch, tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def operators(form: Form, dtype: torch.dtype = torch.float32) -> list[str]:
    """What a form is in Relax."""
    model = Spelled({"form": form}).to(dtype).eval()
    imported = import_model(model, given(3, 6), "attention_mask")
    return names(tidy(imported.module, {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*TANH, *ERF])
def test_forms_are_one_operator(name: str, dtype: torch.dtype) -> None:
    found = operators((TANH | ERF)[name], dtype)
    assert found.count("nn.gelu_tanh" if name in TANH else "nn.gelu") == 1
    assert not {"tanh", "erf", "power", "add"} & set(found[found.index("multiply") :])


@pytest.mark.parametrize("name", OTHERS)
def test_what_comes_near_stays(name: str) -> None:
    function, form = OTHERS[name]
    found = operators(form)
    assert function in found and not {"nn.gelu_tanh", "nn.gelu"} & set(found)


def test_values_are_torchs() -> None:
    forms = TANH | ERF | {name: form for name, (_, form) in OTHERS.items()}
    del forms["x divides"]  # by what may be 0
    model = Spelled(forms).eval()
    ours, words = compile(model, given(3, 6)), given(4, 9)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(**words)
    for name, found in ours(**words).items():
        error = (found.double() - exact[name]).norm() / exact[name].norm()
        assert error < 1e-5, name
