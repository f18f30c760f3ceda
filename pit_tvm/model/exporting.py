"""From a torch module to an exported program with a dynamic batch and length."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import DTypeError, PitError, ShapeError, UnsupportedModel, mismatch
from ..torch.experts import experts_here
from .deferred import unproven
from .faults import CODE_FAULTS, LONGEST_MESSAGE
from .tracing import Traceable

_VIOLATED = "Constraints violated"
# Tokens from which on torch traces: 2 for every number; it takes parts of a single one, as all but
# the first of 2, or but the first and the last of 3, or what is left of few by strides, for
# constants.
_LEASTS = (2, 3, 4, 8, 16)
# What an error of torch.export says, and what helps.
_ADVICE = (
    (
        "data-dependent",
        "no branch and no extent may depend on values: choose by torch.where, or leave that part "
        "out of the model",
    ),
    ("not a known type", "let it return tensors only: config.use_cache = False in transformers"),
    (
        _VIOLATED,
        "the model's code admits only some lengths or batches; after a slice with a step, as "
        "x[:, ::2], .contiguous() makes it admit all",
    ),
)


def export_program(
    model: torch.nn.Module, example_inputs: Mapping[str, torch.Tensor], mask: str
) -> ExportedProgram:
    """Export a module in evaluation mode, its inputs' leading extents dynamic where they are those
    of ``mask`` ``[batch, tokens]``. Inputs go where its weights are. Experts of transformers'
    models are exported as ours, and what wraps the module is left out.

    Raises
    ------
    DTypeError
        An input is no tensor.
    ShapeError
        The module does not take inputs of these names.
    UnsupportedModel
        torch cannot trace the module for every batch and length, or it is none in Python.
    """
    for name, value in example_inputs.items():
        if not isinstance(value, torch.Tensor):
            expected = f"a torch.Tensor as {name!r}"
            raise DTypeError(mismatch("example_inputs", expected, type(value).__name__))
        if value.layout is not torch.strided:
            expected = f"a strided tensor as {name!r}"
            raise DTypeError(mismatch("example_inputs", expected, value.layout, "pass .to_dense()"))
    model = _bare(model)
    first = next(chain(model.parameters(), model.buffers()), None)
    if first is not None:
        example_inputs = {name: each.to(first.device) for name, each in example_inputs.items()}
    training = {part: part.training for part in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), Traceable(), experts_here(model):
            return _export_from(model, example_inputs, mask, _LEASTS)
    finally:
        for part, was in training.items():
            part.training = was


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """The module in what torch.compile and torch's data parallelism make of it, whose own forward
    tells no parameters."""
    while True:
        parallel = isinstance(model, DataParallel | DistributedDataParallel)
        inner = model.module if parallel else getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def _export_from(
    model: torch.nn.Module,
    example_inputs: Mapping[str, torch.Tensor],
    mask: str,
    leasts: Sequence[int],
) -> ExportedProgram:
    """Export for so many tokens or more, the first of ``leasts`` that torch can trace for; the
    first one's error if it can for none."""
    inputs = _told_apart(example_inputs, tuple(example_inputs[mask].shape), leasts[0])
    plane = inputs[mask].shape
    tokens = Dim("tokens", min=leasts[0]) if leasts[0] > _LEASTS[0] else Dim("tokens")
    sizes = dict(enumerate((Dim("batch"), tokens)))
    shapes = {name: sizes if each.shape[:2] == plane else None for name, each in inputs.items()}
    try:
        return _export_within_bounds(model, *_as_called(model, inputs), shapes)
    except UnsupportedModel as error:
        if _VIOLATED not in str(error) or len(leasts) == 1:
            raise
        try:
            return _export_from(model, example_inputs, mask, leasts[1:])
        except UnsupportedModel:
            raise error from None


def _told_apart(
    inputs: Mapping[str, torch.Tensor], plane: tuple[int, ...], least: int
) -> dict[str, torch.Tensor]:
    """Inputs with a batch of at least 2 and so many tokens, neither of which divides the other:
    torch takes an extent of 1 for a constant, and what divides or equals another for what always
    does."""
    batch, tokens = max(plane[0], 2), max(plane[1], least)
    shapes = [tuple(value.shape) for value in inputs.values()]
    tied = any(shape[:2] != plane and batch in shape for shape in shapes)  # refused by its name
    while not tied and (batch % tokens == 0 or tokens % batch == 0):
        batch += 1
    times = [
        -(-most // max(extent, 1)) for most, extent in zip((batch, tokens), plane, strict=True)
    ]
    return {
        name: value.repeat(*times, *[1] * (value.dim() - 2))[:batch, :tokens]
        if tuple(value.shape[:2]) == plane
        else value
        for name, value in inputs.items()
    }


def _as_called(
    model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Positional arguments, which are those that cannot be named, and the others by name."""
    if isinstance(model, torch.jit.ScriptModule):
        expected, advice = "a module in Python", "pass the one that it was made of"
        raise UnsupportedModel(mismatch("model", expected, "one of TorchScript", advice))
    parameters = inspect.signature(model.forward).parameters
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    required = {n for n, p in named.items() if p.default is p.empty}
    if not required <= set(inputs) <= set(named):
        expected = f"inputs by the names of forward's parameters {list(named)}"
        advice = (
            "all without a default, and none that forward takes by **: write a module around it"
        )
        raise ShapeError(mismatch("example_inputs", expected, sorted(inputs), advice))
    first = [n for n, p in named.items() if p.kind is p.POSITIONAL_ONLY and n in inputs]
    rest = {name: value for name, value in inputs.items() if name not in first}
    return tuple(inputs[name] for name in first), rest


def _export_within_bounds(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: Any,
    tries: int = 3,
    refused: Exception | None = None,
    watched: bool = True,
) -> ExportedProgram:
    """Export; where tables bound the number of tokens, torch says so, and the bound is taken: at
    its end, so that a trace that is ``watched`` ends as soon as a layer has met one.

    What torch ``refused``, because of conditions on extents that it cannot prove, is exported with
    them, and they are proven here: torch 2.11 has such as ``min(8 * tokens, 16 * tokens) == 8 *
    tokens`` of attention whose heads share keys.
    """
    how: dict[str, Any] = {"dynamic_shapes": shapes, "strict": False}
    if refused is not None:
        how["prefer_deferred_runtime_asserts_over_guards"] = True
    try:
        with _watching(model, shapes) if watched else nullcontext():
            program = torch.export.export(model, args, kwargs, **how)
    except PitError:
        raise
    except _Bounded as bounded:
        shapes = bounded.shapes
    except torch._dynamo.exc.UserError as error:
        fixes = str(error).split("\n\n")[0]
        if tries > 1 and "Suggested fixes" in fixes:
            fixed = refine_dynamic_shapes_from_suggested_fixes(fixes, shapes)
            tries -= 1
        else:
            fixed = None
        if fixed is not None and not _ties(fixed):
            shapes = fixed
        elif refused is not None or _VIOLATED not in fixes:
            raise _unsupported(error) from error
        else:
            refused = error
    except CODE_FAULTS as error:
        raise _unsupported(error) from error
    else:
        if refused is not None and unproven(program):
            raise _unsupported(refused) from refused
        return program
    return _export_within_bounds(model, args, kwargs, shapes, tries, refused, watched=False)


def _ties(shapes: Any) -> bool:
    """Whether an extent is one of another number only, as all even ones are."""
    return any(
        not isinstance(size, int) and isinstance(size, Dim) and hasattr(size, "root")
        for sizes in shapes.values()
        for size in (sizes or {}).values()
    )


class _Bounded(Exception):
    """A model admits fewer tokens than it was traced for: those of ``shapes``."""

    def __init__(self, shapes: Any) -> None:
        super().__init__()
        self.shapes = shapes


@contextmanager
def _watching(model: torch.nn.Module, shapes: Any) -> Iterator[None]:
    """Raise `_Bounded` after the first part of a model that meets a bound on the tokens."""
    name = next(name for name, sizes in shapes.items() if sizes)
    tokens, here = shapes[name][1], threading.get_ident()
    traced: list[Any] = []

    def enter(_: Any, __: Any, given: Mapping[str, torch.Tensor]) -> None:
        traced.extend(given[name].shape[1:2] if name in given else ())

    def leave(*_: Any) -> None:
        extent = traced[0] if traced else None
        if not isinstance(extent, torch.SymInt) or threading.get_ident() != here:
            return
        most = extent.node.shape_env.bound_sympy(extent.node.expr).upper
        if most < tokens.max:
            sizes = shapes[name] | {1: Dim(tokens.__name__, min=tokens.min, max=int(most))}
            raise _Bounded({other: own and sizes for other, own in shapes.items()})

    of_all = torch.nn.modules.module.register_module_forward_hook
    handles = model.register_forward_pre_hook(enter, with_kwargs=True), of_all(leave)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unsupported(error: Exception) -> UnsupportedModel:
    text = str(error)
    advice = next((advice for words, advice in _ADVICE if words in text), "")
    said = " ".join(text.split())[:LONGEST_MESSAGE]
    expected = "a module that torch.export can trace for every batch and length"
    return UnsupportedModel(mismatch("model", expected, f"{type(error).__name__}: {said}", advice))
