"""Compile a whole model: skip what is dead wherever that is proven, and run the rest as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tvm
from torch.utils import _pytree as pytree
from tvm import relax

from ..quick_stacks import quick_stacks
from ..target import TargetInfo, resolve_target
from .compiled import LINEAR, CompiledModel, machine_of
from .embeddings import extract_embeddings
from .importer import Imported, import_model
from .inputs import Inputs
from .kernels import CpuKernels, Kernels
from .layers import Layers
from .linear import LinearLayer, extract_linear
from .lowering import build
from .norms import extract_norms
from .outputs import Outputs
from .plane import Plane
from .propagate import Decision, propagate
from .tidy import tidy


def compile(  # noqa: A001  (the name users know from TVM and torch)
    model: Any,
    example_inputs: Mapping[str, torch.Tensor],
    *,
    mask: str = "attention_mask",
    target: Any = "llvm",
    database: str | Path | None = None,
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
        "llvm" or "cuda", with options as `pit_tvm.compile` takes them. On a GPU the model's
        floating-point type must be float16 or bfloat16, and the result is a `CudaModel`.
    database
        A folder of tuned tiles instead of the shipped one.

    Raises
    ------
    ShapeError
        The mask is missing or has another rank; the export fixed the batch or the length.
    UnsupportedModel
        torch cannot trace the module for every batch and length, or TVM lacks an operator.
    BackendUnavailable
        The target is a GPU, and there is none.
    """
    info = resolve_target(target)
    imported = import_model(model, example_inputs, mask)
    if info.kind == "cuda":
        return _for_gpu(imported, info, database)
    with quick_stacks():
        rewritten = rewrite(imported, CpuKernels(info))
    executable = build(rewritten.module, info)
    structure, layers = imported.structure, Layers(rewritten.layers, info, database)
    return CompiledModel(
        rewritten.inputs,
        layers,
        rewritten.decisions,
        machine_of(executable.export_library, layers),
        lambda leaves: pytree.tree_unflatten(leaves, structure),
        lambda: Outputs.of(structure),
        rewritten.module,
    )


def _for_gpu(imported: Imported, info: TargetInfo, database: str | Path | None) -> CompiledModel:
    from .cuda import CudaModel, cuda_machine
    from .cuda_kernels import CudaKernels

    kernels = CudaKernels(Plane(imported.batch, imported.tokens))
    with quick_stacks():
        rewritten = rewrite(imported, kernels)
        machine, layers, module = cuda_machine(
            imported,
            rewritten.module,
            rewritten.layers,
            rewritten.inputs,
            kernels,
            info,
            database,
        )
    structure = imported.structure
    return CudaModel(
        rewritten.inputs,
        layers,
        rewritten.decisions,
        machine,
        lambda leaves: pytree.tree_unflatten(leaves, structure),
        lambda: Outputs.of(structure),
        module,
    )


@dataclass(frozen=True)
class Rewritten:
    """A graph on live tokens: it calls ``layers`` by number under the name `LINEAR`."""

    module: tvm.IRModule
    inputs: Inputs
    decisions: list[Decision]
    layers: list[LinearLayer]


def rewrite(imported: Imported, kernels: Kernels) -> Rewritten:
    """All graph passes in order, with a backend's kernels."""
    bounds = imported.size_bounds
    plane = Plane(imported.batch, imported.tokens)
    module = tidy(imported.module, bounds)
    inputs = Inputs.of(imported, module)
    module, decisions = propagate(module, plane, imported.mask, kernels)
    module = relax.transform.RemoveRedundantReshape()(tidy(module, bounds))
    module = extract_norms(extract_embeddings(module, kernels), kernels)
    module, layers = extract_linear(module, LINEAR)
    module = relax.transform.RemoveRedundantReshape()(module)
    return Rewritten(module, inputs, decisions, layers)
