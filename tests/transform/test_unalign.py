"""Parameters that promise no more than their element's alignment."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import s_tir, te
from tvm.script import tirx as T

from pit_tvm import op
from pit_tvm.transform.unalign import parameter, unalign, unaligned
from tests.schedules import sparse


def test_every_buffer_is_declared_at_its_elements_alignment():
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((4,), "float16"), s: T.int32, B: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("B"):
                v = T.axis.spatial(4, i)
                T.reads(A[v])
                T.writes(B[v])
                B[v] = T.Cast("float32", A[v]) + T.Cast("float32", s)

    @T.prim_func(s_tir=True)
    def after(
        A: T.Buffer((4,), "float16", align=2), s: T.int32, B: T.Buffer((4,), "float32", align=4)
    ):
        for i in range(4):
            with T.sblock("B"):
                v = T.axis.spatial(4, i)
                T.reads(A[v])
                T.writes(B[v])
                B[v] = T.Cast("float32", A[v]) + T.Cast("float32", s)

    got = unalign(before).with_attr("global_symbol", "after")
    tvm.ir.assert_structural_equal(got, after)


@pytest.mark.parametrize(
    ("dtype", "align"),
    [("int8", 1), ("bool", 1), ("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8)],
)
def test_alignment_of_a_type(dtype, align):
    buffer = parameter("a", [3, 5], dtype)
    assert int(buffer.ty.data_alignment) == align
    assert str(buffer.dtype) == dtype


def test_copy_of_a_parameter_takes_another_shape_and_type():
    buffer = parameter("a", [3, 5], "float32")
    same, other = unaligned(buffer), unaligned(buffer, [7], "float64")
    assert [int(e) for e in same.shape] == [3, 5] and str(same.dtype) == "float32"
    assert [int(e) for e in other.shape] == [7] and str(other.dtype) == "float64"
    assert same.name == other.name == "a"


def test_views_at_every_element_are_read_and_written():
    func = unalign(te.create_prim_func(op.elementwise((32,), [("mul", 3.0)])))
    kernel = sparse.build(s_tir.Schedule(func).mod)
    memory = np.arange(64, dtype=np.float32)
    for begin in range(17):
        out = np.full(64, np.nan, np.float32)
        kernel(memory[begin : begin + 32], out[begin : begin + 32])
        assert np.array_equal(out[begin : begin + 32], 3 * memory[begin : begin + 32])
        assert np.isnan(out[:begin]).all() and np.isnan(out[begin + 32 :]).all()
