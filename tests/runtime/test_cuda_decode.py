"""Products of a few rows through operators: which, their plans, and on a GPU their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.runtime import cuda_bind, cuda_decode, cuda_repeat
from pit_tvm.runtime.bind import PackedOperand
from pit_tvm.runtime.cuda_columns import ColumnsDispatcher
from pit_tvm.runtime.cuda_decode import FAMILY, DecodeDispatcher, PackingDispatcher
from pit_tvm.runtime.cuda_few_rows import MOST_ROWS, CudaFewRows
from pit_tvm.runtime.cuda_watch import CountWatch
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import Candidate, Plan, SparsitySpec

torch = pytest.importorskip("torch")

H200 = "cuda -arch=sm_90a -model=h200"
SIZES = {"n": 5120, "k": 20480}


def operator(spec: SparsitySpec | None = None, kind: str = "matmul", **options: Any) -> Any:
    """matmul (weight [k, n]) or linear ([n, k]) of any size."""
    cache, dtype = options.pop("cache", None), options.pop("dtype", "float16")
    made = op.matmul(None, None, None, dtype=dtype, transpose_rhs=kind == "linear", **options)
    target = H200 if cache is None else "cuda"
    sparse = {"lhs": spec or pit_tvm.Values()}
    return pit_tvm.compile(made, sparse=sparse, target=target, cache=cache)


def activations(m: int, zeros: float, k: int = 20480, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((m, k)) * (rng.random((m, k)) >= zeros)).astype(np.float16)


def explained(made: Any, m: int, zeros: float, **sizes: int) -> Plan:
    x = activations(m, zeros, {**SIZES, **sizes}["k"])
    plan = made.explain(sparsity=x, sizes={"m": m, **SIZES, **sizes}, library="torch")
    assert isinstance(plan, Plan)
    return plan


# --------------------------------------------------------------------------------------------
# Which programs, and their plans


def test_values_of_rows_are_looked_for_while_they_are_read() -> None:
    assert type(operator()._dispatcher) is DecodeDispatcher
    assert type(operator(kind="linear")._dispatcher) is PackingDispatcher
    assert type(operator(transpose_lhs=True)._dispatcher) is ColumnsDispatcher
    for spec in (pit_tvm.Mask(), pit_tvm.Rows()):
        assert not isinstance(operator(spec)._dispatcher, DecodeDispatcher)


@pytest.mark.parametrize("m", [1, 8, MOST_ROWS])
def test_plans_of_a_few_rows_show_live_columns_and_dense(m: int) -> None:
    made = operator(bias=True, activation="relu")
    for zeros, kind in ((0.995, "pit"), (0.0, "dense")):
        plan = explained(made, m, zeros)
        assert plan.choice.kind == kind
        assert {c.kind for c in plan.candidates} == {"pit", "dense"}
        gathered = next(c for c in plan.candidates if c.tile is not None)
        assert gathered.tile is not None and gathered.tile.family == FAMILY
        assert str(gathered.micro_tile) == "*x1" and gathered.covered == pytest.approx(
            1 - zeros**m, abs=0.01
        )


def test_more_rows_and_rows_that_are_no_whole_pieces_go_by_live_rows() -> None:
    made = operator()
    for m, n in ((MOST_ROWS + 1, 5120), (1, 5121)):
        plan = explained(made, m, 0.5, n=n)
        assert all(c.tile is None or c.tile.family != FAMILY for c in plan.candidates)


def test_a_plan_says_that_nothing_has_been_counted() -> None:
    dispatcher = operator()._dispatcher
    layout = dispatcher.binder.layout_of({"m": 2, **SIZES}, "torch")
    planner = dispatcher.planner
    assert "no count" in planner.plan(layout, None).reason
    known = planner.plan(layout, (1001,))
    assert "no count" not in known.reason and known is planner.plan(layout, (1002,))
    assert known is not planner.plan(layout, (20000,))
    many = dispatcher.binder.layout_of({"m": 2000, **SIZES}, "torch")
    assert "no count" not in planner.plan(many, None).reason


def test_a_linear_is_planned_as_packed_where_there_are_no_arrays() -> None:
    made = operator(kind="linear", bias=True)
    plan = explained(made, 1, 0.95)
    assert plan.choice.tile is not None and plan.choice.tile.family == FAMILY


def test_building_asks_for_the_kernel_of_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool, str]] = []
    monkeypatch.setattr(
        CudaFewRows, "kernel", lambda self, tile, bias, act: asked.append((tile.rows, bias, act))
    )
    for kind in ("matmul", "linear"):
        made = operator(kind=kind, bias=True, activation="gelu")
        for one in (made._dispatcher, getattr(made._dispatcher, "_turned", None)):
            if one is not None:
                monkeypatch.setattr(one, "modules", lambda name, make: None)
                monkeypatch.setattr(one.kernels, "product", lambda *given, **options: None)
        made.build({"m": 9, **SIZES})
    assert asked == [(16, True, "gelu")] * 2


def test_only_the_weight_is_packed_and_only_for_its_operator() -> None:
    made = operator(kind="linear")
    with pytest.raises(DTypeError, match="CUDA tensor"):
        made.pack(rhs=torch.zeros(8, 8, dtype=torch.half))
    with pytest.raises(ShapeError, match="dense operand"):
        made.pack(lhs=torch.zeros(8, 8, dtype=torch.half))
    foreign = PackedOperand("rhs", None, None, operator(kind="linear")._dispatcher)
    with pytest.raises(ShapeError, match="another one"):
        made(torch.zeros(1, 8, dtype=torch.half), foreign)


# --------------------------------------------------------------------------------------------
# Calls, with torch's product instead of the kernel


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of weights that the kernel would have read; tensors may be the CPU's."""
    seen: list[tuple[int, ...]] = []

    def product(_: Any, x: Any, w: Any, bias: Any, out: Any, act: str = "none") -> None:
        seen.append(tuple(w.shape))
        assert act == "relu"
        out.copy_((x.float() @ w.float() + bias.float()).relu())

    monkeypatch.setattr(CudaFewRows, "__call__", product)
    monkeypatch.setattr(CountWatch, "due", lambda self: False)
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda device: False)
    for module in (cuda_bind, cuda_decode):
        monkeypatch.setattr(module, "check_tensor", lambda *given, **options: None)
    return seen


@pytest.mark.parametrize("kind", ["matmul", "linear"])
def test_calls_reach_the_kernel_with_a_weight_stored_kn(
    multiplied: list[tuple[int, ...]], kind: str
) -> None:
    made = operator(kind=kind, bias=True, activation="relu")
    x = torch.from_numpy(activations(3, 0.9, 2048))
    weight, bias = torch.randn(2048, 4096).half() / 45, torch.randn(4096).half()
    given = made.pack(rhs=weight.t().contiguous()) if kind == "linear" else weight
    want = (x.float() @ weight.float() + bias.float()).relu()
    for out in (None, torch.full((3, 4096), torch.nan, dtype=torch.half)):
        assert (made(x, given, bias, out=out).float() - want).abs().max() < 1e-2
    assert multiplied == [(2048, 4096)] * 2
    assert made.explain(x, given, bias).choice.tile.family == FAMILY
    aside = torch.empty(weight.numel() + 1, dtype=torch.half)[1:].view_as(weight).copy_(weight)
    if kind == "matmul":  # rows that do not begin at 16 bytes: dense
        assert (made(x, aside, bias).float() - want).abs().max() < 1e-2
        assert len(multiplied) == 2


# --------------------------------------------------------------------------------------------
# Results, on a GPU


def gathered(plan: Plan) -> Candidate:
    return next(c for c in plan.candidates if c.tile is not None)


def arrays(m: int, n: int, k: int, zeros: float, seed: int) -> tuple[Any, Any, Any]:
    """x with its zeros, a weight [k, n] whose rows that must not be read are NaN, and the truth."""
    made = torch.Generator("cuda").manual_seed(seed)
    options: dict[str, Any] = {"generator": made, "device": "cuda"}
    x = torch.randn(m, k, **options) * (torch.rand(m, k, **options) >= zeros)
    weight = (torch.randn(k, n, **options) / k**0.5).half()
    x = x.half()
    want = (x.double() @ weight.double()).relu()
    weight[(x == 0).all(0)] = torch.nan
    return x, weight, want


def wrong(out: Any, want: Any) -> bool:
    limit = 4 * 2.0**-11 * (want.abs() + want.square().mean().sqrt() + 1e-6)
    return not bool(((out.double() - want).abs() <= limit).all())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["matmul", "linear"])
def test_a_few_rows_read_what_lives(cache: KernelCache, kind: str) -> None:
    made = operator(kind=kind, activation="relu", cache=cache)
    rng = np.random.default_rng(3)
    for seed, zeros in enumerate((0.0, 0.5, 0.95, 1.0) * 4):
        m = int(rng.integers(1, MOST_ROWS + 1))
        n, k = 8 * int(rng.integers(1, 150)), int(rng.integers(1, 6000))
        x, weight, want = arrays(m, n, k, zeros, seed)
        given = made.pack(rhs=weight.t().contiguous()) if kind == "linear" else weight
        out = torch.full((m, n), torch.nan, dtype=torch.half, device="cuda")
        made._dispatcher.run((x, given), None, out, choose=gathered)
        assert not wrong(out, want), (m, n, k, zeros)


@pytest.mark.gpu
def test_counts_arrive_and_decide(cache: KernelCache) -> None:
    made = operator(activation="relu", cache=cache)
    for zeros, kind in ((0.95, "pit"), (0.0, "dense")):
        x, weight, want = arrays(4, 4096, 8192, zeros, 1)
        for _ in range(40):
            profile = made.profile(x, weight)
        assert profile.plan is not None and profile.plan.choice.kind == kind
        assert "no count" not in profile.plan.reason
        assert not wrong(made(x, weight), want)


@pytest.mark.gpu
def test_activations_change_in_a_graph(cache: KernelCache) -> None:
    made = operator(activation="relu", cache=cache)
    x, weight, _ = arrays(3, 1032, 5000, 0.9, 2)
    weight = torch.nan_to_num(weight)
    out = torch.empty(3, 1032, dtype=torch.half, device="cuda")

    def call() -> None:
        made._dispatcher.run((x, weight), None, out, choose=gathered)

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    for zeros in (0.5, 0.99, 1.0):
        x.copy_(torch.randn_like(x) * (torch.rand_like(x) >= zeros))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert not wrong(out, (x.double() @ weight.double()).relu())
