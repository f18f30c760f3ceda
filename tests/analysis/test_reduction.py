"""Reducers of blocks: what is recognised, and what is refused and why."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import te, tirx
from tvm.script import tirx as T

from pit_tvm.analysis.access import block_infos
from pit_tvm.analysis.reduction import NotAReducer, Reducer, reducer_of
from tests.analysis import operators as ops


def reducers(func: Any) -> list[Reducer | NotAReducer]:
    """The reducers of the last block, one per written buffer."""
    info = block_infos(func)[-1]
    found = []
    for write in info.writes:
        if not any(write.buffer.same_as(seen.buffer) for seen in found):
            found.append(write)
    return [reducer_of(info, write.buffer) for write in found]


def reduced(reducer: Any, dtype: str) -> Any:
    a, k = te.placeholder((4, 5), dtype, name="A"), te.reduce_axis((0, 5), "k")
    out = te.compute((4,), lambda i: reducer(a[i, k], axis=k), name="C")
    return te.create_prim_func([a, out])


def of_two(fold: Any, start: Any) -> Any:
    return te.comm_reducer(fold, lambda t: tirx.const(start, t))


@pytest.mark.parametrize(
    "reducer, dtype, op",
    [
        (te.sum, "float32", "sum"),
        (te.sum, "int32", "sum"),
        (te.max, "float16", "max"),
        (te.min, "int8", "min"),
        (of_two(lambda x, y: x * y, 1), "float64", "prod"),
        (of_two(lambda x, y: tirx.all(x, y), True), "bool", "and"),
        (of_two(lambda x, y: tirx.any(x, y), False), "bool", "or"),
        (of_two(lambda x, y: x & y, -1), "int32", "and"),
        (of_two(lambda x, y: x | y, 0), "int32", "or"),
    ],
)
def test_a_reducer_of_te_is_recognised_from_its_block(reducer, dtype, op):
    (found,) = reducers(reduced(reducer, dtype))
    assert isinstance(found, Reducer)
    assert found.op == op and found.takes_any_order
    assert [str(t) for t in found.terms] == ["A[v_i, v_k]"]


def test_independent_components_of_a_tuple_are_reducers():
    func = te.create_prim_func(ops.layer_norm())
    info = next(i for i in block_infos(func) if i.name == "moments")
    found = [reducer_of(info, w.buffer) for w in info.writes]
    assert [r.op for r in found if isinstance(r, Reducer)] == ["sum", "sum"]


def test_argmax_is_no_reducer():
    for found in reducers(te.create_prim_func(ops.argmax())):
        assert isinstance(found, NotAReducer)
        assert "not an accumulation" in found.reason


@T.prim_func(s_tir=True)
def difference(A: T.Buffer((4,), "float32"), B: T.Buffer((1,), "float32")):
    for k in range(4):
        with T.sblock("B"):
            vk = T.axis.reduce(4, k)
            B[0] = B[0] - A[vk]


@T.prim_func(s_tir=True)
def reversed_difference(A: T.Buffer((4,), "float32"), B: T.Buffer((1,), "float32")):
    for k in range(4):
        with T.sblock("B"):
            vk = T.axis.reduce(4, k)
            B[0] = A[vk] - B[0]


@T.prim_func(s_tir=True)
def two_operators(A: T.Buffer((4,), "float32"), B: T.Buffer((1,), "float32")):
    for k in range(4):
        with T.sblock("B"):
            vk = T.axis.reduce(4, k)
            B[0] = B[0] + A[vk]
            B[0] = B[0] * A[vk]


@T.prim_func(s_tir=True)
def doubling(A: T.Buffer((4,), "float32"), B: T.Buffer((1,), "float32")):
    for k in range(4):
        with T.sblock("B"):
            vk = T.axis.reduce(4, k)
            B[0] = B[0] + A[vk] + B[0]


@T.prim_func(s_tir=True)
def own_condition(A: T.Buffer((4,), "float32"), B: T.Buffer((1,), "float32")):
    for k in range(4):
        with T.sblock("B"):
            vk = T.axis.reduce(4, k)
            if B[0] < T.float32(3):
                B[0] = B[0] + A[vk]


@T.prim_func(s_tir=True)
def rounded(A: T.Buffer((4,), "float32"), B: T.Buffer((1,), "float16")):
    for k in range(4):
        with T.sblock("B"):
            vk = T.axis.reduce(4, k)
            B[0] = T.Cast("float16", T.Cast("float32", B[0]) + A[vk])


@pytest.mark.parametrize(
    "func, fragment",
    [
        (reversed_difference, "not an accumulation"),
        (two_operators, "accumulated by prod and sum"),
        (doubling, "not an accumulation"),
        (own_condition, "reads B[0], which the block writes"),
        (rounded, "not an accumulation"),
        (ops.running_sum, "B[t] reads the partial result S[0]"),
    ],
)
def test_what_depends_on_the_order_is_refused_with_a_reason(func, fragment):
    found = reducers(func)[0]
    assert isinstance(found, NotAReducer)
    assert fragment in found.reason


def test_a_difference_is_recognised_as_ordered():
    (found,) = reducers(difference)
    assert isinstance(found, Reducer) and found.op == "difference"
    assert not found.takes_any_order


@T.prim_func(s_tir=True)
def two_terms(A: T.Buffer((4,), "float32"), B: T.Buffer((1,), "float32")):
    for k in range(4):
        with T.sblock("B"):
            vk = T.axis.reduce(4, k)
            B[0] = A[vk] + B[0] + A[vk] * A[vk]


def test_a_chain_of_one_operator_gives_all_its_terms():
    (found,) = reducers(two_terms)
    assert isinstance(found, Reducer)
    assert [str(t) for t in found.terms] == ["A[vk]", "A[vk] * A[vk]"]
