"""What blocks must be for operators to be rewritten and scheduled: those of ``te.compute``.

Rewrites put every block under loops of its own, read each array as the one block left it that
computes it, and may compute the output twice, dead and live. A PrimFunc that was written by hand
may do otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import ir, sym, tirx
from tvm.s_tir import SBlockRealize
from tvm.tirx import BufferStore

from ..analysis.access import Access, BlockInfo, loads_of, same_access
from ..errors import AxisError, mismatch


def check_blocks(func: tirx.PrimFunc, infos: Sequence[BlockInfo]) -> None:
    """Check the blocks of a function.

    Raises
    ------
    AxisError
        A block is not one store of all elements of an array, each once, under one serial loop for
        each axis; its sums begin with nothing; it reads what no earlier block has computed, or
        computes what another one does; or its result is read by none.
    """
    _check_serial(func)
    root = func.body.block if isinstance(func.body, SBlockRealize) else None
    known = {*func.params, *(root.alloc_buffers if root else ())}
    inputs, done = set(func.params[:-1]), set[ir.Var]()
    taken: list[ir.Var] = []
    for info in infos:
        _check_loops(info, taken)
        target = _target(info)
        if target.buffer in done or target.buffer not in known:
            expected = "arrays of the function or its root, each computed by one block"
            raise _odd(info, expected, info.access_text(target))
        _check_loads(info, target, inputs | done)
        done.add(target.buffer)
    read = {func.params[-1]}
    for info in reversed(infos):
        if read.isdisjoint(access.buffer for access in info.writes):
            advice = "TVM takes 0 for its product with 0, and for its difference with itself"
            what = f"the result of block {info.name}"
            raise AxisError(mismatch(what, "a later block that reads it", "none", advice))
        read.update(access.buffer for access in info.reads)


def _odd(info: BlockInfo, expected: str, got: object) -> AxisError:
    advice = "te.create_prim_func of te.compute gives such blocks"
    return AxisError(mismatch(f"block {info.name}", expected, got, advice))


def _check_serial(func: tirx.PrimFunc) -> None:
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, found.append))
    for loop in found:
        if loop.kind != tirx.ForKind.SERIAL or loop.step is not None:
            what, got = f"loop {loop.loop_var.name}", tirx.ForKind(loop.kind).name.lower()
            got = "one with a step" if loop.step is not None else got
            raise AxisError(mismatch(what, "a serial loop without a step", got))


def _check_loops(info: BlockInfo, taken: list[ir.Var]) -> None:
    """Axes are bound to the block's loops, in order and whole; only an axis of one element may
    have none. ``taken``: loops of earlier blocks."""
    proofs, left = sym.Analyzer(), list(info.loops)
    bound = ", ".join(f"{axis} = {info.bindings[axis]}" for axis in info.axes)
    got = f"{bound} under loops {', '.join(loop.var.name for loop in left) or 'of no number'}"
    for axis in info.axes:
        value, dom = info.bindings[axis], info.domain(axis)
        begin, extent = value, 1
        if isinstance(value, ir.Var) and left and value.same_as(left[0].var):
            loop = left.pop(0)
            begin, extent = loop.begin, loop.extent
        pairs = ((begin, dom.min), (extent, dom.extent))
        if not all(proofs.can_prove_equal(a, b) for a, b in pairs):
            raise _odd(info, "one loop for each axis, as long and in their order", got)
    if left or any(loop.var in taken for loop in info.loops):
        raise _odd(info, "one loop for each axis and for no other block", got)
    taken += [loop.var for loop in info.loops]


def _target(info: BlockInfo) -> Access:
    """The one access that a block writes: every element of an array, once."""
    init, reduces = info.block.init, "reduce" in info.kinds.values()
    stores = [info.block.body] if init is None else [init, info.block.body]
    for store in stores:
        if not isinstance(store, BufferStore):
            raise _odd(info, "one store", type(store).__name__)
    if reduces is (init is None):
        expected = "T.init() where it has a T.axis.reduce, and only there"
        raise _odd(info, expected, f"{'no' if init is None else 'a'} T.init()")
    target = info.updates[0].target
    if any(not same_access(store.target, target) for store in info.init):
        raise _odd(info, f"T.init() of {info.access_text(target)}", "one of another element")
    axes = [info.iter_vars.get(i, "") if isinstance(i, ir.Var) else "" for i in target.indices]
    whole = all(a and info.spans(a, e) for a, e in zip(axes, target.buffer.shape, strict=True))
    beside = [a for a in info.axes if info.kinds[a] == "spatial" and a not in axes]
    spread = any(not info.spans(a, 1) for a in beside)
    summed = any(info.kinds[a] == "reduce" for a in axes if a)
    if not whole or spread or summed or len(set(axes)) < len(axes):
        expected = "every element to be written once, at the block's spatial axes"
        raise _odd(info, expected, info.access_text(target))
    return target


def _check_loads(info: BlockInfo, target: Access, known: set[ir.Var]) -> None:
    """A block reads inputs and results of earlier blocks; its own one only to add to it."""
    for store in (*info.init, *info.updates):
        sums = bool(info.init) and store in info.updates
        for load in loads_of(store):
            if load.buffer in known or (sums and same_access(load, target)):
                continue
            expected = "reads of inputs and of what earlier blocks compute"
            raise _odd(info, expected, info.access_text(load))
