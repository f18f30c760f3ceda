"""PIT axes as block annotations: written, printed, parsed and read back."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import te
from tvm.script import tirx as T

from pit_tvm.analysis.pit_axis import pit_axes
from pit_tvm.errors import AxisError
from pit_tvm.transform.annotate_pit_axes import PIT_AXES, annotate_pit_axes, annotated_axes
from tests.analysis import operators as ops


def blockized() -> Any:
    sch = tvm.s_tir.Schedule(te.create_prim_func(ops.matmul(8, 4, 4)))
    m, n, k = sch.get_loops(sch.get_sblock("C"))
    outer, inner = sch.split(m, [2, 4])
    sch.reorder(outer, n, inner, k)
    sch.blockize(inner)
    return sch.mod["main"]


@T.prim_func(s_tir=True)
def with_a_call(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("copy"):
            vi = T.axis.spatial(8, i)
            B[vi] = A[vi]
    with T.sblock("call"):
        T.reads(A[0:8])
        T.writes(B[0:8])
        T.evaluate(T.call_extern("int32", "f", A.data, B.data))


FUNCS = {
    "matmul": lambda: te.create_prim_func(ops.matmul()),
    "symbolic matmul": lambda: te.create_prim_func(
        ops.matmul(te.var("m"), te.var("n"), te.var("k"))
    ),
    "conv2d": lambda: te.create_prim_func(ops.conv2d()),
    "softmax": lambda: te.create_prim_func(ops.softmax()),
    "layer norm": lambda: te.create_prim_func(ops.layer_norm()),
    "argmax": lambda: te.create_prim_func(ops.argmax()),
    "cumulative sum": lambda: ops.cumsum,
    "nested blocks": blockized,
    "external call": lambda: with_a_call,
}


@pytest.mark.parametrize("name", FUNCS)
def test_annotations_are_the_accepted_axes(name):
    func = FUNCS[name]()
    assert annotated_axes(func) == {}
    assert annotated_axes(annotate_pit_axes(func)) == pit_axes(func).accepted


@pytest.mark.parametrize("name", FUNCS)
def test_annotations_survive_printing_and_parsing(name):
    annotated = annotate_pit_axes(FUNCS[name]())
    parsed = tvm.script.from_source(annotated.script(), s_tir=True)
    tvm.ir.assert_structural_equal(parsed, annotated)
    assert annotated_axes(parsed) == annotated_axes(annotated)


def test_annotations_survive_json():
    annotated = annotate_pit_axes(te.create_prim_func(ops.softmax()))
    loaded = tvm.ir.load_json(tvm.ir.save_json(annotated))
    tvm.ir.assert_structural_equal(loaded, annotated)
    assert annotated_axes(loaded) == annotated_axes(annotated)


def test_annotations_are_flat_positions_in_the_order_of_the_iter_vars():
    sch = tvm.s_tir.Schedule(annotate_pit_axes(te.create_prim_func(ops.conv2d())))
    annotation = sch.get(sch.get_sblock("C")).annotations[PIT_AXES]
    assert [int(p) for p in annotation] == [0, 1, 4]  # n, f, c of n, f, x, y, c, i, j


def test_an_earlier_annotation_is_replaced_and_others_are_kept():
    sch = tvm.s_tir.Schedule(te.create_prim_func(ops.matmul()))
    block = sch.get_sblock("C")
    sch.annotate(block, PIT_AXES, [0])
    sch.annotate(block, "mine", 7)
    annotated = annotate_pit_axes(sch.mod["main"])
    assert annotated_axes(annotated) == {"C": frozenset({"m", "n", "k"})}
    kept = tvm.s_tir.Schedule(annotated)
    assert int(kept.get(kept.get_sblock("C")).annotations["mine"]) == 7
    tvm.ir.assert_structural_equal(annotate_pit_axes(annotated), annotated)


def test_the_annotated_function_differs_in_nothing_else():
    func = te.create_prim_func(ops.matmul())
    sch = tvm.s_tir.Schedule(annotate_pit_axes(func))
    sch.unannotate(sch.get_sblock("C"), PIT_AXES)
    tvm.ir.assert_structural_equal(sch.mod["main"], func)


@pytest.mark.parametrize("value", [[3], [-1], 2, "m"])
def test_a_foreign_annotation_is_refused(value):
    sch = tvm.s_tir.Schedule(te.create_prim_func(ops.matmul()))
    sch.annotate(sch.get_sblock("C"), PIT_AXES, value)
    with pytest.raises(AxisError, match="pit.axes of block C"):
        annotated_axes(sch.mod["main"])


@pytest.mark.parametrize("function", [annotate_pit_axes, annotated_axes])
def test_only_a_prim_func_can_be_annotated_or_read(function):
    with pytest.raises(AxisError, match="func: expected a PrimFunc, got list"):
        function(ops.matmul())
