"""What cannot be read and written through an index, and what the error says."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tvm import te, tirx
from tvm.script import tirx as T

from pit_tvm import op
from pit_tvm.errors import AxisError, ShapeError
from pit_tvm.structs import MicroTile
from pit_tvm.transform.axis_map import Remap, rows_map
from pit_tvm.transform.insert_sread_swrite import SparseForm, insert_sread_swrite
from pit_tvm.transform.remap_axes import remap_axes


def refused(error: type[Exception], text: str) -> Any:
    return pytest.raises(error, match=re.escape(text))


def insert(tensors: Any, operand: str, axis: str, dim: int, extents: tuple[int, ...]) -> None:
    func = tensors if isinstance(tensors, tirx.PrimFunc) else te.create_prim_func(tensors)
    insert_sread_swrite(func, MicroTile(operand, axis, dim, extents), SparseForm(4))


@pytest.mark.parametrize(
    ("also", "text"),
    [
        (MicroTile("rhs", "k", 0, (1, 0)), "micro_tile.also: expected one list of another axis"),
        (MicroTile("lhs", "m", 0, (1, 0)), "micro_tile.also: expected one list of another axis"),
        (MicroTile("lhs", "k", 1, (4, 1)), "micro_tile.also: expected one list of another axis"),
        (MicroTile("lhs", "n", 1, (0, 1)), "axis on dimension 1 of lhs: expected k, got n"),
    ],
)
def test_second_axis_that_is_none_of_the_others(also, text):
    micro_tile = MicroTile("lhs", "m", 0, (1, 0), also)
    with refused(AxisError, text):
        insert_sread_swrite(
            te.create_prim_func(op.matmul(6, 5, 7)), micro_tile, SparseForm(4, also=2)
        )


def test_axis_of_a_stencil():
    text = "axis x: expected a PIT axis, got none: "
    data = te.placeholder((9,), "float32", "data")
    offset = te.reduce_axis((0, 3), "i")
    out = te.compute((7,), lambda x: te.sum(data[x + offset], axis=offset), name="out")
    with refused(AxisError, "axis on dimension 0 of data: expected None, got x"):
        insert([data, out], "data", "x", 0, (1,))
    scale = te.placeholder((7,), "float32", "scale")
    out = te.compute((7,), lambda x: te.sum(data[x + offset] * scale[x], axis=offset), name="out")
    with refused(AxisError, text):
        insert([data, scale, out], "scale", "x", 0, (1,))


def test_axis_of_a_predicate():
    data = te.placeholder((9,), "float32", "data")
    zero = tirx.const(0, "float32")
    out = te.compute((9,), lambda x: te.if_then_else(x < 3, data[x], zero), name="out")
    with refused(AxisError, "axis x: expected a PIT axis, got none: "):
        insert([data, out], "data", "x", 0, (1,))


@T.prim_func(s_tir=True)
def recurrence(data: T.Buffer((9,), "float32"), out: T.Buffer((9,), "float32")):
    for i in range(9):
        with T.sblock("out"):
            x = T.axis.spatial(9, i)
            out[x] = T.if_then_else(x > 0, out[x - 1], T.float32(0)) + data[x]


def test_axis_of_a_recurrence():
    with refused(AxisError, "axis i: expected a PIT axis, got none: "):
        insert(recurrence, "data", "i", 0, (1,))


@pytest.mark.parametrize("operand", ["weight", "acc"])
def test_operand_that_is_neither_input_nor_output(operand):
    expected = "an input, one of ['lhs', 'rhs', 'bias'], or the output"
    text = f"operand: expected {expected}, got {operand}"
    with refused(AxisError, text):
        insert(op.linear(6, 5, 7), operand, "m", 0, (1, 0))


def test_axis_that_another_dimension_has():
    with refused(AxisError, "axis on dimension 0 of lhs: expected m, got k"):
        insert(op.matmul(6, 5, 7), "lhs", "k", 0, (1, 0))


def test_rank_that_is_not_the_operands():
    with refused(ShapeError, "micro-tile of lhs: expected 2 extents, got (1, 0, 0)"):
        insert(op.matmul(6, 5, 7), "lhs", "m", 0, (1, 0, 0))


def test_micro_tile_longer_than_one_on_its_axis():
    with refused(ShapeError, "MicroTile.extents: expected extent 1 on dimension 0, got (4, 0)"):
        MicroTile("lhs", "m", 0, (4, 0))


def test_slots_along_a_dimension_whose_index_is_not_bare():
    text = "micro-tile 1x*x2x*, dimension 2: expected 0 (the whole), its index is not bare, got 2"
    with refused(AxisError, text):
        insert(op.conv2d(2, 3, 5, 4, 4, 2), "data", "n", 0, (1, 0, 2, 0))


def test_slots_along_the_axis_itself():
    square = te.placeholder((6, 6), "float32", "square")
    out = te.compute((6,), lambda i: square[i, i] + 1.0, name="out")
    text = "micro-tile 1x1, dimension 1: expected 0 (the whole), its index is i again, got 1"
    with refused(AxisError, text):
        insert([square, out], "square", "i", 0, (1, 1))


@pytest.mark.parametrize(("reduce", "name"), [(te.max, "max"), (te.min, "min")])
def test_slots_along_a_reduction_that_is_no_sum(reduce, name):
    data = te.placeholder((6, 7), "float32", "data")
    k = te.reduce_axis((0, 7), "k")
    out = te.compute((6,), lambda m: reduce(data[m, k], axis=k), name="out")
    with refused(AxisError, f"slots along axis k: expected a sum from zero, got {name}"):
        insert([data, out], "data", "m", 0, (1, 4))
    insert([data, out], "data", "m", 0, (1, 0))


@T.prim_func(s_tir=True)
def from_a_bias(
    data: T.Buffer((6, 7), "float32"),
    bias: T.Buffer((6,), "float32"),
    out: T.Buffer((6,), "float32"),
):
    for m, k in T.grid(6, 7):
        with T.sblock("out"):
            i, c = T.axis.remap("SR", [m, k])
            with T.init():
                out[i] = bias[i]
            out[i] = out[i] + data[i, c]


def test_slots_along_a_sum_that_does_not_start_at_zero():
    with refused(AxisError, "slots along axis k: expected a sum from zero, got another start"):
        insert(from_a_bias, "data", "m", 0, (1, 4))


def test_later_block_that_shifts_the_axis():
    data = te.placeholder((9,), "float32", "data")
    stage = te.compute((9,), lambda x: data[x] * 2.0, name="stage")
    out = te.compute((8,), lambda x: stage[x + 1] - stage[x], name="out")
    text = "block out, stage[x + 1]: expected axis x as one bare index, got x + 1; the permutation"
    with refused(AxisError, text):
        insert([data, out], "data", "x", 0, (1,))


def test_later_block_that_pairs_the_axis_with_itself():
    data = te.placeholder((9,), "float32", "data")
    stage = te.compute((9,), lambda x: data[x] * 2.0, name="stage")
    out = te.compute((9, 9), lambda i, j: stage[i] - stage[j], name="out")
    text = "block out, stage[j]: expected axis x as one bare index, got j"
    with refused(AxisError, text):
        insert([data, out], "data", "x", 0, (1,))


def test_axis_indexed_in_64_bits():
    extent = te.var("m", "int64")
    data = te.placeholder((extent,), "float32", "data")
    out = te.compute((extent,), lambda m: data[m] + 1.0, name="out")
    with refused(ShapeError, "axis m of block out: expected an int32 extent, got int64"):
        insert([data, out], "data", "m", 0, (1,))


def test_staged_operand_that_is_read_twice():
    data = te.placeholder((6, 7), "float32", "data")
    k = te.reduce_axis((0, 7), "k")
    out = te.compute((6, 6), lambda i, j: te.sum(data[i, k] * data[j, k], axis=k), name="out")
    func = te.create_prim_func([data, out])
    text = "staged operand data: expected one read by bare indices, got data[i, k], data[j, k]"
    with refused(AxisError, text):
        insert_sread_swrite(
            func, MicroTile("data", "i", 0, (1, 0)), SparseForm(4, staged=("data",))
        )


@pytest.mark.parametrize("tile", [0, -1, 1.5, None, 2**40, (4, 0)])
def test_tiles_of_no_size(tile: Any):
    func = te.create_prim_func(op.matmul(6, 5, 7))
    text = f"tile of m: expected sizes that are integers of 1 to 2147483647, got {tile}"
    with refused(ShapeError, text):
        insert_sread_swrite(func, MicroTile("lhs", "m", 0, (1, 0)), SparseForm(tile))


def test_block_that_does_not_exist():
    func = te.create_prim_func(op.matmul(6, 5, 7))
    with refused(AxisError, "block: expected one of ['out'], got acc"):
        remap_axes(func, Remap("acc", {"m": rows_map("m", 6, 4)}))


def test_block_with_two_stores():
    data = te.placeholder((6, 7), "float32", "data")
    k = te.reduce_axis((0, 7), "k")

    def pick(x: Any, y: Any) -> Any:
        return te.if_then_else(x[1] >= y[1], x[0], y[0]), te.max(x[1], y[1])

    def start(a: str, b: str) -> Any:
        return tirx.const(-1, a), tirx.min_value(b)

    argmax = te.comm_reducer(pick, start, name="argmax")
    where, value = te.compute((6,), lambda m: argmax((k, data[m, k]), axis=k), name="out")
    func = te.create_prim_func([data, where, value])
    with refused(AxisError, "block out: expected one store, got SeqStmt"):
        remap_axes(func, Remap("out", {"m": rows_map("m", 6, 4)}))
