"""The CUDA kernels of detection in modules that are compiled as one, and how they are had."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tvm

from ..structs import Index
from . import (
    cuda_detect_axes,
    cuda_detect_block_lists,
    cuda_detect_blocks,
    cuda_detect_cluster,
    cuda_detect_columns,
    cuda_detect_groups,
    cuda_detect_rows,
    cuda_detect_slices,
    cuda_detect_strips,
)
from .content_keys import content_key
from .cuda_build import build_cuda
from .cuda_detect_emit import THREADS, emit, emit_axes
from .detect_plan import Kernel
from .kernel_cache import KernelCache

GetModule = Callable[[str, Callable[[], tvm.IRModule]], Any]


def cached_modules(cache: KernelCache, arch: str = "sm_90a") -> GetModule:
    """What `CudaDetector` and `CudaFill` ask for modules: compiled once, kept in ``cache``.

    Compiling needs nvcc and no GPU: see `pit_tvm.runtime.cuda_build.build_cuda`.
    """

    def get_module(name: str, build: Callable[[], tvm.IRModule]) -> Any:
        key = content_key(name, arch)
        return cache.module(key, lambda: build_cuda(build(), arch, tirx=True))

    return get_module


def named_module(functions: dict[str, tvm.tirx.PrimFunc]) -> tvm.IRModule:
    """A module whose functions are called by their names."""
    return tvm.IRModule({n: f.with_attr("global_symbol", n) for n, f in functions.items()})


def mask_module(clusters: bool = True) -> tvm.IRModule:
    """Kernels that read masks and values; those for GPUs with ``clusters`` only if there are."""
    made = {
        "fold_blocks": cuda_detect_rows.fold_blocks(),
        "list_blocks": cuda_detect_block_lists.list_blocks(),
        "fold_axes": cuda_detect_axes.fold_axes(),
    }
    for bits in (1, 8, 16, 32, 64):
        for threads in (256, 1024):
            name = f"list_columns_{bits}_{threads}"
            made[name] = cuda_detect_columns.list_columns(bits, threads)
        made[f"fold_columns_{bits}"] = cuda_detect_columns.fold_columns(bits)
        made[f"fold_rows_{bits}"] = cuda_detect_rows.fold_rows(bits)
        if clusters:
            made[f"list_rows_{bits}"] = cuda_detect_strips.list_rows(bits)
    return named_module(made)


def slice_module(clusters: bool = True) -> tvm.IRModule:
    """Kernels that read row ids, lengths and group ids, and the one that reports counts; those for
    GPUs with ``clusters`` only if there are."""
    made = {"report_counts": cuda_detect_slices.report_counts()}
    for bits in (32, 64):
        made[f"copy_rows_{bits}"] = cuda_detect_slices.copy_rows(bits)
        made[f"mark_rows_{bits}"] = cuda_detect_slices.mark_rows(bits)
        if clusters:
            made[f"cluster_groups_{bits}"] = cuda_detect_cluster.cluster_groups(bits)
        made[f"search_groups_{bits}"] = cuda_detect_groups.search_groups(bits)
        made[f"count_groups_{bits}"] = cuda_detect_groups.count_groups(bits)
        made[f"place_groups_{bits}"] = cuda_detect_groups.place_groups(bits)
        for kind, cumulative in (("lengths", False), ("sums", True)):
            for both in (False, True):
                name = f"spread_{kind}{'_both' * both}_{bits}"
                made[name] = cuda_detect_slices.spread_lengths(bits, cumulative, both)
    return named_module(made)


def emit_module() -> tvm.IRModule:
    """Kernels that turn bits into lists."""
    made = {"emit": emit(False), "emit_both": emit(True)}
    axes = {"emit_axes": emit_axes(False), "emit_axes_both": emit_axes(True)}
    return named_module({**made, **axes})


def blocks_module() -> tvm.IRModule:
    """Kernels that make and count maps of blocks, and that count bits of lines."""
    made = {f"map_blocks_{bits}": cuda_detect_blocks.map_blocks(bits) for bits in (1, 8, 16)}
    made["count_steps"] = cuda_detect_blocks.count_steps()
    return named_module({**made, "count_lines": cuda_detect_blocks.count_lines()})


def detection_modules(clusters: bool) -> dict[str, Callable[[], tvm.IRModule]]:
    """Every module of detection by the name under which it is asked for: to build all ahead, for
    GPUs with ``clusters`` of CTAs or without."""
    return {
        "cuda-mask": partial(mask_module, clusters),
        "cuda-slices": partial(slice_module, clusters),
        "cuda-emit": emit_module,
        "cuda-blocks": blocks_module,
    }


class ModuleKernels:
    """Kernels of modules that are compiled or loaded when one of theirs is first needed."""

    def __init__(self, get_module: GetModule) -> None:
        self._get_module = get_module
        self._known: dict[tuple[str, str], Kernel] = {}

    def find(self, module: str, build: Callable[[], tvm.IRModule], name: str) -> Kernel:
        """The kernel ``name`` of a module, which ``build()`` makes."""
        kernel = self._known.get((module, name))
        if kernel is None:
            kernel = self._known[module, name] = self._get_module(module, build)[name]
        return kernel


class CudaKernels:
    """Kernels of detection, for GPUs with ``clusters`` of CTAs or without."""

    def __init__(self, get_module: GetModule, clusters: bool = True) -> None:
        self._kernels, self.clusters = ModuleKernels(get_module), clusters

    def mask(self, name: str) -> Kernel:
        """A kernel of `mask_module`."""
        return self._find("cuda-mask", name)

    def blocks(self, name: str) -> Kernel:
        """A kernel of `blocks_module`."""
        return self._find("cuda-blocks", name)

    def slices(self, name: str) -> Kernel:
        """A kernel of `slice_module`."""
        return self._find("cuda-slices", name)

    def emit(
        self,
        lines: Any,
        parts: int,
        axis: tuple[int, int, int],
        first: Index,
        second: Index | None = None,
    ) -> None:
        """Turn ``lines`` (slots * parts, words), uint32, into lists.

        ``axis``: entries, positions per entry, and positions of the PIT axis. ``first`` gets the
        set bits; ``second``, if given, the others.
        """
        numbers = (lines, parts, *axis, _pieces(axis[0]), first.ids, first.count)
        if second is None:
            self._find("cuda-emit", "emit")(*numbers)
        else:
            self._find("cuda-emit", "emit_both")(*numbers, second.ids, second.count)

    def emit_axes(
        self,
        lines: tuple[Any, Any],
        extents: tuple[int, int],
        first: Index,
        dead: Index | None,
        second: Index,
    ) -> None:
        """Turn ``lines`` of either axis of a mask into the lists ``first``, with ``dead`` that of
        what does not live beside it, and ``second``."""
        (own, lives), (across, beside) = (
            ((of, of.shape[0], extent, _pieces(extent)), (index.ids, index.count))
            for of, extent, index in zip(lines, extents, (first, second), strict=True)
        )
        if dead is None:
            self._find("cuda-emit", "emit_axes")(*own, *lives, *across, *beside)
        else:
            lists = (*lives, dead.ids, dead.count)
            self._find("cuda-emit", "emit_axes_both")(*own, *lists, *across, *beside)

    def _find(self, module: str, name: str) -> Kernel:
        return self._kernels.find(module, detection_modules(self.clusters)[module], name)


def _pieces(entries: int) -> int:
    """CTAs that share a slot of so many bits."""
    return max(1, -(-entries // (32 * THREADS)))
