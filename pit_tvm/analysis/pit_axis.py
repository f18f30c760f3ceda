"""Which axes of a tensor expression are PIT axes, and why the others are not.

An axis is a PIT axis if its elements can be permuted in every operand that carries it (and in the
output, if the output carries it) without changing the result: PIT, SOSP'23, section 3.1. Each
access is an operand of its own, so ``A[i, k] * A[j, k]`` permutes two operands. The analysis is
conservative: it may reject an axis that happens to be invariant, and never accepts another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, te, tirx
from tvm.ir import prim

from ..errors import AxisError, mismatch
from ..interrupts import pass_interrupts
from ..structs import AxisReport
from .access import Access, BlockInfo, Store, bare_dims, block_infos, is_bare, loads_of, uses
from .expr import StrayUse, stray_index, stray_use
from .iteration import binding_reason, predicate_reason, shared_loop_reason
from .reduction import NotAReducer, reducer_of

_ARGUMENT = "tensors"


def pit_axes(tensors: Any) -> AxisReport:
    """PIT axes of every block of an operator, with a reason for every other axis.

    Parameters
    ----------
    tensors
        A list or tuple of TE tensors, inputs and outputs as ``te.create_prim_func`` takes them;
        or a ``PrimFunc`` with blocks; or an ``IRModule`` that holds exactly one PrimFunc.
        Shapes may be symbolic.

    Returns
    -------
    AxisReport
        One entry per block but the root, in program order, under TE's axis names. A block without
        axes (an external call, loops inside one block) has its reason under ``"*"``.

    Raises
    ------
    AxisError
        The argument is none of these, has no block, or holds a TE operation that TVM cannot
        turn into a PrimFunc without changing it (scans; the ``where`` of a reduction).
    """
    found = _reasons(as_prim_func(tensors))
    if not found:
        raise AxisError(
            mismatch(
                _ARGUMENT,
                "a PrimFunc with at least one block besides the root",
                "none",
                "write the loops as blocks (T.sblock), or pass TE tensors with a te.compute",
            )
        )
    return AxisReport(
        {name: frozenset(a for a, why in reasons if why is None) for name, reasons in found},
        {name: {a: why for a, why in reasons if why is not None} for name, reasons in found},
    )


@lru_cache(maxsize=16)  # an operator that is compiled asks three times
def _reasons(func: tirx.PrimFunc) -> tuple[tuple[str, tuple[tuple[str, str | None], ...]], ...]:
    """Of every block its name, and why not, or None, of every axis."""
    blocks = block_infos(func)
    return tuple(
        (
            info.name,
            tuple((axis, _reason(info, axis, blocks)) for axis in info.axes)
            or (("*", _no_axes_reason(info)),),
        )
        for info in blocks
    )


# --------------------------------------------------------------------------------------------
# The argument


def as_prim_func(tensors: Any) -> tirx.PrimFunc:
    """The PrimFunc of TE tensors, of a PrimFunc or of an IRModule with one; else AxisError."""
    pass_interrupts()
    if isinstance(tensors, tirx.PrimFunc):
        return tensors
    if isinstance(tensors, tvm.IRModule):
        return _only_prim_func(tensors)
    if isinstance(tensors, list | tuple):
        return _from_tensors(tensors)
    raise AxisError(
        mismatch(
            _ARGUMENT,
            "a list of TE tensors, a PrimFunc or an IRModule",
            type(tensors).__name__,
            "pit_tvm.op makes such lists; pit_tvm.model.compile takes a whole model",
        )
    )


def _only_prim_func(module: tvm.IRModule) -> tirx.PrimFunc:
    found = [f for f in module.functions.values() if isinstance(f, tirx.PrimFunc)]
    if len(found) != 1:
        raise AxisError(
            mismatch(_ARGUMENT, "an IRModule with one PrimFunc", f"{len(found)} PrimFuncs")
        )
    return found[0]


def _from_tensors(tensors: Sequence[Any]) -> tirx.PrimFunc:
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, te.Tensor | ir.Var):
            got = type(tensor).__name__
            raise AxisError(mismatch(f"{_ARGUMENT}[{position}]", "a TE tensor", got))
    given = [t.op for t in tensors if isinstance(t, te.Tensor)]
    for op in _operations(tensors):
        if isinstance(op, te.ScanOp):
            raise AxisError(
                mismatch(_ARGUMENT, "te.compute operations", f"te.scan {op.name}", _SCAN_ADVICE)
            )
        if isinstance(op, te.PlaceholderOp) and not any(op.same_as(seen) for seen in given):
            names = [seen.name for seen in given]
            raise AxisError(mismatch(_ARGUMENT, f"the input {op.name} among them", names))
        if isinstance(op, te.ComputeOp):
            _check_reductions(op)
    return te.create_prim_func(list(tensors))


_SCAN_ADVICE = "write the scan as a PrimFunc"


def _operations(tensors: Sequence[Any]) -> list[Any]:
    """All operations that the tensors are computed from, theirs included."""
    found: list[Any] = []
    pending = [t.op for t in tensors if isinstance(t, te.Tensor)]
    while pending:
        op = pending.pop()
        if not any(op.same_as(seen) for seen in found):
            found.append(op)
            pending += [t.op for t in op.input_tensors]
    return found


def _check_reductions(op: te.ComputeOp) -> None:
    """te.create_prim_func drops the ``where`` and the ``init`` of a reduction without a word."""
    found: list[tirx.Reduce] = []
    for body in op.body:
        tvm_ffi.structural_walk(body, (tirx.Reduce, found.append))
    for node in found:
        if not (isinstance(node.condition, prim.IntImm) and node.condition.value):
            advice = "TVM drops the condition: put it into the summand with if_then_else"
            expected = f"a reduction in {op.name} without where="
            raise AxisError(mismatch(_ARGUMENT, expected, "one with where=", advice))
        if node.init:
            advice = "TVM drops what sums begin with: add it in a te.compute behind the reduction"
            expected = f"a reduction in {op.name} without init="
            raise AxisError(mismatch(_ARGUMENT, expected, "one with init=", advice))


# --------------------------------------------------------------------------------------------
# The rules, in the order in which they are tried


def _reason(info: BlockInfo, axis: str, blocks: Sequence[BlockInfo]) -> str | None:
    """Why ``axis`` is no PIT axis of a block; None if it is one."""
    if info.opaque:
        return _opaque_reason(info)
    if info.kinds[axis] == "other":
        return f"it is declared neither spatial nor a reduction of {_outputs_text(info)}"
    why = _stray_reason(info, axis) or _output_reason(info, axis)
    if why is not None:
        return why
    why = binding_reason(info, axis) or predicate_reason(info, axis)
    if why is not None:
        return f"{why}, so {_outputs_text(info)} depends on its order"
    return shared_loop_reason(info, axis, blocks)


def _opaque_reason(info: BlockInfo) -> str:
    return f"block {info.name} is no tensor expression: {info.opaque[0]}"


def _no_axes_reason(info: BlockInfo) -> str:
    if info.opaque:
        return _opaque_reason(info)
    return f"block {info.name} writes {_outputs_text(info)} without any axis of its own"


def _outputs_text(info: BlockInfo) -> str:
    return ", ".join(info.access_text(w) for w in info.writes) or "nothing"


def _stray_reason(info: BlockInfo, axis: str) -> str | None:
    """Rules 1 and 2: the axis occurs only as a bare index, never in a value or predicate."""
    var = info.var(axis)
    for store in (*info.init, *info.updates):
        target = store.target
        gathered = [index for d, index in enumerate(target.indices) if not is_bare(target, d, var)]
        found = stray_index(target, var)
        for expr in (*gathered, *store.conditions, store.value):
            found = found or stray_use(expr, var)
        if found is not None:
            return _stray_text(info, axis, store, found)
    return None


def _stray_text(info: BlockInfo, axis: str, store: Store, found: StrayUse) -> str:
    text = info.text(found.expr)
    if found.access is not None:
        where = info.access_text(found.access)
        return f"index {text} in dimension {found.dim} of {where} is not {axis} alone"
    what = "predicate" if found.is_predicate else "value"
    return f"{axis} occurs in the {what} {text} of {info.access_text(store.target)}"


def _output_reason(info: BlockInfo, axis: str) -> str | None:
    """Rules 3 and 4, for every buffer that the block writes."""
    for write in info.writes:
        why = _one_output_reason(info, axis, write)
        if why is not None:
            return why
    return None


def _one_output_reason(info: BlockInfo, axis: str, write: Access) -> str | None:
    var = info.var(axis)
    common = _owned_dims(info, axis, write)
    if not common:
        return _accumulation_reason(info, axis, write)
    if info.kinds[axis] == "reduce":
        return f"it is declared a reduction, but {info.access_text(write)} is indexed by it"
    # Elements of the axis own disjoint slices of the output: none may look into another's.
    for load in info.reads:
        if not load.buffer.same_as(write.buffer):
            continue
        common &= bare_dims(load, var)
        if not common:
            return (
                f"the block reads its output at {info.access_text(load)} "
                f"while it writes {info.access_text(write)}"
            )
    return None


def _owned_dims(info: BlockInfo, axis: str, write: Access) -> frozenset[int]:
    """Dimensions of a written buffer that every store of the block indexes by ``axis`` alone."""
    var = info.var(axis)
    stores = [w for w in info.writes if w.buffer.same_as(write.buffer)]
    return frozenset.intersection(*(bare_dims(w, var) for w in stores))


def _accumulation_reason(info: BlockInfo, axis: str, write: Access) -> str | None:
    """Every element of the axis writes the same elements: only a reducer may do that."""
    var, text = info.var(axis), info.access_text(write)
    how = "scattered by an index" if any(uses(i, var) for i in write.indices) else "shared"
    reducer = reducer_of(info, write.buffer)
    if isinstance(reducer, NotAReducer):
        return f"{text} is {how} by all {axis} and not accumulated: {reducer.reason}"
    if not reducer.takes_any_order:
        return f"{text} is accumulated by a {reducer.op}, which is not commutative and associative"
    starts = [s for s in info.init if s.target.buffer.same_as(write.buffer)]
    for other in info.axes if starts else ():
        if info.kinds[other] != "reduce" and not _owned_dims(info, other, write):
            return f"{text} is initialised anew for every {other}, so the last one wins"
    for store in starts:
        parts = (*store.target.indices, *store.conditions, store.value)
        if any(uses(part, var) for part in parts):
            return f"the initial value of {text} depends on {axis}"
        if any(load.buffer.same_as(w.buffer) for load in loads_of(store) for w in info.writes):
            return f"the initial value of {text} is read from what the block writes"
    return None
