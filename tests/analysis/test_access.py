"""Blocks as loads and stores: names, kinds, bindings, predicates, nested blocks, helpers."""

from __future__ import annotations

import pytest
import tvm
from tvm import te, tirx
from tvm.script import tirx as T

from pit_tvm.analysis.access import (
    bare_dims,
    block_infos,
    is_bare,
    loads_in,
    loads_of,
    same,
    same_access,
    uses,
)
from pit_tvm.analysis.expr import is_one, is_zero, outside_loads, replace_vars, stray_use
from tests.analysis import operators as ops


def texts(info, accesses):
    return [info.access_text(a) for a in accesses]


def test_a_matmul_is_one_block_over_the_axes_of_te():
    (info,) = block_infos(te.create_prim_func(ops.matmul()))
    assert info.name == "C"
    assert info.axes == ("m", "n", "k")
    assert info.kinds == {"m": "spatial", "n": "spatial", "k": "reduce"}
    assert texts(info, info.reads) == ["C[m, n]", "A[m, k]", "B[k, n]"]
    assert texts(info, info.writes) == ["C[m, n]"]
    assert [loop.var.name for loop in info.loops] == ["m", "n", "k"]
    assert (info.predicates, info.opaque) == ((), ())
    assert [info.text(s.value) for s in info.init] == ["T.float32(0.0)"]
    assert [info.text(s.value) for s in info.updates] == ["C[m, n] + A[m, k] * B[k, n]"]
    assert info.var("k").same_as(info.block.iter_vars[2].var)
    with pytest.raises(KeyError):
        info.var("v_k")


def test_blocks_come_in_program_order_without_the_root():
    infos = block_infos(te.create_prim_func(ops.softmax()))
    assert [info.name for info in infos] == ["high", "e", "total", "P"]


def test_a_function_without_blocks_has_none():
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4,), "float32")):
        for i in range(4):
            A[i] = T.float32(0)

    assert block_infos(func) == []


def test_repeated_loads_are_one_access():
    a = te.placeholder((4,), name="A")
    out = te.compute((4,), lambda i: a[i] * a[i] + a[3 - i], name="C")
    (info,) = block_infos(te.create_prim_func([a, out]))
    assert texts(info, info.reads) == ["A[i]", "A[3 - i]"]


def test_loads_include_those_in_indices_and_conditions_inner_ones_first():
    a, idx = te.placeholder((4,), name="A"), te.placeholder((4,), "int32", name="idx")
    body = te.compute((4,), lambda i: tirx.if_then_else(a[i] > 0.0, a[idx[i]], 0.0), name="C")
    (info,) = block_infos(te.create_prim_func([a, idx, body]))
    assert texts(info, info.reads) == ["A[i]", "idx[i]", "A[idx[i]]"]
    assert texts(info, loads_in(info.updates[0].value)) == ["A[i]", "idx[i]", "A[idx[i]]"]


@T.prim_func(s_tir=True)
def named(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
    for i, j in T.grid(4, 4):
        with T.sblock("B"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A[vi, vj]
    for f in range(16):
        with T.sblock("B"):
            vi = T.axis.spatial(4, f // 4)
            v_j = T.axis.spatial(4, f % 4)
            B[vi, v_j] = A[vi, v_j]
    for i in range(4):
        with T.sblock("B"):
            vi = T.axis.spatial(4, i)
            vj = T.axis.spatial(4, i)
            vk = T.axis.scan(1, 0)
            B[vi, vj] = A[vi, vk]


def test_axis_names_are_those_of_te_or_of_the_loop_and_unique():
    first, second, third = block_infos(named)
    assert first.axes == ("i", "j")  # bound bare to loops i and j
    assert second.axes == ("vi", "j")  # v_j loses its prefix; f // 4 names nothing
    assert third.axes == ("i", "i_1", "vk")
    assert third.kinds["vk"] == "other"
    assert same(second.bindings["j"], second.loops[0].var % 4)


def test_block_names_are_unique():
    assert [info.name for info in block_infos(named)] == ["B", "B_1", "B_2"]


def test_axes_of_one_name_are_told_apart():
    a, k = te.placeholder((4,), name="A"), te.reduce_axis((0, 4), "i")
    out = te.compute((4,), lambda i: te.sum(a[i] * a[k], axis=k), name="C")
    (info,) = block_infos(te.create_prim_func([a, out]))
    assert info.axes == ("i", "i_1")
    assert texts(info, info.reads) == ["C[i]", "A[i]", "A[i_1]"]


def test_an_axis_without_a_name_has_that_of_its_loop():
    a, k = te.placeholder((4, 4), name="A"), te.reduce_axis((0, 4), "")
    out = te.compute((4,), lambda v: te.sum(a[v, k], axis=k), name="C")
    (info,) = block_infos(te.create_prim_func([a, out]))
    assert info.axes == ("v", "v_1")
    assert texts(info, info.reads) == ["C[v]", "A[v, v_1]"]


@T.prim_func(s_tir=True)
def inside(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
    for i in range(4):
        with T.sblock("B"):
            vi = T.axis.spatial(4, i)
            row: T.let[T.int32] = vi + 1
            if A[vi, 0] > T.float32(0):
                for j in range(vi):
                    B[row, j] = A[vi, j]
            else:
                B[vi, 0] = T.float32(1)


def test_let_is_replaced_and_conditions_and_inner_bounds_are_kept():
    (info,) = block_infos(inside)
    assert texts(info, info.writes) == ["B[i + 1, j]", "B[i, 0]"]
    taken, otherwise = info.updates
    assert [info.text(c) for c in taken.conditions] == ["A[i, 0] > T.float32(0.0)", "i"]
    assert [info.text(c) for c in otherwise.conditions] == ["not A[i, 0] > T.float32(0.0)"]
    assert texts(info, loads_of(otherwise)) == ["A[i, 0]"]


@T.prim_func(s_tir=True)
def around(A: T.Buffer((10,), "float32"), B: T.Buffer((10,), "float32"), n: T.int32):
    for i_0, i_1 in T.grid(4, 3):
        if n > i_0:
            with T.sblock("B"):
                vi = T.axis.spatial(10, i_0 * 3 + i_1)
                T.where(i_0 * 3 + i_1 < 10)
                B[vi] = A[vi]


def test_predicates_around_a_block_are_over_loop_variables():
    (info,) = block_infos(around)
    outer, guard = info.predicates
    assert uses(outer, info.loops[0].var)
    assert str(guard) == "i_0 * 3 + i_1 < 10"


def test_a_block_that_encloses_another_is_seen_through_its_own_axes():
    sch = tvm.s_tir.Schedule(te.create_prim_func(ops.matmul(8, 4, 4)))
    block = sch.get_sblock("C")
    m, n, k = sch.get_loops(block)
    outer, inner = sch.split(m, [2, 4])
    sch.reorder(outer, n, inner, k)
    sch.blockize(inner)
    infos = {info.name: info for info in block_infos(sch.mod["main"])}
    assert list(infos) == ["C_o", "C_init", "C"]
    (row, _), *_ = [a.indices for a in infos["C_o"].writes]
    assert uses(row, infos["C_o"].var("m_o"))
    assert not is_bare(infos["C_o"].writes[0], 0, infos["C_o"].var("m_o"))
    # The nested block runs under the iter vars of the block around it.
    assert any(x.var.same_as(infos["C_o"].var("m_o")) for x in infos["C"].loops)


def test_helpers_tell_bare_indices_from_other_uses():
    i, j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
    a = tirx.decl_buffer((4, 4, 4), "float32", name="A")
    idx = tirx.decl_buffer((4,), "int32", name="idx")
    (_, access) = loads_in(tirx.BufferLoad(a, [i, idx[i], i + j]))
    assert [is_bare(access, d, i) for d in range(3)] == [True, False, False]
    assert bare_dims(access, i) == {0} and bare_dims(access, j) == frozenset()
    assert uses(access.indices[1], i) and not outside_loads(access.indices[1], i)
    assert outside_loads(access.indices[2], j)
    assert same_access(access, loads_in(tirx.BufferLoad(a, [i, idx[i], i + j]))[1])
    assert not same_access(access, loads_in(tirx.BufferLoad(a, [j, idx[i], i + j]))[1])


def test_a_widened_index_is_bare_and_a_narrowed_one_is_not():
    i = tirx.Var("i", "int32")
    a = tirx.decl_buffer((4,), "float32", name="A")
    (wide,) = loads_in(tirx.BufferLoad(a, [i.astype("int64")]))
    (narrow,) = loads_in(tirx.BufferLoad(a, [i.astype("int8").astype("int32")]))
    assert is_bare(wide, 0, i)
    assert not is_bare(narrow, 0, i)


def test_let_expressions_are_expanded():
    i, t = tirx.Var("i", "int32"), tirx.Var("t", "int32")
    let = tirx.Let(t, i + 1, t * t)
    assert same(replace_vars(let, {}), (i + 1) * (i + 1))
    assert stray_use(replace_vars(let, {}), i) is not None


def test_zero_and_one_must_be_known():
    extents = [*(tirx.IntImm("int32", number) for number in range(3)), tirx.Var("n", "int32")]
    assert [is_one(extent) for extent in extents] == [False, True, False, False]
    assert [is_zero(extent) for extent in extents] == [True, False, False, False]
