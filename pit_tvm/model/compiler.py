"""Compile a whole model: skip what is dead wherever that is proven, and run the rest as it is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import UnsupportedTarget, mismatch
from ..quick_stacks import quick_stacks
from ..target import resolve_target
from .compiled import CompiledModel, machine_of
from .dump import into
from .importer import import_model
from .kernels import CpuKernels
from .layers import Layers
from .lowering import build
from .outputs import Outputs
from .recurrence import check_none
from .rewrite import rewrite
from .threshold import check_threshold


def compile(  # noqa: A001  (the name users know from TVM and torch)
    model: Any,
    example_inputs: Mapping[str, torch.Tensor] | None = None,
    *,
    mask: str = "attention_mask",
    target: Any = "llvm",
    database: str | Path | None = None,
    activation_threshold: float | None = None,
    cuda_graphs: bool = True,
    dump: str | Path | None = None,
) -> CompiledModel:
    """Compile a model for inference on padded batches, without the padding.

    Parameters
    ----------
    model
        A ``torch.nn.Module`` that is called by keyword, or a ``torch.export.ExportedProgram`` of
        one with a dynamic batch and length; or an ``onnx.ModelProto`` or the path of an ``.onnx``
        file, with inputs of a named batch and length. A module that torch.compile or torch's data
        parallelism has wrapped is taken without that. Its weights are bound as they are now. torch
        traces a module for several sequences of several tokens: one of either is treated as several
        are, whatever the module's code does otherwise then (``if x.shape[1] == 1``, ``squeeze()``).
    example_inputs
        Its inputs by name, as ``tokenizer(..., return_tensors="pt")`` gives them. Only types and
        ranks matter, and that what is ``[batch, tokens, ...]`` begins with the mask's extents,
        which should both exceed 1. None for ONNX.
    mask
        Name of the input ``[batch, tokens]`` that is 1 where a token is and 0 where none is. Any
        pattern may come at run time: padding left, right or anywhere, empty sequences.
    target
        "llvm" or "cuda", with options as `pit_tvm.compile` takes them. On a GPU the model's
        floating-point type must be float16 or bfloat16, and the result is a `CudaModel`.
    database
        A folder of tuned tiles over the shipped ones, as `pit_tvm.compile` takes it; ``pit-tvm tune
        --model`` writes what a model lacks of both.
    activation_threshold
        Linear layers that follow ReLU, GELU or SiLU take activations of at most this size for
        zeros, and skip them where that is faster. This changes results: `CompiledModel.activity`
        and `CompiledModel.explain` report what was dropped. None: zeros of ReLU only, which
        changes nothing. On CPUs.
    cuda_graphs
        On a GPU: record the kernels for a shape of batch and a number of live tokens, in steps of
        1/32, when these come again, and launch them at once from then on. Recorded kernels keep
        memory for intermediate tensors. False, or where torch has another allocator than its own
        (``cudaMallocAsync``): launch them one by one, always.
    dump
        A folder for the graph after every pass, as text: ``00_imported.py``, ``01_tidy.py``, ...

    Raises
    ------
    ShapeError
        The mask is missing or has another rank; the export fixed the batch or the length; the
        threshold is negative or not finite.
    DTypeError
        The example inputs are no mapping of names to tensors; the target is a GPU, and a linear
        layer is in another type than those of 16 bits.
    UnsupportedModel
        torch cannot trace the module for every batch and length, or TVM lacks an operator or
        cannot compile it in this form.
    BackendUnavailable
        The target is a GPU, and there is none; the model is a file, and onnx is not installed; or
        ``dump`` cannot be written.
    UnsupportedTarget
        The target is a GPU, and a threshold is given.
    """
    check_threshold(activation_threshold)
    info = resolve_target(target)
    if info.kind == "cuda" and activation_threshold is not None:
        raise UnsupportedTarget(mismatch("activation_threshold", "None on a GPU", "a number"))
    look, device = into(dump), None
    if info.kind == "cuda":  # asked for first: to import a model takes its time
        from .cuda import compile_for_gpu, current_device

        device = current_device()
    imported = import_model(model, example_inputs, mask)
    with quick_stacks():
        if device is not None:
            check_none(imported.module["main"])
            return compile_for_gpu(imported, info, device, database, cuda_graphs, look)
        rewritten = rewrite(imported, CpuKernels(info), look)
    executable = build(rewritten.module, info)
    layers = Layers(
        rewritten.layers,
        info,
        database,
        threshold=activation_threshold,
        grouped=rewritten.grouped,
    )
    return CompiledModel(
        rewritten.inputs,
        layers,
        rewritten.decisions,
        machine_of(executable.export_library, layers),
        partial(pytree.tree_unflatten, treespec=imported.structure),
        partial(Outputs.of, imported.structure),
        rewritten.module,
    )
