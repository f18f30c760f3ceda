"""SRead, SWrite and live counts of a matrix product: the function before, and the one after."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import te
from tvm.script import tirx as T

from pit_tvm import op
from pit_tvm.structs import MicroTile
from pit_tvm.transform.insert_sread_swrite import SparseForm, insert_sread_swrite


def product(**options: Any) -> Any:
    return te.create_prim_func(op.matmul(6, 5, 7, **options))


def check(func: Any, micro_tile: MicroTile, form: SparseForm, expected: Any) -> None:
    after = insert_sread_swrite(func, micro_tile, form)
    tvm.ir.assert_structural_equal(after, expected)
    parsed = tvm.script.from_source(after.script(), s_tir=True)
    tvm.ir.assert_structural_equal(parsed, after)


def test_two_axes_are_read_through_a_list_each():
    micro_tile = MicroTile("lhs", "m", 0, (1, 0), MicroTile("lhs", "k", 1, (0, 1)))
    after = insert_sread_swrite(product(), micro_tile, SparseForm(2, also=3))
    names = [str(p.name) for p in after.params]
    assert names == ["lhs", "rhs", "ids", "count", "ids_k", "count_k", "out"]
    text = after.script()
    assert "(capacity + 1) // 2" in text and "(capacity_k + 2) // 3" in text
    assert text.count("ids_k[0,") >= 2 and "out[ids[0," in text  # of both operands


def test_rows_are_read_and_written_through_one_list():
    @T.prim_func(s_tir=True)
    def main(
        lhs: T.Buffer((6, 7), "float32", align=4),
        rhs: T.Buffer((7, 5), "float32", align=4),
        ids: T.Buffer((1, "capacity"), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
        out: T.Buffer((6, 5), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer(((capacity + 1) // 2, 2, 5))
        for m_t, m_r, n, k in T.grid((capacity + 1) // 2, 2, 5, 7):
            with T.sblock("out"):
                t, r, j, c = T.axis.remap("SSSR", [m_t, m_r, n, k])
                T.reads(count[0], lhs[0:6, c], ids[0, t * 2 + r], rhs[c, j])
                T.writes(acc[t, r, j])
                with T.init():
                    acc[t, r, j] = T.float32(0)
                if t * 2 + r < count[0]:
                    acc[t, r, j] = (
                        acc[t, r, j]
                        + lhs[T.if_then_else(t * 2 + r < count[0], ids[0, t * 2 + r], 0), c]
                        * rhs[c, j]
                    )
        for m_t, m_r, n in T.grid((capacity + 1) // 2, 2, 5):
            with T.sblock("out_swrite"):
                t, r, j = T.axis.remap("SSS", [m_t, m_r, n])
                T.reads(count[0], acc[t, r, j], ids[0, t * 2 + r])
                T.writes(out[ids[0, t * 2 + r], j])
                T.sblock_attr({"pit.swrite": 1})
                if t * 2 + r < count[0]:
                    out[ids[0, t * 2 + r], j] = acc[t, r, j]

    check(product(), MicroTile("lhs", "m", 0, (1, 0)), SparseForm(2), main)


def test_staged_rows_are_copied_with_zeros_beyond_the_count():
    @T.prim_func(s_tir=True)
    def main(
        lhs: T.Buffer((6, 7), "float16", align=2),
        rhs: T.Buffer((7, 5), "float16", align=2),
        ids: T.Buffer((1, "capacity"), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
        out: T.Buffer((6, 5), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        panel = T.sblock_alloc_buffer(((capacity + 1) // 2, 2, 7))
        acc = T.sblock_alloc_buffer(((capacity + 1) // 2, 2, 5))
        for m_t, m_r, k in T.grid((capacity + 1) // 2, 2, 7):
            with T.sblock("lhs_sread"):
                t, r, c = T.axis.remap("SSS", [m_t, m_r, k])
                T.reads(count[0], lhs[ids[0, t * 2 + r], c], ids[0, t * 2 + r])
                T.writes(panel[t, r, c])
                T.sblock_attr({"pit.sread": "lhs"})
                panel[t, r, c] = T.if_then_else(
                    t * 2 + r < count[0],
                    T.Cast("float32", lhs[ids[0, t * 2 + r], c]),
                    T.float32(0),
                )
        for m_t, m_r, n, k in T.grid((capacity + 1) // 2, 2, 5, 7):
            with T.sblock("out"):
                t, r, j, c = T.axis.remap("SSSR", [m_t, m_r, n, k])
                T.reads(count[0], panel[t, r, c], rhs[c, j])
                T.writes(acc[t, r, j])
                T.sblock_attr({"pit.speculative": 1})
                with T.init():
                    acc[t, r, j] = T.float32(0)
                if t * 2 + r < count[0]:
                    # The cast of the operand stays, of a panel that has the type already.
                    acc[t, r, j] = acc[t, r, j] + T.Cast("float32", panel[t, r, c]) * T.Cast(
                        "float32", rhs[c, j]
                    )
        for m_t, m_r, n in T.grid((capacity + 1) // 2, 2, 5):
            with T.sblock("out_swrite"):
                t, r, j = T.axis.remap("SSS", [m_t, m_r, n])
                T.reads(count[0], acc[t, r, j], ids[0, t * 2 + r])
                T.writes(out[ids[0, t * 2 + r], j])
                T.sblock_attr({"pit.swrite": 1})
                if t * 2 + r < count[0]:
                    out[ids[0, t * 2 + r], j] = acc[t, r, j]

    func = product(dtype="float16", out_dtype="float32")
    form = SparseForm(2, staged=("lhs",))
    check(func, MicroTile("lhs", "m", 0, (1, 0)), form, main)


def test_steps_of_the_reduction_index_both_operands_alike_one_list_per_tile_row():
    @T.prim_func(s_tir=True)
    def main(
        lhs: T.Buffer((6, 7), "float32", align=4),
        rhs: T.Buffer((7, 5), "float32", align=4),
        ids: T.Buffer((2, "capacity"), "int32", align=4),
        count: T.Buffer((2,), "int32", align=4),
        out: T.Buffer((6, 5), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer((2, 4, 5))
        for m_t, m_r, n, k_t, k_r in T.grid(2, 4, 5, (capacity + 7) // 8, 8):
            with T.sblock("out"):
                t, r, j, d, e = T.axis.remap("SSSRR", [m_t, m_r, n, k_t, k_r])
                T.reads(
                    count[t],
                    lhs[0:6, ids[t, d * 8 + e]],
                    ids[t, d * 8 + e],
                    rhs[ids[t, d * 8 + e], j],
                )
                T.writes(acc[t, r, j])
                with T.init():
                    acc[t, r, j] = T.float32(0)
                if t * 4 + r < 6:
                    if d * 8 + e < count[t]:
                        acc[t, r, j] = (
                            acc[t, r, j]
                            + lhs[T.if_then_else(t * 4 + r < 6, t * 4 + r, 0), ids[t, d * 8 + e]]
                            * rhs[ids[t, d * 8 + e], j]
                        )
        for m_t, m_r, n in T.grid(2, 4, 5):
            with T.sblock("out_swrite"):
                t, r, j = T.axis.remap("SSS", [m_t, m_r, n])
                T.reads(acc[t, r, j])
                T.writes(out[t * 4 + r, j])
                T.sblock_attr({"pit.swrite": 1})
                if t * 4 + r < 6:
                    out[t * 4 + r, j] = acc[t, r, j]

    check(product(), MicroTile("lhs", "k", 1, (4, 1)), SparseForm(8), main)


def test_micro_tile_of_the_whole_column_has_one_list_and_no_guard_on_rows():
    @T.prim_func(s_tir=True)
    def main(
        lhs: T.Buffer((6, 7), "float32", align=4),
        rhs: T.Buffer((7, 5), "float32", align=4),
        ids: T.Buffer((1, "capacity"), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
        out: T.Buffer((6, 5), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer((6, 5))
        for m, n, k_t, k_r in T.grid(6, 5, (capacity + 7) // 8, 8):
            with T.sblock("out"):
                i, j, d, e = T.axis.remap("SSRR", [m, n, k_t, k_r])
                T.reads(
                    count[0],
                    lhs[i, ids[0, d * 8 + e]],
                    ids[0, d * 8 + e],
                    rhs[ids[0, d * 8 + e], j],
                )
                T.writes(acc[i, j])
                with T.init():
                    acc[i, j] = T.float32(0)
                if d * 8 + e < count[0]:
                    acc[i, j] = acc[i, j] + lhs[i, ids[0, d * 8 + e]] * rhs[ids[0, d * 8 + e], j]
        for m, n in T.grid(6, 5):
            with T.sblock("out_swrite"):
                i, j = T.axis.remap("SS", [m, n])
                T.reads(acc[i, j])
                T.writes(out[i, j])
                T.sblock_attr({"pit.swrite": 1})
                out[i, j] = acc[i, j]

    check(product(), MicroTile("lhs", "k", 1, (0, 1)), SparseForm(8), main)


def test_rows_in_slots_along_the_reduction_are_added_to_the_sums():
    @T.prim_func(s_tir=True)
    def main(
        lhs: T.Buffer((6, 7), "float16", align=2),
        rhs: T.Buffer((7, 5), "float16", align=2),
        ids: T.Buffer((2, "capacity"), "int32", align=4),
        count: T.Buffer((2,), "int32", align=4),
        out: T.Buffer((6, 5), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer((2, (capacity + 1) // 2, 2, 5))
        for m_t, m_r, n, k_t, k_r in T.grid((capacity + 1) // 2, 2, 5, 2, 4):
            with T.sblock("acc"):
                t, r, j, s, c = T.axis.remap("SSSSR", [m_t, m_r, n, k_t, k_r])
                T.reads(count[s], lhs[0:6, s * 4 + c], ids[s, t * 2 + r], rhs[s * 4 + c, j])
                T.writes(acc[s, t, r, j])
                with T.init():
                    acc[s, t, r, j] = T.float32(0)
                if t * 2 + r < count[s]:
                    if s * 4 + c < 7:
                        acc[s, t, r, j] = acc[s, t, r, j] + T.Cast(
                            "float32",
                            lhs[
                                T.if_then_else(t * 2 + r < count[s], ids[s, t * 2 + r], 0),
                                s * 4 + c,
                            ],
                        ) * T.Cast("float32", rhs[s * 4 + c, j])
        for m_t, m_r, n, k_t in T.grid((capacity + 1) // 2, 2, 5, 2):
            with T.sblock("acc_swrite"):
                t, r, j, s = T.axis.remap("SSSS", [m_t, m_r, n, k_t])
                T.reads(count[s], ids[s, t * 2 + r], acc[s, t, r, j])
                T.writes(out[ids[s, t * 2 + r], j])
                T.sblock_attr({"pit.swrite": 1})
                if t * 2 + r < count[s]:
                    out[ids[s, t * 2 + r], j] = out[ids[s, t * 2 + r], j] + acc[s, t, r, j]

    # The bias belongs to what follows the sums, and is no parameter any more.
    func = product(dtype="float16", bias=True)
    check(func, MicroTile("lhs", "m", 0, (1, 4)), SparseForm(2), main)


def test_group_of_a_tile_row_takes_the_place_of_the_operand_that_holds_it():
    @T.prim_func(s_tir=True)
    def main(
        lhs: T.Buffer((6, 7), "float32", align=4),
        rhs: T.Buffer((3, 7, 5), "float32", align=4),
        bias: T.Buffer((3, 5), "float32", align=4),
        ids: T.Buffer((3, "capacity"), "int32", align=4),
        count: T.Buffer((3,), "int32", align=4),
        out: T.Buffer((6, 5), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer((3, (capacity + 1) // 2, 2, 5))
        for group, m_t, m_r, n, k in T.grid(3, (capacity + 1) // 2, 2, 5, 7):
            with T.sblock("acc"):
                g, t, r, j, c = T.axis.remap("SSSSR", [group, m_t, m_r, n, k])
                T.reads(count[g], lhs[0:6, c], ids[g, t * 2 + r], rhs[g, c, j])
                T.writes(acc[g, t, r, j])
                with T.init():
                    acc[g, t, r, j] = T.float32(0)
                if t * 2 + r < count[g]:
                    acc[g, t, r, j] = (
                        acc[g, t, r, j]
                        + lhs[T.if_then_else(t * 2 + r < count[g], ids[g, t * 2 + r], 0), c]
                        * rhs[g, c, j]
                    )
        for group, m_t, m_r, n in T.grid(3, (capacity + 1) // 2, 2, 5):
            with T.sblock("out"):
                g, t, r, j = T.axis.remap("SSSS", [group, m_t, m_r, n])
                T.reads(count[g], acc[g, t, r, j], bias[g, j], ids[g, t * 2 + r])
                T.writes(out[ids[g, t * 2 + r], j])
                T.sblock_attr({"pit.swrite": 1})
                if t * 2 + r < count[g]:
                    out[ids[g, t * 2 + r], j] = acc[g, t, r, j] + bias[g, j]

    func = te.create_prim_func(op.grouped_matmul(6, 5, 7, 3, bias=True))
    form = SparseForm(2, groups=(3, "group_ids"))
    check(func, MicroTile("lhs", "m", 0, (1, 0)), form, main)


def test_columns_of_the_right_operand_are_columns_of_the_result():
    @T.prim_func(s_tir=True)
    def main(
        lhs: T.Buffer((6, 7), "float32", align=4),
        rhs: T.Buffer((7, 5), "float32", align=4),
        bias: T.Buffer((5,), "float32", align=4),
        ids: T.Buffer((1, "capacity"), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
        out: T.Buffer((6, 5), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer((6, (capacity + 1) // 2, 2))
        for m, n_t, n_r, k in T.grid(6, (capacity + 1) // 2, 2, 7):
            with T.sblock("acc"):
                i, t, r, c = T.axis.remap("SSSR", [m, n_t, n_r, k])
                T.reads(count[0], lhs[i, c], rhs[c, 0:5], ids[0, t * 2 + r])
                T.writes(acc[i, t, r])
                with T.init():
                    acc[i, t, r] = T.float32(0)
                if t * 2 + r < count[0]:
                    acc[i, t, r] = (
                        acc[i, t, r]
                        + lhs[i, c]
                        * rhs[c, T.if_then_else(t * 2 + r < count[0], ids[0, t * 2 + r], 0)]
                    )
        for m, n_t, n_r in T.grid(6, (capacity + 1) // 2, 2):
            with T.sblock("out"):
                i, t, r = T.axis.remap("SSS", [m, n_t, n_r])
                T.reads(count[0], acc[i, t, r], bias[0:5], ids[0, t * 2 + r])
                T.writes(out[i, ids[0, t * 2 + r]])
                T.sblock_attr({"pit.swrite": 1})
                if t * 2 + r < count[0]:
                    out[i, ids[0, t * 2 + r]] = (
                        acc[i, t, r]
                        + bias[T.if_then_else(t * 2 + r < count[0], ids[0, t * 2 + r], 0)]
                    )

    func = product(bias=True)
    check(func, MicroTile("rhs", "n", 1, (0, 1)), SparseForm(2), main)


def test_pieces_of_the_output_have_a_list_for_every_slot_of_columns():
    @T.prim_func(s_tir=True)
    def main(
        lhs: T.Buffer((6, 7), "float32", align=4),
        rhs: T.Buffer((7, 5), "float32", align=4),
        ids: T.Buffer((3, "capacity"), "int32", align=4),
        count: T.Buffer((3,), "int32", align=4),
        out: T.Buffer((6, 5), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer(((capacity + 3) // 4, 4, 3, 2))
        for m_t, m_r, n_t, n_r, k in T.grid((capacity + 3) // 4, 4, 3, 2, 7):
            with T.sblock("out"):
                t, r, s, j, c = T.axis.remap("SSSSR", [m_t, m_r, n_t, n_r, k])
                T.reads(count[s], lhs[0:6, c], ids[s, t * 4 + r], rhs[c, 0:5])
                T.writes(acc[t, r, s, j])
                with T.init():
                    acc[t, r, s, j] = T.float32(0)
                if t * 4 + r < count[s] and s * 2 + j < 5:
                    acc[t, r, s, j] = (
                        acc[t, r, s, j]
                        + lhs[T.if_then_else(t * 4 + r < count[s], ids[s, t * 4 + r], 0), c]
                        * rhs[c, T.if_then_else(s * 2 + j < 5, s * 2 + j, 0)]
                    )
        for m_t, m_r, n_t, n_r in T.grid((capacity + 3) // 4, 4, 3, 2):
            with T.sblock("out_swrite"):
                t, r, s, j = T.axis.remap("SSSS", [m_t, m_r, n_t, n_r])
                T.reads(count[s], acc[t, r, s, j], ids[s, t * 4 + r])
                T.writes(out[ids[s, t * 4 + r], s * 2 + j])
                T.sblock_attr({"pit.swrite": 1})
                if t * 4 + r < count[s] and s * 2 + j < 5:
                    out[ids[s, t * 4 + r], s * 2 + j] = acc[t, r, s, j]

    check(product(), MicroTile("out", "m", 0, (1, 2)), SparseForm(4), main)
