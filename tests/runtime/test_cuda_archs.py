"""GPUs other than Hopper: which kernels run there, and that nothing in them is Hopper's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import UnsupportedTarget
from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.runtime.cuda_detect_plan import plan_mask
from pit_tvm.runtime.cuda_dispatch import CudaDispatcher, all_modules
from pit_tvm.runtime.cuda_general import GeneralDispatcher
from pit_tvm.runtime.cuda_rows import RowsKernels
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import Groups, Mask, MicroTile, Rows, SparsitySpec
from pit_tvm.target import resolve_target

torch = pytest.importorskip("torch")

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
LINEAR = op.linear(None, 256, 512, dtype="float16", bias=True, activation="gelu")
HOPPERS = ("cluster", "griddepcontrol", "wgmma", "cp.async.bulk", "mbarrier")


def compiled(arch: str, tensors: Any, spec: SparsitySpec, operand: str = "lhs") -> Any:
    target = f"cuda -arch={arch}"
    return pit_tvm.compile(tensors, sparse={operand: spec}, target=target)._dispatcher


@pytest.mark.parametrize("arch", ARCHS)
def test_tensor_ir_schedules_run_what_hoppers_families_run_on_hopper(arch: str) -> None:
    assert type(compiled("sm_90a", LINEAR, Rows())) is CudaDispatcher
    made = compiled(arch, LINEAR, Rows())
    assert isinstance(made, GeneralDispatcher)
    assert made.target.clusters == (arch not in ("sm_80", "sm_86", "sm_89"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
def test_products_hold_instructions_of_every_such_gpu(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[str] = []

    def build(mod: tvm.IRModule, arch: str, **options: Any) -> Any:
        sources.append(cuda_source(mod, arch, **options))
        raise InterruptedError

    made = compiled(arch, LINEAR, Rows())
    monkeypatch.setattr("pit_tvm.runtime.cuda_general.build_cuda", build)
    with pytest.raises(InterruptedError):
        made.kernels.product(made.planner.tiles[0])
    assert "mma.sync" in sources[0] and "cp.async" in sources[0]
    assert not [word for word in HOPPERS if word in sources[0]]


def test_detection_needs_no_clusters() -> None:
    for make in all_modules(False).values():
        source = cuda_source(make(), "sm_80", tirx=True)
        assert not [word for word in HOPPERS if word in source]


def test_masks_and_groups_are_read_by_the_kernels_that_are_there() -> None:
    rows = MicroTile("lhs", "m", 0, (1, 64))
    plans = [
        plan_mask(Mask(1, 64), "bool", (512, 512), rows, clusters) for clusters in (True, False)
    ]
    assert plans[0].lists is not None and plans[1].lists is None
    assert plans[0].fold == plans[1].fold
    asked: list[str] = []
    for arch in ("sm_90", "sm_80"):
        made = compiled(arch, op.grouped_matmul(None, 64, 64, 4, dtype="float16"), Groups(4))
        made.detector._kernels.slices = asked.append
        micro_tile = MicroTile("lhs", "m", 0, (1, 0))
        ids = torch.zeros(256, dtype=torch.int32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pit_tvm.runtime.cuda_detect.check_tensor", lambda *_: None)
            patch.setattr("pit_tvm.runtime.cuda_detect_ids.check_tensor", lambda *_: None)
            made.detector.prepared(Groups(4), ids, (256, 64), micro_tile, False, False)
    assert asked == ["cluster_groups_32", "search_groups_32"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_what_only_hopper_has_is_refused(arch: str) -> None:
    with pytest.raises(UnsupportedTarget, match="target -arch.*sm_90a.*whole models"):
        RowsKernels(KernelCache(), arch)


def test_an_unknown_architecture_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedTarget, match="sm_100.*'sm_70'"):
        resolve_target("cuda -arch=sm_70")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_code_for_any_gpu_of_the_generation_runs_on_hopper(dtype: str, tmp_path: Any) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    rng = np.random.default_rng()
    lhs, rhs = rng.standard_normal((300, 64)), rng.standard_normal((96, 64)) / 8
    arrays = [torch.from_numpy(a).to("cuda", getattr(torch, dtype)) for a in (lhs, rhs)]
    live = np.flatnonzero(rng.random(300) < 0.3)
    out = torch.full((300, 96), torch.nan, dtype=arrays[0].dtype, device="cuda")
    tensors = op.linear(None, 96, 64, dtype=dtype, bias=False)
    made = pit_tvm.compile(
        tensors, sparse={"lhs": Rows()}, target="cuda -arch=sm_90", cache=tmp_path
    )
    made(*arrays, sparsity=torch.from_numpy(live).cuda(), out=out)
    dead = torch.ones(300, dtype=torch.bool, device="cuda")
    dead[live] = False
    assert out[dead].isnan().all()
    left, right = (a.double() for a in arrays)
    want = left @ right.t()
    error = (out.double() - want)[live].abs().max() / want.abs().max()
    assert error < {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5}[dtype]
