"""From a PyTorch model to one Relax function over ``[batch, tokens]`` inputs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tvm
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils import _pytree as pytree
from tvm import relax, tirx
from tvm.ir import prim

from ..errors import DTypeError, ShapeError, UnsupportedModel, mismatch
from ..interrupts import pass_interrupts
from .complex_pairs import is_complex
from .counts import TOLD_APART, check_counts
from .exporting import export_program
from .onnx_model import is_onnx, read_onnx
from .plane import BATCH, TOKENS, Bound
from .rebuild import bindings_of, extents_of, same_extents
from .translating import translated

# The least extent that torch traces as dynamic: it takes 0 and 1 for constants.
_TRACED_LEAST = 2
_TRACING = threading.Lock()  # torch.export keeps its state in globals


@dataclass(frozen=True)
class Imported:
    """A model as Relax: ``main`` takes ``inputs`` in order; weights are constants.

    ``batch`` and ``tokens`` are the symbolic extents of the mask's two dimensions, ``bounds`` the
    least and the most that the model admits of each (None: any); ``structure`` puts the flat
    outputs back into what the model returns.
    """

    module: tvm.IRModule
    inputs: tuple[str, ...]
    mask: str
    batch: tirx.Var
    tokens: tirx.Var
    bounds: Mapping[str, Bound]
    structure: pytree.TreeSpec

    @property
    def longest(self) -> int | None:
        """The largest number of tokens that the model admits (None: any)."""
        return self.bounds[TOKENS][1]

    @property
    def size_bounds(self) -> dict[tirx.Var, int]:
        """Largest values of the symbolic extents that have one."""
        most = {self.batch: self.bounds[BATCH][1], self.tokens: self.bounds[TOKENS][1]}
        return {var: extent for var, extent in most.items() if extent is not None}


def import_model(
    model: Any, example_inputs: Mapping[str, torch.Tensor] | None, mask: str
) -> Imported:
    """Import a model whose token-wise inputs are ``[batch, tokens, ...]``.

    Parameters
    ----------
    model
        A module in evaluation mode, called by keyword, or what ``torch.export.export`` made of
        one with a dynamic batch and a dynamic length; or an ``onnx.ModelProto`` or the path of a
        file ``.onnx`` with a named batch and length.
    example_inputs
        Tensors by argument name, the mask among them; their values do not matter. An ONNX model
        needs none.
    mask
        Name of the attention mask ``[batch, tokens]``: 1 where a token is, 0 where none is.

    Raises
    ------
    ShapeError
        The mask is missing or not two-dimensional, an extent was fixed by the export, or the module
        does not take inputs of these names.
    DTypeError
        The inputs are no mapping of names, or one is no tensor.
    UnsupportedModel
        torch cannot trace the module for every batch and length, it has an operator that is not
        known, or returns something else than tensors.
    BackendUnavailable
        An ONNX model comes in a file, and the package onnx is not installed.
    """
    pass_interrupts()
    if is_onnx(model):
        read = read_onnx(model)
        from .onnx_import import translate_onnx  # TVM's importer needs the package onnx

        module, most, names = translate_onnx(read)
        structure, least = pytree.tree_structure(dict.fromkeys(names, 0)), {}
    else:
        with _TRACING:
            program = _exported(model, example_inputs, mask)
            module = _as_called(translated(program), program)
        structure = program.call_spec.out_spec
        known = module["main"].attrs or {}
        least, most = (dict(known.get(f"tir_var_{side}_bound", {})) for side in ("lower", "upper"))
    main = module["main"]
    _check_straight(main)
    inputs = tuple(p.name for p in main.params)
    if mask not in inputs:
        raise ShapeError(mismatch("mask", f"an input of the program, {sorted(inputs)}", repr(mask)))
    plane = main.params[inputs.index(mask)]
    if len(extents_of(plane)) != 2:
        expected = f"{mask} with two dimensions, [batch, tokens]"
        raise ShapeError(mismatch("mask", expected, str(plane.ty)))
    batch, tokens = _plane(plane, main.params)
    others = sorted(set(most) - {tokens.name}) if is_onnx(model) else []
    if others:
        expected = f"tables that are cut to the length of {mask} only"
        raise UnsupportedModel(mismatch("model", expected, f"one cut to {', '.join(others)}"))
    bounds = {
        role: _bound(least.get(var.name), most.get(var.name))
        for role, var in ((BATCH, batch), (TOKENS, tokens))
    }
    check_counts(main, {batch: bounds[BATCH], tokens: bounds[TOKENS]})
    return Imported(module, inputs, mask, batch, tokens, bounds, structure)


def _bound(least: Any, most: Any) -> Bound:
    """A least of up to 2 is none: torch gives it to every extent that it traces as dynamic."""
    first = 0 if least is None or int(least) <= _TRACED_LEAST else int(least)
    return first, None if most is None else int(most)


def _exported(
    model: Any, example_inputs: Mapping[str, torch.Tensor] | None, mask: str
) -> ExportedProgram:
    """What torch exports of a module, or exported; see `import_model`."""
    if not isinstance(model, ExportedProgram | torch.nn.Module):
        raise UnsupportedModel(_no_model(model))
    _check_examples(example_inputs)
    if not example_inputs:
        expected, advice = "tensors by the names of the model's inputs", "pass a batch of any size"
        raise ShapeError(mismatch("example_inputs", expected, example_inputs, advice))
    if mask not in example_inputs:
        raise ShapeError(mismatch("mask", f"one of {sorted(example_inputs)}", repr(mask)))
    if not isinstance(example_inputs[mask], torch.Tensor):
        got = type(example_inputs[mask]).__name__
        raise DTypeError(mismatch("example_inputs", f"a torch.Tensor as {mask!r}", got))
    if example_inputs[mask].dim() != 2:
        expected = f"{mask} with two dimensions, [batch, tokens]"
        raise ShapeError(mismatch("mask", expected, tuple(example_inputs[mask].shape)))
    if isinstance(model, ExportedProgram):
        program = model
    else:
        program = export_program(model, example_inputs, mask)
    _check_ends(program)
    return program


def _no_model(model: Any) -> str:
    """What to say of something that is no model."""
    expected = "a torch.nn.Module, an ExportedProgram, an onnx.ModelProto or a file .onnx"
    if not isinstance(model, str | Path):
        return mismatch("model", expected, type(model).__name__)
    advice = "torch.export.load reads a program, and pit_tvm.model.load what was compiled"
    return mismatch("model", expected, repr(str(model)), advice)


def _check_examples(given: Any) -> None:
    """DTypeError unless ``given`` is None or a mapping from names."""
    expected = "a mapping of names to tensors"
    if given is not None and not isinstance(given, Mapping):
        raise DTypeError(mismatch("example_inputs", expected, type(given).__name__))
    others = sorted({type(name).__name__ for name in given or () if not isinstance(name, str)})
    if others:
        raise DTypeError(mismatch("example_inputs", expected, f"names of type {others}"))


def _plane(mask: relax.Var, params: Sequence[relax.Var]) -> tuple[tirx.Var, tirx.Var]:
    """The symbolic extents of the mask, one of ``params``.

    Raises
    ------
    ShapeError
        They are fixed, or tied to others.
    """
    extents = extents_of(mask)
    for name, extent in zip(("batch", "length"), extents, strict=True):
        if isinstance(extent, prim.IntImm):
            found = f"a {name} of {int(extent)}"
            advice = (
                "a program is exported with dynamic_shapes; and where the model's code uses a "
                "constant of that size, torch takes it for the only one"
            )
            tied = [p.name for p in params if _is_tied(p, extents, int(extent))]
            if tied:
                advice += (
                    f"; or it is that of {', '.join(tied)}, while inputs of a module are of any "
                )
                advice += (
                    "size only if they are [batch, tokens, ...]: export it with dynamic_shapes"
                )
        elif not isinstance(extent, tirx.Var):
            found, advice = f"a {name} of {extent}", "the model's code admits no others"
        elif extent.same_as(extents[0]) and name == "length":
            found, advice = "a length that is its batch", TOLD_APART
        else:
            continue
        expected = f"a model exported with {mask.name} of a dynamic batch and a dynamic length"
        raise ShapeError(mismatch("model", expected, found, advice))
    batch, tokens = extents
    return batch, tokens


def _is_tied(param: relax.Var, plane: Sequence[Any], size: int) -> bool:
    """Whether an input that is not ``[batch, tokens, ...]`` has a dimension of this size alone."""
    found = extents_of(param)
    fixed = any(isinstance(e, prim.IntImm) and int(e) == size for e in found)
    return fixed and not same_extents(found[:2], plane)


def _check_ends(program: ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_OUTPUT and not isinstance(spec.arg, TensorArgument):
            got = getattr(spec.arg, "value", spec.arg.name)
            advice = "give back tensors only"
            raise UnsupportedModel(mismatch("model", "tensors as outputs", repr(got), advice))
    given = [n for n in program.graph.nodes if n.name in program.graph_signature.user_inputs]
    made = program.graph.output_node().all_input_nodes
    for end, nodes in (("input", given), ("output", made)):
        for node in filter(is_complex, nodes):
            got, advice = node.meta["val"].dtype, f"make it torch.view_as_real of that {end}"
            raise UnsupportedModel(mismatch("model", f"real numbers as {end}s", got, advice))


def _check_straight(main: relax.Function) -> None:
    if not main.is_pure or any(isinstance(b.value, relax.If) for b in bindings_of(main)):
        expected, got = "one chain of operators", "a branch or an assertion"
        advice = "compute both branches and choose by torch.where"
        raise UnsupportedModel(mismatch("model", expected, got, advice))


def _as_called(module: tvm.IRModule, program: ExportedProgram) -> tvm.IRModule:
    """``module`` with inputs by the names of the program's keywords: torch writes them small."""
    main, call = module["main"], program.call_spec
    _, keywords = pytree.tree_unflatten(program.graph_signature.user_inputs, call.in_spec)
    names = {small: key for key, small in keywords.items() if isinstance(small, str)}
    params = [relax.Var(names.get(p.name, p.name), p.ty) for p in main.params]
    bound = main.bind_params(dict(zip(main.params, params, strict=True)))
    module["main"] = relax.Function(params, bound.body, bound.ret_ty, bound.is_pure, bound.attrs)
    return module
