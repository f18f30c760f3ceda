"""Writes the PIT axes of every block into its annotations, and reads them back.

``annotate`` and TVMScript refuse nested dictionaries, so a block carries the flat list of the
positions of its accepted iter vars: ``T.sblock_attr({"pit.axes": [0, 2]})``.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock

from ..analysis.access import BlockInfo, block_infos
from ..analysis.pit_axis import pit_axes
from ..errors import AxisError, mismatch
from .rebuild import rebuilt

PIT_AXES = "pit.axes"


def annotate_pit_axes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A copy of ``func`` whose blocks, the root excepted, are annotated with their PIT axes.

    A block without PIT axes gets an empty list; an earlier annotation is replaced. Raises
    AxisError as :func:`pit_tvm.analysis.pit_axis.pit_axes` does.
    """
    _check(func)
    accepted = pit_axes(func).accepted
    infos = block_infos(func)

    def annotate(block: SBlock) -> SBlock:
        for info in infos:
            if block.same_as(info.block):
                positions = [p for p, axis in enumerate(info.axes) if axis in accepted[info.name]]
                return rebuilt(block, annotations={**block.annotations, PIT_AXES: positions})
        return block

    # From the outside in: an outer block is still itself when its turn comes.
    body = tvm_ffi.structural_map(func.body, [(SBlock, annotate)], order="pre")
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


def annotated_axes(func: tirx.PrimFunc) -> dict[str, frozenset[str]]:
    """PIT axes by block name, as the annotations of ``func`` tell them.

    Blocks without the annotation do not appear. Raises AxisError if an annotation is no list of
    positions of the block's iter vars.
    """
    _check(func)
    found: dict[str, frozenset[str]] = {}
    for info in block_infos(func):
        if PIT_AXES in info.block.annotations:
            found[info.name] = frozenset(_read(info))
    return found


def _check(func: tirx.PrimFunc) -> None:
    if not isinstance(func, tirx.PrimFunc):
        raise AxisError(mismatch("func", "a PrimFunc", type(func).__name__))


def _read(info: BlockInfo) -> list[str]:
    value = info.block.annotations[PIT_AXES]
    if not isinstance(value, list | tuple | tvm_ffi.Array):
        raise AxisError(mismatch(f"{PIT_AXES} of block {info.name}", "a list of positions", value))
    positions = [int(p) for p in value]
    for position in positions:
        if not 0 <= position < len(info.axes):
            expected = f"positions below {len(info.axes)}"
            raise AxisError(mismatch(f"{PIT_AXES} of block {info.name}", expected, positions))
    return [info.axes[p] for p in positions]
