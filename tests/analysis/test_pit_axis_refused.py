"""Blocks that are no tensor expression, and arguments that cannot be analysed."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import te, tirx
from tvm.script import tirx as T

from pit_tvm.analysis.pit_axis import pit_axes
from pit_tvm.errors import AxisError, PitError
from tests.analysis import operators as ops
from tests.analysis.operators import tensor

# --------------------------------------------------------------------------------------------
# Blocks that are no tensor expression


@T.prim_func(s_tir=True)
def opaque(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
    for i, j in T.grid(4, 4):
        with T.sblock("call"):
            vi, vj = T.axis.remap("SS", [i, j])
            T.evaluate(T.call_extern("int32", "f", T.address_of(B[vi, vj])))
    for i, j in T.grid(4, 4):
        with T.sblock("while"):
            vi, vj = T.axis.remap("SS", [i, j])
            while B[vi, vj] < T.float32(1):
                B[vi, vj] = B[vi, vj] + A[vi, vj]
    for i in range(4):
        with T.sblock("view"):
            vi = T.axis.spatial(4, i)
            row = T.match_buffer(A[vi, 0:4], (4,))
            B[vi, 0] = row[1]
    for i in range(4):
        with T.sblock("opaque_axis"):
            vi = T.axis.opaque(4, i)
            B[vi, 0] = A[vi, 0]
    for i in range(4):
        with T.sblock("nothing"):
            vi = T.axis.spatial(4, i)
            T.evaluate(0)
    with T.sblock("whole"):
        T.reads(A[0:4, 0:4])
        T.writes(B[0:4, 0:4])
        T.evaluate(T.call_extern("int32", "f", A.data, B.data))


@pytest.mark.parametrize(
    "block, axis, fragment",
    [
        ("call", "i", "call_extern"),
        ("call", "j", "call_extern"),
        ("while", "i", "While"),
        ("view", "i", "T.match_buffer"),
        ("opaque_axis", "i", "neither spatial nor a reduction of B[i, 0]"),
        ("whole", "*", "call_extern"),
    ],
)
def test_a_block_that_is_no_tensor_expression_is_rejected_with_a_reason(block, axis, fragment):
    report = pit_axes(opaque)
    assert report.accepted[block] == frozenset()
    assert fragment in report.rejected[block][axis]


def test_an_axis_of_a_block_that_writes_nothing_is_free():
    assert pit_axes(opaque).accepted["nothing"] == {"i"}


def test_an_external_operation_of_te_is_rejected_with_a_reason():
    a = tensor("A", 8)
    out = te.extern(
        (8,), [a], lambda i, o: tirx.call_extern("int32", "f", i[0].data), name="ext", dtype="int8"
    )
    assert "call_extern" in pit_axes([a, out]).rejected["ext"]["*"]


def test_a_block_with_loops_inside_but_no_axes_is_rejected_with_a_reason():
    a = tensor("A", 4, 8)
    report = pit_axes([a, tvm.topi.cumsum(a, axis=1)])
    assert report.accepted == {"cumsum_generic": frozenset()}
    assert "out_buf[" in report.rejected["cumsum_generic"]["*"]


@T.prim_func(s_tir=True)
def shifted_view(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
    ahead = T.decl_buffer((7,), "float32", data=B.data, elem_offset=1)
    for i in range(7):
        with T.sblock("B"):
            vi = T.axis.spatial(7, i)
            B[vi] = ahead[vi] + A[vi]


@T.prim_func(s_tir=True)
def matched_view(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
    with T.sblock("around"):
        ahead = T.match_buffer(B[1:8], (7,), offset_factor=1)
        for i in range(7):
            with T.sblock("B"):
                vi = T.axis.spatial(7, i)
                B[vi] = ahead[vi] + A[vi]


@T.prim_func(s_tir=True)
def store_between(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
    for i in range(8):
        B[0] = T.float32(1)
        with T.sblock("B"):
            vi = T.axis.spatial(8, i)
            B[vi] = A[vi]


@T.prim_func(s_tir=True)
def turned_by_a_binding(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
    for i in range(8):
        j: T.let = 7 - i
        with T.sblock("B"):
            vi = T.axis.spatial(8, i)
            B[vi] = A[j]


@pytest.mark.parametrize(
    ("func", "fragment"),
    [
        (shifted_view, "DeclBuffer outside of blocks"),
        (matched_view, "T.match_buffer around the block"),
        (store_between, "BufferStore outside of blocks: B[0]"),
        (turned_by_a_binding, "loop i, which drives i, occurs in A[7 - i]"),
    ],
)
def test_what_stands_around_a_block_counts(func, fragment):
    report = pit_axes(func)
    assert not report.accepted["B"]
    assert fragment in report.rejected["B"]["i"]


# --------------------------------------------------------------------------------------------
# Bad arguments


def scan() -> list[Any]:
    x = tensor("X", 4)
    state = te.placeholder((5, 4), name="state")
    first = te.compute((1, 4), lambda _, i: x[i], name="first")
    step = te.compute((5, 4), lambda t, i: state[t - 1, i] + x[i], name="step")
    return [x, te.scan(first, step, state, name="scanned")]


def conditional_sum() -> list[Any]:
    x, k = tensor("X", 4), te.reduce_axis((0, 4), "k")
    return [x, te.compute((1,), lambda i: te.sum(x[k], axis=k, where=x[k] > 0.0), name="C")]


def sum_with_a_start() -> list[Any]:
    x, k = tensor("X", 4), te.reduce_axis((0, 4), "k")
    return [x, te.compute((1,), lambda i: te.sum(x[k], axis=k, init=3.0), name="C")]


@T.prim_func(s_tir=True)
def plain_loops(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    for i in range(4):
        B[i] = A[i]


@pytest.mark.parametrize(
    "argument, fragments",
    [
        (7, ("tensors", "int", "pit_tvm.model.compile")),
        (tensor("A", 4), ("tensors", "a list of TE tensors")),
        ([tensor("A", 4), 3], ("tensors[1]", "int")),
        ([], ("at least one block",)),
        ([tensor("A", 4)], ("at least one block",)),
        (ops.matmul()[2:], ("the input", "among them")),
        (scan(), ("te.scan scanned", "PrimFunc")),
        (conditional_sum(), ("where=", "if_then_else")),
        (sum_with_a_start(), ("without init=", "te.compute")),
        (plain_loops, ("at least one block", "T.sblock")),
        (tvm.IRModule({}), ("an IRModule with one PrimFunc", "0 PrimFuncs")),
        (tvm.IRModule({"f": plain_loops, "g": plain_loops}), ("2 PrimFuncs",)),
    ],
)
def test_a_bad_argument_raises_a_typed_error_that_says_what_was_expected(argument, fragments):
    with pytest.raises(AxisError) as error:
        pit_axes(argument)
    assert isinstance(error.value, PitError)
    for fragment in fragments:
        assert fragment in str(error.value)
