"""Live rows and live columns at once on GPUs: which programs, plans, and on a GPU results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.reference.index import index_lists
from pit_tvm.runtime import cuda_bind
from pit_tvm.runtime.cuda_detect import CudaDetector
from pit_tvm.runtime.cuda_fill import CudaFill
from pit_tvm.runtime.cuda_grid import GridDispatcher, GridForm, GridKernels, grid_form
from pit_tvm.runtime.cuda_rows import FamilyKernels
from pit_tvm.runtime.cuda_watch import CountWatch
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.program import analyse
from pit_tvm.structs import Candidate, Plan
from tests.runtime.cuda_products import check_replays, memory, roundings
from tests.runtime.test_cuda_blocks import LINEAR, TURNED, operator

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


# --------------------------------------------------------------------------------------------
# Which programs, and plans


@pytest.mark.parametrize("options", [{}, {**LINEAR, "bias": True, "activation": "gelu"}])
def test_grids_of_a_row_major_lhs_have_micro_tiles_on_both_axes(options: dict[str, Any]) -> None:
    found = form(**options)
    assert found is not None and found.both is not None
    assert str(found.both) == "1x* and *x1" and str(found.route.micro_tile) == "1x*"
    assert isinstance(operator(pit_tvm.Grid(), **options)._dispatcher, GridDispatcher)


@pytest.mark.parametrize(
    ("side", "options"), [("lhs", TURNED), ("rhs", {}), ("lhs", {"dtype": "float32"})]
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


@pytest.mark.parametrize(("options", "packs"), [({}, 2), (LINEAR, 2)])
def test_building_asks_for_every_kernel(
    options: dict[str, Any], packs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[object, None] = {}
    monkeypatch.setattr(
        FamilyKernels, "_get", lambda self, key, make: asked.update({key: None}) or make
    )
    made = operator(pit_tvm.Grid(), **options)
    monkeypatch.setattr(made._dispatcher, "modules", lambda name, make: None)
    made.build({"m": 256, "n": 256, "k": 256})
    products = [key for key in asked if key[0] == "hopper-rows"]  # type: ignore[index]
    deep = [key for key in products if ("deep", True) in key]  # type: ignore[operator]
    assert 0 < len(deep) and 2 * len(deep) == len(products)
    assert len(asked) - len(products) == packs


# --------------------------------------------------------------------------------------------
# What calls hand to kernels, without a GPU


def find_along(self: Any, spec: Any, value: Any, shape: tuple[int, ...], tile: Any, *_: Any) -> Any:
    """`CudaDetector.prepared` for tensors on the CPU, in memory that the caller gives."""

    def run(given: Any, take: Any) -> Any:
        (ids,) = index_lists(spec, given.numpy(), shape, tile)
        index = take(given, "live", 1, shape[tile.dim])
        index.ids[0, : len(ids)] = index.ids.new_tensor(ids)
        index.count[0] = len(ids)
        return index, None

    return run


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("options", [{}, {**LINEAR, "bias": True}], ids=str)
@pytest.mark.parametrize("n", [24, 37])
def test_calls_pack_both_operands_and_tell_the_depth(
    monkeypatch: pytest.MonkeyPatch, n: int, options: dict[str, Any], learns: bool
) -> None:
    m, k = 70, 150
    rng = np.random.default_rng(n)
    rows, columns = rng.random(m) < 0.5, rng.random(k) < 0.4
    lhs = rng.standard_normal((m, k)) * np.outer(rows, columns)
    rhs = rng.standard_normal((n, k) if options else (k, n))
    made = [lhs, rhs, *[rng.standard_normal(n)] * ("bias" in options)]
    arrays = [torch.from_numpy(array.astype(np.float16)) for array in made]
    reported: list[list[int]] = []

    def gather_columns(self: Any, dtype: str, some: bool) -> Any:
        def run(source: Any, ids: Any, count: Any, *rest: Any) -> None:
            *listed, packed = map(memory, rest)
            kept = listed[0][0, : listed[1][0]] if some else np.arange(len(source))
            live = memory(count)[0]
            packed[kept, : -(-live // 64) * 64] = 0
            packed[kept, :live] = memory(source)[kept][:, memory(ids)[0, :live]]

        return run

    def gather_rows(self: Any, dtype: str) -> Any:
        def run(source: Any, ids: Any, count: Any, packed: Any) -> None:
            live = memory(count)[0]
            memory(packed)[: -(-live // 64) * 64] = 0
            memory(packed)[:live, : source.shape[1]] = memory(source)[memory(ids)[0, :live]]

        return run

    def product(self: Any, tile: Any, groups: int, **given: Any) -> Any:
        def run(own: Any, ids: Any, count: Any, depth: Any, dense: Any, *rest: Any) -> None:
            assert given["deep"]
            (right,), *bias, out = map(memory, (dense, *rest))
            deep, live = -(-int(memory(depth)[0]) // 64) * 64, memory(ids)[0, : memory(count)[0]]
            right = right[:, :deep].T if given["rhs_layout"] == "nk" else right[:deep]
            # Columns beyond n hold anything, and are cut off.
            with np.errstate(invalid="ignore", over="ignore"):
                sums = memory(own)[live, :deep].astype(float) @ right.astype(float)
                out[live] = sums + (bias[0] if bias else 0.0)

        return run

    def pad_copy(self: Any, source: Any, made: Any) -> None:
        made[:, : source.shape[1]] = source[:, : made.shape[1]]

    def report(self: Any, count: Any, write: Any) -> None:
        reported.append(count.tolist())

    monkeypatch.setattr(CudaDetector, "prepared", find_along)
    monkeypatch.setattr(CountWatch, "due", lambda self: learns)
    monkeypatch.setattr(CountWatch, "report", report)
    monkeypatch.setattr(cuda_bind, "check_tensor", lambda *given, **options: None)
    monkeypatch.setattr(CudaFill, "pad_copy", pad_copy)
    monkeypatch.setattr("pit_tvm.runtime.cuda_workspace.stream_of", lambda device: 0)
    monkeypatch.setattr("pit_tvm.runtime.cuda_workspace.is_rehearsed", lambda: False)
    fakes = (("columns", gather_columns), ("rows", gather_rows), ("product", product))
    for name, fake in fakes:
        monkeypatch.setattr(GridKernels, name, fake)
    value = torch.from_numpy(np.outer(rows, columns))
    out = torch.full((m, n), torch.nan, dtype=torch.float16)
    operator(pit_tvm.Grid(), **options)._dispatcher.run(arrays, value, out, choose=both)
    left, right, *bias = (array.double().numpy() for array in arrays)
    want = left @ (right.T if options else right) + (bias[0] if bias else 0.0)
    assert roundings(out[rows], want[rows]) < 2
    assert out[~rows].isnan().all()  # dead rows are another kernel's
    assert reported == [[rows.sum(), columns.sum()]] * learns


# --------------------------------------------------------------------------------------------
# Results, on a GPU


class Case:
    """Random arrays of whose lhs whole rows and whole columns are zero."""

    def __init__(
        self, sizes: tuple[int, int, int], live: tuple[float, float], seed: int, **o: Any
    ) -> None:
        m, n, k = sizes
        rng = np.random.default_rng(seed)
        dtype = getattr(torch, o.get("dtype", "float16"))
        mask = np.outer(rng.random(m) < live[0], rng.random(k) < live[1])
        lhs = rng.standard_normal((m, k)) * mask
        rhs = rng.standard_normal((n, k) if o.get("transpose_rhs") else (k, n))
        arrays = [lhs, rhs, *[rng.standard_normal(n)] * bool(o.get("bias"))]
        self.arrays = [torch.from_numpy(a).to(dtype).cuda() for a in arrays]
        self.value = torch.from_numpy(mask).cuda()
        left, right, *bias = (a.double().cpu().numpy() for a in self.arrays)
        self.want = left @ (right.T if o.get("transpose_rhs") else right)
        self.want = self.want + (bias[0] if bias else 0.0)
        if o.get("activation") == "relu":
            self.want = np.maximum(self.want, 0)
        self.out = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")

    def error(self) -> float:
        """Of the whole output."""
        return roundings(self.out, self.want)


@pytest.fixture(scope="module")
def cache() -> KernelCache:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return KernelCache()


FULL = {"dtype": "bfloat16", "bias": True, "activation": "relu"}
OPTIONS: list[dict[str, Any]] = [{}, LINEAR, FULL, {**LINEAR, **FULL}]
LIVE = [(0.4, 0.3), (0.0, 0.5), (0.5, 0.0), (1.0, 1.0), (0.05, 0.05), (0.0, 0.0)]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_random_shapes_and_patterns_give_the_dense_result(
    cache: KernelCache, options: dict[str, Any]
) -> None:
    run = operator(pit_tvm.Grid(), cache=cache, **options)._dispatcher.run
    rng = np.random.default_rng(len(options))
    fixed = [(1, 1, 1), (8, 8, 64), (264, 512, 1000), (2000, 520, 70)]
    drawn = [tuple(int(x) for x in rng.integers(1, 700, 3)) for _ in range(6)]
    for seed, sizes in enumerate([*fixed, *drawn]):
        for live in LIVE:
            case = Case(sizes, live, seed, **options)  # type: ignore[arg-type]
            run(case.arrays, case.value, case.out, choose=both)
            assert case.error() < 4, (sizes, live)


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
@pytest.mark.parametrize("options", OPTIONS[::3], ids=str)
def test_replayed_graphs_follow_new_patterns(cache: KernelCache, options: dict[str, Any]) -> None:
    made = operator(pit_tvm.Grid(), cache=cache, **options)
    cases = [Case((512, 328, 640), live, 5, **options) for live in LIVE]
    run, first = made._dispatcher.run, cases[0]
    check_replays(lambda: run(first.arrays, first.value, first.out, choose=both), cases)


def test_a_gpu_that_is_not_hopper_takes_grids_as_masks() -> None:
    tensors = op.matmul(None, None, None, dtype="float16")
    made = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Grid()}, target="cuda -arch=sm_80")
    assert not isinstance(made._dispatcher, GridDispatcher)
