"""Reads one operand through its mask: zero outside, whatever the memory there holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import TensorLoad

from ..errors import AxisError, mismatch
from ..structs import BitMask, BlockMask, Mask, SparsitySpec
from .axis_map import Expr, ceil_div
from .rebuild import rebuilt
from .unalign import is_buffer, parameter

_BITS = 8  # elements to a byte of a BitMask


def apply_mask(func: tirx.PrimFunc, operand: str, spec: SparsitySpec, name: str) -> tirx.PrimFunc:
    """``func`` with every read ``operand[i]`` replaced by ``operand[i] if live(i) else 0``.

    The array of ``spec`` becomes a parameter ``name`` right after ``operand``: uint8, of the shape
    that the specification states. ``func`` may have been rewritten for an index before, but not
    scheduled. It is returned as it is if it does not read ``operand``.

    Raises
    ------
    AxisError
        ``spec`` is none of Mask, BitMask and BlockMask.
    """
    source = next((p for p in func.params if is_buffer(p) and p.name == operand), None)
    if source is None or not _reads(func, source):
        return func
    mask = parameter(name, _shape(spec, source.shape), "uint8")
    live = _live(spec, mask)

    def through(load: TensorLoad) -> Expr:
        if not load.source.same_as(source):
            return load
        # Both sides of a Select are evaluated: whatever guards the load's indices stands around.
        zero = tirx.const(0, str(source.dtype))
        return tirx.Select(live(list(load.indices)), load, zero)

    def declare(block: s_tir.SBlock) -> s_tir.SBlock:
        return _with_read(block, mask) if block.iter_vars else block

    body = tvm_ffi.structural_map(func.body, [(TensorLoad, through)])
    body = tvm_ffi.structural_map(body, [(s_tir.SBlock, declare)])
    params = [each for p in func.params for each in ([p, mask] if p.same_as(source) else [p])]
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs)


def _reads(func: tirx.PrimFunc, source: ir.Var) -> bool:
    hits: list[bool] = []
    tvm_ffi.structural_walk(
        func.body, (TensorLoad, lambda load: hits.append(load.source.same_as(source)))
    )
    return any(hits)


def _shape(spec: SparsitySpec, shape: Sequence[Expr]) -> list[Expr]:
    """Shape of the pattern's array for an operand of ``shape``."""
    if isinstance(spec, Mask):
        return list(shape)
    if isinstance(spec, BitMask):
        return [*shape[:-1], ceil_div(shape[-1], _BITS)]
    if isinstance(spec, BlockMask):
        return [ceil_div(size, extent) for size, extent in zip(shape, spec.extents, strict=True)]
    raise AxisError(mismatch("spec", "Mask, BitMask or BlockMask", spec))


def _live(spec: SparsitySpec, mask: ir.Var) -> Callable[[list[Expr]], Expr]:
    """Whether the element at some indices of the operand is live. Indices are never negative."""

    def live(indices: list[Expr]) -> Expr:
        if isinstance(spec, BitMask):
            *lead, last = indices
            byte = tirx.BufferLoad(mask, [*lead, last >> 3]).astype("int32")
            return tirx.NE((byte >> (last & (_BITS - 1))) & 1, tirx.const(0, "int32"))
        if isinstance(spec, BlockMask):
            pairs = zip(indices, spec.extents, strict=True)
            indices = [i if extent == 1 else tirx.truncdiv(i, extent) for i, extent in pairs]
        return tirx.NE(tirx.BufferLoad(mask, indices), tirx.const(0, "uint8"))

    return live


def _with_read(block: s_tir.SBlock, mask: ir.Var) -> s_tir.SBlock:
    """``block`` with the region of ``mask`` that it reads among its reads."""
    found, _, _ = s_tir.analysis.get_sblock_access_region(block, {mask: mask})
    regions = [region for region in found if region.source.same_as(mask)]
    return rebuilt(block, reads=[*block.reads, *regions])
