"""The GPU's k-axis family: which programs it takes, its plans, and on a GPU its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import ShapeError, UnsupportedTarget
from pit_tvm.runtime.cuda_columns import ColumnsDispatcher, ColumnsKernels
from pit_tvm.runtime.cuda_families import dispatcher_of
from pit_tvm.runtime.cuda_form import ColumnsForm, form_of
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.program import analyse
from pit_tvm.schedules.hopper_bands import COLUMNS, columns_tile
from pit_tvm.structs import SparsitySpec
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore
from tests.runtime.cuda_products import (
    by_tile,
    check_replays,
    tiled,
)
from tests.runtime.test_cuda_blocks import H200, LINEAR, TURNED, Case, operator
from tests.runtime.test_cuda_columns_calls import spec_of

torch = pytest.importorskip("torch")


def form(spec: SparsitySpec, sparse: str = "lhs", dtype: str = "float16", **options: Any) -> Any:
    return form_of(analyse(op.matmul(None, 64, None, dtype=dtype, **options), {sparse: spec}))


# --------------------------------------------------------------------------------------------
# Which programs


@pytest.mark.parametrize(
    ("spec", "sparse", "options", "height"),
    [
        (pit_tvm.Mask(32, 1), "lhs", {}, 32),
        (pit_tvm.Mask(64, 1), "lhs", LINEAR, 64),
        (pit_tvm.Mask(128, 1), "lhs", {"bias": True, "activation": "gelu"}, 128),
        (pit_tvm.BlockMask(256, 64), "lhs", {}, 128),
        (pit_tvm.BitMask(96, 64), "lhs", {}, 32),
        (pit_tvm.Mask(16, 16), "lhs", {}, 32),
        (pit_tvm.Mask(4, 1), "lhs", {**LINEAR, "bias": True}, 32),
        (pit_tvm.Mask(1, 64), "lhs", TURNED, 64),
        (pit_tvm.Values(), "lhs", TURNED, 32),
        (pit_tvm.Mask(1, 1), "lhs", {**TURNED, **LINEAR, "bias": True}, 32),
        (pit_tvm.Grid(), "lhs", TURNED, 32),
        (pit_tvm.Mask(32, 1), "rhs", {**LINEAR, "bias": True}, 32),
        (pit_tvm.BitMask(8, 16), "rhs", {**TURNED, **LINEAR}, 32),
        (pit_tvm.Mask(1, 128), "rhs", {}, 128),
        (pit_tvm.BlockMask(16, 64), "rhs", {**TURNED, "bias": True, "activation": "relu"}, 64),
    ],
)
def test_blocks_of_rows_are_gathered_along_k(
    spec: SparsitySpec, sparse: str, options: dict[str, Any], height: int
) -> None:
    found = form(spec, sparse, **options)
    turned, linear = "transpose_lhs" in options, "transpose_rhs" in options
    assert isinstance(found, ColumnsForm) and (found.side, found.height) == (sparse, height)
    assert (found.transposed, found.rhs_layout) == (turned, "nk" if linear else "kn")
    # Whatever is not stored as rows of k is packed or turned first.
    of_lhs = sparse == "lhs"
    assert found.packed == (not turned if of_lhs else linear)
    assert found.turns == (linear if of_lhs else not turned)
    assert found.route.micro_tile.axis == "k"
    assert found.route.micro_tile.extents == ((height, 1) if found.packed else (1, height))
    assert found.act == (options.get("activation") or "none")
    assert found.bias == ("bias" if options.get("bias") else "")
    assert found.options == {
        "bias": bool(found.bias),
        "act": found.act,
        "packed": found.packed,
        "common": False,
        "flip": not of_lhs,
    }


@pytest.mark.parametrize("sparse", ["lhs", "rhs"])
@pytest.mark.parametrize("spec", [pit_tvm.Rows(), pit_tvm.Lengths()])
def test_rows_of_k_that_exist_are_one_list_for_both_operands(
    spec: SparsitySpec, sparse: str
) -> None:
    found = form(spec, sparse, **TURNED, bias=True)
    assert isinstance(found, ColumnsForm) and found.common and not found.packed
    assert (found.lhs, found.rhs, found.bias) == ("lhs", "rhs", "bias")
    assert (found.route.micro_tile.operand, found.route.micro_tile.axis) == (sparse, "k")
    assert found.transposed and found.options["common"]


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (pit_tvm.Mask(1, 32), {}),
        (pit_tvm.Mask(2, 1), {}),
        (pit_tvm.Mask(24, 1), {}),
        (pit_tvm.Mask(), {}),
        (pit_tvm.Grid(), {}),
        (pit_tvm.Values(), {}),
        (pit_tvm.Rows(), {}),
        (pit_tvm.Mask(24, 1), LINEAR),
    ],
)
def test_other_patterns_are_gathered_by_rows(spec: SparsitySpec, options: dict[str, Any]) -> None:
    found = form(spec, **options)
    assert not isinstance(found, ColumnsForm) and found.route.micro_tile.axis == "m"


@pytest.mark.parametrize(
    ("spec", "sparse", "options", "match"),
    [
        (pit_tvm.Rows(1), "lhs", TURNED, "stored"),
        (pit_tvm.Rows(1), "lhs", {}, "gathered rows"),  # no row of lhs is contiguous
        (pit_tvm.Rows(), "lhs", {**TURNED, **LINEAR}, "gathered rows"),
        (pit_tvm.Mask(1, 32), "rhs", {"dtype": "float32"}, "stored"),
        (pit_tvm.Mask(2, 1), "rhs", LINEAR, "rows to be those of the result"),
        (pit_tvm.Mask(32, 1), "lhs", {"dtype": "float32"}, "float16 or bfloat16"),
    ],
)
def test_what_no_family_computes_is_refused(
    spec: SparsitySpec, sparse: str, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedTarget, match=match):
        form(spec, sparse, **options)


# --------------------------------------------------------------------------------------------
# Plans


@pytest.mark.parametrize(
    ("side", "options", "moved"),
    [
        ("lhs", {}, {"pack"}),
        ("lhs", TURNED, set()),
        ("rhs", LINEAR, {"pack", "turn"}),
    ],
)
def test_plans_weigh_live_columns_against_dense(
    side: str, options: dict[str, Any], moved: set[str]
) -> None:
    grain = (64, 1) if "pack" in moved else (1, 64)
    made = operator(pit_tvm.Mask(*grain), side, **options)
    kinds = {}
    for zeros in (0.0, 0.95):
        blocks = np.random.default_rng(3).random([2048 // extent for extent in grain]) >= zeros
        mask = blocks.repeat(grain[0], axis=0).repeat(grain[1], axis=1)
        sizes = {"m": 4096, "n": 4096, "k": 2048, "m" if side == "lhs" else "n": 2048}
        plan = made.explain(sparsity=mask, sizes=sizes, library="torch")
        assert {c.kind for c in plan.candidates} == {"pit", "dense"}
        parts = dict(plan.candidates[0].parts)
        assert {part for part in ("pack", "turn") if parts[part] > 0} == moved
        assert "bound" in str(plan)
        kinds[zeros] = plan.choice.kind
    assert kinds == {0.0: "dense", 0.95: "pit"}


@pytest.mark.parametrize("sparse", ["lhs", "rhs"])
def test_what_does_not_exist_may_hold_anything_so_dense_is_no_candidate(sparse: str) -> None:
    tensors = op.matmul(None, None, None, dtype="float16", **TURNED)
    made = pit_tvm.compile(tensors, sparse={sparse: pit_tvm.Lengths()}, target=H200)
    lengths, sizes = np.array([40, 0, 64]), {"m": 768, "n": 768, "k": 192}
    plan = made.explain(sparsity=lengths, sizes=sizes, library="torch")
    assert {c.kind for c in plan.candidates} == {"pit"}
    assert plan.choice.covered == pytest.approx(104 / 192)
    planner = made._dispatcher.planner
    layout = made._dispatcher.binder.layout_of(sizes, "torch")
    assert planner.plan(layout, None).choice.covered == 0.5


def test_a_plan_is_made_before_any_count_is_known_and_kept_for_counts_alike() -> None:
    program = analyse(op.matmul(None, None, None, dtype="float16"), {"lhs": pit_tvm.Mask(32, 1)})
    target = resolve_target(H200)
    store = TileStore.open(device=target.device, isa=target.isa)
    options: dict[str, Any] = {"deterministic": False, "dead": "skip"}
    made = dispatcher_of(program, target, store, KernelCache(), **options)
    assert isinstance(made, ColumnsDispatcher)
    layout = made.binder.layout_of({"m": 320, "n": 512, "k": 1000}, "torch")
    planner = made.planner
    assert planner.plan(layout, None) is planner.plan(layout, None)
    assert planner.plan(layout, (100,) * 10) is planner.plan(layout, (101,) * 10)
    assert planner.plan(layout, (100,) * 10) is not planner.plan(layout, (900,) * 10)
    assert {tile.family for tile in planner.likely_tiles(layout)} == {COLUMNS}


def test_operands_whose_places_pass_32_bits_are_refused() -> None:
    mask, sizes = np.ones((64, 64), bool), {"m": 64, "n": 2**28, "k": 64}
    with pytest.raises(ShapeError, match="elements"):
        operator(pit_tvm.Mask(64, 1)).explain(sparsity=mask, sizes=sizes, library="torch")


def test_building_asks_for_every_kernel_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        ColumnsKernels, "_get", lambda self, key, make: asked.append(key[0]) or make
    )
    made = operator(pit_tvm.Mask(128, 1), "rhs", **LINEAR)
    monkeypatch.setattr(made._dispatcher, "modules", lambda name, make: asked.append(name))
    made.build({"m": 256, "n": 256, "k": 256})
    kinds = {kind: asked.count(kind) for kind in ("hopper-columns", "cuda-pack", "cuda-turn")}
    assert kinds == {"hopper-columns": 1, "cuda-pack": 1, "cuda-turn": 1} and "cuda-mask" in asked


class Kept:
    """A tensor that says what is done to it; ``device`` it is on."""

    def __init__(self, device: int, size: int = 0) -> None:
        self.device, self.size, self.zeroed = device, size, 0

    def get_device(self) -> int:
        return self.device

    def data_ptr(self) -> int:
        return 4096

    def zero_(self) -> None:
        self.zeroed += 1


def test_sums_that_are_exchanged_use_their_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Kept] = []

    def make(dtype: str, like: Kept, shape: tuple[int, ...]) -> Kept:
        made.append(Kept(like.device, int(np.prod(shape))))
        return made[-1]

    monkeypatch.setattr("pit_tvm.runtime.cuda_columns.empty_of", make)
    monkeypatch.setattr("pit_tvm.runtime.cuda_workspace.stream_of", lambda device: 0)
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ColumnsKernels, "_get", lambda *_: lambda *args: given.append(args))
    tensors = op.matmul(None, None, None, dtype="float16", **TURNED)
    rows = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Rows()}, target=H200)
    dispatcher: Any = rows._dispatcher
    sizes = {"m": 64, "n": 64, "k": 64}
    plan = rows.explain(sparsity=np.arange(9), sizes=sizes, library="torch")
    launch = dispatcher._kernel(plan.choice)
    for device in (0, 0, 1):
        launch(Kept(device), "ids", "count", "rhs", "out")
    first, again, other = (args[4] for args in given)
    assert first is again is not other and given[0][1:4] + given[0][-1:] == (
        *("ids", "count", "rhs"),
        "out",
    )
    shape = columns_tile(plan.choice.tile).parts_shape
    assert [(k.size, k.zeroed) for k in made] == 2 * [(np.prod(shape), 0), (shape[0], 1)]


# --------------------------------------------------------------------------------------------
# Results, on a GPU


OPTIONS: list[tuple[int, str, dict[str, Any]]] = [
    (32, "lhs", TURNED),
    (64, "lhs", {**TURNED, "dtype": "bfloat16", "bias": True, "activation": "relu"}),
    (128, "lhs", TURNED),
    (32, "lhs", {"bias": True, "activation": "relu"}),
    (64, "lhs", {**LINEAR, "dtype": "bfloat16"}),
    (32, "rhs", {**LINEAR, "bias": True, "activation": "relu"}),
    (64, "rhs", TURNED),
    (128, "rhs", {"dtype": "bfloat16", "bias": True}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("height", "side", "options"), OPTIONS)
def test_products_of_random_shapes_and_patterns(
    cache: KernelCache, height: int, side: str, options: dict[str, Any]
) -> None:
    spec = spec_of(height, side, options)
    made = operator(spec, side, cache, **options)
    rng = np.random.default_rng(height)
    fixed = [((1, 1, 1), 0.0), ((height, 8, 64), 0.0), ((8 * height, 264, 72), 1.0)]
    many = [((300 * height, 520, 40), zeros) for zeros in (0.97, 1.0)]  # tiles for every CTA
    drawn = [(tuple(int(x) for x in rng.integers(1, 700, 3)), z) for z in (0.3, 0.9, 0.97, 0.99)]
    for seed, (sizes, zeros) in enumerate([*fixed, *drawn, *many, ((300, 512, 4000), 0.5)]):
        high, wide, k = sizes
        sizes = (high, wide, k) if side == "lhs" else (wide, high, k)
        case = Case(spec, side, sizes, zeros, seed, **options)
        for at in range(len(made._dispatcher.planner.tiles)):
            case.out.fill_(torch.nan)
            run = made._dispatcher.run
            run(case.arrays, case.value, case.out, choose=lambda plan, at=at: tiled(plan, at))
            assert case.error() < 4, (sizes, zeros, at)


@pytest.mark.gpu
def test_calls_choose_and_agree_whatever_they_choose(cache: KernelCache) -> None:
    spec = pit_tvm.Mask(1, 64)
    made = operator(spec, "lhs", cache, **TURNED)
    for zeros in (0.99, 0.0):
        case = Case(spec, "lhs", (512, 512, 512), zeros, 5, **TURNED)
        for _ in range(20):
            out = made(*case.arrays, sparsity=case.value)
        case.out = out
        assert case.error() < 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("side", "options"), [("lhs", {}), ("lhs", TURNED), ("rhs", {}), ("rhs", LINEAR)]
)
def test_masks_change_in_a_graph_without_a_word_to_the_host(
    cache: KernelCache, side: str, options: dict[str, Any]
) -> None:
    spec = spec_of(32, side, options)
    made = operator(spec, side, cache, **options)
    cases = [
        Case(spec, side, (448, 520, 392), zeros, seed, **options)
        for seed, zeros in enumerate((0.9, 0.2, 1.0))
    ]
    check_replays(made, cases)


class Existing(Case):
    """Rows of k of both operands that exist, ``share`` of them, named by ids or, ``padded``, as one
    sequence; the others hold NaN."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        share: float,
        seed: int,
        padded: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(pit_tvm.Mask(1, 1), "lhs", sizes, 0.0, seed, **TURNED, **options)
        rng, k = np.random.default_rng(seed), sizes[2]
        live = round(share * k)
        ids = np.arange(live) if padded else rng.permutation(k)[:live]
        lhs, rhs, *bias = self.arrays
        self.want = (lhs[ids].double().t() @ rhs[ids].double()).cpu().numpy()
        if bias:
            self.want = np.maximum(self.want + bias[0].double().cpu().numpy(), 0)
        dead = np.setdiff1d(np.arange(k), ids)
        lhs[dead] = rhs[dead] = torch.nan
        named = np.full(k, -1)
        named[:live] = ids
        self.value = torch.tensor([live] if padded else named, dtype=torch.int32, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
def test_products_over_rows_of_k_that_exist(cache: KernelCache, padded: bool) -> None:
    own = {"dtype": "bfloat16", "bias": True, "activation": "relu"} if padded else {}
    tensors = op.matmul(None, None, None, **{"dtype": "float16", **TURNED, **own})
    spec = pit_tvm.Lengths() if padded else pit_tvm.Rows()
    made = pit_tvm.compile(
        tensors, sparse={"lhs": spec}, target="cuda", cache=cache, deterministic=True
    )
    rng = np.random.default_rng(7)
    drawn = [tuple(int(x) for x in rng.integers(1, 700, 3)) for _ in range(3)]
    fixed = [(1, 1, 1), (136, 264, 9000), (1000, 2056, 3000), (768, 3072, 4096), (64, 8, 20000)]
    for sizes in (*fixed, *drawn):
        for seed, share in enumerate((0.0, 1 / sizes[2], 0.4, 1.0)):
            case = Existing(sizes, share, seed, padded, **own)
            for tile in made._dispatcher.planner.tiles:
                sums = []
                for _ in range(2):  # the same whoever comes first, and whatever plans know by then
                    case.out.fill_(torch.nan)
                    run = made._dispatcher.run
                    run(case.arrays, case.value, case.out, choose=by_tile(tile))
                    assert case.error() < 4, (sizes, share, str(tile))
                    sums.append(case.out.clone())
                assert torch.equal(*sums)


@pytest.mark.gpu
def test_rows_of_k_change_in_a_graph(cache: KernelCache) -> None:
    tensors = op.matmul(None, None, None, dtype="float16", **TURNED)
    made = pit_tvm.compile(tensors, sparse={"rhs": pit_tvm.Rows()}, target="cuda", cache=cache)
    cases = [Existing((448, 520, 9000), share, 3) for share in (0.9, 0.2, 0.0)]
    check_replays(made, cases)
