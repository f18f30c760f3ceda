"""Padded rows of buffers that a software pipeline has made several."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import s_tir
from tvm.script import tirx as T

from pit_tvm.transform.settle_strides import settle_strides


def copied(strides: tuple[int, ...], notes: dict[str, Any]) -> Any:
    """A copy into one of two stages of a panel of 4 rows of 8."""

    @T.prim_func(s_tir=True)
    def func(lhs: T.Buffer((4, 8), "float16")):
        with T.sblock(""):
            T.reads()
            T.writes()
            panel = T.sblock_alloc_buffer((2, 4, 8), "float16", strides=strides, scope="shared")
            for i, k in T.grid(4, 8):
                with T.sblock("copy"):
                    T.reads(lhs[i, k])
                    T.writes(panel[0, i, k])
                    T.sblock_attr(notes)
                    panel[0, i, k] = lhs[i, k]

    return func


def notes_of(func: Any) -> dict[str, Any]:
    found: list[Any] = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, found.append))
    (copy,) = (block for block in found if block.name_hint == "copy")
    return dict(copy.annotations)


def test_wish_names_the_dimension_that_is_padded_now():
    wish = {"buffer_dim_align": [[0, 0, 16, 8]], "pit.sread": "lhs"}
    kept = notes_of(settle_strides(copied((96, 24, 1), wish)))
    assert [int(x) for x in kept["buffer_dim_align"][0]] == [0, 1, 16, 8]
    assert kept["pit.sread"] == "lhs"


def test_wish_that_rows_fulfil_by_themselves_is_dropped():
    kept = notes_of(settle_strides(copied((32, 8, 1), {"buffer_dim_align": [[0, 0, 16, 8]]})))
    assert kept == {}
