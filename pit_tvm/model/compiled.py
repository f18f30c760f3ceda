"""Compile a whole model: skip what is dead wherever that is proven, and run the rest as it is."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import tvm
import tvm_ffi
from torch.utils import _pytree as pytree
from tvm import relax

from ..errors import UnsupportedTarget, mismatch
from ..runtime.live_tokens import live_tokens
from ..target import TargetInfo, resolve_target
from .importer import Imported, import_model
from .inputs import Inputs
from .kernels import CpuKernels
from .layers import Layers
from .linear import extract_linear
from .lowering import build
from .norms import extract_norms
from .packing import LIVE_TOKENS
from .plane import Plane
from .propagate import BY_TOKEN, propagate
from .tidy import tidy

_NUMBERS = itertools.count()


def compile(  # noqa: A001  (the name users know from TVM and torch)
    model: Any,
    example_inputs: Mapping[str, torch.Tensor],
    *,
    mask: str = "attention_mask",
    target: Any = "llvm",
    database: Any = None,
) -> CompiledModel:
    """Compile a model for inference on padded batches, without the padding.

    Parameters
    ----------
    model
        A ``torch.nn.Module`` that is called by keyword, or a ``torch.export.ExportedProgram`` of
        one with a dynamic batch and length. Its weights are bound as they are now.
    example_inputs
        Its inputs by name, as ``tokenizer(..., return_tensors="pt")`` gives them. Only types and
        ranks matter, and that what is ``[batch, tokens, ...]`` begins with the mask's extents,
        which should both exceed 1.
    mask
        Name of the input ``[batch, tokens]`` that is 1 where a token is and 0 where none is. Any
        pattern may come at run time: padding left, right or anywhere, empty sequences.
    target
        "llvm", with options as `pit_tvm.compile` takes them.
    database
        A folder of tuned tiles instead of the shipped one.

    Raises
    ------
    ShapeError
        The mask is missing or has another rank; the export fixed the batch or the length.
    UnsupportedTarget
        The target is no CPU.
    """
    info = resolve_target(target)
    if info.kind != "llvm":
        raise UnsupportedTarget(mismatch("target", "'llvm'", repr(info.kind)))
    return CompiledModel(import_model(model, example_inputs, mask), info, database)


class CompiledModel:
    """A model that runs on live tokens only. Call it as the module, by keyword."""

    def __init__(self, imported: Imported, target: TargetInfo, database: Any = None) -> None:
        kernels, self._structure = CpuKernels(target), imported.structure
        name = f"pit_tvm.model.{next(_NUMBERS)}.linear"
        bounds = imported.size_bounds
        plane = Plane(imported.batch, imported.tokens)
        module = tidy(imported.module, bounds)
        self._inputs = Inputs(imported, module)
        module, self.decisions = propagate(module, plane, imported.mask, kernels)
        module = relax.transform.RemoveRedundantReshape()(tidy(module, bounds))
        #: The graph that runs, as Relax: ``module.show()`` prints it.
        self.module, layers = extract_linear(extract_norms(module, kernels), name)
        _register(self, name, Layers(layers, target, database))
        self._machine = relax.VirtualMachine(build(self.module, target), tvm.cpu())

    def __call__(self, **inputs: torch.Tensor) -> Any:
        """Run a batch.

        Parameters
        ----------
        **inputs
            CPU tensors by the names of the example, of any batch and any length that the model
            admits. They are not copied if they are contiguous.

        Returns
        -------
        Any
            What the module returns. Where an output has a value for every token, those of dead
            tokens are 0; and where the model picks one token of each sequence (the first, to pool)
            and that one is dead, it picks zeros.

        Raises
        ------
        ShapeError, DTypeError
            An input is missing, unknown, of another type or shape, or has ids outside its table;
            the mask has other values than 0 and 1; there are more tokens than the model admits.
        """
        found = self._machine["main"](*self._inputs.check(inputs))
        return pytree.tree_unflatten([torch.from_dlpack(f) for f in found], self._structure)

    def explain(self) -> str:
        """How many operators run on live tokens only; which do not, and what keeps each from it."""
        live = [d.reason for d in self.decisions if d.live]
        whole = [d for d in self.decisions if d.whole]
        stops = [d for d in whole if d.reason != BY_TOKEN]
        lines = [f"{len(live)} operators on live tokens only"]
        kinds = sorted({reason for reason in live if reason != BY_TOKEN})
        lines += [f"  {live.count(kind)} of them {kind}" for kind in kinds]
        lines += [f"{len(whole)} operators on all tokens, dead ones included"]
        lines += [f"  {d.operator} -> {d.result}: {d.reason}" for d in stops]
        if len(whole) > len(stops):
            lines += [f"  {len(whole) - len(stops)} whose results these read"]
        others = len(self.decisions) - len(live) - len(whole)
        return "\n".join(
            [*lines, f"{others} operators on weights, positions, masks, pooled values"]
        )


def _register(owner: CompiledModel, name: str, layers: Layers) -> None:
    """Let the graph of ``owner`` call its layers, for as long as it lives."""
    tvm.register_global_func(name, layers.__call__)
    weakref.finalize(owner, tvm_ffi.registry.remove_global_func, name)
    tvm.register_global_func(LIVE_TOKENS, _live_tokens, override=True)


def _live_tokens(mask: Any) -> list[Any]:
    return [tvm.runtime.tensor(part) for part in live_tokens(mask)]
