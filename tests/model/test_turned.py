"""Tokens put before sequences and flattened: rows of another order are no tokens of the mask's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from tvm import relax

from pit_tvm.model import CompiledModel, compile
from pit_tvm.model.turned import turned
from tests.model.graphs import PLANE, B, T, graph, weight

op = relax.op
WIDTH = 8
MASKS = {
    "right": [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
    "left": [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]],
    "holes": [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]],
}
Order = Callable[[torch.Tensor], torch.Tensor]


def by_heads(x: torch.Tensor, inner: bool = True) -> torch.Tensor:
    """Rows of tokens first, by way of sequences and heads as one dimension."""
    batch, tokens, width = x.shape
    heads = x.transpose(0, 1).contiguous().reshape(tokens, batch * 2, width // 2)
    return (heads * 2 if inner else heads).reshape(tokens * batch, width)


def heads_apart(x: torch.Tensor) -> torch.Tensor:
    """Rows of a head's tokens together, ``[2 * batch, tokens, 4]``, and back."""
    batch, tokens, width = x.shape
    heads = x.reshape(batch, tokens, 2, width // 2).permute(2, 0, 1, 3).contiguous()
    rows = torch.relu(heads.reshape(2 * batch, tokens, width // 2))
    return rows.reshape(2, batch, tokens, width // 2).permute(1, 2, 0, 3).reshape(x.shape)


# Rows of tokens first: what a dead token has there is the model's own.
ROWS: dict[str, Order] = {
    "flat": lambda x: x.transpose(0, 1).reshape(-1, WIDTH),
    "used": lambda x: x.transpose(0, 1).reshape(-1, WIDTH) * 2 + 1,
    "by heads": by_heads,
    "by heads at once": lambda x: by_heads(x, False),
    "joined with numbers": lambda x: by_heads(x) + torch.arange(x.shape[0] * x.shape[1])[:, None],
    "widths first": lambda x: x.transpose(0, 1).reshape(x.shape[1], -1).reshape(-1, WIDTH),
    "tokens and widths": lambda x: (x.transpose(0, 1).flatten(1) * 2).flatten().view(-1, WIDTH),
}
# Tokens in an order of their own, [tokens, batch, WIDTH] or [batch, tokens, WIDTH].
BACK: dict[str, Order] = {
    "turned": lambda x: x.transpose(0, 1) * 2,
    "back": lambda x: (x.transpose(0, 1).reshape(-1, WIDTH) * 2).reshape(x.shape[1], -1, WIDTH),
    "back by heads": lambda x: (by_heads(x) + 1).reshape(x.shape[1], x.shape[0], WIDTH),
    "back in order": lambda x: (
        (by_heads(x) + 1).reshape(x.shape[1], x.shape[0], WIDTH).transpose(0, 1)
    ),
    "heads apart": heads_apart,
    "not in order": lambda x: (x.transpose(0, 1).reshape(-1, WIDTH) * 2).reshape(x.shape),
}
PAIRS: dict[str, Order] = {
    "pairs": lambda x: x @ x.transpose(1, 2),
    "pairs of features": lambda x: x[:, :, None] * x[:, None],
}


class Flat(nn.Module):
    """Rows of words, in another order."""

    def __init__(self, orders: dict[str, Order]) -> None:
        super().__init__()
        self.words, self.orders = nn.Embedding(30, WIDTH), orders

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """All rows; the mask is an input only."""
        words = self.words(input_ids)
        return {name: order(words) for name, order in self.orders.items()}


def inputs(pattern: str) -> dict[str, torch.Tensor]:
    mask = torch.tensor(MASKS[pattern])
    return {"input_ids": torch.arange(12).reshape(3, 4), "attention_mask": mask}


Compiled = tuple[nn.Module, CompiledModel]


def compiled(model: nn.Module) -> Compiled:
    """The module in float64, and what is compiled of it."""
    return copy.deepcopy(model).double(), compile(model.eval(), inputs("right"))


def results(made: Compiled, pattern: str) -> tuple[Any, Any, torch.Tensor]:
    """What is compiled gives, what the module gives in float64, and the mask."""
    (exact, ours), given = made, inputs(pattern)
    with torch.no_grad():
        return ours(**given), exact(**given), given["attention_mask"].bool()


@pytest.fixture(scope="module")
def rows() -> Compiled:
    torch.manual_seed(0)
    return compiled(Flat(ROWS))


@pytest.fixture(scope="module")
def back() -> Compiled:
    torch.manual_seed(0)
    return compiled(Flat(BACK))


@pytest.fixture(scope="module")
def pairs() -> Compiled:
    torch.manual_seed(0)
    return compiled(Flat(PAIRS))


@pytest.mark.parametrize("pattern", MASKS)
def test_rows_of_another_order_are_the_models(rows: Compiled, pattern: str) -> None:
    found, wanted, _ = results(rows, pattern)
    for name in ROWS:
        torch.testing.assert_close(found[name].double(), wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pattern", MASKS)
def test_what_comes_back_in_order_is_zero_where_dead(back: Compiled, pattern: str) -> None:
    found, wanted, live = results(back, pattern)
    for name in BACK:
        at = live if wanted[name].shape[:2] == live.shape else live.T
        expected = wanted[name] * at[..., None]
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-6, msg=name)


class Heads(nn.Module):
    """torch's attention, which folds sequences and heads with tokens first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(30, WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The attention of words ``[batch, tokens, WIDTH]``."""
        x = self.words(input_ids)
        x = x if self.attend.batch_first else x.transpose(0, 1)
        found = self.attend(x, x, x, key_padding_mask=attention_mask == 0)[0]
        return found if self.attend.batch_first else found.transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_attention_is_zero_where_dead(batch_first: bool) -> None:
    torch.manual_seed(0)
    found, wanted, live = results(compiled(Heads(batch_first)), "left")
    torch.testing.assert_close(found[live].double(), wanted[live], rtol=1e-4, atol=1e-5)
    assert not found[~live].any()


@pytest.mark.parametrize("pattern", MASKS)
def test_rows_of_pairs_of_tokens_are_zero_where_dead(pairs: Compiled, pattern: str) -> None:
    found, wanted, live = results(pairs, pattern)
    for name in PAIRS:
        rows = found[name].double()
        torch.testing.assert_close(rows[live], wanted[name][live], rtol=1e-5, atol=1e-6)
        assert not rows[~live].any()


def turned_twice(x: torch.Tensor) -> torch.Tensor:
    batch, tokens, width = x.shape
    return x.reshape(tokens, batch, width).transpose(0, 1).reshape(tokens, batch, width)


def test_rows_of_another_order_do_not_come_back_transposed() -> None:
    torch.manual_seed(0)
    found, wanted, _ = results(compiled(Flat({"twice": turned_twice})), "right")
    torch.testing.assert_close(found["twice"].double(), wanted["twice"])


# --------------------------------------------------------------------------------------------
# Graphs


def shaped(x: Any, *extents: Any) -> Any:
    return op.reshape(x, relax.ShapeExpr(list(extents)))


def swapped(x: Any) -> Any:
    return op.permute_dims(x, [1, 0, *range(2, x.ty.ndim)])


def normal(x: Any) -> Any:
    """A variable for an expression, as operators that look at shapes need it."""
    return relax.BlockBuilder.current().emit(x)


def folded(x: Any) -> Any:
    """``[batch * 2, tokens, 4]``."""
    heads = normal(op.permute_dims(normal(shaped(x, B, T, 2, 4)), [0, 2, 1, 3]))
    return normal(shaped(heads, B * 2, T, 4))


def heads_first(x: Any) -> Any:
    """``[2 * batch, tokens, 4]``."""
    heads = normal(op.permute_dims(normal(shaped(x, B, T, 2, 4)), [2, 0, 1, 3]))
    return normal(shaped(heads, B * 2, T, 4))


ORDERS: dict[str, tuple[Callable[..., Any], bool]] = {
    "rows": (lambda x, y: shaped(x, B * T, 8), False),
    "rows, the other way round": (lambda x, y: shaped(x, T * B, 8), False),
    "heads": (lambda x, y: shaped(x, B, T, 2, 4), False),
    "through the width": (lambda x, y: shaped(normal(shaped(x, B, T * 8)), B, T, 8), False),
    "through all": (lambda x, y: shaped(normal(shaped(x, B * T * 8)), B * T, 2, 4), False),
    "a product of heads": (
        lambda x, y: shaped(normal(op.matmul(folded(x), weight(4, 6))), B, 2, T, 6),
        False,
    ),
    "a softmax of scores": (
        lambda x, y: shaped(
            normal(
                op.matmul(
                    normal(
                        op.nn.softmax(op.matmul(folded(x), op.permute_dims(folded(x), [0, 2, 1])))
                    ),
                    folded(y),
                )
            ),
            B,
            2,
            T,
            4,
        ),
        False,
    ),
    "a mask for each head": (
        lambda x, y: shaped(
            normal(op.add(heads_first(x), op.tile(normal(op.sum(y, [2], True)), [2, 1, 1]))),
            2,
            B,
            T,
            4,
        ),
        False,
    ),
    "a mask for heads of another order": (
        lambda x, y: shaped(
            normal(op.add(folded(x), op.tile(normal(op.sum(y, [2], True)), [2, 1, 1]))),
            B,
            2,
            T,
            4,
        ),
        True,
    ),
    "tokens first": (lambda x, y: shaped(normal(swapped(x)), B * T, 8), True),
    "tokens as sequences": (lambda x, y: shaped(x, T, B, 8), True),
    "heads as sequences": (lambda x, y: shaped(folded(x), 2, B, T, 4), True),
    "two orders": (
        lambda x, y: shaped(normal(op.add(folded(x), heads_first(y))), B, 2, T, 4),
        True,
    ),
    "parts of tokens": (lambda x, y: shaped(x, B, 2, T, 4), True),
    "a longer sequence": (
        lambda x, y: op.strided_slice(
            normal(
                op.concat([x, normal(op.strided_slice(y, [1], [0], [1], assume_inbound=True))], 1)
            ),
            [1],
            [0],
            [T],
            assume_inbound=True,
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_order_of_a_graph(name: str) -> None:
    make, expected = ORDERS[name]
    main = graph(make, x=(B, T, 8), y=(B, T, 8))["main"]
    (block,) = main.body.blocks
    made = [b.var for b in block.bindings if isinstance(b.value, relax.Call)]
    assert (made[-1] in turned(main, PLANE)) is expected
