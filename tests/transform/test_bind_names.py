"""Names in stored values as statements."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import prim
from tvm.script import tirx as T

from pit_tvm.transform.bind_names import bind_names


def let(name: str, value, make):
    var = tirx.Var(name, value.ty)
    return tirx.Let(var, value, make(var))


def stored(value_of):
    """A function that stores what is made of an element."""

    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        for i in range(4):
            B[i] = A[i]

    store = main.body.body
    made = tirx.BufferStore(store.buffer, value_of(store.value), store.indices)
    return main.with_body(tirx.For(main.body.loop_var, 0, 4, tirx.ForKind.SERIAL, made))


def test_names_are_bound_before_the_store_inner_ones_first():
    def value_of(x):
        inner = let("y", x * x, lambda y: y + y)
        return let("x", inner, lambda v: let("z", x, lambda z: v * z)) + tirx.const(1.0, "float32")

    @T.prim_func(s_tir=True)
    def after(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        for i in range(4):
            y = T.bind(A[i] * A[i])
            x = T.bind(y + y)
            z = T.bind(A[i])
            B[i] = x * z + T.float32(1)

    found = bind_names(stored(value_of)).with_attr("global_symbol", "main")
    tvm.ir.assert_structural_equal(found, after.with_attr("global_symbol", "main"))


def test_a_value_that_occurs_twice_gets_two_names():
    def value_of(x):
        same = let("y", x, lambda y: y * y)
        return same + same

    body = bind_names(stored(value_of)).body.body
    *binds, _ = body.seq
    names = [bind.var for bind in binds]
    assert all(not a.same_as(b) for n, a in enumerate(names) for b in names[:n])


def test_what_only_one_side_of_a_choice_needs_stays_there():
    def value_of(x):
        return tirx.if_then_else(x > 0.0, let("y", x, lambda y: y * y), x)

    before = stored(value_of)
    tvm.ir.assert_structural_equal(bind_names(before), before)
    assert isinstance(before.body.body.value.args[1], prim.Let)
