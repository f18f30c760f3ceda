"""From a PyTorch model to one Relax function over ``[batch, tokens]`` inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tvm
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils import _pytree as pytree
from tvm import relax, tirx
from tvm.ir import prim
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from ..errors import DTypeError, PitError, ShapeError, UnsupportedModel, mismatch
from ..interrupts import pass_interrupts
from ..quick_stacks import quick_stacks
from ..runtime.cuda_arrays import dtype_name
from .complex_pairs import complex_pairs, is_complex
from .converters import converters
from .counts import TOLD_APART, check_counts
from .decomposing import decompose
from .deferred import without_conditions
from .draws import check_program
from .exporting import export_program
from .faults import CODE_FAULTS, LEAVE_OUT, faults_as_unsupported, operator_name, place
from .onnx_model import is_onnx, read_onnx
from .plane import BATCH, TOKENS, Bound
from .products import product_converters
from .promotion import promoting_converters
from .real_sizes import real_sizes
from .rebuild import bindings_of, extents_of, same_extents

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
            module = _as_called(_translated(program), program)
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


def _check_state(program: ExportedProgram) -> None:
    """Buffers are constants, so nothing may change one; only a decomposed program tells."""
    changed = [
        spec.target
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.BUFFER_MUTATION
    ]
    if changed:
        expected, got = "a module that leaves its buffers alone", f"changes of {changed}"
        advice = "let it take such state as an input and return it"
        raise UnsupportedModel(mismatch("model", expected, got, advice))


def _check_straight(main: relax.Function) -> None:
    if not main.is_pure or any(isinstance(b.value, relax.If) for b in bindings_of(main)):
        expected, got = "one chain of operators", "a branch or an assertion"
        advice = "compute both branches and choose by torch.where"
        raise UnsupportedModel(mismatch("model", expected, got, advice))


# --------------------------------------------------------------------------------------------
# From torch's operators to Relax


# What is exported otherwise where a module is passed, and what helps: experts of transformers'
# models, and recurrent networks.
_BY_MODULES = {
    "grouped_mm": "pass the module itself, or export it with experts of ours: "
    "pit_tvm.torch.register_experts(), then "
    'model.set_experts_implementation("pit_tvm")',
    "rnn_layer": "pass the module itself",
    "packed_rows": "pass padded tokens: nothing but recurrent networks reads packed sequences",
}


class _Importer(ExportedProgramImporter):
    """TVM's importer with our conversions; what one raises names the operator."""

    def create_convert_map(self) -> dict[str, Callable[[fx.Node], Any]]:
        """Conversions by the name of torch's operator."""
        ours: dict[str, Callable[..., Any]] = product_converters() | promoting_converters()
        ours |= converters()
        bound = {name: partial(convert, importer=self) for name, convert in ours.items()}
        every = super().create_convert_map() | bound
        every |= real_sizes(every, self)
        every |= complex_pairs(every, self)
        return {name: _named(convert, self) for name, convert in every.items()}


def _translated(program: ExportedProgram) -> tvm.IRModule:
    """The program in Relax, its weights as constants.

    Raises
    ------
    UnsupportedModel
        An operator is not known to TVM, or not in this form.
    """
    with torch.no_grad(), quick_stacks():
        check_program(program)
        program = without_conditions(decompose(program))
        _check_state(program)
        importer = _Importer()
        calls = [n for n in program.graph.nodes if n.op == "call_function"]
        missing = {place(n) for n in calls if operator_name(n) not in importer.convert_map}
        if missing:
            expected, got = "operators that TVM's importer knows", ", ".join(sorted(missing))
            known = (advice for name, advice in _BY_MODULES.items() if name in got)
            advice = next(known, LEAVE_OUT)
            raise UnsupportedModel(mismatch("model", expected, got, advice))
        with faults_as_unsupported("inputs and operators that TVM's importer knows"):
            return importer.from_exported_program(
                program,
                keep_params_as_input=False,
                unwrap_unit_return_tuple=False,
                no_bind_return_tuple=False,
                custom_convert_map=None,
            )


def _as_called(module: tvm.IRModule, program: ExportedProgram) -> tvm.IRModule:
    """``module`` with inputs by the names of the program's keywords: torch writes them small."""
    main, call = module["main"], program.call_spec
    _, keywords = pytree.tree_unflatten(program.graph_signature.user_inputs, call.in_spec)
    names = {small: key for key, small in keywords.items() if isinstance(small, str)}
    params = [relax.Var(names.get(p.name, p.name), p.ty) for p in main.params]
    bound = main.bind_params(dict(zip(main.params, params, strict=True)))
    module["main"] = relax.Function(params, bound.body, bound.ret_ty, bound.is_pure, bound.attrs)
    return module


def _named(
    convert: Callable[[fx.Node], Any], importer: ExportedProgramImporter
) -> Callable[[fx.Node], Any]:
    def converted(node: fx.Node) -> Any:
        try:
            made = convert(node)
            if is_complex(node):
                return made
            _check_made(node, made)
            return _as_wide(node, made, importer)
        except PitError:
            raise
        except CODE_FAULTS as error:
            said = " ".join(str(error).split()) or type(error).__name__
            expected = f"{place(node)} in a form that TVM's importer knows"
            raise UnsupportedModel(mismatch("model", expected, said, LEAVE_OUT)) from error

    return converted


def _is_one_tensor(node: fx.Node, made: Any) -> bool:
    known, ours = node.meta.get("val"), getattr(made, "ty", None)
    return isinstance(known, torch.Tensor) and isinstance(ours, relax.TensorType)


def _as_wide(node: fx.Node, made: Any, importer: ExportedProgramImporter) -> Any:
    """Integers in torch's type: some operators of TVM count in another."""
    if not _is_one_tensor(node, made) or made.ty.dtype is None:
        return made
    dtype = dtype_name(node.meta["val"])
    if str(made.ty.dtype) == dtype:
        return made
    return importer.block_builder.emit(relax.op.astype(made, dtype))


def _check_made(node: fx.Node, made: Any) -> None:
    """Refuse a tensor of another kind of numbers, rank or constant extent than torch's."""
    if not _is_one_tensor(node, made):
        return
    known, ours = node.meta["val"], made.ty
    dtype, shape = dtype_name(known), list(known.shape)
    found = None if ours.ndim < 0 else list(extents_of(made)) if ours.shape else [None] * ours.ndim
    wrong_dtype = ours.dtype is not None and _kind(str(ours.dtype)) != _kind(dtype)
    if wrong_dtype or (found is not None and not _alike(shape, found)):
        expected = f"{place(node)} to give {dtype} of extents {shape}, as torch does"
        got = f"{ours.dtype} of extents {found} from TVM's importer"
        raise UnsupportedModel(mismatch("model", expected, got, LEAVE_OUT))


def _kind(dtype: str) -> str:
    """The type itself, but one for all integers, which `_as_wide` mends."""
    return "integer" if dtype.startswith(("int", "uint")) else dtype


def _alike(known: list[Any], found: list[Any]) -> bool:
    return len(known) == len(found) and not any(
        isinstance(a, int) and isinstance(b, prim.IntImm) and a != int(b)
        for a, b in zip(known, found, strict=True)
    )
