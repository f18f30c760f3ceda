"""Indices that arrays tell stay in the tensors that are read at them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te

from pit_tvm.transform.read_inside import read_inside


def lookup(dtype: str, rows: Any = 300) -> list[Any]:
    """``out[m, n] = table[ids[m], n]``."""
    table = te.placeholder((rows, 4), "float32", "table")
    ids = te.placeholder((7,), dtype, "ids")
    return [table, ids, te.compute((7, 4), lambda m, n: table[ids[m], n], "out")]


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("int32", [0, 299, 300, -1, 2**31 - 1, -(2**31), 5]),
        ("int64", [0, 299, 300, -1, 2**62, -(2**63), 5]),
        ("uint32", [0, 299, 300, 2**32 - 1, 2**31, 7, 5]),
        ("uint8", [0, 1, 254, 255, 9, 7, 5]),
        ("int8", [0, 127, -128, -1, 9, 7, 5]),
    ],
)
@pytest.mark.parametrize("rows", [300, None])
def test_indices_outside_read_the_nearest_row(dtype: str, given: list[int], rows: Any) -> None:
    func = te.create_prim_func(lookup(dtype, rows or te.var("rows")))
    held = read_inside(func, {("ids", "table", 0)})
    run = tvm.compile(held.with_attr("global_symbol", "main"), target="llvm")["main"]
    table, ids = np.random.rand(300, 4).astype("float32"), np.array(given, dtype)
    out = tvm.runtime.empty((7, 4), "float32")
    run(tvm.runtime.tensor(table), tvm.runtime.tensor(ids), out)
    nearest = [min(max(i, 0), 299) for i in given]
    np.testing.assert_array_equal(out.numpy(), table[nearest])


def test_other_indices_stay_as_they_are() -> None:
    func = te.create_prim_func(lookup("int32"))
    assert read_inside(func, ()).same_as(func)
    tvm.ir.assert_structural_equal(read_inside(func, {("ids", "table", 1)}), func)
