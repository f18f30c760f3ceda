"""From a PyTorch model to one Relax function over ``[batch, tokens]`` inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from torch.export import Dim, ExportedProgram
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes
from torch.utils import _pytree as pytree
from tvm import tirx
from tvm.relax.frontend.torch import from_exported_program

from ..errors import ShapeError, mismatch
from ..quick_stacks import quick_stacks
from .rebuild import shape_of


@dataclass(frozen=True)
class Imported:
    """A model as Relax: ``main`` takes ``inputs`` in order; weights are constants.

    ``batch`` and ``tokens`` are the symbolic extents of the mask's two dimensions, ``longest``
    the largest number of tokens that the model admits (None: any); ``structure`` puts the flat
    outputs back into what the model returns.
    """

    module: tvm.IRModule
    inputs: tuple[str, ...]
    mask: str
    batch: tirx.Var
    tokens: tirx.Var
    longest: int | None
    structure: pytree.TreeSpec

    @property
    def size_bounds(self) -> dict[tirx.Var, int]:
        """Largest values of the symbolic extents that have one."""
        return {} if self.longest is None else {self.tokens: self.longest}


def import_model(
    model: torch.nn.Module | ExportedProgram, example_inputs: Mapping[str, torch.Tensor], mask: str
) -> Imported:
    """Import a model whose token-wise inputs are ``[batch, tokens, ...]``.

    Parameters
    ----------
    model
        A module in evaluation mode, called by keyword, or what ``torch.export.export`` made of
        one with a dynamic batch and a dynamic length.
    example_inputs
        Tensors by argument name, the mask among them; their values do not matter.
    mask
        Name of the attention mask ``[batch, tokens]``: 1 where a token is, 0 where none is.

    Raises
    ------
    ShapeError
        The mask is missing or not two-dimensional, or an extent was fixed by the export.
    """
    if mask not in example_inputs:
        raise ShapeError(mismatch("mask", f"one of {sorted(example_inputs)}", repr(mask)))
    if example_inputs[mask].dim() != 2:
        expected = f"{mask} with two dimensions, [batch, tokens]"
        raise ShapeError(mismatch("mask", expected, tuple(example_inputs[mask].shape)))
    if isinstance(model, ExportedProgram):
        program = model
    else:
        program = _export(model, example_inputs, tuple(example_inputs[mask].shape))
    with torch.no_grad(), quick_stacks():
        module = from_exported_program(
            program, keep_params_as_input=False, unwrap_unit_return_tuple=False
        )
    main = module["main"]
    inputs = tuple(p.name for p in main.params)
    extents = shape_of(main.params[inputs.index(mask)]) if mask in inputs else None
    if extents is None or not all(isinstance(e, tirx.Var) for e in extents):
        expected = f"a model exported with {mask} of a dynamic batch and a dynamic length"
        raise ShapeError(mismatch("model", expected, extents and [str(e) for e in extents]))
    batch, tokens = extents
    bounds = (main.attrs or {}).get("tir_var_upper_bound", {})
    longest = bounds.get(tokens.name)
    return Imported(
        module,
        inputs,
        mask,
        batch,
        tokens,
        None if longest is None else int(longest),
        program.call_spec.out_spec,
    )


def _export(
    model: torch.nn.Module, example_inputs: Mapping[str, torch.Tensor], plane: tuple[int, ...]
) -> ExportedProgram:
    """Export with the mask's extents dynamic wherever an input begins with them."""
    sizes = dict(enumerate((Dim("batch"), Dim("tokens"))))
    shapes: Any = {
        name: sizes if tuple(value.shape[:2]) == plane else None
        for name, value in example_inputs.items()
    }
    kwargs = dict(example_inputs)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _export_within_bounds(model, kwargs, shapes)
    finally:
        model.train(training)


def _export_within_bounds(model: torch.nn.Module, kwargs: Any, shapes: Any) -> ExportedProgram:
    """Export; where tables bound the number of tokens, torch says so, and the bound is taken."""
    for _ in range(3):
        try:
            return torch.export.export(model, (), kwargs, dynamic_shapes=shapes, strict=False)
        except torch._dynamo.exc.UserError as error:
            fixes = str(error).split("\n\n")[0]
            if "Suggested fixes" not in fixes:
                raise
            shapes = refine_dynamic_shapes_from_suggested_fixes(fixes, shapes)
    return torch.export.export(model, (), kwargs, dynamic_shapes=shapes, strict=False)
