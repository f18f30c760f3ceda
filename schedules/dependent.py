"""Kernels that take their places on the device while the kernel before them ends.

A kernel that calls `after_predecessor` is launched as a programmatic dependent (`as_dependent`):
its CTAs may begin once every CTA of the kernel before it in the stream has let it in or ended, and
then wait until all of that kernel is done and can be seen. Behind the call everything is as after
a plain launch: what earlier kernels wrote is there, and nobody reads any more what this one
overwrites. Before it a kernel touches no global memory. Foreign kernels need not take part.

A kernel may call `after_predecessor` last, and work beside the one before it, if that one called it
first, so that all before is done, and if neither touches what the other writes: what the second
writes was allocated before the first was launched, or it could be memory that was given back by
somebody whose kernel is under way. Whoever waits for the second waits for the first as well.

A kernel lets its successor in only when its own predecessor is done, so at most two kernels of a
stream overlap. CTAs that come early gather on the multiprocessors that fall free first, so a kernel
that reads much with several CTAs on a multiprocessor gains little by it: of 7 us that a fold of a
mask of 4096 x 4096 adds to a product on an H200, 0.6.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

_LAUNCH = "tirx.use_programtic_dependent_launch"  # spelt so in TVM
_OVERLAP = "tirx.ptx.griddepcontrol"


@T.inline
def after_predecessor():
    """By every thread of every CTA, before the first access to global memory (or last: above)."""
    T.ptx.griddepcontrol.wait()
    T.ptx.griddepcontrol.launch_dependents()


@T.inline
def let_successor_in():
    """At the beginning of a kernel that is launched plainly: its successor may be a dependent."""
    T.ptx.griddepcontrol.launch_dependents()


def waits(func: tvm.tirx.PrimFunc) -> bool:
    """Whether a kernel calls `after_predecessor`."""
    found: list[bool] = []

    def visit(call: tvm.ir.Call) -> None:
        if getattr(call.op, "name", "") == _OVERLAP:
            found.append(any(getattr(arg, "value", None) == "wait" for arg in call.args))

    tvm_ffi.structural_walk(func.body, (tvm.ir.Call, visit))
    return any(found)


def as_plain(mod: tvm.IRModule) -> tvm.IRModule:
    """The module without what lets kernels overlap, for GPUs older than that."""

    def drop(stmt: tirx.Evaluate) -> tirx.Evaluate:
        if getattr(getattr(stmt.value, "op", None), "name", "") == _OVERLAP:
            return tirx.Evaluate(0)
        return stmt

    plain = [(tirx.Evaluate, drop)]
    return tvm.IRModule(
        {
            name: func.with_body(tvm_ffi.structural_map(func.body, plain))
            for name, func in mod.functions.items()
        }
    )


def as_dependent(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with every kernel that waits, and no other, launched as a dependent."""
    return tvm.IRModule(
        {
            name: func.with_attr("tirx.kernel_launch_params", [_LAUNCH]) if waits(func) else func
            for name, func in mod.functions.items()
        }
    )
