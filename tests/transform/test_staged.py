"""Panels of staged operands have the iterators that their coordinates need."""

from __future__ import annotations

from tvm import te, tirx

from pit_tvm import op
from pit_tvm.structs import MicroTile
from pit_tvm.transform.axis_map import rows_map
from pit_tvm.transform.insert_sread_swrite import SparseForm, insert_sread_swrite


def panel(func: tirx.PrimFunc, name: str) -> list[object]:
    """The constant extents of an operand's panel, None for others."""
    allocs = {b.name: b for b in func.body.block.alloc_buffers}
    shape = allocs[f"{name}_panel"].shape
    return [int(e) if isinstance(e, tirx.IntImm) else None for e in shape]


def test_the_other_operand_of_a_gathered_reduction_has_one_panel_per_list() -> None:
    func = te.create_prim_func(op.matmul(8, 5, 7))
    maps = {"m": rows_map("m", 8, 4)}
    form = SparseForm(3, maps, staged=("lhs", "rhs"), padded=True)
    made = insert_sread_swrite(func, MicroTile("lhs", "k", 1, (4, 1)), form)
    assert panel(made, "lhs") == [2, 4, None, 3]
    assert panel(made, "rhs") == [2, None, 3, 5]


def test_the_matrices_of_groups_have_one_panel_per_group() -> None:
    func = te.create_prim_func(op.grouped_matmul(None, 5, 7, 3))
    form = SparseForm(4, {}, ("lhs", "rhs"), "float32", {}, (3, "group_ids"), padded=True)
    made = insert_sread_swrite(func, MicroTile("lhs", "m", 0, (1, 0)), form)
    assert panel(made, "lhs") == [3, None, 4, 7]
    assert panel(made, "rhs") == [3, 7, 5]


def test_a_sum_that_is_padded_on_every_side_has_no_guard() -> None:
    func = te.create_prim_func(op.matmul(6, 5, 7))
    maps = {
        "n": rows_map("n", 5, (2, 2), padded=True),
        "k": rows_map("k", 7, (2, 4), padded=True),
    }
    form = SparseForm((2, 2), maps, ("lhs", "rhs"), padded=True)
    made = insert_sread_swrite(func, MicroTile("lhs", "m", 0, (1, 0)), form)
    text = made.script()
    main = text[text.index('T.sblock("out")') : text.index('T.sblock("out_swrite")')]
    assert "if " not in main and "if " in text
    assert panel(made, "lhs") == [None, 2, 2, 1, 2, 4]
