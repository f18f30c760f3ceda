"""Linear layers and PIT axes of small graphs."""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx

from pit_tvm.model.layers import linear_operator
from pit_tvm.model.linear import LINEAR, LinearForm, extract_linear
from pit_tvm.model.report import (
    AxisCount,
    count_axes,
    linear_forms,
    linear_plan,
    linear_uses,
)
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore
from tests.model.graphs import B, T, graph, weight

op = relax.op


def layers(x: Any, y: Any) -> Any:
    """Two layers of one form on all tokens, one of another on sequences, one on four rows."""
    bias = weight(6)
    first = op.add(op.matmul(x, weight(8, 6)), bias)
    second = op.add(op.matmul(x, weight(8, 6)), bias)
    pooled = op.nn.gelu(op.matmul(op.sum(x, [1]), weight(8, 6)))
    return relax.Tuple([first, second, pooled, op.matmul(y, weight(8, 6))])


def test_forms_and_rows_of_linear_layers() -> None:
    module, found = extract_linear(graph(layers, x=(B, T, 8), y=(4, 8)))
    biased = LinearForm(6, 8, "float32", True, "")
    active = LinearForm(6, 8, "float32", False, "gelu")
    plain = LinearForm(6, 8, "float32", False, "")
    assert linear_forms(found) == {biased: 2, active: 1, plain: 1}
    sizes = {"batch": 3, "tokens": 5}
    uses = {(u.form, u.count(sizes), u.layers) for u in linear_uses(module, found, LINEAR)}
    assert uses == {(biased, 15, 2), (active, 3, 1), (plain, 4, 1)}
    assert str(active) == "6 x 8 float32 + gelu" and str(biased) == "6 x 8 float32 + bias"


def test_plan_of_a_form() -> None:
    target = resolve_target("llvm")
    store = TileStore.open(device=target.device, isa=target.isa)
    operator = linear_operator(LinearForm(64, 32, "float32", True, "relu"), target, store)
    plan = linear_plan(operator, 10)
    assert plan.choice in plan.candidates and plan.choice.cost_us > 0
    assert "dense" in {c.kind for c in plan.candidates}
    assert linear_plan(operator, 1000).choice.cost_us > plan.choice.cost_us


def test_axes_are_counted_by_operator() -> None:
    def make(x: Any, w: Any) -> Any:
        product = op.matmul(op.add(x, x), w)
        return op.reshape(op.cumsum(op.add(product, product), 1), [B * T, 3])

    counts = count_axes(graph(make, x=(B, T, 4), w=(4, 3)))
    assert AxisCount("matmul", ("i0", "i1", "i2", "k"), 1) in counts
    assert sum(c.number for c in counts if c.operator == "add") == 2
    # TVM has loops of running sums for a target alone: nobody looks at them here.
    assert [c for c in counts if c.operator == "cumsum"][0].axes is None
    assert [c for c in counts if c.operator == "reshape"][0].axes == ()


def test_axes_of_what_is_not_lowered_are_unknown() -> None:
    """TVM lowers no operator whose shapes it does not know."""

    def make(x: Any, y: Any) -> Any:
        known = op.nn.softmax(op.add(x, x))
        return relax.Tuple([known, op.nn.softmax(op.add(x, y))])

    others = tirx.Var("others", "int64")
    counts = count_axes(graph(make, x=(B, T, 4), y=(1, others, 4)))
    softmax = {c.operator: c.axes for c in counts if "softmax" in c.operator}
    assert softmax.pop("nn.softmax") is None
    assert softmax == {"softmax": ("i0", "i1", "i2", "k")}
