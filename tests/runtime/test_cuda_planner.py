"""Plans for a GPU, made without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import BackendUnavailable, DTypeError, ShapeError, UnsupportedTarget
from pit_tvm.runtime import cuda_planner, cuda_rows
from pit_tvm.runtime.bind import Binder
from pit_tvm.runtime.cuda_call import CudaCall
from pit_tvm.runtime.cuda_form import rows_form
from pit_tvm.runtime.cuda_planner import CudaPlanner
from pit_tvm.runtime.cuda_rows import RowsKernels, fits
from pit_tvm.runtime.program import analyse
from pit_tvm.schedules.hopper_knobs import RowsTile
from pit_tvm.schedules.hopper_space import starting_tiles
from pit_tvm.structs import Candidate, Plan
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore

H200 = "cuda -arch=sm_90a -model=h200"


def linear(spec: pit_tvm.structs.SparsitySpec, **options: object) -> pit_tvm.api.Operator:
    tensors = op.linear(None, 3072, 768, dtype="float16")
    return pit_tvm.compile(tensors, sparse={"lhs": spec}, target=H200, **options)


@pytest.mark.parametrize("dead", ["skip", "zero"])
@pytest.mark.parametrize("fresh", [True, False])
def test_dense_needs_dead_rows_that_it_may_write(dead: str, fresh: bool) -> None:
    program = analyse(op.linear(None, 3072, 768, dtype="float16"), {"lhs": pit_tvm.Lengths()})
    target = resolve_target(H200)
    store = TileStore.open(device=target.device, isa=target.isa)
    planner = CudaPlanner(program, rows_form(program), target, store, dead)
    layout = Binder(program, None).layout_of({"m": 32768}, "torch")
    plan = planner.plan(layout, (32768,), fresh)
    assert plan.choice.covered == 1.0 and "bound" in str(plan)
    dense = dense_of(plan)
    assert bool(dense) == (fresh or dead == "zero")
    assert planner.dense_fills == (dead == "zero")
    if dense:  # a dead row is looked for only to be overwritten
        assert (dict(dense[0].parts)["index"] > 0) == (dead == "zero")


def test_the_host_decides_for_few_rows_unless_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capturing = False
    monkeypatch.setattr(cuda_planner, "is_capturing", lambda device: capturing)
    monkeypatch.setattr(cuda_planner, "is_rehearsed", lambda: False)
    made = linear(pit_tvm.Lengths(), dead="zero")._dispatcher
    few, many = (
        CudaCall(made.binder.layout_of({"m": m}, "torch"), 0, (), True, True) for m in (128, 32768)
    )
    called, recorded = [], []
    for plans in (called, recorded, called):
        capturing = plans is recorded
        plans += [made.planner.plan_of(few), made.planner.plan_of(many)]
    assert called[0] is called[2] and [p.choice.kind for p in called[:2]] == ["pit", "pit"]
    assert [p.choice.kind for p in recorded] == ["dense", "pit"]
    host, device = (dict(c.parts) for p in (called[0], recorded[0]) for c in dense_of(p))
    assert "host" not in device and host.pop("host") > 0 and host == device
    assert called[1].candidates == recorded[1].candidates
    lengths = np.full(8, 8, dtype="int32")
    assert made.explain([], lengths, {"m": 128}, "torch").choice.kind == "pit"
    kept = linear(pit_tvm.Lengths())._dispatcher
    assert not kept.planner.hosted(0)  # its dense product has no zeros behind it


def dense_of(plan: Plan) -> list[Candidate]:
    return [c for c in plan.candidates if c.kind == "dense"]


def test_counts_that_fill_other_waves_have_plans_of_their_own() -> None:
    program = analyse(op.linear(None, 3072, 768, dtype="float16"), {"lhs": pit_tvm.Lengths()})
    target = resolve_target(H200)
    store = TileStore.open(device=target.device, isa=target.isa)
    planner = CudaPlanner(program, rows_form(program), target, store, "skip")
    layout = Binder(program, None).layout_of({"m": 32768}, "torch")
    first = planner.plan(layout, (8515,))
    assert planner.plan(layout, (8520,)) is first
    others = [planner.plan(layout, (m,)) for m in (8515, 8963, 9346, 12, 20, 1000, 1025)]
    assert len(set(map(id, others))) == 7
    assert planner.plan(layout, None) is planner.plan(layout, None)


@pytest.mark.parametrize("m", [12, 1050, 32768])
def test_every_plan_of_a_size_has_a_tile_that_is_built_ahead(m: int) -> None:
    dispatcher = linear(pit_tvm.Rows())._dispatcher
    planner, layout = dispatcher.planner, dispatcher.binder.layout_of({"m": m}, "torch")
    built = {None, *planner.likely_tiles(layout)}
    assert planner.plan(layout, None).choice.tile in built
    for live in {*range(0, m + 1, 13), m}:
        plan = planner.plan(layout, (live,), fresh=False)
        assert {plan.choice.tile, planner.decide(layout, (live,)).choice.tile} <= built


def test_the_first_of_counts_that_share_a_plan_does_not_decide_it() -> None:
    dispatcher = linear(pit_tvm.Rows())._dispatcher
    layout = dispatcher.binder.layout_of({"m": 32768}, "torch")
    for live, most in ((641, 648), (1, 8), (2305, 2368), (32705, 32768)):
        plan = dispatcher.planner.plan(layout, (live,))
        assert plan == dispatcher.planner.decide(layout, (most,))


def test_tiles_of_any_routing_to_groups_are_built_ahead() -> None:
    rng = np.random.default_rng(0)
    tensors = op.grouped_matmul(None, 1408, 2048, 64, dtype="bfloat16", transpose_rhs=True)
    operator = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Groups(64)}, target=H200)
    planner = operator._dispatcher.planner
    layout = operator._dispatcher.binder.layout_of({"m": 8192}, "torch")
    built = planner.likely_tiles(layout)
    for skew in (0.0, 1.0, 3.0, 8.0) * 10:
        share = rng.random(64) ** skew
        counts = (rng.integers(64, 8192) * share / share.sum()).astype(int).tolist()
        assert planner.plan(layout, tuple(counts)).choice.tile in built


def test_groups_are_never_dense() -> None:
    tensors = op.grouped_matmul(None, 64, 128, 4, dtype="float16")
    operator = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Groups(4)}, target=H200)
    plan = operator.explain(sparsity=np.zeros(512, np.int64), sizes={"m": 512})
    assert {c.kind for c in plan.candidates} == {"pit"}


def test_masks_are_dense_where_nothing_is_saved() -> None:
    operator = linear(pit_tvm.Mask(1, 64))
    full = operator.explain(sparsity=np.ones((8192, 768), bool), sizes={"m": 8192})
    assert full.choice.kind == "dense"
    few = np.zeros((8192, 768), bool)
    few[::64] = True
    assert operator.explain(sparsity=few, sizes={"m": 8192}).choice.kind == "pit"


def test_dense_products_of_all_rows_are_those_of_a_steady_load() -> None:
    """A mask of them tells zeros, which draw no power."""
    told = {"x": np.ones((32768, 768), bool), "rows": np.arange(32768)}
    specs = {"x": pit_tvm.Mask(1, 768), "rows": pit_tvm.Rows()}
    costs = {}
    for name, spec in specs.items():
        plan = linear(spec).explain(sparsity=told[name], sizes={"m": 32768})
        dense = next(c for c in plan.candidates if c.kind == "dense")
        costs[name] = dict(dense.parts)["product"]
    assert 1.05 < costs["rows"] / costs["x"] < 1.15


def test_more_live_rows_cost_more() -> None:
    operator = linear(pit_tvm.Rows())
    costs = [
        operator.explain(sparsity=np.arange(live), sizes={"m": 32768}).choice.cost_us
        for live in (256, 4096, 32768)
    ]
    assert costs == sorted(costs) and costs[0] < costs[2]


def test_tiles_that_cannot_be_built_for_a_layout_are_no_candidates() -> None:
    tensors = op.matmul(None, 3072, 768, dtype="float16")
    plan = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Lengths()}, target=H200).explain(
        sparsity=np.full(256, 64), sizes={"m": 32768}
    )
    tiles = [c.tile for c in plan.candidates]
    assert tiles and all(fits(tile, "float16", {"rhs_layout": "kn"}) for tile in tiles)


def test_starting_tiles_fit_the_plain_kernel() -> None:
    assert all(fits(tile, "float16", {}) for tile in starting_tiles("sm_90a", "float16"))


def test_explain_needs_a_pattern() -> None:
    with pytest.raises(ShapeError, match="sparsity"):
        linear(pit_tvm.Lengths()).explain(sizes={"m": 128})


def test_only_gpu_operators_are_built_ahead() -> None:
    cpu = pit_tvm.compile(op.matmul(8, 8, 8), sparse={"lhs": pit_tvm.Rows()})
    with pytest.raises(UnsupportedTarget, match="build"):
        cpu.build({})


def test_empty_operands_have_plans() -> None:
    for spec, pattern in ((pit_tvm.Mask(1, 64), np.zeros((0, 768), bool)), (pit_tvm.Rows(), [])):
        plan = linear(spec).explain(sparsity=np.asarray(pattern), sizes={"m": 0})
        assert plan.choice.cost_us >= 0.0


@pytest.mark.parametrize(("groups", "most"), [(2, 256), (257, 1024), (1024, 1024)])
def test_kernels_hold_as_many_groups_as_there_are(
    groups: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []

    def kernel(dtype: str, knobs: RowsTile, **options: object) -> None:
        built.append(knobs.most_groups)
        return None

    monkeypatch.setattr(cuda_rows, "rows_kernel", kernel)
    monkeypatch.setattr(RowsKernels, "_build", lambda self, func: func)
    cache = NoCache()
    grouped = [t for t in starting_tiles("sm_90a", "float16") if t.family == "groups-hopper"]
    RowsKernels(cache, "sm_90a").product(grouped[0], groups)  # type: ignore[arg-type]
    assert built == [most]


class NoCache:
    """Builds at every call."""

    def get(self, key: str, build: Callable[[], object]) -> object:
        return build()


def test_more_groups_than_any_kernel_takes_are_refused() -> None:
    tensors = op.grouped_matmul(None, 32, 16, 1025, dtype="float16")
    with pytest.raises(UnsupportedTarget, match="1024 groups"):
        pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Groups(1025)}, target=H200)


@pytest.mark.parametrize(
    ("spec", "told", "error", "text"),
    [
        (pit_tvm.Mask(1, 64), np.ones((64, 767), bool), ShapeError, "lhs.*shape"),
        (pit_tvm.Mask(1, 64), np.ones(64, bool), ShapeError, "lhs.*shape"),
        (pit_tvm.Mask(1, 64), np.ones((64, 768), np.float32), DTypeError, "bool or uint8"),
        (pit_tvm.Values(), np.ones((63, 768), np.float32), ShapeError, "lhs.*shape"),
        (pit_tvm.BlockMask(64, 64), np.ones((1, 11), bool), ShapeError, "lhs.*shape"),
        (pit_tvm.Rows(), [1, 64], ShapeError, "64 at position 1"),
        (pit_tvm.Rows(), np.array([-1, 3]), ShapeError, "-1 at position 0"),
        (pit_tvm.Rows(), np.arange(70), ShapeError, "at most 64 ids"),
        (pit_tvm.Rows(), np.array([1.5, 2.0]), DTypeError, "int32 or int64"),
        (pit_tvm.Lengths(), [1, 2, 3], ShapeError, "divides 64 rows"),
        (pit_tvm.Lengths(), [1, 2, 3, 400], ShapeError, "400 at position 3"),
        (pit_tvm.Lengths(), np.array([[1, 2]]), ShapeError, "one dimension"),
        (pit_tvm.Lengths(), "abc", DTypeError, "sparsity"),
        (pit_tvm.Lengths(), object(), DTypeError, "sparsity"),
        (pit_tvm.Lengths(cumulative=True), [1, 2, 3], ShapeError, "start at 0"),
    ],
)
def test_patterns_that_are_explained_are_checked_as_on_cpus(
    spec: Any, told: Any, error: type[Exception], text: str
) -> None:
    tensors = op.linear(None, 3072, 768, dtype="float16", bias=True)
    for target in (H200, "cuda -arch=sm_80", "llvm"):
        made = pit_tvm.compile(tensors, sparse={"lhs": spec}, target=target)
        with pytest.raises(error, match=text.replace("lhs", "" if target == "llvm" else "lhs")):
            made.explain(sparsity=told, sizes={"m": 64})


def test_group_ids_that_are_explained_are_checked() -> None:
    tensors = op.grouped_matmul(None, 256, 128, 4, dtype="float16", transpose_rhs=True)
    made = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Groups(4)}, target=H200)
    assert made.explain(sparsity=np.arange(64) % 5 - 1, sizes={"m": 64}).choice.kind == "pit"
    for told in (np.full(64, 4), np.full(64, -2), np.zeros(63, int), np.zeros((64, 2), int)):
        with pytest.raises(ShapeError, match="group ids"):
            made.explain(sparsity=told, sizes={"m": 64})
    with pytest.raises(DTypeError, match="group ids"):
        made.explain(sparsity=np.zeros(64), sizes={"m": 64})


def test_what_else_is_asked_of_plans_is_checked() -> None:
    made, told = linear(pit_tvm.Rows()), np.arange(3)
    with pytest.raises(BackendUnavailable, match="library"):
        made.explain(sparsity=told, sizes={"m": 64}, library="jax")
    with pytest.raises(ShapeError, match="size m"):
        made.explain(sparsity=told, sizes={"m": -64})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_operands_explain_themselves(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensors = op.matmul(None, 256, 128, dtype=dtype)
    made = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Values()}, target=H200)
    told = torch.zeros((64, 256), dtype=getattr(torch, dtype))[:, :128]
    told[3] = 1
    plans = [made.explain(sparsity=t, sizes={"m": 64}) for t in (told, told.requires_grad_())]
    assert plans[0] == plans[1] and plans[0].candidates[0].covered == pytest.approx(1 / 64)
