"""From a rewritten graph to an executable."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, tirx

from pit_tvm.model.lowering import build
from pit_tvm.schedules.cpu_attention import attention
from pit_tvm.schedules.cpu_rows import embedding_norm, residual_norm
from pit_tvm.target import resolve_target
from pit_tvm.windows import CAUSAL, FULL, Window
from tests.model.graphs import B, T, graph

HOST = resolve_target("llvm")


def test_functions_that_nothing_calls_are_left_out(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Reshapes become views."""
    by = rng.uniform(-1, 1, (8, 3)).astype("float32")
    rows = relax.ShapeExpr([B * T, 8])
    made = graph(lambda x: relax.op.matmul(relax.op.reshape(x, rows), relax.const(by)), x=(B, T, 8))
    built = build(made, HOST)
    built.export_library(str(tmp_path / "built.so"))
    library = (tmp_path / "built.so").read_bytes()
    assert b"__tvm_ffi_matmul" in library and b"__tvm_ffi_reshape" not in library
    x = rng.uniform(-1, 1, (3, 5, 8)).astype("float32")
    found = relax.VirtualMachine(built, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    wanted = x.reshape(15, 8).astype("float64") @ by.astype("float64")
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def attentions(target: str, dim: int, dtype: str, window: Window) -> tirx.PrimFunc:
    return attention(2, dim, dim, dtype, window, 0.5, target=resolve_target(target))


FUNCTIONS: dict[str, Callable[[], tirx.PrimFunc]] = {
    "attention": partial(attentions, "llvm", 4, "float32", FULL),
    "attention, causal": partial(attentions, "llvm", 12, "bfloat16", CAUSAL),
    "attention, narrow": partial(attentions, "llvm -mcpu=x86-64-v3", 64, "float32", FULL),
    "attention, narrow, causal": partial(attentions, "llvm -mcpu=x86-64-v3", 12, "float16", CAUSAL),
    "attention, near": partial(attentions, "llvm", 12, "float32", Window(5, 2)),
    "norm": lambda: residual_norm(20, "float32", 1e-5, True, target=HOST),
    "embeddings": lambda: embedding_norm(20, "float32", 1e-5, ("int64",), 1, target=HOST),
}


def scratch(module: tvm.IRModule) -> list[tuple[str, list[str]]]:
    """Names and extents of what is allocated."""
    found = re.findall(r"(\w+) = T\.alloc_buffer\(\((.*?),?\)(?:,|\))", module.script())
    return [(name, re.findall(r"\b\d+\b", extents)) for name, extents in found]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scratch_is_asked_for_as_small_as_it_can_be(name: str) -> None:
    """So that models leave out the pass of TVM which would shrink it."""
    passes = s_tir.transform
    before = tvm.ir.transform.Sequential(
        [
            passes.LowerInitBlock(),
            passes.PlanAndUpdateBufferAllocationLocation(),
            passes.ConvertBlocksToOpaque(),
        ]
    )(tvm.IRModule({"main": FUNCTIONS[name]()}))
    after = passes.CompactBufferAllocation()(before)
    assert scratch(before) and scratch(before) == scratch(after)
