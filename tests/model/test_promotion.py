"""Operators of operands of different types, in whole models against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from tvm import relax

from pit_tvm.errors import UnsupportedModel
from pit_tvm.model import compile, translating

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]


class Small(nn.Module):
    """Embeddings, and what ``rest`` makes of them, the ids and the mask."""

    def __init__(self, rest: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.rest = nn.Embedding(40, 16), rest

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What ``rest`` makes of values ``[batch, tokens, 16]``, ids and mask, by name."""
        return self.rest(self.table(input_ids), input_ids, attention_mask)


def inputs(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """Random ids, all of them live."""
    ids = torch.randint(3, 40, (batch, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check(rest: Forward) -> None:
    """What is compiled gives torch's values in torch's types."""
    model = Small(rest).eval()
    ours = compile(model, inputs(3, 6))
    for given in (inputs(3, 6), inputs(2, 5)):
        with torch.no_grad():
            expected = model(**given)
        found = ours(**given)
        for name, one in expected.items():
            assert found[name].dtype == one.dtype, name
            tolerance = 1e-3 if one.dtype == torch.float16 else 1e-5
            torch.testing.assert_close(found[name], one, rtol=tolerance, atol=1e-5, msg=name)


def weighted(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "means": (x * (mask / mask.sum(1, keepdim=True))[..., None]).sum(1),
        "product and sum": x * (mask * 0.9 + 0.1)[..., None],
        "places": x + (torch.arange(x.shape[1]) * 0.01)[:, None],
        "truth values": x * ((ids > 10) * 0.5)[..., None],
        "difference": x * (1.5 - mask)[..., None],
        "tokens": x / x.shape[1],
        "a wider number": x * torch.tensor(0.5, dtype=torch.float64),
        "16 bits": x.half() * mask[..., None] + torch.tensor(0.5),
    }


def whole(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "quotient": ids / (mask + 1),
        "of a number": ids / 4,
        "reciprocal": 1 / ids,
        "to zero": torch.div(-ids, 4, rounding_mode="trunc"),
        "down": -ids // 4,
        "real, to zero": torch.div(-ids, 2.5, rounding_mode="trunc"),
        "real, down": ids // 2.5,
        "remainder": -ids % 3,
        "real remainder": ids % 1.5,
        "with its sign": torch.fmod(-ids, 3),
        "real, with its sign": torch.fmod(ids, 2.5),
        "cube": ids**3,
        "root": ids**0.5,
        "power": 2.0**mask,
    }


def compared(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    high, low = ids > 10, ids < 20
    return {
        "below": ids < 5.5,
        "at least": ids + 0.5 >= ids,
        "tokens": ids < x.shape[1],
        "unlike": ids != 7.5,
        "alike": high == low,
        "above": high > 0,
        "both": high * low,
        "either": high + low,
        "counted": high + 1,
    }


def counted(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "places": torch.cumsum(mask.int(), 1),
        "of truth values": torch.cumsum(ids > 10, 1),
        "of bytes": torch.cumsum(ids.to(torch.int8) * 3, 1),
        "real": torch.cumsum(mask, 1, dtype=torch.float32),
        "along values": x.cumsum(-1),
        "products": torch.cumprod(ids.int() % 3 + 1, 1),
        "product": (ids.int() % 3 + 1).prod(1),
    }


def joined(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "values": torch.cat([x.half(), x * 2], 2),
        "numbers": torch.cat([x, ids[..., None]], dim=-1),
        "alike": torch.cat([x, x * 3], 1),
        "stacked": torch.stack([ids > 10, ids]),
        "larger": torch.maximum(x.half(), torch.tensor([0.1])),
        "smaller": torch.minimum(ids.int(), torch.tensor(7)),
        "chosen": torch.where(ids > 10, x.half().sum(-1), x.sum(-1)),
    }


def multiplied(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "sum": torch.add(x, x * x, alpha=2),
        "in place": (x * 1).add_(x * x, alpha=2),
        "number": torch.sub(x, 1.5, alpha=2),
        "whole": torch.sub(ids, mask, alpha=3),
        "reverse": torch.rsub(x, x * x, alpha=3),
        "reverse number": torch.rsub(x, 2, alpha=0.5),
    }


def activated(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "selu": nn.functional.selu(x),
        "elu": nn.functional.elu(x),
        "elu, half": nn.functional.elu(x, 0.5),
        "celu": nn.functional.celu(x, 0.7),
    }


@pytest.mark.parametrize("rest", [multiplied, activated], ids=lambda f: f.__name__)
def test_factors_are_taken(rest: Forward) -> None:
    check(rest)


@pytest.mark.parametrize(
    "rest", [weighted, whole, compared, counted, joined], ids=lambda f: f.__name__
)
def test_operands_take_torchs_type(rest: Forward) -> None:
    check(rest)


def test_whole_power_of_values_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="pow: expected a constant exponent"):
        compile(Small(lambda x, ids, mask: {"power": 2**mask}).eval(), inputs(3, 6))


UNLIKE = {
    "type": lambda x: relax.op.astype(x, "int64"),
    "bits": lambda x: relax.op.astype(x, "float16"),
    "rank": lambda x: relax.op.sum(x, 1),
    "extent": lambda x: relax.op.concat([x, x], 2),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_translation_to_another_tensor_than_torchs_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(node: torch.fx.Node, importer: translating._Importer) -> relax.Expr:
        return importer.block_builder.emit(UNLIKE[name](importer.env[node.args[0]]))

    monkeypatch.setattr(translating, "converters", lambda: {"tanh.default": wrong})
    with pytest.raises(UnsupportedModel, match=r"tanh.default .* to give float32 of extents"):
        compile(Small(lambda x, ids, mask: {"tanh": torch.tanh(x)}).eval(), inputs(3, 6))


def test_integers_take_torchs_width(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(node: torch.fx.Node, importer: translating._Importer) -> relax.Expr:
        ids = importer.block_builder.emit(relax.op.astype(importer.env[node.args[0]], "int32"))
        return importer.block_builder.emit(relax.op.negative(ids))

    monkeypatch.setattr(translating, "converters", lambda: {"neg.default": narrow})
    check(lambda x, ids, mask: {"negative": -ids, "and more": -ids * 3_000_000_000})
