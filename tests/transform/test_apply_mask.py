"""Reads through a mask: before an index and after it, for every form of the mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import s_tir, te
from tvm.script import tirx as T

from pit_tvm import op
from pit_tvm.errors import AxisError
from pit_tvm.reference.index import dense_mask
from pit_tvm.structs import BitMask, BlockMask, Lengths, Mask, MicroTile, SparsitySpec, Values
from pit_tvm.transform.apply_mask import apply_mask
from pit_tvm.transform.insert_sread_swrite import SparseForm, insert_sread_swrite
from pit_tvm.transform.unalign import unalign
from tests.schedules import sparse


def double() -> Any:
    return te.create_prim_func(op.elementwise((6, 10), [("mul", 2.0)]))


def test_every_read_is_a_choice_and_the_mask_follows_the_operand():
    @T.prim_func(s_tir=True)
    def main(
        data: T.Buffer((6, 10), "float32"),
        m: T.Buffer((6, 10), "uint8", align=1),
        out: T.Buffer((6, 10), "float32"),
    ):
        T.func_attr({"tirx.noalias": True})
        for p, q in T.grid(6, 10):
            with T.sblock("out"):
                i, j = T.axis.remap("SS", [p, q])
                T.reads(data[i, j], m[i, j])
                T.writes(out[i, j])
                out[i, j] = T.Select(m[i, j] != T.uint8(0), data[i, j], T.float32(0)) * T.float32(2)

    tvm.ir.assert_structural_equal(apply_mask(double(), "data", Mask(), "m"), main)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (Mask(), (6, 10)),
        (Mask(2, 2), (6, 10)),
        (BitMask(), (6, 2)),
        (BlockMask(4, 3), (2, 4)),
        (BlockMask(1, 1), (6, 10)),
        (BlockMask(6, 10), (1, 1)),
    ],
    ids=str,
)
def test_every_form_of_the_mask_means_what_the_reference_says(spec, shape):
    func = unalign(apply_mask(double(), "data", spec, "m"))
    assert tuple(int(e) for e in func.params[1].shape) == shape
    kernel = sparse.build(s_tir.Schedule(func).mod)
    rng = np.random.default_rng()
    for _ in range(5):
        told = rng.integers(0, 256, shape).astype(np.uint8) * (rng.random(shape) < 0.6)
        told = told.astype(np.uint8)
        live = dense_mask(spec, told, (6, 10))
        data = np.where(live, rng.standard_normal((6, 10)), np.nan).astype(np.float32)
        out = np.full((6, 10), np.nan, np.float32)
        kernel(data, told, out)
        np.testing.assert_array_equal(out, np.where(live, 2 * data, 0))


def test_gathered_reads_look_the_mask_up_at_the_same_place():
    func = te.create_prim_func(op.matmul(None, 5, None))
    micro_tile = MicroTile("lhs", "m", 0, (1, 0))
    gathered = insert_sread_swrite(func, micro_tile, SparseForm(4, staged=("lhs",)))
    found = apply_mask(gathered, "lhs", Mask(), "lhs_mask")
    names = [str(p.name) for p in found.params]
    assert names == ["lhs", "lhs_mask", "rhs", "ids", "count", "out"]
    text = " ".join(found.script().split())
    place = "[ids[0, v_m_t * 4 + v_m_r], v_k]"
    assert f"T.Select(lhs_mask{place} != T.uint8(0), lhs{place}, T.float32(0.0))" in text
    assert "T.if_then_else(v_m_t * 4 + v_m_r < count[0], T.Select(" in text
    # Only the copy reads the operand, so only the copy declares the mask.
    assert text.count("lhs_mask[") == 2


@pytest.mark.parametrize("operand", ["rhs", "out"])
def test_function_that_does_not_read_the_operand_stays(operand):
    func = double()
    assert apply_mask(func, operand, Mask(), "m").same_as(func)


@pytest.mark.parametrize("spec", [Values(), Lengths(), SparsitySpec()], ids=str)
def test_other_patterns_have_no_mask(spec):
    with pytest.raises(AxisError, match="^spec: expected Mask, BitMask or BlockMask"):
        apply_mask(double(), "data", spec, "m")
