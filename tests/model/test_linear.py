"""Linear layers of a graph: what is taken into one call, and what is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from pit_tvm.model.linear import LINEAR, LinearLayer, extract_linear
from tests.model.graphs import B, T, graph, names, weight

op = relax.op


def constant(*shape: int, seed: int = 0) -> np.ndarray:
    """Small numbers."""
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype("float32")


WEIGHT, BIAS = constant(8, 6), constant(6, seed=1)


def product(x: Any) -> Any:
    """``x @ WEIGHT``."""
    return op.matmul(x, relax.const(WEIGHT))


def biased(x: Any) -> Any:
    """``x @ WEIGHT + BIAS``."""
    return op.add(product(x), relax.const(BIAS))


def reference(layer: LinearLayer, x: np.ndarray) -> np.ndarray:
    """What a layer computes, by numpy."""
    y = x @ layer.weight.T + (0 if layer.bias is None else layer.bias)
    if layer.activation == "relu":
        return np.maximum(y, 0)
    if layer.activation == "silu":
        return y / (1 + np.exp(-y))
    if layer.activation == "gelu":
        erf = np.vectorize(math.erf)
        return y * 0.5 * (1 + erf(y / np.sqrt(2)))
    return y


def extract(make: Callable[..., Any], **params: Any) -> tuple[list[str], list[LinearLayer]]:
    """Operators that are left, and the layers."""
    after, layers = extract_linear(graph(make, **params))
    return names(after), layers


def assert_same_results(make: Callable[..., Any]) -> None:
    """``make`` of one ``[batch, tokens, 8]`` gives the same before and after."""
    before = graph(make, x=(B, T, 8))
    after, layers = extract_linear(before)

    def run(layer: int, x: Any, out: Any) -> None:
        tvm.runtime.tensor(reference(layers[layer], x.numpy()).astype("float32")).copyto(out)

    inputs = [constant(3, 5, 8, seed=7)]
    tvm.register_global_func(LINEAR, run)
    try:
        results = [evaluate(module, inputs) for module in (before, after)]
    finally:
        tvm_ffi.registry.remove_global_func(LINEAR)
    for old, new in zip(*results, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


def evaluate(module: tvm.IRModule, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The results of ``main``."""
    machine = relax.VirtualMachine(relax.build(module, "llvm"), tvm.cpu())
    found = machine["main"](*[tvm.runtime.tensor(i) for i in inputs])
    return (
        [f.numpy() for f in found] if isinstance(found, list | tvm_ffi.Array) else [found.numpy()]
    )


ACTIVATIONS = {"relu": op.nn.relu, "gelu": op.nn.gelu, "silu": op.nn.silu}


def shared(x: Any) -> Any:
    """A product that is used three times."""
    y = product(x)
    return relax.Tuple([op.add(y, relax.const(BIAS)), op.nn.relu(y), y])


def apart(x: Any) -> Any:
    """Flat rows, with a reshape before bias and activation."""
    y = op.reshape(product(op.reshape(x, relax.ShapeExpr([B * T, 8]))), relax.ShapeExpr([B, T, 6]))
    return op.nn.relu(op.add(y, relax.const(BIAS)))


@pytest.mark.parametrize(
    "make",
    [product, lambda x: op.nn.gelu(biased(x)), lambda x: op.nn.silu(product(x)), shared, apart],
)
def test_results_stay(make: Callable[..., Any]) -> None:
    assert_same_results(make)


@pytest.mark.parametrize("extents", [(B, T, 8), (B * T, 8), (T, 8), (3, 8)])
def test_product_with_a_constant_is_a_layer(extents: Any) -> None:
    left, (layer,) = extract(product, x=extents)
    assert "matmul" not in left
    np.testing.assert_array_equal(layer.weight, WEIGHT.T)
    assert (layer.bias, layer.activation, layer.dtype) == (None, None, "float32")


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_bias_and_activation_belong_to_it(name: str, bias: bool) -> None:
    made = biased if bias else product
    left, (layer,) = extract(lambda x: ACTIVATIONS[name](made(x)), x=(B, T, 8))
    assert set(left) == {"reshape", "call_dps_packed"}
    assert layer.activation == name
    assert (layer.bias is not None) is bias


@pytest.mark.parametrize("axes", [[0, 1], [0, -1], [1, 0], [-1, 0], None], ids=str)
def test_stored_weights_are_taken_as_they_are_permuted(axes: list[int] | None) -> None:
    stored = constant(8, 8)

    def make(x: Any) -> Any:
        return op.matmul(x, op.permute_dims(relax.const(stored), axes))

    (layer,) = extract(make, x=(B, T, 8))[1]
    np.testing.assert_array_equal(layer.weight.T, np.transpose(stored, axes))


def test_stored_weights_are_transposed_and_biases_come_first() -> None:
    stored = relax.const(np.ascontiguousarray(WEIGHT.T))
    left, (layer,) = extract(
        lambda x: op.add(relax.const(BIAS), op.matmul(x, op.permute_dims(stored))), x=(B, T, 8)
    )
    np.testing.assert_array_equal(layer.weight, WEIGHT.T)
    np.testing.assert_array_equal(layer.bias, BIAS)
    assert "add" not in left


def test_reshapes_between_are_looked_through() -> None:
    left, (layer,) = extract(apart, x=(B, T, 8))
    assert set(left) == {"reshape", "call_dps_packed"}
    assert layer.bias is not None and layer.activation == "relu"


def test_product_used_twice_keeps_its_bias_apart() -> None:
    left, (layer,) = extract(shared, x=(B, T, 8))
    assert (layer.bias, layer.activation) == (None, None)
    assert {"add", "nn.relu"} <= set(left)


def test_sum_used_twice_keeps_its_activation_apart() -> None:
    def make(x: Any) -> Any:
        y = biased(x)
        return op.add(op.nn.relu(y), y)

    left, (layer,) = extract(make, x=(B, T, 8))
    assert layer.bias is not None and layer.activation is None
    assert {"add", "nn.relu"} <= set(left)


def test_product_that_is_an_output_too_keeps_its_bias_apart() -> None:
    def make(x: Any) -> Any:
        y = product(x)
        return relax.Tuple([y, op.nn.relu(y)])

    _, (layer,) = extract(make, x=(B, T, 8))
    assert (layer.bias, layer.activation) == (None, None)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: op.add(product(x), relax.const(np.float32(2))),  # one number for all
        lambda x: op.add(product(x), relax.const(constant(1, 6))),
        lambda x: op.subtract(product(x), relax.const(BIAS)),
        lambda x: op.add(product(x), product(x)),
        lambda x: op.nn.gelu_tanh(product(x)),
        lambda x: op.exp(product(x)),
        lambda x: op.add(
            op.reshape(product(x), relax.ShapeExpr([B, T * 3, 2])), relax.const(BIAS[:2])
        ),
    ],
)
def test_what_follows_otherwise_stays(make: Callable[..., Any]) -> None:
    _, layers = extract(make, x=(B, T, 8))
    assert all((layer.bias, layer.activation) == (None, None) for layer in layers)


@pytest.mark.parametrize(
    ("make", "params"),
    [
        (lambda x, y: op.matmul(x, y), {"x": (B, T, 8), "y": (8, 6)}),
        (lambda x, y: op.matmul(x, y), {"x": (B, T, 8), "y": (B, 8, T)}),
        (lambda x: op.matmul(x, relax.const(constant(1, 8, 6))), {"x": (B, T, 8)}),
        (lambda x: op.matmul(relax.const(constant(6, 8)), x), {"x": (B, 8, T)}),
    ],
)
def test_other_products_are_left_alone(make: Callable[..., Any], params: Any) -> None:
    left, layers = extract(make, **params)
    assert layers == [] and left == ["matmul"]


def test_layers_are_numbered_in_order() -> None:
    def make(x: Any) -> Any:
        return op.matmul(op.nn.relu(biased(x)), weight(6, 4))

    _, layers = extract(make, x=(B, T, 8))
    assert [layer.weight.shape for layer in layers] == [(6, 8), (4, 6)]
