"""The forms of a contraction: loops and their roles, panels and packed operands."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import te, tirx

from pit_tvm import op
from pit_tvm.analysis.access import block_infos
from pit_tvm.analysis.contraction import contraction_of
from pit_tvm.schedules.contraction_forms import (
    axis_extents,
    contraction_form,
    pack_func,
    packed_shape,
)
from pit_tvm.structs import MicroTile, Tile

LANES = 8
TILE = Tile("", "avx2", "float32", 24, 32, 64)


def form(
    tensors: list[te.Tensor], micro_tile: MicroTile | None, operand: str = "lhs", groups: int = 0
) -> tuple[Any, Any]:
    func = te.create_prim_func(tensors)
    return contraction_form(func, contraction_of(func, operand), TILE, LANES, micro_tile, groups)


def extents(func: Any, name: str) -> list[str]:
    """Extents of the block ``name``, as text."""
    info = next(i for i in block_infos(func) if i.name == name)
    return [f"{info.iter_vars[iv.var]}={iv.dom.extent}" for iv in info.block.iter_vars]


MATMUL = op.matmul(None, 70, 190)
BATCHED = op.batch_matmul(3, None, 70, 190)


@pytest.mark.parametrize(
    ("tensors", "micro_tile", "threads", "serial", "reduce_outer"),
    [
        (MATMUL, None, ("m_t", ""), (), "k_t"),
        (MATMUL, MicroTile("lhs", "m", 0, (1, 0)), ("", "m_t"), (), "k_t"),
        (MATMUL, MicroTile("lhs", "k", 1, (24, 1)), ("m_t", ""), (), "k_t"),
        (MATMUL, MicroTile("lhs", "m", 0, (1, 64)), ("",), ("k_t", "m_t"), ""),
        (BATCHED, None, ("b", "m_t", ""), (), "k_t"),
        (BATCHED, MicroTile("lhs", "b", 0, (1, 0, 0)), ("b_t", "b_r", "m_t", ""), (), "k_t"),
        (BATCHED, MicroTile("lhs", "m", 1, (1, 1, 0)), ("b", ""), ("m_t",), "k_t"),
        (BATCHED, MicroTile("lhs", "k", 2, (1, 24, 1)), ("b", "m_t", ""), (), "k_t"),
        (BATCHED, MicroTile("lhs", "m", 1, (1, 1, 64)), ("b", ""), ("k_t", "m_t"), ""),
    ],
)
def test_roles_of_the_loops(tensors, micro_tile, threads, serial, reduce_outer):
    func, roles = form(tensors, micro_tile)
    assert (roles.threads, roles.serial, roles.reduce_outer) == (threads, serial, reduce_outer)
    assert (roles.row, roles.panel, roles.lane, roles.reduce_inner) == ("m_r", "n_p", "n_l", "k_r")
    names = {text.split("=")[0] for text in extents(func, roles.block)}
    used = {*threads, *serial, roles.row, roles.panel, roles.lane, reduce_outer, "k_r"} - {""}
    assert used == names


def test_groups_take_turns_outside_of_their_rows():
    tensors = op.grouped_matmul(None, 70, 190, 5)
    func, roles = form(tensors, MicroTile("lhs", "m", 0, (1, 0)), groups=5)
    assert (roles.threads, roles.serial) == (("", "group"), ("m_t",))
    assert [p.name for p in func.params] == ["lhs", "rhs", "ids", "count", "out"]


def test_roles_follow_the_sparse_operand():
    _, roles = form(MATMUL, MicroTile("rhs", "n", 1, (0, 1)), "rhs")
    assert (roles.row, roles.panel, roles.threads) == ("n_r", "m_p", ("", "n_t"))


def test_reduction_is_cut_evenly_in_steps_of_eight():
    func, _ = form(MATMUL, None)
    assert extents(func, "lhs_sread")[-2:] == ["k_t=3", "k_r=64"]  # 190 / 64 is nearest to 3
    func, _ = form(op.matmul(None, 70, 100), None)
    assert extents(func, "lhs_sread")[-2:] == ["k_t=2", "k_r=56"]
    func, _ = form(op.matmul(None, 70, None), None)
    assert extents(func, "lhs_sread")[-1] == "k_r=64"


@pytest.mark.parametrize(
    ("columns", "panels"), [(16, 1), (33, 3), (64, 2), (80, 1), (96, 2), (None, 1)]
)
def test_column_blocks_are_equal_numbers_of_panels(columns, panels):
    _, roles = form(op.matmul(None, columns, 40), None)
    assert roles.panels == panels  # two panels of 16 columns fit into the tile's 32


@pytest.mark.parametrize(("wanted", "panels"), [(1, 1), (2, 2), (4, 6), (8, 6), (16, 18)])
def test_register_blocks_of_two_panels_find_whole_pairs(wanted, panels):
    func = te.create_prim_func(op.matmul(None, 18 * 16, 40))
    con = contraction_of(func, "lhs")
    _, roles = contraction_form(func, con, Tile("", "", "", 24, 16 * wanted, 64), 8, None)
    assert roles.panels == panels


def test_micro_tile_decides_how_many_rows_make_a_tile():
    func, _ = form(MATMUL, MicroTile("lhs", "k", 1, (40, 1)))
    assert "m_r=40" in extents(func, "out")
    func, _ = form(MATMUL, MicroTile("lhs", "m", 0, (1, 0)))
    assert "m_r=24" in extents(func, "out")


def test_extents_of_the_axes():
    func = te.create_prim_func(op.matmul(None, 70, 190))
    sizes = axis_extents(func, contraction_of(func, "lhs"))
    assert (sizes["n"], sizes["k"]) == (70, 190)
    assert isinstance(sizes["m"], tirx.Var)


@pytest.mark.parametrize(
    ("tensors", "operand", "shape"),
    [
        (op.matmul(6, 70, 190), "lhs", [5, 192, 16]),
        (op.matmul(6, 70, 190, transpose_rhs=True), "lhs", [5, 192, 16]),
        (op.matmul(6, 70, 190), "rhs", [1, 192, 16]),
        (op.batch_matmul(3, 6, 70, 190), "lhs", [3, 5, 192, 16]),
        (op.grouped_matmul(6, 70, 190, 4), "lhs", [4, 5, 192, 16]),
        (op.matmul(6, 70, 190, dtype="int8"), "lhs", [5, 192, 16]),
    ],
)
def test_packed_operand_has_whole_panels_and_steps(tensors, operand, shape):
    func = te.create_prim_func(tensors)
    con = contraction_of(func, operand)
    dense = next(p for p in func.params if p.name == con.dense)
    assert packed_shape(con, [int(e) for e in dense.shape], LANES) == shape
    packing = pack_func(func, con, LANES)
    assert [int(e) for e in packing.params[-1].shape] == shape
    assert str(packing.params[-1].dtype) == con.accumulator
    sparse, _ = contraction_form(func, con, TILE, LANES, None)
    param = next(p for p in sparse.params if p.name == con.dense)
    assert [int(e) for e in param.shape] == shape
