"""What tensor expressions must be for calls to pass arrays, and patterns, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import ir, tirx

from ..analysis.access import BlockInfo
from ..errors import AxisError, ShapeError, mismatch
from ..transform.unalign import is_buffer
from .block_checks import check_blocks


def check_program(func: tirx.PrimFunc, infos: Sequence[BlockInfo]) -> None:
    """Check a function and its blocks.

    Raises
    ------
    AxisError
        A parameter is no array; two arrays, or two symbolic extents, have one name; an extent is
        that of no input; or another array than the last one is computed; or blocks are none of
        ``te.compute``.
    ShapeError
        A sum is over no elements, whatever is passed.
    """
    _check_arrays(func)
    _check_names(func.params)
    _check_order(infos, [str(p.name) for p in func.params])
    _check_sums(infos)
    check_blocks(func, infos)


def _check_arrays(func: tirx.PrimFunc) -> None:
    """Calls take arrays only."""
    for param in func.params:
        if not is_buffer(param):
            advice = "pass it as a tensor of shape (1,); extents come with the arrays"
            raise AxisError(mismatch("tensors", "arrays only", f"the number {param.name}", advice))


def _check_names(params: Sequence[Any]) -> None:
    """Calls know arrays and symbolic extents by name, the latter from inputs."""
    _check_distinct("inputs", [str(p.name) for p in params], "pass name= to te.placeholder")
    extents = symbolic_extents(params)
    names = [str(var.name) for var in extents]
    _check_distinct("symbolic extents", names, "pass a name to te.var")
    told = {extent for p in params[:-1] for extent in p.shape if isinstance(extent, ir.Var)}
    if lost := [str(var.name) for var in extents if var not in told]:
        expected = "every symbolic extent to be that of an input"
        raise AxisError(mismatch("tensors", expected, f"{', '.join(lost)}, which is of none"))


def symbolic_extents(params: Sequence[Any]) -> list[ir.Var]:
    """The variables of all extents of arrays, each once."""
    found: list[ir.Var] = []
    for extent in (extent for p in params for extent in p.shape):
        tvm_ffi.structural_walk(extent, (ir.Var, found.append))
    return list(dict.fromkeys(found))


def _check_distinct(what: str, names: list[str], advice: str) -> None:
    if len(set(names)) < len(names):
        expected = f"{what} with names of their own"
        raise AxisError(mismatch("tensors", expected, names, advice))


def _check_order(infos: Sequence[BlockInfo], names: list[str]) -> None:
    """The last array, and no other one, is computed."""
    made = {a.buffer_name for info in infos for a in info.writes}
    computed = [name for name in names if name in made]
    if not names or computed != names[-1:]:
        expected = "inputs, and then one tensor that is computed of them"
        raise AxisError(mismatch("tensors", expected, f"{names}, of which {computed} are computed"))


def _check_sums(infos: Sequence[BlockInfo]) -> None:
    """Tiles of an axis have elements."""
    for info in infos:
        for var, axis in info.iter_vars.items():
            extent = next(v.dom.extent for v in info.block.iter_vars if v.var.same_as(var))
            if info.kinds[axis] == "reduce" and getattr(extent, "value", 1) == 0:
                raise ShapeError(mismatch(axis, "an extent of at least 1 to reduce over", 0))
