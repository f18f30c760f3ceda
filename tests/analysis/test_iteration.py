"""Loops, bindings and predicates around a block: which of them keep an axis from being permuted."""

from __future__ import annotations

import pytest
import tvm
from tvm import te
from tvm.script import tirx as T

from pit_tvm.analysis.pit_axis import pit_axes
from tests.analysis import operators as ops


@T.prim_func(s_tir=True)
def bindings(A: T.Buffer((8, 8), "float32"), B: T.Buffer((8, 8), "float32")):
    for i in range(8):
        with T.sblock("same_loop"):
            vi = T.axis.spatial(8, i)
            vj = T.axis.spatial(8, i)
            B[vi, vj] = A[vi, vj]
    for i, j in T.grid(7, 8):
        with T.sblock("part"):
            vi = T.axis.spatial(8, i)
            vj = T.axis.spatial(8, j)
            B[vi, vj] = A[vi, vj]
    for i, j in T.grid(8, 8):
        with T.sblock("clamped"):
            vi = T.axis.spatial(8, T.min(i, 3))
            vj = T.axis.spatial(8, j)
            B[vi, vj] = A[vi, vj]
    for i_0, i_1, j in T.grid(2, 4, 8):
        with T.sblock("split"):
            vi = T.axis.spatial(8, i_0 * 4 + i_1)
            vj = T.axis.spatial(8, j)
            B[vi, vj] = A[vi, vj]
    for i_0, i_1, j in T.grid(3, 3, 8):
        with T.sblock("imperfect_split"):
            vi = T.axis.spatial(8, i_0 * 3 + i_1)
            vj = T.axis.spatial(8, j)
            T.where(i_0 * 3 + i_1 < 8)
            B[vi, vj] = A[vi, vj]
    for i_0, i_1, j in T.grid(2, 3, 8):
        with T.sblock("short_split"):
            vi = T.axis.spatial(8, i_0 * 3 + i_1)
            vj = T.axis.spatial(8, j)
            B[vi, vj] = A[vi, vj]
    for f in range(64):
        with T.sblock("fused"):
            vi = T.axis.spatial(8, f // 8)
            vj = T.axis.spatial(8, f % 8)
            B[vi, vj] = A[vi, vj]


@pytest.mark.parametrize(
    "block, accepted, rejected",
    [
        ("same_loop", set(), {"i": "bound to i", "i_1": "bound to i"}),
        ("part", {"j"}, {"i": "bound to i, which does not visit each element once"}),
        ("clamped", {"j"}, {"vi": "bound to T.min(i, 3)"}),
        ("split", {"vi", "j"}, {}),
        ("imperfect_split", {"vi", "j"}, {}),
        ("short_split", {"j"}, {"vi": "bound to i_0 * 3 + i_1"}),
        ("fused", {"vi", "vj"}, {}),
    ],
)
def test_an_axis_must_be_visited_once_per_element(block, accepted, rejected):
    report = pit_axes(bindings)
    assert report.accepted[block] == accepted
    assert report.rejected[block].keys() == rejected.keys()
    for axis, fragment in rejected.items():
        assert fragment in report.rejected[block][axis]
        assert "B[" in report.rejected[block][axis]


@T.prim_func(s_tir=True)
def predicates(
    A: T.Buffer((8, 8), "float32"),
    B: T.Buffer((8, 8), "float32"),
    mask: T.Buffer((8,), "bool"),
    lengths: T.Buffer((8,), "int32"),
    S: T.Buffer((8,), "float32"),
):
    for i, j in T.grid(8, 8):
        if j <= i:
            with T.sblock("causal"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj]
    for i, j in T.grid(8, 8):
        with T.sblock("where"):
            vi, vj = T.axis.remap("SS", [i, j])
            T.where(i + 2 < 8)
            B[vi, vj] = A[vi, vj]
    for i, j in T.grid(8, 8):
        if mask[i]:
            with T.sblock("masked"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj]
    for i in range(8):
        for j in range(i + 1):
            with T.sblock("triangle"):
                vi = T.axis.spatial(8, i)
                vj = T.axis.spatial(8, j)
                B[vi, vj] = A[vi, vj]
    for i in range(8):
        for j in range(lengths[i]):
            with T.sblock("ragged"):
                vi = T.axis.spatial(8, i)
                vj = T.axis.spatial(8, j)
                B[vi, vj] = A[vi, vj]
    for i, j in T.grid(8, 8):
        if mask[j]:
            with T.sblock("masked_sum"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    S[vi] = T.float32(0)
                S[vi] = S[vi] + A[vi, vj]
    for i, j in T.grid(8, 8):
        if S[i] < T.float32(9):
            with T.sblock("until_full"):
                vi, vj = T.axis.remap("SR", [i, j])
                S[vi] = S[vi] + A[vi, vj]


@pytest.mark.parametrize(
    "block, accepted, rejected",
    [
        ("causal", set(), {"i": "predicate j <= i", "j": "predicate j <= i"}),
        ("where", {"j"}, {"i": "predicate i + 2 < 8"}),
        ("masked", {"i", "j"}, {}),
        ("triangle", set(), {"i": "loop j depend on loop i", "j": "B[i, j]"}),
        ("ragged", set(), {"i": "loop j depend on loop i", "j": "B[i, j]"}),
        ("masked_sum", {"i"}, {"j": "initialised only where mask[j] holds"}),
        ("until_full", set(), {"i": "its own output S[i]", "j": "its own output S[i]"}),
    ],
)
def test_a_predicate_may_only_be_a_mask_operand(block, accepted, rejected):
    report = pit_axes(predicates)
    assert report.accepted[block] == accepted
    assert report.rejected[block].keys() == rejected.keys()
    for axis, fragment in rejected.items():
        assert fragment in report.rejected[block][axis]


@T.prim_func(s_tir=True)
def repeated(A: T.Buffer((8, 8), "float32"), S: T.Buffer((8,), "float32")):
    for k, t, i in T.grid(8, 2, 8):  # noqa: B007
        with T.sblock("again"):
            vk, vi = T.axis.remap("RS", [k, i])
            with T.init():
                S[vi] = T.float32(0)
            S[vi] = S[vi] + A[vk, vi]
    for i, k in T.grid(8, 8):
        with T.sblock("never_reduced"):
            vi, vk = T.axis.remap("SS", [i, k])
            with T.init():
                S[0] = T.float32(0)
            S[0] = S[0] + A[vi, vk]


def test_a_reduction_must_not_be_initialised_twice():
    report = pit_axes(repeated)
    assert report.accepted["again"] == {"i"}
    assert "loop t runs the block again" in report.rejected["again"]["k"]
    assert "initialised anew for every i" in report.rejected["never_reduced"]["i"]
    assert "S[0]" in report.rejected["never_reduced"]["k"]


@T.prim_func(s_tir=True)
def inner_loops(A: T.Buffer((8, 8), "float32"), B: T.Buffer((8, 8), "float32")):
    for b, i in T.grid(8, 8):
        with T.sblock("constant"):
            vb, vi = T.axis.remap("SS", [b, i])
            for t in range(7):
                B[vb, t + 1] = B[vb, t] + A[vi, t]
    for i in range(8):
        with T.sblock("triangle"):
            vi = T.axis.spatial(8, i)
            for t in range(vi):
                B[vi, t] = A[vi, t]


def test_loops_inside_a_block_are_no_axes_but_their_bounds_count():
    report = pit_axes(inner_loops)
    assert report.accepted == {"constant": frozenset({"b"}), "triangle": frozenset()}
    assert "not accumulated" in report.rejected["constant"]["i"]
    assert "i occurs in the value i of B[i, t]" in report.rejected["triangle"]["i"]


def test_blocks_that_share_a_loop_and_a_buffer_are_not_permuted_alone():
    sch = tvm.s_tir.Schedule(te.create_prim_func(ops.matmul()))
    block = sch.get_sblock("C")
    sch.decompose_reduction(block, sch.get_loops(block)[2])
    report = pit_axes(sch.mod["main"])
    assert report.accepted["C_update"] == {"k"}
    assert "C[m, n] is also accessed by block C_init" in report.rejected["C_update"]["m"]


def test_axes_survive_splitting_fusing_and_binding_to_threads():
    sch = tvm.s_tir.Schedule(te.create_prim_func(ops.matmul(8, 6, 5)))
    m, n, k = sch.get_loops(sch.get_sblock("C"))
    sch.bind(sch.fuse(m, n), "blockIdx.x")
    sch.split(k, [None, 2])
    assert pit_axes(sch.mod).accepted == {"C": frozenset({"m", "n", "k"})}
