"""SRead, SWrite and live counts of everything that is no plain matrix product."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import te, tirx
from tvm.script import tirx as T

from pit_tvm import op
from pit_tvm.structs import MicroTile
from pit_tvm.transform.insert_sread_swrite import SparseForm, insert_sread_swrite


def check(tensors: Any, micro_tile: MicroTile, form: SparseForm, expected: Any) -> None:
    after = insert_sread_swrite(te.create_prim_func(tensors), micro_tile, form)
    tvm.ir.assert_structural_equal(after, expected)


def test_rows_of_a_sum():
    @T.prim_func(s_tir=True)
    def main(
        data: T.Buffer((6, 7), "float32", align=4),
        ids: T.Buffer((1, "capacity"), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
        out: T.Buffer((6,), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer(((capacity + 1) // 2, 2))
        for p_t, p_r, l in T.grid((capacity + 1) // 2, 2, 7):  # noqa: E741
            with T.sblock("out"):
                t, r, c = T.axis.remap("SSR", [p_t, p_r, l])
                T.reads(count[0], data[0:6, c], ids[0, t * 2 + r])
                T.writes(acc[t, r])
                with T.init():
                    acc[t, r] = T.float32(0)
                if t * 2 + r < count[0]:
                    acc[t, r] = (
                        acc[t, r]
                        + data[T.if_then_else(t * 2 + r < count[0], ids[0, t * 2 + r], 0), c]
                    )
        for p_t, p_r in T.grid((capacity + 1) // 2, 2):
            with T.sblock("out_swrite"):
                t, r = T.axis.remap("SS", [p_t, p_r])
                T.reads(count[0], acc[t, r], ids[0, t * 2 + r])
                T.writes(out[ids[0, t * 2 + r]])
                T.sblock_attr({"pit.swrite": 1})
                if t * 2 + r < count[0]:
                    out[ids[0, t * 2 + r]] = acc[t, r]

    check(op.reduce_sum(6, 7), MicroTile("data", "p", 0, (1, 0)), SparseForm(2), main)


def test_terms_of_a_sum_one_list_per_row():
    @T.prim_func(s_tir=True)
    def main(
        data: T.Buffer((6, 7), "float32", align=4),
        ids: T.Buffer((6, "capacity"), "int32", align=4),
        count: T.Buffer((6,), "int32", align=4),
        out: T.Buffer((6,), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer((6,))
        for p, l_t, l_r in T.grid(6, (capacity + 1) // 2, 2):
            with T.sblock("out"):
                i, t, r = T.axis.remap("SRR", [p, l_t, l_r])
                T.reads(count[i], data[i, ids[i, t * 2 + r]], ids[i, t * 2 + r])
                T.writes(acc[i])
                with T.init():
                    acc[i] = T.float32(0)
                if t * 2 + r < count[i]:
                    acc[i] = acc[i] + data[i, ids[i, t * 2 + r]]
        for p in range(6):
            with T.sblock("out_swrite"):
                i = T.axis.spatial(6, p)
                T.reads(acc[i])
                T.writes(out[i])
                T.sblock_attr({"pit.swrite": 1})
                out[i] = acc[i]

    check(op.reduce_sum(6, 7), MicroTile("data", "l", 1, (1, 1)), SparseForm(2), main)


def test_chain_has_one_sread_at_its_entry_and_one_swrite_at_its_exit():
    @T.prim_func(s_tir=True)
    def main(
        data: T.Buffer((6, 5), "float32", align=4),
        rhs: T.Buffer((6, 5), "float32", align=4),
        ids: T.Buffer((1, "capacity"), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
        out: T.Buffer((6, 5), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        panel = T.sblock_alloc_buffer(((capacity + 1) // 2, 2, 5))
        stage0 = T.sblock_alloc_buffer(((capacity + 1) // 2, 2, 5))
        stage1 = T.sblock_alloc_buffer(((capacity + 1) // 2, 2, 5))
        for p_t, p_r, q in T.grid((capacity + 1) // 2, 2, 5):
            with T.sblock("data_sread"):
                t, r, j = T.axis.remap("SSS", [p_t, p_r, q])
                T.reads(count[0], data[ids[0, t * 2 + r], j], ids[0, t * 2 + r])
                T.writes(panel[t, r, j])
                T.sblock_attr({"pit.sread": "data"})
                panel[t, r, j] = T.if_then_else(
                    t * 2 + r < count[0], data[ids[0, t * 2 + r], j], T.float32(0)
                )
        for p_t, p_r, q in T.grid((capacity + 1) // 2, 2, 5):
            with T.sblock("stage0"):
                t, r, j = T.axis.remap("SSS", [p_t, p_r, q])
                T.reads(count[0], panel[t, r, j], rhs[0:6, j], ids[0, t * 2 + r])
                T.writes(stage0[t, r, j])
                T.sblock_attr({"pit.speculative": 1})
                stage0[t, r, j] = T.if_then_else(
                    t * 2 + r < count[0],
                    panel[t, r, j]
                    + rhs[T.if_then_else(t * 2 + r < count[0], ids[0, t * 2 + r], 0), j],
                    T.float32(0),
                )
        for p_t, p_r, q in T.grid((capacity + 1) // 2, 2, 5):
            with T.sblock("stage1"):
                t, r, j = T.axis.remap("SSS", [p_t, p_r, q])
                T.reads(count[0], stage0[t, r, j])
                T.writes(stage1[t, r, j])
                T.sblock_attr({"pit.speculative": 1})
                stage1[t, r, j] = T.if_then_else(
                    t * 2 + r < count[0],
                    T.Select(stage0[t, r, j] < T.float32(0), T.float32(0), stage0[t, r, j]),
                    T.float32(0),
                )
        for p_t, p_r, q in T.grid((capacity + 1) // 2, 2, 5):
            with T.sblock("out"):
                t, r, j = T.axis.remap("SSS", [p_t, p_r, q])
                T.reads(count[0], stage1[t, r, j], ids[0, t * 2 + r])
                T.writes(out[ids[0, t * 2 + r], j])
                T.sblock_attr({"pit.swrite": 1})
                if t * 2 + r < count[0]:
                    out[ids[0, t * 2 + r], j] = stage1[t, r, j] * T.float32(0.5)

    chain = op.elementwise((6, 5), ["add", "relu", ("mul", 0.5)])
    form = SparseForm(2, staged=("data",))
    check(chain, MicroTile("data", "p", 0, (1, 0)), form, main)


def test_products_of_a_batch():
    @T.prim_func(s_tir=True)
    def main(
        lhs: T.Buffer((4, 6, 7), "float32", align=4),
        rhs: T.Buffer((4, 7, 5), "float32", align=4),
        ids: T.Buffer((1, "capacity"), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
        out: T.Buffer((4, 6, 5), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer((capacity, 1, 6, 5))
        for b_t, b_r, m, n, k in T.grid(capacity, 1, 6, 5, 7):
            with T.sblock("out"):
                t, r, i, j, c = T.axis.remap("SSSSR", [b_t, b_r, m, n, k])
                T.reads(count[0], lhs[0:4, i, c], ids[0, t + r], rhs[0:4, c, j])
                T.writes(acc[t, r, i, j])
                with T.init():
                    acc[t, r, i, j] = T.float32(0)
                if t + r < count[0]:
                    acc[t, r, i, j] = (
                        acc[t, r, i, j]
                        + lhs[T.if_then_else(t + r < count[0], ids[0, t + r], 0), i, c]
                        * rhs[T.if_then_else(t + r < count[0], ids[0, t + r], 0), c, j]
                    )
        for b_t, b_r, m, n in T.grid(capacity, 1, 6, 5):
            with T.sblock("out_swrite"):
                t, r, i, j = T.axis.remap("SSSS", [b_t, b_r, m, n])
                T.reads(count[0], acc[t, r, i, j], ids[0, t + r])
                T.writes(out[ids[0, t + r], i, j])
                T.sblock_attr({"pit.swrite": 1})
                if t + r < count[0]:
                    out[ids[0, t + r], i, j] = acc[t, r, i, j]

    tensors = op.batch_matmul(4, 6, 5, 7)
    check(tensors, MicroTile("lhs", "b", 0, (1, 0, 0)), SparseForm(1), main)


def test_images_of_a_convolution_keep_its_padding():
    @T.prim_func(s_tir=True)
    def main(
        data: T.Buffer((6, 3, 4), "float32", align=4),
        weight: T.Buffer((5, 3, 3), "float32", align=4),
        ids: T.Buffer((1, "capacity"), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
        out: T.Buffer((6, 5, 4), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer(((capacity + 1) // 2, 2, 5, 4))
        for n_t, n_r, f, x, c, i in T.grid((capacity + 1) // 2, 2, 5, 4, 3, 3):
            with T.sblock("out"):
                t, r, vf, vx, vc, vi = T.axis.remap("SSSSRR", [n_t, n_r, f, x, c, i])
                T.reads(count[0], data[0:6, vc, vx + vi - 1], ids[0, t * 2 + r], weight[vf, vc, vi])
                T.writes(acc[t, r, vf, vx])
                with T.init():
                    acc[t, r, vf, vx] = T.float32(0)
                if t * 2 + r < count[0]:
                    acc[t, r, vf, vx] = (
                        acc[t, r, vf, vx]
                        + T.if_then_else(
                            1 <= vx + vi and vx + vi < 5,
                            data[
                                T.if_then_else(t * 2 + r < count[0], ids[0, t * 2 + r], 0),
                                vc,
                                vx + vi - 1,
                            ],
                            T.float32(0),
                        )
                        * weight[vf, vc, vi]
                    )
        for n_t, n_r, f, x in T.grid((capacity + 1) // 2, 2, 5, 4):
            with T.sblock("out_swrite"):
                t, r, vf, vx = T.axis.remap("SSSS", [n_t, n_r, f, x])
                T.reads(count[0], acc[t, r, vf, vx], ids[0, t * 2 + r])
                T.writes(out[ids[0, t * 2 + r], vf, vx])
                T.sblock_attr({"pit.swrite": 1})
                if t * 2 + r < count[0]:
                    out[ids[0, t * 2 + r], vf, vx] = acc[t, r, vf, vx]

    data, weight = te.placeholder((6, 3, 4), name="data"), te.placeholder((5, 3, 3), name="weight")
    c, i = te.reduce_axis((0, 3), "c"), te.reduce_axis((0, 3), "i")

    def element(n: Any, f: Any, x: Any) -> Any:
        at, zero = x + i - 1, tirx.const(0, "float32")
        inside = tirx.all(tirx.const(0, "int32") <= at, at < 4)
        return te.sum(te.if_then_else(inside, data[n, c, at], zero) * weight[f, c, i], axis=[c, i])

    out = te.compute((6, 5, 4), element, name="out")
    micro_tile = MicroTile("data", "n", 0, (1, 0, 0))
    check([data, weight, out], micro_tile, SparseForm(2), main)


def test_filters_of_a_convolution_are_columns_of_its_weight():
    @T.prim_func(s_tir=True)
    def main(
        data: T.Buffer((2, 3, 4, 4), "float32", align=4),
        weight: T.Buffer((5, 3, 2, 2), "float32", align=4),
        ids: T.Buffer((1, "capacity"), "int32", align=4),
        count: T.Buffer((1,), "int32", align=4),
        out: T.Buffer((2, 5, 3, 3), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer((2, (capacity + 1) // 2, 2, 3, 3))
        for n, f_t, f_r, x, y, c, i, j in T.grid(2, (capacity + 1) // 2, 2, 3, 3, 3, 2, 2):
            with T.sblock("out"):
                vn, t, r, vx, vy, vc, vi, vj = T.axis.remap(
                    "SSSSSRRR", [n, f_t, f_r, x, y, c, i, j]
                )
                T.reads(
                    count[0],
                    data[vn, vc, vx + vi, vy + vj],
                    weight[0:5, vc, vi, vj],
                    ids[0, t * 2 + r],
                )
                T.writes(acc[vn, t, r, vx, vy])
                with T.init():
                    acc[vn, t, r, vx, vy] = T.float32(0)
                if t * 2 + r < count[0]:
                    acc[vn, t, r, vx, vy] = (
                        acc[vn, t, r, vx, vy]
                        + data[vn, vc, vx + vi, vy + vj]
                        * weight[
                            T.if_then_else(t * 2 + r < count[0], ids[0, t * 2 + r], 0), vc, vi, vj
                        ]
                    )
        for n, f_t, f_r, x, y in T.grid(2, (capacity + 1) // 2, 2, 3, 3):
            with T.sblock("out_swrite"):
                vn, t, r, vx, vy = T.axis.remap("SSSSS", [n, f_t, f_r, x, y])
                T.reads(count[0], acc[vn, t, r, vx, vy], ids[0, t * 2 + r])
                T.writes(out[vn, ids[0, t * 2 + r], vx, vy])
                T.sblock_attr({"pit.swrite": 1})
                if t * 2 + r < count[0]:
                    out[vn, ids[0, t * 2 + r], vx, vy] = acc[vn, t, r, vx, vy]

    tensors = op.conv2d(2, 3, 5, 4, 4, 2)
    check(tensors, MicroTile("weight", "f", 0, (1, 0, 0, 0)), SparseForm(2), main)


def test_channels_of_a_convolution_index_data_and_weight_alike():
    @T.prim_func(s_tir=True)
    def main(
        data: T.Buffer((2, 3, 4, 4), "float32", align=4),
        weight: T.Buffer((5, 3, 2, 2), "float32", align=4),
        ids: T.Buffer((2, "capacity"), "int32", align=4),
        count: T.Buffer((2,), "int32", align=4),
        out: T.Buffer((2, 5, 3, 3), "float32", align=4),
    ):
        capacity = T.int32()
        T.func_attr({"tirx.noalias": True})
        acc = T.sblock_alloc_buffer((2, 5, 3, 3))
        for n, f, x, y, c_t, c_r, i, j in T.grid(2, 5, 3, 3, (capacity + 1) // 2, 2, 2, 2):
            with T.sblock("out"):
                vn, vf, vx, vy, t, r, vi, vj = T.axis.remap(
                    "SSSSRRRR", [n, f, x, y, c_t, c_r, i, j]
                )
                T.reads(
                    count[vn],
                    data[vn, ids[vn, t * 2 + r], vx + vi, vy + vj],
                    ids[vn, t * 2 + r],
                    weight[vf, ids[vn, t * 2 + r], vi, vj],
                )
                T.writes(acc[vn, vf, vx, vy])
                with T.init():
                    acc[vn, vf, vx, vy] = T.float32(0)
                if t * 2 + r < count[vn]:
                    acc[vn, vf, vx, vy] = (
                        acc[vn, vf, vx, vy]
                        + data[vn, ids[vn, t * 2 + r], vx + vi, vy + vj]
                        * weight[vf, ids[vn, t * 2 + r], vi, vj]
                    )
        for n, f, x, y in T.grid(2, 5, 3, 3):
            with T.sblock("out_swrite"):
                vn, vf, vx, vy = T.axis.remap("SSSS", [n, f, x, y])
                T.reads(acc[vn, vf, vx, vy])
                T.writes(out[vn, vf, vx, vy])
                T.sblock_attr({"pit.swrite": 1})
                out[vn, vf, vx, vy] = acc[vn, vf, vx, vy]

    tensors = op.conv2d(2, 3, 5, 4, 4, 2)
    check(tensors, MicroTile("data", "c", 1, (1, 1, 0, 0)), SparseForm(2), main)
