"""What follows the sums, and what the result is where the operand is zero."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import te
from tvm.script import tirx as T

from pit_tvm import op
from pit_tvm.errors import AxisError
from pit_tvm.transform.split_epilogue import dead_value, split_epilogue


def linear() -> Any:
    return te.create_prim_func(op.linear(6, 5, 7, dtype="float16", activation="relu"))


def scaled() -> Any:
    """``(w * 2) * (lhs @ rhs) + lhs``: a block before the sums, and the operand after them."""
    lhs, rhs = te.placeholder((6, 6), name="lhs"), te.placeholder((6, 6), name="rhs")
    w = te.placeholder((6,), name="w")
    k = te.reduce_axis((0, 6), "k")
    scale = te.compute((6,), lambda n: w[n] * 2.0, name="scale")
    acc = te.compute((6, 6), lambda m, n: te.sum(lhs[m, k] * rhs[k, n], axis=k), name="acc")
    out = te.compute((6, 6), lambda m, n: scale[n] * acc[m, n] + lhs[m, n], name="out")
    return te.create_prim_func([lhs, rhs, w, out])


def test_epilogue_reads_the_sums_from_a_parameter():
    @T.prim_func(s_tir=True)
    def main(
        acc: T.Buffer((6, 5), "float32"),
        bias: T.Buffer((5,), "float16"),
        out: T.Buffer((6, 5), "float16"),
    ):
        T.func_attr({"tirx.noalias": True})
        for m, n in T.grid(6, 5):
            with T.sblock("out"):
                i, j = T.axis.remap("SS", [m, n])
                T.reads(acc[i, j], bias[j])
                T.writes(out[i, j])
                out[i, j] = T.Cast(
                    "float16",
                    T.Select(
                        acc[i, j] + T.Cast("float32", bias[j]) < T.float32(0),
                        T.float32(0),
                        acc[i, j] + T.Cast("float32", bias[j]),
                    ),
                )

    tvm.ir.assert_structural_equal(split_epilogue(linear(), "acc"), main)


def test_epilogue_brings_the_blocks_before_the_sums_that_it_needs():
    @T.prim_func(s_tir=True)
    def main(
        acc: T.Buffer((6, 6), "float32"),
        lhs: T.Buffer((6, 6), "float32"),
        w: T.Buffer((6,), "float32"),
        out: T.Buffer((6, 6), "float32"),
    ):
        T.func_attr({"tirx.noalias": True})
        scale = T.sblock_alloc_buffer((6,))
        for n in range(6):
            with T.sblock("scale"):
                j = T.axis.spatial(6, n)
                T.reads(w[j])
                T.writes(scale[j])
                scale[j] = w[j] * T.float32(2)
        for m, n in T.grid(6, 6):
            with T.sblock("out"):
                i, j = T.axis.remap("SS", [m, n])
                T.reads(scale[j], acc[i, j], lhs[i, j])
                T.writes(out[i, j])
                out[i, j] = scale[j] * acc[i, j] + lhs[i, j]

    tvm.ir.assert_structural_equal(split_epilogue(scaled(), "acc"), main)


def test_sums_that_are_the_result_have_no_epilogue():
    assert split_epilogue(te.create_prim_func(op.matmul(6, 5, 7)), "out") is None


def test_result_without_the_operand_is_the_epilogue_of_zero():
    @T.prim_func(s_tir=True)
    def main(bias: T.Buffer((5,), "float16"), out: T.Buffer((6, 5), "float16")):
        T.func_attr({"tirx.noalias": True})
        for m, n in T.grid(6, 5):
            with T.sblock("out"):
                i, j = T.axis.remap("SS", [m, n])
                T.reads(bias[j])
                T.writes(out[i, j])
                out[i, j] = T.Cast(
                    "float16",
                    T.Select(
                        T.Add(T.float32(0), T.Cast("float32", bias[j])) < T.float32(0),
                        T.float32(0),
                        T.Add(T.float32(0), T.Cast("float32", bias[j])),
                    ),
                )

    tvm.ir.assert_structural_equal(dead_value(linear(), "acc", "lhs"), main)


def test_result_without_the_operand_reads_what_follows_the_sums():
    dead = dead_value(scaled(), "acc", "rhs")
    assert [p.name for p in dead.params] == ["lhs", "w", "out"]


def test_sums_that_are_the_result_are_zero_without_the_operand():
    assert dead_value(te.create_prim_func(op.matmul(6, 5, 7)), "out", "lhs") is None


def test_chain_without_a_reduction_is_evaluated_at_zero():
    @T.prim_func(s_tir=True)
    def main(rhs: T.Buffer((6,), "float32"), out: T.Buffer((6,), "float32")):
        T.func_attr({"tirx.noalias": True})
        stage = T.sblock_alloc_buffer((6,))
        for p in range(6):
            with T.sblock("stage0"):
                i = T.axis.spatial(6, p)
                T.reads(rhs[i])
                T.writes(stage[i])
                stage[i] = T.float32(0) - rhs[i]
        for p in range(6):
            with T.sblock("out"):
                i = T.axis.spatial(6, p)
                T.reads(stage[i])
                T.writes(out[i])
                out[i] = stage[i] * T.float32(3)

    func = te.create_prim_func(op.elementwise((6,), ["sub", ("mul", 3.0)]))
    tvm.ir.assert_structural_equal(dead_value(func, "stage0", "data"), main)


def test_reads_at_other_places_are_evaluated_as_they_are():
    @T.prim_func(s_tir=True)
    def main(data: T.Buffer((6,), "float32"), out: T.Buffer((6, 6), "float32")):
        T.func_attr({"tirx.noalias": True})
        for p, q in T.grid(6, 6):
            with T.sblock("out"):
                i, j = T.axis.remap("SS", [p, q])
                # The region of both reads together: wider than what is left, and harmless.
                T.reads(data[T.min(i, j) : T.min(i, j) + (T.max(i, j) + 1 - T.min(i, j))])
                T.writes(out[i, j])
                out[i, j] = T.float32(0) - data[j]

    data = te.placeholder((6,), name="data")
    out = te.compute((6, 6), lambda p, q: data[p] - data[q], name="out")
    func = te.create_prim_func([data, out])
    tvm.ir.assert_structural_equal(dead_value(func, "out", "data"), main)


@pytest.mark.parametrize("call", [split_epilogue, lambda f, main: dead_value(f, main, "data")])
def test_parameter_stays_whose_shape_alone_defines_an_extent(call):
    tensors = op.conv2d(None, 3, 4, None, 9, 3, dtype="float16", bias=True)
    func = call(te.create_prim_func(tensors), "acc")
    assert [p.name for p in func.params if p.name != "acc"] == ["data", "bias", "out"]


def test_parameter_stays_that_defines_an_extent_of_arrays_between():
    data, sized = te.placeholder((6,), name="data"), te.placeholder((te.var("r"),), name="sized")
    wide = te.compute((sized.shape[0], 6), lambda r, p: data[p] + 1.0, name="wide")
    out = te.compute((6,), lambda p: wide[0, p], name="out")
    func = dead_value(te.create_prim_func([data, sized, out]), "wide", "data")
    assert [p.name for p in func.params] == ["sized", "out"]


@pytest.mark.parametrize("call", [split_epilogue, lambda f, main: dead_value(f, main, "lhs")])
def test_block_that_does_not_exist(call):
    with pytest.raises(AxisError, match="block: expected a block of the function, got sum"):
        call(linear(), "sum")
