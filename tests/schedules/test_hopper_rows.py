"""The Hopper rows family as CUDA source; running it needs the GPU."""

from __future__ import annotations

import pytest
import tvm
from tvm.backend.cuda.host import export_cuda_host
from tvm.target import Target

from pit_tvm.schedules.hopper_rows import RowsTile, rows_kernel


def cuda_source(dtype: str, knobs: RowsTile, **options: object) -> str:
    target = Target({"kind": "cuda", "arch": "sm_90a"}, host="cuda_host")
    with target:
        kernel = rows_kernel(dtype, knobs, **options)  # type: ignore[arg-type]
        mod = tvm.IRModule({"main": kernel})
        built = tvm.compile(mod, target=target, tir_pipeline="tirx")
    return export_cuda_host(built.mod)


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "f16"), ("bfloat16", "bf16")])
def test_rows_are_gathered_by_cp_async_and_multiplied_by_wgmma(dtype: str, kind: str) -> None:
    source = cuda_source(dtype, RowsTile())
    assert f"wgmma.mma_async.sync.aligned.m64n256k16.f32.{kind}.{kind}" in source
    assert "cp.async.cg.shared.global" in source
    assert "cp.async.bulk.tensor.3d" in source  # rhs [groups, n, k] by TMA


def test_tile_width_decides_the_instruction_and_clusters_multicast() -> None:
    source = cuda_source("float16", RowsTile(tile_n=128, cluster=2))
    assert "m64n128k16" in source and "m64n256k16" not in source
    assert "multicast::cluster" in source


def test_bias_and_activation_are_parameters() -> None:
    plain = cuda_source("float16", RowsTile())
    full = cuda_source("float16", RowsTile(), bias=True, act="relu")
    assert "bias" not in plain and "bias" in full


@pytest.mark.parametrize("knobs", [{"tile_m": 100}, {"tile_n": 12}, {"stages": 99}])
def test_knobs_that_no_kernel_can_have_are_refused(knobs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(knobs))):
        rows_kernel("float16", RowsTile(**knobs))
