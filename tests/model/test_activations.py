"""Which linear layers of a graph are known to read activations, and of which kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tvm import relax

from pit_tvm.model.activations import name_activations
from pit_tvm.model.linear import extract_linear
from tests.model.graphs import B, T, graph, weight

op = relax.op


def after(make: Callable[..., Any], **params: Any) -> list[str | None]:
    """What the linear layers of ``make`` come after, in order."""
    module, layers = extract_linear(graph(make, **params))
    named = name_activations(module, layers)
    assert [layer.weight for layer in named] == [layer.weight for layer in layers]
    return [layer.after for layer in named]


def up(x: Any, act: Callable[[Any], Any] = op.nn.relu) -> Any:
    """The first linear layer, with bias and activation."""
    return act(op.add(op.matmul(x, weight(8, 6)), weight(6)))


def down(h: Any) -> Any:
    """The second."""
    return op.matmul(h, weight(6, 4))


def flat(x: Any) -> Any:
    """As rows."""
    return op.reshape(x, relax.ShapeExpr([B * T, 6]))


@pytest.mark.parametrize(
    ("act", "name"), [(op.nn.relu, "relu"), (op.nn.gelu, "gelu"), (op.nn.silu, "silu")]
)
def test_activation_of_the_layer_before(act: Callable[[Any], Any], name: str) -> None:
    assert after(lambda x: down(up(x, act)), x=(B, T, 8)) == [None, name]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: down(flat(up(x))),
        lambda x: down(op.multiply(up(x), up(x, op.nn.silu))),
        lambda x: down(op.multiply(op.matmul(x, weight(8, 6)), up(x))),
        lambda x: down(op.square(up(x))),
        lambda x: down(op.astype(op.astype(up(x), "float16"), "float32")),
    ],
    ids=["reshaped", "gated", "gate", "squared", "cast"],
)
def test_zeros_pass_what_keeps_them(make: Callable[..., Any]) -> None:
    found = after(make, x=(B, T, 8))
    assert "relu" in found and found.count("relu") == 1


def test_silu_in_two_operators() -> None:
    def make(x: Any) -> Any:
        h = op.matmul(x, weight(8, 6))
        return relax.Tuple([down(op.multiply(op.sigmoid(h), h)), down(op.sigmoid(h))])

    assert after(make, x=(B, T, 8)) == [None, "silu", None]


def test_relu_of_no_linear_layer_counts() -> None:
    assert after(lambda h: down(op.nn.relu(op.add(h, h))), h=(B, T, 6)) == ["relu"]


def test_activation_that_others_read_too() -> None:
    def make(x: Any) -> Any:
        h = up(x)
        return relax.Tuple([h, down(h)])

    assert after(make, x=(B, T, 8)) == [None, "relu"]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: down(op.add(up(x), weight(6))),
        lambda x: down(op.nn.softmax(up(x))),
        lambda x: down(op.matmul(x, weight(8, 6))),
        lambda x: down(op.add(op.nn.relu(op.matmul(x, weight(8, 6))), op.matmul(x, weight(8, 6)))),
    ],
    ids=["added to", "softmax", "linear", "residual"],
)
def test_others_are_not_after_an_activation(make: Callable[..., Any]) -> None:
    assert set(after(make, x=(B, T, 8))) == {None}
