"""Operators by others that the importer takes whole, in forms that it does and others, beside
torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional

from pit_tvm.model import compile
from pit_tvm.model.decomposing import decompose
from tests.model.test_fragments import targets

WIDTH = 16
LIVE = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
TABLE = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)
ONE, OTHER = TABLE[0], TABLE[1]


def attention(x: Tensor, mask: Tensor | None, shared: bool = False, **options: Any) -> Tensor:
    """Of two heads, or of four that share the keys of two."""
    query, keys, values = (x.roll(at, -1).unflatten(-1, (4, -1)).transpose(1, 2) for at in range(3))
    if shared:
        keys, values = keys[:, :2], values[:, :2]
    attend = functional.scaled_dot_product_attention
    found = attend(query, keys, values, mask, enable_gqa=shared, **options)
    return found.transpose(1, 2).flatten(2)


def seen(mask: Tensor) -> Tensor:
    """Live keys, for every query."""
    return mask[:, None, None].bool()


def added(x: Tensor, mask: Tensor) -> Tensor:
    """As numbers."""
    low = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(mask == 0, -1e4)
    return low[:, None, None].expand(-1, 1, x.shape[1], -1)


Form = Callable[[Tensor, Tensor], Tensor]
ATTENTION: dict[str, Form] = {
    "seen": lambda x, m: attention(x, seen(m)),
    "added": lambda x, m: attention(x, added(x, m), scale=0.3),
    "all": lambda x, m: attention(x, None),
    "rows without keys": lambda x, m: attention(x, seen(m) & (m[:, None, :, None] < 0)),
}
OTHER_ATTENTION: dict[str, Form] = {
    "causal": lambda x, m: attention(x, None, is_causal=True),
    "by a factor below 0": lambda x, m: attention(x, seen(m), scale=-0.5),
    "heads that share keys": lambda x, m: attention(x, seen(m), shared=True),
    "of one head without its dimension": lambda x, m: functional.scaled_dot_product_attention(
        x, x, x, m[:, None].bool()
    ),
}
# By the operator that stays.
WHOLE: dict[str, dict[str, Form]] = {
    "scaled_dot_product_attention.default": ATTENTION,
    "linear.default": {
        "rows": lambda x, m: functional.linear(x, TABLE, TABLE[:, 1]),
        "no bias": lambda x, m: functional.linear(x.flatten(0, 1), TABLE).view(*x.shape[:2], 3),
    },
    "matmul.default": {
        "by a matrix": lambda x, m: x @ TABLE.mT,
        "of sequences": lambda x, m: x @ (x.mT @ x),
    },
    "layer_norm.default": {"plain": lambda x, m: functional.layer_norm(x, (WIDTH,), ONE, OTHER)},
    "softmax.int": {
        "plain": lambda x, m: torch.softmax(x, -1),
        "in another type": lambda x, m: torch.softmax(x.half(), -1, dtype=torch.float32),
    },
    "dropout.default": {"plain": lambda x, m: functional.dropout(x, 0.5, training=False)},
    "reshape.default": {"plain": lambda x, m: (x + 1).reshape(*x.shape[:2], 2, -1).flatten(2)},
    "transpose.int": {"plain": lambda x, m: x.unflatten(-1, (2, -1)).transpose(-2, 2).flatten(2)},
    "arange.default": {
        "whole": lambda x, m: x * torch.arange(WIDTH),
        "real": lambda x, m: x * torch.arange(float(WIDTH)),
    },
    "to.dtype": {"other": lambda x, m: (x * 4).to(torch.int32) + x.to(torch.float32)},
    "type_as.default": {"other": lambda x, m: m[..., None].type_as(x) * x},
    "contiguous.default": {"plain": lambda x, m: x.mT.contiguous().mT},
    "floor_divide.default": {
        "by a number": lambda x, m: x // 0.3,
        "whole": lambda x, m: (x * 8).int() // 3,
        "by another": lambda x, m: x // (x.abs() + 1),
    },
    "__and__.Tensor": {"conditions": lambda x, m: (x > 0) & (x < 1)},
    "__or__.Tensor": {"numbers": lambda x, m: (x * 8).int() | (x * 4).int()},
}
OTHERS: dict[str, dict[str, Form]] = {
    "scaled_dot_product_attention.default": OTHER_ATTENTION,
    "matmul.default": {
        "with one less": lambda x, m: (x[:, None] @ x.mT[:, None].expand(-1, 2, -1, -1)).sum(1),
        "with a vector": lambda x, m: (x @ ONE)[..., None],
    },
    "layer_norm.default": {"no shift": lambda x, m: functional.layer_norm(x, (WIDTH,), ONE)},
}


class Model(nn.Module):
    """What forms make of ``input``, whose dead tokens are 0, side by side."""

    def __init__(self, named: dict[str, dict[str, Form]]) -> None:
        super().__init__()
        self.forms = [form for forms in named.values() for form in forms.values()]

    def forward(self, input: Tensor, attention_mask: Tensor) -> Tensor:
        """``[batch, tokens, ...]``, 0 where dead."""
        live = attention_mask[..., None].to(input.dtype)
        x = input * live
        found = [form(x, attention_mask).to(input.dtype) for form in self.forms]
        return torch.cat(found, -1) * live


def program_of(model: nn.Module) -> ExportedProgram:
    """For any number of sequences and tokens."""
    given = {"input": torch.rand(3, 7, WIDTH), "attention_mask": torch.ones(3, 7).long()}
    sizes = {0: Dim("batch"), 1: Dim("tokens")}
    return torch.export.export(model, (), given, dynamic_shapes=dict.fromkeys(given, sizes))


def test_what_the_importer_takes_stays_and_gives_what_torch_does() -> None:
    model = Model(WHOLE)
    program = program_of(model)
    before, after = targets(program), targets(decompose(program))
    for name in WHOLE:
        assert after[f"aten.{name}"] == before[f"aten.{name}"] > 0
    given = {"input": torch.randn(*LIVE.shape, WIDTH), "attention_mask": LIVE}
    got = compile(program, given)(**given)
    torch.testing.assert_close(got, model(**given), rtol=1e-4, atol=1e-4)


def test_other_forms_are_what_they_consist_of() -> None:
    model = Model(OTHERS)
    program = program_of(model)
    found = decompose(program)
    for name in OTHERS:
        assert targets(program)[f"aten.{name}"] and not targets(found)[f"aten.{name}"]
    given = {"input": torch.randn(*LIVE.shape, WIDTH), "attention_mask": LIVE}
    torch.testing.assert_close(found.module()(**given), model(**given))
