"""Tiles, lists and panels in the place of an axis."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import tirx

from pit_tvm.transform.axis_map import index_map, padded_map, rows_map
from pit_tvm.transform.unalign import parameter


def iterators(*names: str) -> dict[str, Any]:
    return {name: tirx.Var(name, "int32") for name in names}


def same(got: Any, expected: Any) -> None:
    tvm.ir.assert_structural_equal(got, expected)


def test_tiles_of_an_extent_that_they_divide_need_no_guard():
    amap = rows_map("m", 12, 4)
    assert [(p.name, p.extent, p.reduces) for p in amap.parts] == [
        ("m_t", 3, None),
        ("m_r", 4, None),
    ]
    v = iterators("m_t", "m_r")
    same(amap.coord(v), v["m_t"] * 4 + v["m_r"])
    assert amap.guard is None and not amap.padded and amap.needs == ()


@pytest.mark.parametrize("make", [rows_map, padded_map])
def test_last_tile_is_guarded_where_the_extent_ends(make):
    amap = make("m", 13, 4)
    outer, inner = (p.name for p in amap.parts)
    v = iterators(outer, inner)
    assert amap.parts[0].extent == 4
    same(amap.guard(v), v[outer] * 4 + v[inner] < 13)


@pytest.mark.parametrize("make", [rows_map, padded_map])
def test_symbolic_extent_is_rounded_up_and_guarded(make):
    m = tirx.Var("m", "int32")
    amap = make("m", m, 4)
    outer, inner = (p.name for p in amap.parts)
    v = iterators(outer, inner)
    same(amap.parts[0].extent, tirx.floordiv(m + 3, 4))
    same(amap.guard(v), v[outer] * 4 + v[inner] < m)


def test_panels_are_padded():
    amap = padded_map("n", 16, 8)
    assert [p.name for p in amap.parts] == ["n_p", "n_l"]
    assert amap.padded and amap.guard is None


def test_panels_may_lie_in_slots():
    amap = padded_map("n", 40, 8, 16)
    assert [(p.name, p.extent) for p in amap.parts] == [("n_t", 3), ("n_p", 2), ("n_l", 8)]
    v = iterators("n_t", "n_p", "n_l")
    where = v["n_t"] * 16 + (v["n_p"] * 8 + v["n_l"])
    same(amap.coord(v), where)
    same(amap.guard(v), where < 40)
    assert padded_map("n", 32, 8, 16).guard is None


def test_list_gives_the_coordinate_and_its_count_the_guard():
    capacity = tirx.Var("capacity", "int32")
    ids, count = parameter("ids", [5, capacity], "int32"), parameter("count", [5], "int32")
    amap = index_map("m", ids, count, 4, lambda v: [v["slot"]], needs=("slot",))
    v = iterators("m_t", "m_r", "slot")
    same(amap.parts[0].extent, tirx.floordiv(capacity + 3, 4))
    same(amap.coord(v), tirx.BufferLoad(ids, [v["slot"], v["m_t"] * 4 + v["m_r"]]))
    same(amap.guard(v), v["m_t"] * 4 + v["m_r"] < tirx.BufferLoad(count, [v["slot"]]))
    assert amap.needs == ("slot",)


def test_map_is_there_only_with_all_its_parts():
    amap = rows_map("m", 12, 4)
    assert amap.has(iterators("m_t", "m_r", "n"))
    assert not amap.has(iterators("m_t", "n"))
