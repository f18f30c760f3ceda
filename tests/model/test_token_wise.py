"""Which operators may run on live tokens alone, and what is said of the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from tvm import relax

from pit_tvm.model import token_wise
from pit_tvm.model.grouped import grouped_linear
from pit_tvm.model.token_wise import Judge, why_not_token_wise
from tests.model.graphs import PLANE, B, T, last_call, weight

op = relax.op
ROWS = (B, T, 8)
HEADS = (B, 2, T, 4)

ACCEPTED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "elementwise": (lambda x: op.exp(x), {"x": ROWS}),
    "sum of two": (lambda x, y: op.add(x, y), {"x": ROWS, "y": ROWS}),
    "sum with a bias": (lambda x: op.add(x, weight(8)), {"x": ROWS}),
    "sum with positions": (lambda x, y: op.add(x, y), {"x": ROWS, "y": (T, 8)}),
    "sum with positions of a batch of one": (
        lambda x, y: op.add(x, y),
        {"x": ROWS, "y": (1, T, 8)},
    ),
    "sum with one value of each sequence": (
        lambda x, y: op.add(x, y),
        {"x": ROWS, "y": (B, 1, 8)},
    ),
    "both axes as one": (lambda x: op.exp(x), {"x": (B * T, 8)}),
    "layer norm": (lambda x: op.nn.layer_norm(x, weight(8), weight(8), [-1]), {"x": ROWS}),
    "softmax over features": (lambda x: op.nn.softmax(x, -1), {"x": ROWS}),
    "sum over features": (lambda x: op.sum(x, [2]), {"x": ROWS}),
    "product with weights": (lambda x: op.matmul(x, weight(8, 5)), {"x": ROWS}),
    "product with weights of flat rows": (lambda x: op.matmul(x, weight(8, 5)), {"x": (B * T, 8)}),
    "rows of a table": (lambda ids: op.take(weight(9, 8), ids, 0), {"ids": ("int64", B, T)}),
    "permuted": (lambda x: op.permute_dims(x, [0, 2, 1, 3]), {"x": HEADS}),
    "tokens last": (lambda x: op.permute_dims(x, [0, 1, 3, 2]), {"x": HEADS}),
    "tokens first": (lambda x: op.permute_dims(x, [1, 0, 2]), {"x": ROWS}),
    "repeated over heads": (
        lambda x: op.broadcast_to(x, relax.ShapeExpr([B, 2, T, 4])),
        {"x": (B, 1, T, 4)},
    ),
    "folded": (lambda x: op.reshape(x, relax.ShapeExpr([B * T, 8])), {"x": ROWS}),
    "unfolded": (lambda x: op.reshape(x, relax.ShapeExpr([B, T, 2, 4])), {"x": (B * T, 8)}),
    "heads apart": (lambda x: op.reshape(x, relax.ShapeExpr([B, T, 2, 4])), {"x": ROWS}),
    "part of the features": (lambda x: op.strided_slice(x, [2], [0], [4]), {"x": ROWS}),
    "features sorted": (lambda x: op.sort(x, -1), {"x": ROWS}),
    "places of the largest features": (
        lambda x: op.topk(x, 2, -1, "indices", dtype="int64"),
        {"x": (B * T, 8)},
    ),
    "weights of experts": (
        lambda x, ids: grouped_linear(x, ids, weight(3, 5, 8), weight(3, 5), "silu"),
        {"x": ROWS, "ids": ("int64", B, T, 2)},
    ),
    "other type": (lambda x: op.astype(x, "float16"), {"x": ROWS}),
    "chosen": (
        lambda c, x, y: op.where(c, x, y),
        {"c": ("bool", B, T, 1), "x": ROWS, "y": ROWS},
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_operators_that_treat_tokens_by_themselves(name: str) -> None:
    make, params = ACCEPTED[name]
    assert why_not_token_wise(last_call(make, **params), PLANE) is None


# What is written, and words of the reason.
REJECTED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "softmax over tokens": (
        lambda x: op.nn.softmax(x, 1),
        {"x": ROWS},
        "softmax_maxelem reduces over the tokens",
    ),
    "cumsum over tokens": (
        lambda x: op.cumsum(x, 1),
        {"x": ("int64", B, T)},
        "cumsum is not lowered to one loop nest",
    ),
    "tokens reversed": (
        lambda x: op.flip(x, 1),
        {"x": ROWS},
        r"dimension 1 of .*tokens - .* does not follow the tokens",
    ),
    "sequences reversed": (
        lambda x: op.flip(x, 0),
        {"x": ROWS},
        r"dimension 0 of .*batch - .* does not follow the batch",
    ),
    "tokens shifted": (
        lambda x, y: op.concat([x, y], 1),
        {"x": (B, T - 1, 8), "y": (B, 1, 8)},
        "concat reads all tokens of a sequence",
    ),
    "choices of other tokens": (
        lambda x, ids: grouped_linear(x, ids, weight(3, 5, 8)),
        {"x": (6, 8), "ids": ("int64", 6)},
        "gives no value of single tokens",
    ),
    "tokens sorted": (
        lambda x: op.sort(x, 1),
        {"x": ROWS},
        "sort of .* orders tokens",
    ),
    "sum over tokens": (
        lambda x: op.sum(x, [1]),
        {"x": ROWS},
        "sum gives no value of single tokens",
    ),
    "mean over tokens, kept": (
        lambda x: op.mean(x, [1], keepdims=True),
        {"x": ROWS},
        "mean gives no value of single tokens",
    ),
    "scores of pairs": (
        lambda q, k: op.matmul(q, k),
        {"q": HEADS, "k": (B, 2, 4, T)},
        "matmul gives no value of single tokens",
    ),
    "product over tokens": (
        lambda p, v: op.matmul(p, v),
        {"p": (B, 2, T, T), "v": HEADS},
        "matmul reads all tokens of a sequence",
    ),
    "first token": (
        lambda x: op.strided_slice(x, [1], [0], [1]),
        {"x": ROWS},
        "strided_slice gives no value of single tokens",
    ),
    "tokens behind features": (
        lambda x: op.reshape(x, relax.ShapeExpr([B, 8, T])),
        {"x": ROWS},
        "reshape of .* mixes tokens with other dimensions",
    ),
    "tokens before the batch": (
        lambda x: op.reshape(x, relax.ShapeExpr([T, B, 8])),
        {"x": ROWS},
        "reshape of .* mixes tokens with other dimensions",
    ),
    "tokens unfolded": (
        lambda x: op.reshape(x, relax.ShapeExpr([B * T, 8])),
        {"x": (B, 8, 1, T)},
        "reshape of .* mixes tokens with other dimensions",
    ),
    "norm over tokens": (
        lambda x: op.nn.layer_norm(x, op.ones([T], "float32"), op.zeros([T], "float32"), [1]),
        {"x": (B, T)},
        "reduces over the tokens",
    ),
    "tokens picked by values": (
        lambda x, ids: op.gather_elements(x, ids, 1),
        {"x": (B, T), "ids": ("int64", B, T)},
        "does not follow the tokens",
    ),
    "tokens scattered": (
        lambda x, ids: op.scatter_elements(x, ids, x, 1),
        {"x": ROWS, "ids": ("int64", *ROWS)},
        "scatter_elements_generic is no tensor expression",
    ),
    "tokens padded": (
        lambda x: op.nn.pad(x, [0, 0, 1, 0, 0, 0]),
        {"x": (B, T - 1, 8)},
        "pad reads all tokens of a sequence",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_operators_that_mix_tokens_and_why(name: str) -> None:
    make, params, reason = REJECTED[name]
    found = why_not_token_wise(last_call(make, **params), PLANE)
    assert found is not None and re.search(reason, found)


def test_operators_that_are_alike_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[relax.Call] = []

    def judge_one(call: relax.Call, plane: Any) -> str | None:
        judged.append(call)
        return why_not_token_wise(call, plane)

    monkeypatch.setattr(token_wise, "why_not_token_wise", judge_one)
    judge = Judge(PLANE)

    def why(make: Callable[..., Any], **params: Any) -> str | None:
        return judge.why_not(last_call(make, **params))

    assert why(lambda x: op.flip(x, 1), x=ROWS) == why(lambda y: op.flip(y, 1), y=ROWS) is not None
    assert why(lambda x: op.add(x, weight(8)), x=ROWS) is None
    assert why(lambda x: op.add(x, weight(8)), x=ROWS) is None
    assert len(judged) == 2
    # Other attributes, and other extents, are other operators.
    assert why(lambda x: op.flip(x, 2), x=ROWS) is None
    assert "does not follow" in str(why(lambda x: op.flip(x, 1), x=(T, B, 8)))
    assert why(lambda x: op.exp(x), x=ROWS) is None
    assert len(judged) == 5
