"""Whole models on a GPU: CUDA tensors in and out, on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tvm
from torch.utils import _pytree as pytree
from tvm import relax

from ..errors import BackendUnavailable, DTypeError, UnsupportedTarget, mismatch
from ..runtime.cuda_arrays import check_tensor
from ..runtime.kernel_cache import KernelCache
from ..target import TargetInfo
from .compiled import LINEAR, CompiledModel
from .cuda_index import CudaIndex, pass_ids
from .cuda_kernels import ATTENTION, CudaKernels
from .cuda_layers import CudaLayers, has_tiles
from .cuda_machine import cuda_program
from .cuda_replay import Replayed
from .dump import Look, unseen
from .importer import Imported
from .inputs import Inputs
from .linear import LinearLayer
from .merge import merge_linear
from .outputs import Outputs
from .packing import LIVE_TOKENS
from .plane import Plane
from .rewrite import Rewritten, rewrite
from .swrite import store_in_place
from .tidy import tidy, tidy_reshapes

PLACED = "pit_tvm.model.linear_in_place"


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
    """A model on a GPU. Weights are on the device that was current when it was compiled.

    With ``cuda_graphs`` batches of a shape and a number of live tokens that come again are replayed
    (`Replayed`). While a call is recorded into a CUDA graph of the caller nothing of the inputs is
    checked, and all rows of the padded batch are computed; replays take other ids and masks of the
    same shape.
    """

    def __init__(self, *parts: Any, cuda_graphs: bool) -> None:
        super().__init__(*parts)
        index = self._machine.functions.get(LIVE_TOKENS)
        replayed = cuda_graphs and self._machine.replayable
        self._run = Replayed(self._machine, index) if replayed else self._machine

    def __call__(self, **inputs: Any) -> Any:
        """Run a batch of contiguous CUDA tensors on torch's current stream; see
        `CompiledModel.__call__`. The host waits for the number of live tokens."""
        with torch.no_grad():
            given = check_on_gpu(inputs, self._inputs, self._machine.device)
            return self._restore(self._run(*given))

    @property
    def program(self) -> str:
        """What runs, as Python."""
        return str(self._machine.source)

    def index(self, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The index of a batch alone, as every call makes it; see `CudaIndex`."""
        return self._machine.functions[LIVE_TOKENS](mask)

    def save(self, path: str | Path) -> None:
        """Not for GPUs.

        Raises
        ------
        UnsupportedTarget
            Always.
        """
        advice = "compile for 'llvm' to save"
        raise UnsupportedTarget(mismatch("target", "'llvm'", "'cuda'", advice))


def compile_for_gpu(
    imported: Imported,
    target: TargetInfo,
    database: str | Path | None,
    cuda_graphs: bool,
    look: Look,
) -> CudaModel:
    """The model on the current device; see `pit_tvm.model.compile`.

    Raises
    ------
    BackendUnavailable
        There is no CUDA device.
    """
    kernels = CudaKernels(Plane(imported.batch, imported.tokens))
    rewritten = rewrite(imported, kernels, look)
    if not torch.cuda.is_available():
        raise BackendUnavailable(mismatch("target cuda", "a CUDA device", "none"))
    device, cache = torch.device("cuda", torch.cuda.current_device()), KernelCache()
    module, merged = _graph(imported, rewritten, look)
    layers = CudaLayers(merged, target, device, cache, database)
    index = CudaIndex(imported.mask, _tables(rewritten.inputs), target.isa, cache)
    packed: dict[str, Callable[..., Any]] = {
        LINEAR: layers,
        PLACED: layers.placed,
        LIVE_TOKENS: index,
        **kernels.packed,
    }
    return CudaModel(
        rewritten.inputs,
        layers,
        rewritten.decisions,
        cuda_program(module, kernels.module, packed, target, device, cache),
        partial(pytree.tree_unflatten, treespec=imported.structure),
        partial(Outputs.of, imported.structure),
        module,
        cuda_graphs=cuda_graphs,
    )


def _graph(
    imported: Imported, rewritten: Rewritten, look: Look = unseen
) -> tuple[tvm.IRModule, list[LinearLayer]]:
    """The graph as a GPU runs it, and its linear layers."""
    module = pass_ids(rewritten.module, list(_tables(rewritten.inputs)))
    module = look("ids", tidy_reshapes(tidy(module, imported.size_bounds)))
    module, merged = merge_linear(module, rewritten.layers, LINEAR, _is_attention)
    module = store_in_place(look("merge", module), merged, LINEAR, PLACED, has_tiles)
    return look("swrite", module), merged


def _tables(inputs: Inputs) -> dict[str, int]:
    """Rows of the tables that inputs of ids name rows of."""
    return {name: one.rows for name, one in inputs.known.items() if one.rows is not None}


def _is_attention(call: relax.Call) -> bool:
    """Whether a call takes views of its operands."""
    return getattr(call.args[0], "global_symbol", "") == ATTENTION if call.args else False
