"""An operator beside its compiled kernels, to run one tile alone: no selection, no index build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import pit_tvm
from pit_tvm.memory import aligned_empty
from pit_tvm.runtime.detect import Detector
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.kernels import Kernels
from pit_tvm.runtime.launch import Launcher
from pit_tvm.runtime.library import library_matmul
from pit_tvm.runtime.program import analyse
from pit_tvm.structs import Candidate, SparsitySpec
from pit_tvm.target import resolve_target


class PitProduct:
    """``matmul(None, n, k)`` with a sparse lhs: the operator, and its kernels one by one."""

    def __init__(self, n: int, k: int, spec: SparsitySpec) -> None:
        tensors, sparse = pit_tvm.op.matmul(None, n, k), {"lhs": spec}
        self.spec = spec
        self.operator = pit_tvm.compile(tensors, sparse=sparse)
        target = resolve_target("llvm")
        self.kernels = Kernels(analyse(tensors, sparse), target, KernelCache())
        self.detector = Detector(target.tvm_target, self.kernels.for_detection)

    def launcher(
        self, choice: Candidate, lhs: Any, rhs: Any, sparsity: np.ndarray, out: Any
    ) -> Callable[[], object]:
        """A function that only runs the kernel of ``choice`` (for dense: the library's product).

        The weight is packed and the index is built beforehand. Elements of ``out`` that the kernel
        leaves to others, such as dead rows, are not written.
        """
        micro_tile = choice.micro_tile
        if micro_tile is None or choice.tile is None:
            return lambda: library_matmul(lhs, rhs, out)
        packed = aligned_empty(self.kernels.packed(rhs.shape).shape, "float32", lasting=True)
        self.kernels.pack()(rhs, packed)
        index = self.detector.detect(self.spec, sparsity, tuple(lhs.shape), micro_tile)
        small = Launcher(self.kernels.program, self.kernels, "skip").is_small(choice)
        kernel = self.kernels.sparse(micro_tile, choice.tile, alone=small)
        return lambda: kernel(lhs, packed, index.ids, index.count, out)
