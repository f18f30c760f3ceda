"""Whole models on a GPU: CUDA tensors in and out, on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import tvm
from torch.utils import _pytree as pytree
from tvm import relax

from ..errors import BackendUnavailable, DTypeError, mismatch
from ..runtime.cuda_arrays import check_tensor, is_capturing
from ..runtime.kernel_cache import KernelCache
from ..target import TargetInfo
from .compiled import CompiledModel
from .cuda_attention import (
    ATTENTION,
    PADDED,
    WINDOWED,
    PackedAttention,
    kernels_of_holed,
    padded_attention,
)
from .cuda_experts import check_grouped
from .cuda_index import CudaIndex, pass_ids
from .cuda_kernels import CudaKernels
from .cuda_layers import CudaLayers, has_tiles
from .cuda_machine import compile_graph, cuda_program
from .cuda_replay import Replayed
from .dump import Look, unseen
from .experts import GROUPED
from .faults import faults_as_unsupported
from .importer import Imported
from .inputs import Inputs
from .linear import LINEAR, LinearLayer
from .merge import merge_linear
from .outputs import Outputs
from .packing import LIVE_TOKENS
from .plane import Plane
from .rebuild import is_op, values_of
from .rewrite import Rewritten, rewrite
from .saved import Parts, tile_store
from .swrite import PLACED, store_in_place
from .tidy import tidy, tidy_reshapes
from .torch_program import TorchProgram
from .wide import check_narrow


def check_on_gpu(
    given: Mapping[str, Any], inputs: Inputs, device: torch.device
) -> list[torch.Tensor]:
    """The inputs of a call in order, as `Inputs.check` does for what the host knows of them: the
    graph's own index looks at the values of ids and mask.

    Raises
    ------
    ShapeError, DTypeError
        An input is missing, unknown, of another type or shape, not contiguous, or not on
        ``device``.
    """
    inputs.check_names(given)
    mask = given[inputs.mask]
    check_tensor(inputs.mask, mask)
    sizes = inputs.sizes(mask.shape)
    for name, one in inputs.known.items():
        value = given[name]
        extents: list[Any] = [sizes.get(e, e) for e in one.extents]
        known = zip(extents, getattr(value, "shape", ()), strict=False)
        shape = [actual if extent is None else extent for extent, actual in known]
        check_tensor(name, value, (one.dtype,), shape if len(shape) == len(extents) else extents)
        if value.device != device:
            raise DTypeError(mismatch(name, f"the model's device, {device}", value.device))
    return [given[name] for name in inputs.known]


class CudaModel(CompiledModel):
    """A model on a GPU. Weights are on the device that was current when it was compiled or loaded.

    With CUDA graphs, batches of a shape and a number of live tokens that come again are replayed
    (`Replayed`). While a call is recorded into a CUDA graph of the caller nothing of the inputs is
    checked, and all rows of the padded batch are computed; replays take other ids and masks of the
    same shape. Threads and streams may share a model: their calls take turns.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        machine = self._machine
        index = machine.functions.get(LIVE_TOKENS)
        # Others have no pools of memory that recorded graphs and cuBLAS could share.
        pools = torch.cuda.get_allocator_backend() == "native"
        replays = machine.graph.replayable and pools
        self._run = InTurn(Replayed(machine, index) if replays else machine)

    def __call__(self, **inputs: Any) -> Any:
        """Run a batch of contiguous CUDA tensors on torch's current stream of their device; see
        `CompiledModel.__call__`. The host waits for the number of live tokens."""
        with torch.no_grad(), torch.cuda.device(self._machine.device):
            given = check_on_gpu(inputs, self._inputs, self._machine.device)
            return self._restore(self._run(*given))

    @property
    def program(self) -> str:
        """What runs, as Python."""
        return str(self._machine.graph.source)

    def index(self, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The index of a batch alone, as the first call makes it; see `CudaIndex`."""
        return self._machine.functions[LIVE_TOKENS](mask)


def compile_for_gpu(
    imported: Imported,
    target: TargetInfo,
    device: torch.device,
    database: str | Path | None,
    cuda_graphs: bool,
    look: Look,
) -> CudaModel:
    """The model on ``device``; see `pit_tvm.model.compile`.

    Raises
    ------
    DTypeError
        A linear layer is not in float16 or bfloat16.
    ShapeError
        Experts are too many, or have widths that no kernel reads.
    """
    kernels = CudaKernels(Plane(imported.batch, imported.tokens))
    rewritten, cache = rewrite(imported, kernels, look), KernelCache()
    for layer in rewritten.layers:
        check_narrow(layer.dtype)
    check_grouped(rewritten.grouped)
    with faults_as_unsupported("operators that TVM can rewrite for a GPU"):
        module, merged = _graph(imported, rewritten, look)
    with faults_as_unsupported("operators that TVM can compile for a GPU"):
        graph = compile_graph(module, kernels.module, target, cache)
    graph = replace(graph, replayable=graph.replayable and cuda_graphs)
    layers = CudaLayers(
        merged, target, device, cache, database, _in_place(module), rewritten.grouped
    )
    return CudaModel(
        rewritten.inputs,
        layers,
        rewritten.decisions,
        _machine(graph, layers, rewritten.inputs, cache),
        partial(pytree.tree_unflatten, treespec=imported.structure),
        partial(Outputs.of, imported.structure),
        module,
    )


def restore(parts: Parts) -> CudaModel:
    """The model that ``parts`` were saved of, on the current device.

    Raises
    ------
    BackendUnavailable
        There is no CUDA device, or a kernel cannot be loaded.
    SavedModelError
        A kernel of the graph is missing.
    """
    device, cache, store = current_device(), KernelCache(), tile_store(parts.tiles, parts.target)
    cache.adopt(parts.kernels)
    layers = CudaLayers(parts.layers, parts.target, device, cache, store, grouped=parts.grouped)
    return CudaModel(
        parts.inputs,
        layers,
        parts.decisions,
        _machine(parts.graph, layers, parts.inputs, cache),
        parts.outputs.build,
        lambda: parts.outputs,
    )


def current_device() -> torch.device:
    """The device on which torch computes.

    Raises
    ------
    BackendUnavailable
        There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailable(mismatch("target cuda", "a CUDA device", "none"))
    return torch.device("cuda", torch.cuda.current_device())


def _machine(graph: Any, layers: CudaLayers, inputs: Inputs, cache: KernelCache) -> TorchProgram:
    """What runs ``graph``, a `ProgramText`, with the functions that a model's graphs call."""
    index = CudaIndex(inputs, layers.target.isa, cache)
    packed: dict[str, Callable[..., Any]] = {
        LINEAR: layers,
        GROUPED: layers.grouped,
        PLACED: layers.placed,
        LIVE_TOKENS: index,
        ATTENTION: PackedAttention(),
        PADDED: padded_attention,
    }
    if WINDOWED in graph.functions:
        packed[WINDOWED] = PackedAttention(kernels_of_holed(layers.target.isa, cache))
    return cuda_program(graph, packed, layers.device, cache)


def _in_place(module: tvm.IRModule) -> set[int]:
    """Numbers of the layers that store rows in place."""
    calls = (v for v in values_of(module["main"]).values() if is_op(v, "call_dps_packed"))
    return {int(c.args[1].fields[0]) for c in calls if c.args[0].global_symbol == PLACED}


def _graph(
    imported: Imported, rewritten: Rewritten, look: Look = unseen
) -> tuple[tvm.IRModule, list[LinearLayer]]:
    """The graph as a GPU runs it, and its linear layers."""
    module = pass_ids(rewritten.module, list(rewritten.inputs.tables))
    module = look("ids", tidy_reshapes(tidy(module, imported.size_bounds)))
    module, merged = merge_linear(module, rewritten.layers, _is_attention)
    module = store_in_place(look("merge", module), merged, has_tiles)
    return look("swrite", module), merged


def _is_attention(call: relax.Call) -> bool:
    """Whether a call takes views of its operands."""
    name = getattr(call.args[0], "global_symbol", "") if call.args else ""
    return name in (ATTENTION, WINDOWED)


class InTurn:
    """``run``, whose calls share memory: one thread calls it at a time, and on another stream than
    the last call's what it launches waits for what that launched.

    While the stream is recorded it waits for nothing: a recorded wait would be for work outside
    the graph, which CUDA refuses.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run, self._lock = run, Lock()
        self._done = torch.cuda.Event()
        self._last: torch.cuda.Stream | None = None

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """What ``run`` gives."""
        with self._lock:
            if is_capturing():
                return self._run(*inputs)
            stream = torch.cuda.current_stream()
            if self._last is not None and self._last != stream:
                stream.wait_event(self._done)
            try:
                return self._run(*inputs)
            finally:
                self._done.record(stream)
                self._last = stream
