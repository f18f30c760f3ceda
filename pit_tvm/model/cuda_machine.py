"""From a rewritten graph to a function on CUDA tensors: fusion, schedules, one library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import tvm
from tvm import tirx
from tvm.s_tir import dlight

from ..errors import BackendUnavailable, SavedModelError, UnsupportedModel, mismatch
from ..runtime.content_keys import content_key
from ..runtime.cuda_build import CudaLibrary, build_cuda, compile_source
from ..runtime.kernel_cache import KernelCache
from ..schedules.cuda_elementwise import Vectorised
from ..target import TargetInfo
from .faults import LEAVE_OUT
from .lowering import fused
from .program_parts import VIEWS
from .saved import ProgramText
from .torch_program import OF_TORCH, TorchProgram, program_text


def cuda_program(
    graph: ProgramText,
    packed: Mapping[str, Callable[..., Any]],
    device: torch.device,
    cache: KernelCache,
) -> TorchProgram:
    """The functions that `compile_graph` described, with ``packed``, functions on torch tensors
    that they call by name. ``cache`` has the libraries.

    Raises
    ------
    SavedModelError
        The cache lacks a library.
    """
    functions = dict(packed)
    for name, key in graph.libraries.items():
        functions[name] = cache.module(key, _lacking)[name]
    return TorchProgram(graph, functions, device)


def compile_graph(
    module: tvm.IRModule, norms: tvm.IRModule, target: TargetInfo, cache: KernelCache
) -> ProgramText:
    """Compile the kernels that ``main`` calls, and write it as Python.

    Parameters
    ----------
    module
        The graph. TVM's passes lower and fuse its operators, and its schedules put them on the
        GPU's threads.
    norms
        Kernels that the graph calls by name.
    cache
        Where compiled kernels are kept.

    Raises
    ------
    UnsupportedModel
        nvcc compiles others, and refuses these kernels.
    BackendUnavailable
        There is no nvcc, or none that works.
    """
    device_target = tvm.target.Target({"kind": "cuda", "arch": target.isa})
    module = fused(module, device_target, [*VIEWS, *OF_TORCH])
    with device_target:
        module = dlight.ApplyDefaultSchedule(
            Vectorised(),
            dlight.gpu.Matmul(),
            dlight.gpu.Reduction(),
            dlight.gpu.GeneralReduction(),
            dlight.gpu.Fallback(),
        )(module)
    kernels = {
        var.name_hint: func.with_attr("global_symbol", var.name_hint)
        for var, func in module.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }
    libraries: dict[str, str] = {}
    for made, tiled in ((tvm.IRModule(kernels), False), (norms, True)):
        names = [var.name_hint for var in made.get_global_vars()]
        if names:
            libraries |= dict.fromkeys(names, _library(made, target.isa, tiled, cache))
    return replace(program_text(module["main"]), libraries=libraries)


def _library(module: tvm.IRModule, arch: str, tiled: bool, cache: KernelCache) -> str:
    """The key of the compiled functions of a module; kept, because nvcc takes long."""
    key = content_key("model", module, arch)
    cache.module(key, lambda: _built(module, arch, tiled))
    return key


def _built(module: tvm.IRModule, arch: str, tiled: bool) -> CudaLibrary:
    try:
        return build_cuda(module, arch, tirx=tiled)
    except BackendUnavailable as error:
        compile_source("", arch)  # raises the same where there is no nvcc, or none that works
        expected = f"operators that nvcc compiles for {arch}"
        raise UnsupportedModel(mismatch("model", expected, error, LEAVE_OUT)) from error


def _lacking() -> Any:
    raise SavedModelError(mismatch("kernels", "those of the graph", "others", "save it again"))
