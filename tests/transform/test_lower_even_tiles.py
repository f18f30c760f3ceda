"""Lowering of `pit.even_tiles`: heights that divide the live positions evenly."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as hs
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError
from pit_tvm.transform.lower_dynamic_extent import lower_dynamic_extent
from pit_tvm.transform.lower_even_tiles import lower_even_tiles

ROWS, MULTIPLE, SHARE, TILES = 8, 2, 2, 5


@T.prim_func(s_tir=True)
def tells_more(count: T.Buffer((1,), "int32"), out: T.Buffer((40,), "int32")):
    for t in T.serial(5, annotations={"pit.even_tiles": [8, 2, 2]}):
        for r in range(8):
            if t * 8 + r < count[0]:
                out[t * 8 + r] = t


@T.prim_func(s_tir=True)
def unguarded(out: T.Buffer((40,), "int32")):
    for t in T.serial(5, annotations={"pit.even_tiles": [8, 2, 2]}):
        for r in range(8):
            out[t * 8 + r] = 0


@T.prim_func(s_tir=True)
def positions(
    count: T.Buffer((1,), "int32"),
    first: T.Buffer((40,), "int32"),
    out: T.Buffer((40, 3), "int32"),
):
    """Each live position's place in its tile, and how often it was visited."""
    for t in T.serial(5, annotations={"pit.even_tiles": [8, 2, 2], "pit.dynamic_extent": 1}):
        for part in range(3):
            with T.sblock(""):
                T.reads(count[0])
                T.writes(out[t * 8 : t * 8 + 8, part], first[t * 8 : t * 8 + 8])
                for r in T.serial(8, annotations={"pit.dynamic_extent": 1}):
                    if t * 8 + r < count[0]:
                        first[t * 8 + r] = r
                        out[t * 8 + r, part] = out[t * 8 + r, part] + 1


@pytest.fixture(scope="module")
def kernel() -> Any:
    return tvm.compile(lower_dynamic_extent(lower_even_tiles(positions)), target="llvm")


@given(live=hs.integers(0, ROWS * TILES))
@settings(max_examples=41, deadline=None)
def test_every_position_is_in_one_tile_of_the_right_height(kernel, live):
    first, out = np.full(40, -1, np.int32), np.zeros((40, 3), np.int32)
    kernel(np.array([live], np.int32), first, out)
    assert (out[:live] == 1).all() and (out[live:] == 0).all() and (first[live:] == -1).all()
    if not live:
        return
    number = SHARE * ceil(max(1, ceil(live / ROWS)) / SHARE)
    height = MULTIPLE * ceil(ceil(live / number) / MULTIPLE)
    assert first[:live].tolist() == [p % height for p in range(live)]
    assert height <= ROWS and ceil(live / height) <= number


def test_variable_that_tells_more_than_positions():
    with pytest.raises(ScheduleError, match="even_tiles: loop t: expected positions alone, 8 a ti"):
        lower_even_tiles(tells_more)


def test_loop_without_a_guard():
    with pytest.raises(ScheduleError, match="even_tiles: loop t: expected one limit of its positi"):
        lower_even_tiles(unguarded)
