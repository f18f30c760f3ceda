"""Copies with a part replaced: all other parts stay what they are."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import s_tir, te, tirx

from pit_tvm import op
from pit_tvm.transform.rebuild import rebuilt


def parts() -> tuple[s_tir.SBlock, tirx.For]:
    """The block of a sum, with an init, and the loop around it."""
    blocks: list[s_tir.SBlock] = []
    loops: list[tirx.For] = []
    func = te.create_prim_func(op.reduce_sum(3, 5))
    tvm_ffi.structural_walk(func.body, [(s_tir.SBlock, blocks.append), (tirx.For, loops.append)])
    return next(b for b in blocks if b.iter_vars), loops[0]


def test_copy_without_replacements_is_equal():
    block, loop = parts()
    tvm.ir.assert_structural_equal(rebuilt(block), block, map_free_vars=True)
    tvm.ir.assert_structural_equal(rebuilt(loop), loop, map_free_vars=True)


def test_replaced_parts_are_there_and_the_others_the_same():
    block, loop = parts()
    body = tirx.Evaluate(0)
    new = rebuilt(block, reads=[], body=body, annotations={"a": 1})
    assert len(new.reads) == 0 and new.body.same_as(body) and dict(new.annotations) == {"a": 1}
    assert new.init.same_as(block.init) and new.name_hint == block.name_hint
    assert all(a.same_as(b) for a, b in zip(new.iter_vars, block.iter_vars, strict=True))
    longer = rebuilt(loop, extent=tirx.const(7, "int32"), body=body, annotations={"b": 2})
    assert int(longer.extent) == 7 and longer.body.same_as(body)
    assert dict(longer.annotations) == {"b": 2} and longer.kind == loop.kind
    assert longer.loop_var.same_as(loop.loop_var)
