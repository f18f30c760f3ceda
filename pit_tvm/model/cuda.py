"""Whole models on a GPU: CUDA tensors in and out, on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tvm import relax

from ..errors import BackendUnavailable, DTypeError, ShapeError, UnsupportedTarget, mismatch
from ..runtime.cuda_arrays import check_tensor
from ..target import TargetInfo
from .compiled import LINEAR, CompiledModel
from .cuda_index import CudaIndex, pass_ids
from .cuda_kernels import ATTENTION, CudaKernels
from .cuda_layers import CudaLayers
from .cuda_machine import cuda_program
from .importer import Imported
from .inputs import Inputs
from .linear import LinearLayer
from .merge import merge_linear
from .packing import LIVE_TOKENS
from .plane import BATCH, TOKENS
from .tidy import tidy


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
    if set(given) != set(inputs.known):
        raise ShapeError(mismatch("inputs", sorted(inputs.known), sorted(given)))
    mask = given[inputs.mask]
    check_tensor(inputs.mask, mask)
    if mask.dim() != 2:
        raise ShapeError(mismatch(inputs.mask, "[batch, tokens]", tuple(mask.shape)))
    if inputs.longest is not None and mask.shape[1] > inputs.longest:
        raise ShapeError(mismatch(inputs.mask, f"at most {inputs.longest} tokens", mask.shape[1]))
    sizes: dict[Any, Any] = {BATCH: mask.shape[0], TOKENS: mask.shape[1]}
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

    While a call is recorded into a CUDA graph nothing of the inputs is checked, and all rows of
    the padded batch are computed; replays take other ids and masks of the same shape.
    """

    def __call__(self, **inputs: Any) -> Any:
        """Run a batch of contiguous CUDA tensors on torch's current stream; see
        `CompiledModel.__call__`. The host waits for the number of live tokens."""
        with torch.no_grad():
            given = check_on_gpu(inputs, self._inputs, self._machine.device)
            return self._restore(self._machine(*given))

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


def cuda_machine(
    imported: Imported,
    module: Any,
    layers: list[LinearLayer],
    inputs: Inputs,
    kernels: CudaKernels,
    target: TargetInfo,
    database: str | Path | None,
) -> tuple[Any, CudaLayers, Any]:
    """What runs a rewritten graph on the current device, its layers, and the graph that runs.

    Raises
    ------
    BackendUnavailable
        There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailable(mismatch("target cuda", "a CUDA device", "none"))
    device = torch.device("cuda", torch.cuda.current_device())
    tables = {name: one.rows for name, one in inputs.known.items() if one.rows is not None}
    module = pass_ids(module, list(tables))
    module = relax.transform.RemoveRedundantReshape()(tidy(module, imported.size_bounds))
    module, merged = merge_linear(module, layers, LINEAR, _is_attention)
    run = CudaLayers(merged, target, device, database)
    index = CudaIndex(imported.mask, tables, target.isa)
    packed: dict[str, Callable[..., Any]] = {LINEAR: run, LIVE_TOKENS: index, **kernels.packed}
    return cuda_program(module, kernels.module, packed, target, device), run, module


def _is_attention(call: relax.Call) -> bool:
    """Whether a call takes views of its operands."""
    return getattr(call.args[0], "global_symbol", "") == ATTENTION if call.args else False
