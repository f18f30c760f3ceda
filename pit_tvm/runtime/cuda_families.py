"""Which family of GPU kernels runs a program."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedTarget
from ..schedules.hopper_space import ISA
from ..target import TargetInfo
from .cuda_block_form import blocks_form
from .cuda_blocks import BlocksDispatcher
from .cuda_columns import ColumnsDispatcher
from .cuda_decode import decode_dispatcher, decodes
from .cuda_dispatch import CudaDispatcher
from .cuda_form import ColumnsForm, form_of
from .cuda_general import GeneralDispatcher
from .cuda_general_form import general_form
from .cuda_grid import GridDispatcher
from .cuda_grid_form import grid_form
from .cuda_outputs import OutputsDispatcher, outputs_form
from .cuda_piece_form import pieces_form
from .cuda_pieces import PiecesDispatcher
from .program import Program


def dispatcher_of(
    program: Program, target: TargetInfo, *parts: Any, **options: Any
) -> CudaDispatcher:
    """The dispatcher of a program's family: Hopper's own where the GPU is one and one computes it,
    TensorIR's elsewhere. Arguments are those of `CudaDispatcher`; UnsupportedTarget if no family
    does."""
    made = _hopper(program, target, *parts, **options) if target.isa == ISA else None
    if made is not None:
        return made
    general: Any = general_form(program, options["deterministic"])
    return GeneralDispatcher(program, target, *parts, form=general, **options)


def _hopper(program: Program, *parts: Any, **options: Any) -> CudaDispatcher | None:
    """The dispatcher of Hopper's family that computes a program; None if none does."""
    outputs = outputs_form(program)
    if outputs is not None:
        return OutputsDispatcher(program, *parts, form=outputs, **options)
    blocks = blocks_form(program)
    if blocks is not None:
        return BlocksDispatcher(program, *parts, form=blocks, **options)
    pieces = pieces_form(program)
    if pieces is not None:
        return PiecesDispatcher(program, *parts, form=pieces, **options)
    grid = grid_form(program)
    if grid is not None:
        return GridDispatcher(program, *parts, form=grid, **options)
    try:
        form = form_of(program)
    except UnsupportedTarget:
        return None
    if decodes(program, form):
        return decode_dispatcher(program, *parts, form=form, **options)
    made = ColumnsDispatcher if isinstance(form, ColumnsForm) else CudaDispatcher
    return made(program, *parts, form=form, **options)
