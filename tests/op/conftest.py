"""Running an operator as it is: compiled without any schedule, results poisoned first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te

from pit_tvm.memory import numpy_dtype
from pit_tvm.runtime.arrays import as_tensor, empty_like_kind

# Rounding of the result's type; sums of both 16-bit types are float32.
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3, "int32": 0.0}


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy where `create_prim_func` expects every argument: at a multiple of 64 bytes."""
    copy = empty_like_kind(array, array.shape, array.dtype.name)
    copy[...] = array
    return copy


@pytest.fixture
def operand(rng: np.random.Generator) -> Callable[[tuple[int, ...], str], np.ndarray]:
    """``operand(shape, dtype)``: normal numbers, or whole ones over all of int8 or int32 / 2**8."""

    def make(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if dtype.startswith("int"):
            limit = 2**7 if dtype == "int8" else 2**23
            return rng.integers(-limit, limit, shape).astype(dtype)
        return rng.standard_normal(shape).astype(numpy_dtype(dtype))

    return make


@pytest.fixture
def run() -> Callable[..., np.ndarray]:
    """``run(tensors, inputs, out_shape)``: the result for ``inputs`` in the tensors' order."""

    def call(
        tensors: list[te.Tensor],
        inputs: Sequence[np.ndarray],
        out_shape: tuple[int, ...],
        target: Any = "llvm",
    ) -> np.ndarray:
        assert tensors[-1].op.name == "out"
        executable = tvm.compile(te.create_prim_func(tensors), target=target)
        out_dtype = str(tensors[-1].dtype)
        out = _aligned(np.full(out_shape, 85, numpy_dtype(out_dtype)))
        if not out_dtype.startswith("int"):
            out[...] = np.nan
        arguments = [
            as_tensor(tensor.op.name, _aligned(array), dtype=str(tensor.dtype), shape=array.shape)
            for tensor, array in zip(tensors[:-1], inputs, strict=True)
        ]
        result = as_tensor("out", out, dtype=out_dtype, shape=out_shape, writable=True)
        executable.mod["main"](*arguments, result)
        return out

    return call


@pytest.fixture
def assert_close() -> Callable[[np.ndarray, np.ndarray], None]:
    """``assert_close(got, truth)``: error relative to the largest truth, by the type of ``got``."""

    def check(got: np.ndarray, truth: np.ndarray) -> None:
        assert got.shape == truth.shape
        error = np.abs(got.astype(np.float64) - truth).max(initial=0.0)
        assert error <= TOLERANCE[got.dtype.name] * np.abs(truth).max(initial=0.0)

    return check
