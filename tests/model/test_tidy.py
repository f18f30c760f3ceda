"""The importer's detours: each before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from pit_tvm.model.rebuild import extents_of, same_extents, shape_of
from pit_tvm.model.tidy import tidy
from tests.model.graphs import B, T, calls, graph, names, weight

op = relax.op
ROWS = (B, T, 8)

# Before, parameters, names of the operators that are left.
RULES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "broadcast to its own shape": (
        lambda x: op.exp(op.broadcast_to(x, relax.ShapeExpr([B, T, 8]))),
        {"x": ROWS},
        ["exp"],
    ),
    "broadcast to another shape": (
        lambda x, y: op.add(op.broadcast_to(x, relax.ShapeExpr([B, T, 8])), y),
        {"x": (B, 1, 8), "y": ROWS},
        ["broadcast_to", "add"],
    ),
    "reshape to its own shape": (
        lambda x: op.exp(op.reshape(x, relax.ShapeExpr([B, T, 8]))),
        {"x": ROWS},
        ["exp"],
    ),
    "reshape to another shape": (
        lambda x: op.exp(op.reshape(x, relax.ShapeExpr([B * T, 8]))),
        {"x": ROWS},
        ["reshape", "exp"],
    ),
    "its own type": (lambda x: op.exp(op.astype(x, "float32")), {"x": ROWS}, ["exp"]),
    "another type": (lambda x: op.exp(op.astype(x, "float16")), {"x": ROWS}, ["astype", "exp"]),
    "times one": (
        lambda x: op.exp(op.multiply(x, relax.const(np.float32(1)))),
        {"x": ROWS},
        ["exp"],
    ),
    "times two": (
        lambda x: op.exp(op.multiply(x, relax.const(np.float32(2)))),
        {"x": ROWS},
        ["multiply", "exp"],
    ),
    "times ones of more rows": (
        lambda x: op.exp(op.multiply(x, relax.const(np.ones((4, 8), "float32")))),
        {"x": (B, 1, 8)},
        ["multiply", "exp"],
    ),
    "permutations that cancel": (
        lambda x: op.exp(op.permute_dims(op.permute_dims(x, [1, 2, 0]), [2, 0, 1])),
        {"x": ROWS},
        ["exp"],
    ),
    "permutations without axes": (
        lambda x: op.exp(op.permute_dims(op.permute_dims(x))),
        {"x": ROWS},
        ["exp"],
    ),
    "permutations that do not cancel": (
        lambda x: op.exp(op.permute_dims(op.permute_dims(x, [1, 2, 0]), [1, 2, 0])),
        {"x": ROWS},
        ["permute_dims", "exp"],
    ),
    "a weight of every batch": (
        lambda x, w: op.matmul(x, op.broadcast_to(w, relax.ShapeExpr([B, 8, 5]))),
        {"x": ROWS, "w": (8, 5)},
        ["matmul"],
    ),
    "several weights": (
        lambda x, w: op.matmul(x, op.broadcast_to(w, relax.ShapeExpr([B, 8, 5]))),
        {"x": ROWS, "w": (1, 8, 5)},
        ["broadcast_to", "matmul"],
    ),
    "a weight of every batch that gives the batch": (
        lambda x, y, w: op.add(op.matmul(x, op.broadcast_to(w, relax.ShapeExpr([B, 8, 5]))), y),
        {"x": (T, 8), "y": (B, T, 5), "w": (8, 5)},
        ["broadcast_to", "matmul", "add"],
    ),
    "the same twice": (
        lambda x: op.add(op.exp(x), op.exp(x)),
        {"x": ROWS},
        ["exp", "add"],
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_detours_go_and_nothing_else(name: str) -> None:
    make, params, left = RULES[name]
    before = graph(make, **params)
    after = tidy(before, {})
    assert names(after) == left
    result = shape_of(after["main"].body)
    assert result is not None and same_extents(result, extents_of(before["main"].body))


def test_permutations_in_a_row_are_one() -> None:
    before = graph(
        lambda x: op.permute_dims(op.permute_dims(x, [1, 2, 0]), [1, 2, 0]),
        x=(2, 3, 4),
    )
    (call,) = calls(tidy(before, {}))
    assert [int(a) for a in call.attrs.axes] == [2, 0, 1]
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    np.testing.assert_array_equal(run(tidy(before, {}), x), x.transpose(1, 2, 0).transpose(1, 2, 0))


@pytest.mark.parametrize(("most", "inside"), [(None, False), (12, True), (13, False)])
def test_slice_gets_its_extent_where_it_ends_inside(most: int | None, inside: bool) -> None:
    table = weight(12, 8)
    before = graph(lambda x: op.add(x, op.strided_slice(table, [0], [0], [T])), x=ROWS)
    after = tidy(before, {} if most is None else {T: most})
    extents = extents_of(next(c for c in calls(after) if c.op.name == "relax.strided_slice"))
    assert same_extents(extents, [T, extents[1]]) is inside


@pytest.mark.parametrize(("begin", "stride"), [(1, 1), (0, 2)])
def test_other_slices_are_left_alone(begin: int, stride: int) -> None:
    table = weight(12, 8)
    before = graph(
        lambda x: op.add(op.sum(x), op.strided_slice(table, [0], [begin], [T], strides=[stride])),
        x=ROWS,
    )
    found = next(c for c in calls(tidy(before, {T: 12})) if c.op.name == "relax.strided_slice")
    assert not found.attrs.assume_inbound


def test_slice_that_ends_before_the_end_keeps_its_extent() -> None:
    before = graph(lambda x: op.sum(op.strided_slice(x, [1], [0], [-1]), [1]), x=(3, 5))
    after = tidy(before, {})
    assert same_extents(extents_of(calls(after)[0]), extents_of(calls(before)[0]))
    x = np.random.default_rng(0).normal(size=(3, 5)).astype("float32")
    np.testing.assert_allclose(run(after, x), x[:, :-1].sum(1), rtol=1e-5)


@pytest.mark.parametrize(
    ("places", "axis", "sizes"),
    [(4, 2, [2, 2, 2, 2]), (3, -1, [3, 3, 2]), ([2, 7], 2, [2, 5, 1]), ([5], 2, [5, 3])],
)
def test_parts_of_a_tensor_are_slices(places: Any, axis: int, sizes: list[int]) -> None:
    def make(x: Any) -> Any:
        whole = relax.BlockBuilder.current().emit(op.split(x, places, axis))
        return relax.Tuple([op.exp(whole[part]) for part in range(len(sizes))])

    after = tidy(graph(make, x=ROWS), {})
    assert sorted(names(after)) == ["exp"] * len(sizes) + ["strided_slice"] * len(sizes)
    x = np.random.default_rng().normal(size=(2, 3, 8)).astype("float32")
    machine = relax.VirtualMachine(relax.build(after, "llvm"), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(x))
    starts = np.cumsum(sizes)[:-1]
    for part, expected in zip(found, np.split(np.exp(x), starts, axis=2), strict=True):
        np.testing.assert_allclose(part.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("widths", [(8, 0), (0, 8), (3, 0, 5), (0, 0), (3, 5)])
def test_parts_without_elements_are_not_joined(widths: tuple[int, ...]) -> None:
    def make(x: Any) -> Any:
        parts = [op.strided_slice(x, [2], [0], [w], assume_inbound=True) for w in widths]
        return op.exp(op.concat(parts, -1))

    after = tidy(graph(make, x=ROWS), {})
    full = [w for w in widths if w]
    joined = [len(c.args[0].fields) for c in calls(after) if c.op.name == "relax.concat"]
    assert joined == {0: [2], 1: []}.get(len(full), [len(full)])
    if full:
        x = np.random.default_rng().normal(size=(2, 3, 8)).astype("float32")
        expected = np.exp(np.concatenate([x[..., :w] for w in widths], -1))
        np.testing.assert_allclose(run(after, x), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("begin", "end", "joins"),
    [
        (0, 3, 0),
        (3, 8, 0),
        (8, 99, 0),
        (3, 99, 2),
        (0, 99, 3),
        (0, 4, 3),
        (1, 3, 3),
        (-2, 99, 3),
        (10, 99, 3),
    ],
)
def test_slices_of_what_was_joined_are_its_parts(begin: int, end: int, joins: int) -> None:
    def make(x: Any) -> Any:
        doubled = op.tile(x, [1, 1, 2])
        parts = [op.strided_slice(doubled, [2], [0], [width]) for width in (3, 5, 2)]
        whole = op.concat([op.exp(parts[0]), op.sin(parts[1]), op.tanh(parts[2])], -1)
        return op.negative(op.strided_slice(whole, [2], [begin], [end]))

    before = graph(make, x=(2, 3, 4))
    after = tidy(before, {})
    joined = [len(c.args[0].fields) for c in calls(after) if c.op.name == "relax.concat"]
    assert joined == [joins] * (joins > 0)
    x = np.random.default_rng().normal(size=(2, 3, 4)).astype("float32")
    np.testing.assert_allclose(run(after, x), run(before, x), rtol=1e-5)


def test_parts_of_an_axis_of_any_length_are_left_alone() -> None:
    def make(x: Any) -> Any:
        whole = relax.BlockBuilder.current().emit(op.split(x, 2, 1))
        return op.exp(whole[0])

    assert "split" in names(tidy(graph(make, x=ROWS), {}))


def run(module: tvm.IRModule, *inputs: np.ndarray) -> np.ndarray:
    """The result of ``main``, as it is."""
    machine = relax.VirtualMachine(relax.build(module, "llvm"), tvm.cpu())
    return machine["main"](*[tvm.runtime.tensor(i) for i in inputs]).numpy()
