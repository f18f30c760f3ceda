"""From a rewritten graph to a function on CUDA tensors: fusion, schedules, one library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import tvm
from tvm import tirx
from tvm.s_tir import dlight

from ..runtime.cuda_build import build_cuda
from ..runtime.kernel_cache import KernelCache, content_key
from ..schedules.cuda_elementwise import Vectorised
from ..target import TargetInfo
from .lowering import fused
from .program_parts import VIEWS
from .torch_program import OF_TORCH, TorchProgram


def cuda_program(
    module: tvm.IRModule,
    norms: tvm.IRModule,
    packed: Mapping[str, Callable[..., Any]],
    target: TargetInfo,
    device: torch.device,
    cache: KernelCache,
) -> TorchProgram:
    """Compile ``main`` and all that it calls.

    Parameters
    ----------
    module
        The graph. TVM's passes lower and fuse its operators, and its schedules put them on the
        GPU's threads.
    norms
        Kernels that the graph calls by name.
    packed
        Functions on torch tensors that it calls by name.
    cache
        Where compiled kernels are kept.
    """
    device_target = tvm.target.Target({"kind": "cuda", "arch": target.isa})
    module = fused(module, device_target, [*VIEWS, *OF_TORCH])
    with device_target:
        module = dlight.ApplyDefaultSchedule(
            Vectorised(),
            dlight.gpu.Matmul(),
            dlight.gpu.Transpose(),
            dlight.gpu.Reduction(),
            dlight.gpu.GeneralReduction(),
            dlight.gpu.Fallback(),
        )(module)
    kernels = {
        var.name_hint: func.with_attr("global_symbol", var.name_hint)
        for var, func in module.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }
    functions = dict(packed)
    for made, tiled in ((tvm.IRModule(kernels), False), (norms, True)):
        library = _library(made, target.isa, tiled, cache)
        functions |= {name.name_hint: library[name.name_hint] for name in made.get_global_vars()}
    return TorchProgram(module["main"], functions, device)


def _library(module: tvm.IRModule, arch: str, tiled: bool, cache: KernelCache) -> Any:
    """The compiled functions of a module; kept, because nvcc takes long."""
    if not module.get_global_vars():
        return {}
    key = content_key("model", module, arch)
    return cache.module(key, lambda: build_cuda(module, arch, tirx=tiled))
