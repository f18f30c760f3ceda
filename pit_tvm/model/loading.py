"""Compiled models from the files that they were saved to."""

from __future__ import annotations

from pathlib import Path

from ..errors import BackendUnavailable, mismatch
from .compiled import CompiledModel, machine_of
from .layers import Layers
from .saved import Parts, ProgramText, read, tile_store


def load(path: str | Path) -> CompiledModel:
    """A model that `CompiledModel.save` wrote. Needs neither torch nor transformers; on a GPU torch
    alone, whose current device it takes.

    Nothing is compiled; a number of live tokens that is new to the file may need a kernel, which
    is compiled then. The file holds code, which runs: load only what you trust.

    Raises
    ------
    SavedModelError
        The file is missing, damaged, of another kind, or written with other versions.
    UnsupportedTarget
        This machine lacks the GPU, or its CPU instructions, that the model was compiled for.
    BackendUnavailable
        A kernel of the file cannot be loaded on this machine, or a GPU's model needs torch.
    """
    parts = read(path)
    if isinstance(parts.graph, ProgramText):
        return _on_gpu(parts)
    graph, store = parts.graph, tile_store(parts.tiles, parts.target)
    layers = Layers(
        parts.layers, parts.target, store, parts.kernels, parts.threshold, parts.grouped
    )
    return CompiledModel(
        parts.inputs,
        layers,
        parts.decisions,
        machine_of(lambda name: Path(name).write_bytes(graph), layers),
        parts.outputs.build,
        lambda: parts.outputs,
    )


def _on_gpu(parts: Parts) -> CompiledModel:
    try:
        from .cuda import restore
    except ModuleNotFoundError as error:
        advice = "pip install 'pit-tvm[torch]'"
        text = mismatch("a model on a GPU", "the package torch", "none", advice)
        raise BackendUnavailable(text) from error
    return restore(parts)
