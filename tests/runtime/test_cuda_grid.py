"""Live rows and live columns at once on GPUs: which programs, plans, and on a GPU results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.reference.ops import activate
from pit_tvm.runtime import cuda_bind
from pit_tvm.runtime.cuda_detect import CudaDetector
from pit_tvm.runtime.cuda_fill import CudaFill
from pit_tvm.runtime.cuda_grid import GridDispatcher, GridKernels
from pit_tvm.runtime.cuda_grid_form import GridForm, grid_form
from pit_tvm.runtime.cuda_rows import FamilyKernels
from pit_tvm.runtime.cuda_watch import CountWatch
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.program import analyse
from pit_tvm.structs import Candidate, Plan
from tests.runtime import cuda_grid_kernels as fakes
from tests.runtime.cuda_products import check_replays, roundings
from tests.runtime.test_cuda_blocks import FULL, LINEAR, TURNED, operator

torch = pytest.importorskip("torch")

SIZES = {"m": 4096, "n": 4096, "k": 4096}


def form(side: str = "lhs", **options: Any) -> GridForm | None:
    tensors = op.matmul(None, 64, None, **{"dtype": "float16", **options})
    return grid_form(analyse(tensors, {side: pit_tvm.Grid()}))


def outer(rows: float, columns: float, seed: int = 2) -> np.ndarray:
    """A mask of so much of 4096 rows and as many columns."""
    lives = np.random.default_rng(seed).random((2, 4096))
    return np.outer(lives[0] < rows, lives[1] < columns)


def both(plan: Plan) -> Candidate:
    """The best candidate that gathers rows and columns."""
    return next(c for c in plan.candidates if c.micro_tile and c.micro_tile.also)


def alone(plan: Plan) -> Candidate:
    """The best candidate that gathers rows alone."""
    return next(c for c in plan.candidates if c.micro_tile and not c.micro_tile.also)


class Case:
    """Random arrays, of one of which whole rows and whole columns are zero; ``live``: shares of
    what lives of rows of lhs or columns of rhs, and of the depth."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        live: tuple[float, float],
        seed: int,
        side: str = "lhs",
        device: str = "cuda",
        **o: Any,
    ) -> None:
        m, n, k = sizes
        rng = np.random.default_rng(seed)
        dtype = getattr(torch, o.get("dtype", "float16"))
        self.lives = rng.random(m if side == "lhs" else n) < live[0], rng.random(k) < live[1]
        mask = np.outer(*self.lives)
        made = {"lhs": rng.standard_normal((m, k)), "rhs": rng.standard_normal((n, k))}
        made[side] *= mask
        turned = {"lhs": o.get("transpose_lhs", False), "rhs": not o.get("transpose_rhs", False)}
        stored = [a.T if turned[name] else a for name, a in made.items()]
        stored += [rng.standard_normal(n)] * bool(o.get("bias"))
        self.arrays = [torch.from_numpy(a.copy()).to(dtype).to(device) for a in stored]
        self.value = torch.from_numpy((mask.T if turned[side] else mask).copy()).to(device)
        left, right, *bias = (a.double().cpu().numpy() for a in self.arrays)
        self.want = (left.T if turned["lhs"] else left) @ (right if turned["rhs"] else right.T)
        self.want = self.want + (bias[0] if bias else 0.0)
        self.want = activate(self.want, o.get("activation"))
        self.out = torch.full((m, n), torch.nan, dtype=dtype, device=device)

    def error(self) -> float:
        """Of the whole output."""
        return roundings(self.out, self.want)


# --------------------------------------------------------------------------------------------
# Which programs, and plans


@pytest.mark.parametrize(
    ("side", "options", "rows", "both"),
    [
        ("lhs", {}, "1x*", "1x* and *x1"),
        ("lhs", {**LINEAR, "bias": True, "activation": "gelu"}, "1x*", "1x* and *x1"),
        ("lhs", {**TURNED, "bias": True}, "*x1", "*x1 and 1x*"),
        ("rhs", {}, "*x1", "*x1 and 1x*"),
        ("rhs", {**LINEAR, **TURNED, "activation": "relu"}, "1x*", "1x* and *x1"),
        ("rhs", {**LINEAR, "bias": True, "activation": "gelu"}, "1x*", "1x* and *x1"),
    ],
)
def test_grids_have_micro_tiles_on_both_axes(
    side: str, options: dict[str, Any], rows: str, both: str
) -> None:
    found = form(side, **options)
    assert found is not None and (str(found.route.micro_tile), str(found.both)) == (rows, both)
    assert isinstance(operator(pit_tvm.Grid(), side, **options)._dispatcher, GridDispatcher)


@pytest.mark.parametrize(
    ("side", "options"), [("rhs", {"dtype": "float32"}), ("lhs", {"dtype": "float32"})]
)
def test_other_grids_are_other_families(side: str, options: dict[str, Any]) -> None:
    assert form(side, **options) is None
    assert not isinstance(operator(pit_tvm.Grid(), side, **options)._dispatcher, GridDispatcher)


@pytest.mark.parametrize("options", [{}, {**LINEAR, "bias": True}])
def test_selection_gathers_both_axes_where_few_rows_and_few_columns_live(
    options: dict[str, Any],
) -> None:
    made = operator(pit_tvm.Grid(), **options)
    chosen = []
    for rows, columns in ((0.3, 0.3), (0.3, 1.0), (1.0, 0.3), (1.0, 1.0)):
        mask = outer(rows, columns)
        plan = made.explain(sparsity=mask, sizes=SIZES, library="torch")
        assert both(plan).covered == pytest.approx(rows * columns, abs=0.03)
        assert dict(both(plan).parts)["pack"] > 4
        chosen.append(str(plan.choice.micro_tile) if plan.choice.micro_tile else "dense")
    assert chosen == ["1x* and *x1", "1x*", "1x* and *x1", "dense"]


@pytest.mark.parametrize(("side", "options"), [("lhs", TURNED), ("rhs", LINEAR), ("rhs", TURNED)])
def test_plans_count_what_is_turned(side: str, options: dict[str, Any]) -> None:
    made, chosen, few = operator(pit_tvm.Grid(), side, **options), [], []
    for rows, columns in ((0.2, 0.2), (0.2, 1.0), (1.0, 1.0)):
        mask = outer(rows, columns)
        mask = mask if made._dispatcher.form.route.micro_tile.dim == 0 else mask.T
        plan = made.explain(sparsity=mask, sizes=SIZES, library="torch")
        parts = dict(both(plan).parts)
        assert (parts["turn"] > 10) == (side == "rhs") and parts["pack"] > 4
        own, back = side == "lhs" or options == TURNED, side == "rhs"
        turning = dict(alone(plan).parts)["turn"]
        assert 8 * (own + back) < turning < 40 and (turning > 20) == (own and back)
        choice = plan.choice.micro_tile
        chosen.append(str(choice and choice.also and "both" or choice and "rows"))
        few.append(both(plan).covered)
    assert chosen == ["both", "rows", "None"] and few == sorted(few)


def test_counts_alike_share_a_plan_and_building_leaves_none_of_their_tiles_out() -> None:
    planner: Any = operator(pit_tvm.Grid())._dispatcher.planner
    layout = operator(pit_tvm.Grid())._dispatcher.binder.layout_of(
        {"m": 600, "n": 512, "k": 1500}, "torch"
    )
    assert planner.plan(layout, None) is planner.plan(layout, None)
    assert planner.plan(layout, (100, 200)) is planner.plan(layout, (101, 220))
    assert planner.plan(layout, (100, 200)) is not planner.plan(layout, (100, 900))
    built = {None, *planner.likely_tiles(layout)}
    rng = np.random.default_rng(4)
    drawn = zip(rng.integers(0, 601, 50), rng.integers(0, 1501, 50), strict=True)
    for counts in ((0, 0), (600, 1500), *drawn):
        assert planner.plan(layout, tuple(map(int, counts))).choice.tile in built


@pytest.mark.parametrize(
    ("side", "options", "packs"),
    [("lhs", {}, 1), ("lhs", LINEAR, 1), ("lhs", TURNED, 2), ("rhs", LINEAR, 2), ("rhs", {}, 3)],
)
def test_building_asks_for_every_kernel(
    side: str, options: dict[str, Any], packs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[object, None] = {}
    monkeypatch.setattr(
        FamilyKernels, "_get", lambda self, key, make: asked.update({key: None}) or make
    )
    made = operator(pit_tvm.Grid(), side, **options)
    monkeypatch.setattr(made._dispatcher, "modules", lambda name, make: None)
    made.build({"m": 256, "n": 256, "k": 256})
    products = [key for key in asked if key[0] == "hopper-rows"]  # type: ignore[index]
    deep = [key for key in products if ("deep", True) in key]  # type: ignore[operator]
    assert 0 < len(deep) and 2 * len(deep) == len(products)  # and rows alone
    assert len(asked) - len(products) == packs


# --------------------------------------------------------------------------------------------
# What calls hand to kernels, without a GPU


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Kernels that work on tensors on the CPU; the counts that are reported."""
    reported: list[list[int]] = []

    def report(self: Any, count: Any, write: Any) -> None:
        reported.append(count.tolist())

    monkeypatch.setattr(CudaDetector, "prepared", fakes.find_along)
    monkeypatch.setattr(CudaDetector, "detect_axes", fakes.find_axes)
    monkeypatch.setattr(CountWatch, "report", report)
    monkeypatch.setattr(cuda_bind, "check_tensor", lambda *given, **options: None)
    monkeypatch.setattr(CudaFill, "pad_copy", fakes.pad_copy)
    monkeypatch.setattr(CudaFill, "fill_rows", fakes.fill_rows)
    monkeypatch.setattr("pit_tvm.runtime.cuda_workspace.stream_of", lambda device: 0)
    monkeypatch.setattr("pit_tvm.runtime.cuda_workspace.is_rehearsed", lambda: False)
    for name in ("gather", "product", "turn_rows", "turned"):
        monkeypatch.setattr(GridKernels, name, getattr(fakes, name))
    return reported


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("lhs", {}),
    ("lhs", {**LINEAR, "bias": True}),
    ("lhs", {**TURNED, "bias": True}),
    ("lhs", {**TURNED, **LINEAR}),
    ("rhs", {}),
    ("rhs", LINEAR),
    ("rhs", TURNED),
    ("rhs", {**TURNED, **LINEAR}),
    ("rhs", {"bias": True}),
    ("rhs", {**LINEAR, "bias": True}),
]


@pytest.mark.parametrize("choose", [both, alone])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(("side", "options"), KINDS, ids=str)
def test_calls_hand_to_kernels_what_they_take(
    monkeypatch: pytest.MonkeyPatch,
    without_gpu: list[list[int]],
    side: str,
    options: dict[str, Any],
    learns: bool,
    choose: Any,
) -> None:
    monkeypatch.setattr(CountWatch, "due", lambda self: learns)
    made = operator(pit_tvm.Grid(), side, **options)
    for sizes in ((70, 24, 150), (37, 24, 152), (64, 42, 152), (64, 40, 152)):
        case = Case(sizes, (0.5, 0.4), sizes[1], side, "cpu", **options)
        rows, columns = case.lives
        made._dispatcher.run(case.arrays, case.value, case.out, choose=choose)
        assert case.error() < 2, sizes
        assert without_gpu == [[rows.sum(), columns.sum()]] * learns
        without_gpu.clear()


def test_what_a_dense_product_gives_dead_rows_stays(
    monkeypatch: pytest.MonkeyPatch, without_gpu: list[list[int]]
) -> None:
    monkeypatch.setattr(CountWatch, "due", lambda self: True)
    options: dict[str, Any] = {**LINEAR, "bias": True}
    case = Case((70, 40, 150), (0.5, 0.4), 1, device="cpu", **options)

    def dense(plan: Plan) -> Candidate:
        return next(c for c in plan.candidates if c.kind == "dense")

    operator(pit_tvm.Grid(), **options)._dispatcher.run(
        case.arrays, case.value, case.out, choose=dense
    )
    assert case.error() < 2 and len(without_gpu) == 1


# --------------------------------------------------------------------------------------------
# Results, on a GPU


ON_GPU: list[tuple[str, dict[str, Any]]] = [
    *KINDS,
    ("lhs", FULL),
    ("lhs", {**LINEAR, **FULL}),
    ("lhs", {**TURNED, **FULL}),
    ("rhs", {"dtype": "bfloat16", "activation": "relu"}),
    ("rhs", {**LINEAR, **FULL}),
    ("rhs", {**TURNED, "bias": True, "activation": "gelu"}),
]
LIVE = [(0.4, 0.3), (0.0, 0.5), (0.5, 0.0), (1.0, 1.0), (0.05, 0.05), (0.0, 0.0)]


@pytest.mark.gpu
@pytest.mark.parametrize(("side", "options"), ON_GPU, ids=str)
def test_random_shapes_and_patterns_give_the_dense_result(
    cache: KernelCache, side: str, options: dict[str, Any]
) -> None:
    run = operator(pit_tvm.Grid(), side, cache=cache, **options)._dispatcher.run
    rng = np.random.default_rng(len(options))
    fixed = [(1, 1, 1), (8, 8, 64), (264, 512, 1000), (2000, 520, 70)]
    drawn = [tuple(int(x) for x in rng.integers(1, 700, 3)) for _ in range(6)]
    for seed, sizes in enumerate([*fixed, *drawn]):
        for live in LIVE:
            case = Case(sizes, live, seed, side, **options)  # type: ignore[arg-type]
            for choose in (both, alone):
                case.out.fill_(torch.nan)
                run(case.arrays, case.value, case.out, choose=choose)
                assert case.error() < 4, (sizes, live, choose)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {**LINEAR, **FULL}], ids=str)
def test_calls_learn_what_lives_and_are_right_meanwhile(
    cache: KernelCache, options: dict[str, Any]
) -> None:
    made = operator(pit_tvm.Grid(), cache=cache, **options)
    chosen = set()
    for live in ((1.0, 0.2), (0.2, 1.0), (1.0, 1.0)):
        case = Case((2048, 4096, 4096), live, 3, **options)
        for _ in range(40):
            case.out.fill_(torch.nan)
            _, plan = made._dispatcher.run(case.arrays, case.value, case.out)
            assert case.error() < 4
        choice = plan.choice
        chosen.add(str(choice.micro_tile) if choice.micro_tile else "dense")
    assert chosen == {"1x* and *x1", "1x*", "dense"}


@pytest.mark.gpu
@pytest.mark.parametrize(("side", "options"), ON_GPU[::3], ids=str)
def test_replayed_graphs_follow_new_patterns(
    cache: KernelCache, side: str, options: dict[str, Any]
) -> None:
    made = operator(pit_tvm.Grid(), side, cache=cache, **options)
    cases = [Case((512, 328, 640), live, 5, side, **options) for live in LIVE]
    check_replays(made, cases, both)


def test_a_gpu_that_is_not_hopper_takes_grids_as_masks() -> None:
    tensors = op.matmul(None, None, None, dtype="float16")
    made = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Grid()}, target="cuda -arch=sm_80")
    assert not isinstance(made._dispatcher, GridDispatcher)
