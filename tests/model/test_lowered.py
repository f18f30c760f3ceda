"""One Relax call as the PrimFunc that computes it."""

from __future__ import annotations

import numpy as np
from tvm import relax

from pit_tvm.analysis.access import block_infos
from pit_tvm.model.lowered import lower
from tests.model.graphs import B, T, last_call, weight

op = relax.op


def test_operands_are_the_calls_tensors_in_order() -> None:
    call = last_call(lambda x, y: op.subtract(x, y), x=(B, T, 8), y=(T, 8))
    found = lower(call)
    assert found is not None
    assert [o.same_as(a) for o, a in zip(found.operands, call.args, strict=True)] == [True, True]
    assert len(found.func.params) >= 3


def test_products_of_symbols_are_symbols_of_their_own() -> None:
    found = lower(last_call(lambda x, y: op.add(x, y), x=(B * T, 8), y=(B * T, 8)))
    assert found is not None
    (block,) = block_infos(found.func)
    assert block.writes[0].buffer.same_as(found.func.params[2])
    rows = {str(p.ty.shape[0]) for p in found.func.params[:3]}
    assert len(rows) == 1 and "*" not in rows.pop()


def test_scalar_constants_stay_in_the_loops() -> None:
    found = lower(last_call(lambda x: op.multiply(x, relax.const(np.float32(2))), x=(B, T)))
    assert found is not None and len(found.operands) == 1


def test_constant_tensors_are_operands() -> None:
    call = last_call(lambda x: op.matmul(x, weight(8, 3)), x=(B, T, 8))
    found = lower(call)
    assert found is not None and found.operands[1].same_as(call.args[1])


def test_several_tensors_of_a_tuple() -> None:
    call = last_call(lambda x, y: op.concat([x, y], 2), x=(B, T, 3), y=(B, T, 5))
    found = lower(call)
    assert found is not None and [o.name for o in found.operands] == ["x", "y"]


def test_nothing_where_a_call_is_no_single_loop_nest() -> None:
    assert lower(last_call(lambda x: op.call_pure_packed("f", x, ty_args=x.ty), x=(B, T))) is None
    assert lower(last_call(lambda x: op.sort(x, 1), x=(B, T))) is None
