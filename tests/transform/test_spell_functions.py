"""Elementary functions as arithmetic."""

from __future__ import annotations

import pytest
from tvm import te, tirx

from pit_tvm.op.elementary import FUNCTIONS
from pit_tvm.transform.spell_functions import spell_functions


def chain(dtype: str, element):
    x = te.placeholder((te.var("n"),), dtype, "x")
    return te.create_prim_func([x, te.compute(x.shape, lambda i: element(x[i]), name="out")])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_of_float32_become_arithmetic_under_a_name(name: str):
    before = chain("float32", getattr(tirx, name))
    script = spell_functions(before).script()
    assert f"T.{name}(" in before.script() and f"T.{name}(" not in script
    assert script.count("x[v_i]") == 2  # what is read, and once in the value


def test_calls_inside_of_calls_are_found():
    script = spell_functions(chain("float32", lambda x: tirx.exp(tirx.tanh(tirx.exp(x))))).script()
    assert "T.exp(" not in script and "T.tanh(" not in script


def test_other_functions_and_types_stay():
    for before in (chain("float64", tirx.exp), chain("float32", tirx.cos)):
        assert spell_functions(before).script() == before.script()
