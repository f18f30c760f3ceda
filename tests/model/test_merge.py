"""Linear layers that share their input, merged where slices of the result will do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from pit_tvm.model.linear import LinearLayer, extract_linear
from pit_tvm.model.merge import merge_linear
from pit_tvm.model.tidy import tidy
from tests.model.graphs import B, T, graph, names, values

op = relax.op
TAKER = "pit_tvm.tests.taker"


def product(x: Any, n: int, seed: int, bias: bool = True) -> Any:
    """A layer with random weights."""
    rng = np.random.default_rng(seed)
    y = op.matmul(x, relax.const(rng.uniform(-1, 1, (8, n)).astype("float32")))
    return op.add(y, relax.const(rng.uniform(-1, 1, n).astype("float32"))) if bias else y


def taken(*operands: Any) -> Any:
    """A call that takes slices, ``[rows, n]`` each."""
    builder = relax.BlockBuilder.current()
    flat = [builder.emit(op.reshape(o, [B * T, o.ty.shape.values[-1]])) for o in operands]
    ty = relax.TensorType([B * T, 2], "float32")
    return op.call_pure_packed(TAKER, *flat, ty_args=[ty])


def merged(make: Any) -> tuple[Any, list[LinearLayer], list[LinearLayer]]:
    """The graph afterwards, layers before and after."""
    module, before = extract_linear(graph(make, x=(B * T, 8)))
    takes = lambda call: getattr(call.args[0], "global_symbol", "") == TAKER  # noqa: E731
    after, layers = merge_linear(tidy(module, {}), before, takes)
    return after, before, layers


def emitted(*layers: Any) -> Any:
    """Each of ``layers`` bound in turn."""
    builder = relax.BlockBuilder.current()
    return [builder.emit(builder.normalize(one)) for one in layers]


@pytest.mark.parametrize("bias", [True, False])
def test_three_layers_become_one_and_its_slices(bias: bool) -> None:
    sizes = (4, 6, 2)

    def make(x: Any) -> Any:
        return taken(*emitted(*(product(x, n, n, bias) for n in sizes)))

    after, before, layers = merged(make)
    assert [len(layer.weight) for layer in before] == list(sizes)
    (one,) = layers
    np.testing.assert_array_equal(one.weight, np.concatenate([b.weight for b in before]))
    if bias:
        np.testing.assert_array_equal(one.bias, np.concatenate([b.bias for b in before]))
    else:
        assert one.bias is None
    slices = [v for v in values(after).values() if getattr(v, "op", None) is not None]
    found = [
        (int(v.args[2].fields[0]), int(v.args[3].fields[0]))
        for v in slices
        if names_of(v) == "relax.strided_slice"
    ]
    assert found == [(0, 4), (4, 10), (10, 12)]
    assert names(after).count("call_dps_packed") == 1


def names_of(call: Any) -> str:
    """Name of an operator."""
    return str(getattr(call.op, "name", ""))


def test_a_layer_that_something_else_reads_stays() -> None:
    def make(x: Any) -> Any:
        a, b, c = emitted(*(product(x, 4, seed) for seed in range(3)))
        return op.add(taken(a, b), op.sum(c, keepdims=True))

    after, before, layers = merged(make)
    assert len(before) == 3 and {len(layer.weight) for layer in layers} == {4, 8}
    assert names(after).count("call_dps_packed") == 2


def test_activations_and_single_layers_stay() -> None:
    def make(x: Any) -> Any:
        a, b = emitted(op.nn.relu(product(x, 4, 0)), product(x, 4, 1))
        return taken(a, b)

    after, _, layers = merged(make)
    assert len(layers) == 2 and "strided_slice" not in names(after)


def test_layers_of_several_inputs_are_merged_apart() -> None:
    def make(x: Any) -> Any:
        builder = relax.BlockBuilder.current()
        y = builder.emit(op.negative(x))
        return taken(*emitted(*(product(v, 4, s) for s, v in enumerate((x, y, x, y)))))

    _, before, layers = merged(make)
    assert len(layers) == 2
    for pair, layer in zip(((0, 2), (1, 3)), layers, strict=True):
        expected = np.concatenate([before[i].weight for i in pair])
        np.testing.assert_array_equal(layer.weight, expected)
