"""The CUDA text of a TIRx kernel, for tests that have no GPU."""

from __future__ import annotations

import re

import tvm
from tvm.backend.cuda.host import export_cuda_host
from tvm.target import Target


def cuda_text(kernel: tvm.tirx.PrimFunc) -> str:
    """Kernel and launcher for sm_90a."""
    target = Target({"kind": "cuda", "arch": "sm_90a"}, host="cuda_host")
    with target:
        built = tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")
    return export_cuda_host(built.mod)


def boxes(source: str) -> int:
    """TMA instructions in the kernel's body."""
    body = source[source.index('extern "C" __global__') :]
    return len(re.findall(r"_bulk_tensor_\dd_shared__cluster_global\w*\(", body))
