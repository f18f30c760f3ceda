"""Sums of narrow integers wrap at once."""

from __future__ import annotations

import pytest
import tvm
from tvm import te, tirx

from pit_tvm.transform.wrap_narrow import wrap_narrow


def module(dtype: str, cast: bool) -> tvm.IRModule:
    """``out = max(a + b - a * b, 0)``, or with each step in int32 and cast back."""
    a, b = (te.placeholder((4,), dtype, name) for name in "ab")

    def step(x: tirx.PrimExpr, y: tirx.PrimExpr, sign: str) -> tirx.PrimExpr:
        if cast:
            x, y = x.astype("int32"), y.astype("int32")
        found = {"+": x + y, "-": x - y, "*": x * y}[sign]
        return found.astype(dtype) if cast else found

    def value(i: tirx.Var) -> tirx.PrimExpr:
        total = step(step(a[i], b[i], "+"), step(a[i], b[i], "*"), "-")
        return tirx.max(total, tirx.const(0, dtype))

    out = te.compute((4,), value, "out")
    return tvm.IRModule({"main": te.create_prim_func([a, b, out])})


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_narrow_integers_are_computed_in_32_bits_and_cast_back(dtype: str) -> None:
    tvm.ir.assert_structural_equal(wrap_narrow(module(dtype, False)), module(dtype, True))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "float16", "float32"])
def test_other_numbers_are_left(dtype: str) -> None:
    tvm.ir.assert_structural_equal(wrap_narrow(module(dtype, False)), module(dtype, False))
