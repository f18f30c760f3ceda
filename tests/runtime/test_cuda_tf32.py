"""Float32 products on tensor cores: in the precision that torch is set to."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.runtime.cuda_arrays import tf32_allowed
from pit_tvm.runtime.cuda_call import CudaCall
from pit_tvm.structs import Candidate, Mask, Plan, Rows, SparsitySpec, Tile

H200 = "cuda -arch=sm_90a -model=h200"


@pytest.fixture
def precision() -> Iterator[Callable[[str], None]]:
    """`torch.set_float32_matmul_precision`, undone at the end."""
    torch = pytest.importorskip("torch")
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def by_warps(tile: Tile) -> bool:
    return dict(tile.knobs).get("mma") == 1


@pytest.mark.parametrize(
    ("tensors", "spec"),
    [
        (op.linear(4096, 4096, 4096), Rows()),
        (op.matmul(4096, 4096, 4096, transpose_lhs=True), Mask(1, 64)),
        (op.matmul(4096, 4096, 4096), Mask(32, 64)),
    ],
)
def test_float32_takes_tensor_cores_where_torch_may(
    tensors: Any, spec: SparsitySpec, precision: Callable[[str], None]
) -> None:
    made = pit_tvm.compile(tensors, sparse={"lhs": spec}, target=H200)._dispatcher
    layout = made.binder.layout_of({}, "torch")
    call = CudaCall(layout, 0, (), True, True)
    precision("highest")
    exact = made.planner.plan_of(call)
    assert made.planner.plan_of(call) is exact and not by_warps(exact.candidates[0].tile)
    precision("high")
    fast = made.planner.plan_of(call)
    assert made.planner.plan_of(call) is fast and by_warps(fast.candidates[0].tile)
    dense = [c.cost_us for plan in (exact, fast) for c in plan.candidates if c.kind == "dense"]
    assert dense[1] < 0.25 * dense[0]
    assert fast.choice.cost_us < 0.5 * exact.choice.cost_us
    precision("highest")
    assert made.planner.plan_of(call) is exact


@pytest.mark.parametrize(("of_rhs", "slower"), [(False, 1.6), (True, 1.0)])
def test_plans_know_which_operands_cublas_multiplies_slowly(
    of_rhs: bool, slower: float, precision: Callable[[str], None]
) -> None:
    def dense_us(turned: bool) -> float:
        tensors = op.matmul(2048, 2048, 2048, transpose_lhs=turned, transpose_rhs=of_rhs)
        made = pit_tvm.compile(tensors, sparse={"lhs": Mask(1, 64)}, target=H200)
        plan = made.explain(sparsity=np.ones((2048, 2048), bool))
        return next(c.cost_us for c in plan.candidates if c.kind == "dense")

    precision("high")
    assert dense_us(True) == pytest.approx(slower * dense_us(False), rel=0.02)
    precision("highest")
    assert dense_us(True) == pytest.approx(dense_us(False), rel=0.02)


def test_other_types_are_as_they_are_in_every_precision(precision: Callable[[str], None]) -> None:
    tensors = op.matmul(256, 256, 256, dtype="int8", out_dtype="int32", transpose_lhs=True)
    made = pit_tvm.compile(tensors, sparse={"lhs": Mask(1, 32)}, target=H200)._dispatcher
    precision("high")
    assert not made.planner.tf32() and not any(map(by_warps, made.planner.tiles))


def test_every_way_to_allow_tf32_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    matmul = torch.backends.cuda.matmul
    assert not tf32_allowed()
    before = matmul.fp32_precision
    try:
        matmul.allow_tf32 = True
        assert tf32_allowed()
        matmul.allow_tf32 = False
        assert not tf32_allowed()
        matmul.fp32_precision = "tf32"
        assert tf32_allowed()
    finally:
        matmul.fp32_precision = "ieee"
        matmul.allow_tf32 = False
        matmul.fp32_precision = before
    older = SimpleNamespace(
        backends=SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True)))
    )
    monkeypatch.setitem(sys.modules, "torch", older)
    assert tf32_allowed()
    monkeypatch.delitem(sys.modules, "torch")
    assert not tf32_allowed()


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_results_are_as_precise_as_torch_is_asked_to_be(
    share: float, turned: bool, precision: Callable[[str], None], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no GPU with TF32")
    rng, (m, n, k) = np.random.default_rng(), (256, 200, 392)
    live = rng.random((k, m // 64)).repeat(64, axis=1) < share  # rows of k, in bands of columns
    lhs = rng.standard_normal((k, m), np.float32) * live if turned else rng.standard_normal((m, k))
    rhs = rng.standard_normal((k, n) if turned else (n, k))
    operands = [torch.from_numpy(a.astype(np.float32)).cuda() for a in (lhs, rhs)]
    rows = np.arange(m) if turned else np.flatnonzero(rng.random(m) < share)
    value = torch.from_numpy(live if turned else rows).cuda()
    left, right = (a.double() for a in operands)
    want = left.t() @ right if turned else left @ right.t()
    plain = op.linear(None, n, k, bias=False)
    tensors = op.matmul(m, n, k, transpose_lhs=True) if turned else plain
    spec: SparsitySpec = Mask(1, 64) if turned else Rows()
    made = pit_tvm.compile(tensors, sparse={"lhs": spec}, target="cuda", cache=tmp_path)
    for name, most in (("highest", 1e-6), ("high", 3e-3), ("highest", 1e-6)):
        precision(name)
        out = torch.full((m, n), torch.nan, device="cuda")

        def choose(plan: Plan, fast: bool = name == "high") -> Candidate:
            found = next(c for c in plan.candidates if c.tile)
            assert found.tile and by_warps(found.tile) == fast
            return found

        made._dispatcher.run(operands, value, out, choose=choose)
        wrong = (out.double() - want)[rows].abs().flatten().tolist()
        error = max(wrong, default=0.0) / max(float(want.abs().max()), 1e-30)
        assert error <= most and not math.isnan(sum(wrong))
        assert name == "highest" or share == 0.0 or error > 1e-6
