"""Recurrent networks over all tokens of sequences, as an operator of Relax with its own loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tvm import ir, relax

from ..errors import UnsupportedModel, mismatch
from ..schedules.cpu_recurrence import GATES, KEPT, columns_of
from ..schedules.cpu_recurrence import recurrence as loops
from .added import operator, scheduled
from .rebuild import bindings_of, extents_of, is_op
from .wide import WIDE

RECURRENCE = "pit_tvm.recurrence"
_ABOUT = "States of recurrent cells, token by token."


def recurrence(
    emit: Callable[[relax.Expr], relax.Expr],
    given: Sequence[relax.Expr],
    lengths: relax.Expr,
    kind: str,
    backwards: bool,
) -> relax.Expr:
    """The states after every token, in float32: ``given`` are float32 gates of tokens, weight and
    bias of states, and the states before the first token, as ``torch.ops.pit_tvm.recurrence`` takes
    them; ``lengths`` int64."""
    gates, weight, bias, *before = given
    width = int(extents_of(weight)[1])
    lacking = columns_of(kind, width) - GATES[kind] * width
    weight = emit(relax.op.permute_dims(weight))
    if lacking:
        weight = emit(relax.op.concat([weight, relax.op.zeros((width, lacking), WIDE)], 1))
        bias = emit(relax.op.concat([bias, relax.op.zeros((lacking,), WIDE)], 0))
    how = ir.make_node("ir.DictAttrs", kind=kind, backwards=int(backwards))
    given = [gates, weight, bias, *before, lengths]
    return emit(relax.Call(operator(RECURRENCE, _ABOUT, _type), given, how))


def check_none(main: relax.Function) -> None:
    """See that a function for a GPU has no recurrent network; UnsupportedModel if it has."""
    if any(is_op(binding.value, RECURRENCE) for binding in bindings_of(main)):
        expected, got = "operators that run on a GPU", "a recurrent network"
        advice = 'compile it with target="llvm", or what comes before it alone'
        raise UnsupportedModel(mismatch("model", expected, got, advice))


def _type(call: relax.Call, _: relax.BlockBuilder) -> relax.TensorType:
    gates, weight = call.args[:2]
    kept = KEPT[str(call.attrs["kind"])] * int(extents_of(weight)[0])
    return relax.TensorType([*extents_of(gates)[:2], kept], gates.ty.dtype)


def _legalized(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    kind, backwards = str(call.attrs["kind"]), bool(int(call.attrs["backwards"]))
    width = int(extents_of(call.args[1])[0])
    func = builder.add_func(_made(kind, width, backwards), "recurrence")
    return relax.call_tir(func, list(call.args), call.ty)


@cache
def _made(kind: str, width: int, backwards: bool) -> Any:
    return scheduled(loops(kind, width, backwards))


#: The rule that lowers it to loops.
RULES = {f"relax.{RECURRENCE}": _legalized}
