"""Functions written by hand are compiled if their blocks are such as ``te.compute`` gives."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tvm import te
from tvm.script import from_source
from tvm.script import tirx as T

import pit_tvm
from pit_tvm.errors import AxisError
from pit_tvm.runtime.program import analyse
from pit_tvm.structs import Mask, Rows

HEAD = """@T.prim_func(s_tir=True)
def main(data: T.Buffer((4, 3), "float32"), out: T.Buffer((4,), "float32")):
    t = T.sblock_alloc_buffer((4,), "float32")
"""
SUMS = """    for i, k in T.grid(4, 3):
        with T.sblock("sums"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                t[vi] = T.float32(0)
            t[vi] = t[vi] + data[vi, vk]
"""
LAST = """    for i in range(4):
        with T.sblock("last"):
            vi = T.axis.spatial(4, i)
            out[vi] = t[vi] * T.float32(2)
"""
BOTH = """    for i in range(4):
        for k in range(3):
            with T.sblock("sums"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    t[vi] = T.float32(0)
                t[vi] = t[vi] + data[vi, vk]
        with T.sblock("last"):
            vi = T.axis.spatial(4, i)
            out[vi] = t[vi] * T.float32(2)
"""
INIT = "            with T.init():\n                t[vi] = T.float32(0)\n"

# The blocks, what is put in place of what in them, and words of the reason.
ODD: dict[str, tuple[str, dict[str, str], str]] = {
    "adds to what is there": (SUMS + LAST, {"= t[vi] *": "= out[vi] + t[vi] *"}, "reads of inputs"),
    "reads what comes later": (LAST + SUMS, {}, "earlier blocks compute, got t[i]"),
    "sums from nothing": (SUMS + LAST, {INIT: ""}, "T.axis.reduce, and only there, got no"),
    "begins without sums": (SUMS + LAST, {'"SR"': '"SS"'}, "and only there, got a T.init()"),
    "begins from itself": (SUMS + LAST, {"= T.float32(0)": "= t[vi]"}, "compute, got t[i]"),
    "begins elsewhere": (
        SUMS + LAST,
        {"    t[vi] = T.f": "    t[3 - vi] = T.f"},
        "T.init() of t[i]",
    ),
    "computed twice": (SUMS + LAST + LAST, {}, "computed by one block, got out[i]"),
    "in part": (SUMS + LAST, {"range(4)": "range(1, 4)"}, "i = i under loops i"),
    "a part": (SUMS + LAST, {"range(4)": "range(3)", "l(4, i": "l(3, i"}, "once, at the"),
    "written elsewhere": (SUMS + LAST, {"out[vi]": "out[3 - vi]"}, "axes, got out[3 - i]"),
    "written by all": (SUMS + LAST, {"out[vi]": "out[0]"}, "axes, got out[0]"),
    "turned loops": (
        SUMS + LAST,
        {"i, k in T.grid(4, 3)": "k, i in T.grid(3, 4)"},
        "under loops k, i",
    ),
    "a split loop": (
        SUMS + LAST,
        {"i in range(4)": "o, p in T.grid(2, 2)", "l(4, i)": "l(4, o * 2 + p)"},
        "i = o * 2 + p under loops o, p",
    ),
    "a loop around": (SUMS + LAST, {"i in range(4)": "i, r in T.grid(4, 2)"}, "under loops i, r"),
    "a loop of two blocks": (BOTH, {}, "for no other block, got i = i under loops i"),
    "threads": (
        SUMS + LAST,
        {"range(4)": "T.parallel(4)"},
        "a serial loop without a step, got par",
    ),
    "a step": (SUMS + LAST, {"range(4)": "range(0, 4, 2)"}, "without a step, got one with"),
    "a choice": (
        SUMS + LAST,
        {"            out[vi]": "            if vi < 2:\n                out[vi]"},
        "expected one store, got IfThenElse",
    ),
    "read by none": (SUMS + LAST, {"= t[vi] *": "= data[vi, 0] *"}, "a later block that reads it"),
}


@pytest.mark.parametrize("name", ODD)
def test_blocks_that_te_does_not_write_are_refused(name: str) -> None:
    blocks, changes, reason = ODD[name]
    for old, new in changes.items():
        assert old in blocks
        blocks = blocks.replace(old, new)
    func = from_source(HEAD + blocks, extra_vars={"T": T})
    with pytest.raises(AxisError, match=re.escape(reason)):
        analyse(func, {"data": Rows()})


def test_blocks_that_te_writes_are_taken(rng: np.random.Generator) -> None:
    func = from_source(HEAD + SUMS + LAST, extra_vars={"T": T})
    data, ids = rng.standard_normal((4, 3)).astype("float32"), np.array([3, 1])
    out = pit_tvm.compile(func, sparse={"data": Rows()})(data, sparsity=ids)
    np.testing.assert_allclose(out[ids], 2 * data[ids].sum(axis=1), rtol=1e-5)


def test_result_without_dimensions_and_axes_of_one_element_are_taken() -> None:
    data = te.placeholder((te.var("m"), 1), "float32", "data")
    m = te.reduce_axis((0, data.shape[0]), "m")
    total = te.compute((), lambda: te.sum(data[m, 0], axis=m), "total")
    out = te.compute((), lambda: total() + 1.0, "out")
    assert analyse([data, out], {"data": Mask()}).main == "total"


def test_sums_that_cancel_are_refused() -> None:
    """TVM writes 0 for a difference of equals: no block reads the product then."""
    lhs, rhs = te.placeholder((4, 3), name="lhs"), te.placeholder((3, 5), name="rhs")
    k = te.reduce_axis((0, 3), "k")
    acc = te.compute((4, 5), lambda m, n: te.sum(lhs[m, k] * rhs[k, n], axis=k), "acc")
    out = te.compute((4, 5), lambda m, n: acc[m, n] - acc[m, n], "out")
    with pytest.raises(AxisError, match="the result of block acc: expected a later block"):
        analyse([lhs, rhs, out], {"lhs": Mask()})
