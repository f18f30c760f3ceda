"""Small activations taken for zeros: the error is the caller's choice, and is reported."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import tvm
from tvm import te, tirx

from ..errors import ShapeError, mismatch
from ..runtime.arrays import as_tensor
from ..runtime.content_keys import content_key
from ..runtime.detect_workspace import Workspace
from ..runtime.kernel_cache import KernelCache
from ..runtime.kernels import plain
from ..target import TargetInfo

_SAMPLED_ROWS = 32


def check_threshold(threshold: float | None) -> None:
    """ShapeError unless it is None or a finite number of at least 0."""
    try:
        fits = threshold is None or 0.0 <= threshold <= sys.float_info.max
    except TypeError:
        fits = False
    if not fits:
        expected = "None or a finite number of at least 0"
        raise ShapeError(mismatch("activation_threshold", expected, repr(threshold)))


class Threshold:
    """Copies arrays ``[rows, k]`` of one type with 0 where ``|x| <= least``; NaN stays.

    Threads may share it; a copy holds until the same thread makes the next one.
    """

    def __init__(self, least: float, dtype: str, target: TargetInfo, cache: KernelCache) -> None:
        least = float(np.float32(least))  # as the kernel compares
        self.least, self._dtype = least, dtype
        self._memory = threading.local()

        def build() -> Any:
            return tvm.compile(plain(_above(least, dtype)), tvm.target.Target(target.tvm_target))

        self._kernel = cache.get(content_key("threshold", least, dtype, target.tvm_target), build)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The copy."""
        if not hasattr(self._memory, "workspace"):
            self._memory.workspace = Workspace()
        copy: np.ndarray = self._memory.workspace.take("kept", x.shape, x.dtype)
        target = as_tensor("kept", copy, dtype=self._dtype, shape=x.shape, writable=True)
        self._kernel(as_tensor("x", x, dtype=self._dtype, shape=x.shape), target)
        return copy

    def squares(self, x: np.ndarray) -> tuple[float, float]:
        """Sums of the squares that a copy drops, and of all, over a few rows."""
        rows = x[:: max(1, len(x) // _SAMPLED_ROWS)].astype(np.float64)
        return float(np.sum(rows[np.abs(rows) <= self.least] ** 2)), float(np.sum(rows**2))


def _above(least: float, dtype: str) -> tirx.PrimFunc:
    """``kept = x`` where ``|x| > least`` or NaN, else 0; compared in float32."""
    x = te.placeholder((te.var("m", "int64"), te.var("k", "int64")), dtype, "x")

    def element(i: Any, j: Any) -> Any:
        small = tirx.abs(x[i, j].astype("float32")) <= tirx.const(least, "float32")
        return tirx.Select(small, tirx.const(0, dtype), x[i, j])

    return te.create_prim_func([x, te.compute(x.shape, element, "kept")])
