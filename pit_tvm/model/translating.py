"""From torch's operators to Relax: TVM's importer with our conversions, each result checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import tvm
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from tvm import relax
from tvm.ir import prim
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from ..errors import PitError, UnsupportedModel, mismatch
from ..quick_stacks import quick_stacks
from ..runtime.cuda_arrays import dtype_name
from .complex_pairs import complex_pairs, is_complex
from .converters import converters
from .decomposing import decompose
from .deferred import without_conditions
from .draws import check_program
from .faults import CODE_FAULTS, LEAVE_OUT, faults_as_unsupported, operator_name, place
from .products import product_converters
from .promotion import promoting_converters
from .real_sizes import real_sizes
from .rebuild import extents_of

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


def translated(program: ExportedProgram) -> tvm.IRModule:
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
