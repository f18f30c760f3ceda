"""The GPU's family of live pieces of rows: programs, plans, lines of bits, on a GPU its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.runtime import cuda_bind, cuda_detect
from pit_tvm.runtime.cuda_modules import CudaKernels
from pit_tvm.runtime.cuda_piece_form import PiecesForm, pieces_form
from pit_tvm.runtime.cuda_pieces import PiecesDispatcher, PiecesKernels
from pit_tvm.runtime.cuda_watch import CountWatch
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.program import analyse
from pit_tvm.schedules.hopper_piece_parts import PIECES, STARTING
from pit_tvm.structs import SparsitySpec
from tests.runtime.cuda_products import memory, roundings, tiled
from tests.runtime.test_cuda_blocks import FULL, LINEAR, TURNED, Case, operator

torch = pytest.importorskip("torch")


def form(spec: SparsitySpec, sparse: str = "lhs", **options: Any) -> Any:
    tensors = op.matmul(None, 64, None, **{"dtype": "float16", **options})
    return pieces_form(analyse(tensors, {sparse: spec}))


# --------------------------------------------------------------------------------------------
# Which programs


@pytest.mark.parametrize(
    ("spec", "side", "options"),
    [
        (pit_tvm.Mask(1, 64), "lhs", {}),
        (pit_tvm.Mask(1, 32), "lhs", {"bias": True, "activation": "gelu"}),
        (pit_tvm.BlockMask(1, 64), "lhs", {**LINEAR, "bias": True}),
        (pit_tvm.BitMask(2, 128), "lhs", LINEAR),
        (pit_tvm.Values(1, 512), "lhs", {}),
        (pit_tvm.Mask(64, 1), "lhs", TURNED),
        (pit_tvm.BlockMask(32, 1), "lhs", {**TURNED, **LINEAR, "bias": True}),
        (pit_tvm.Mask(1, 64), "rhs", {**LINEAR, "bias": True}),
        (pit_tvm.BitMask(1, 32), "rhs", {**TURNED, **LINEAR}),
        (pit_tvm.Mask(64, 2), "rhs", {}),
        (pit_tvm.Values(64, 1), "rhs", {**TURNED, "bias": True, "activation": "relu"}),
    ],
)
def test_pieces_are_taken_on_either_side_and_of_either_layout(
    spec: SparsitySpec, side: str, options: dict[str, Any]
) -> None:
    found = form(spec, side, **options)
    assert isinstance(found, PiecesForm)
    assert (found.side, found.lhs, found.rhs) == (side, "lhs", "rhs")
    assert found.rhs_layout == ("nk" if "transpose_rhs" in options else "kn")
    assert found.transposed == ("transpose_lhs" in options)
    wide = spec.extents[0] > spec.extents[1]  # type: ignore[attr-defined]
    assert found.turns == wide
    assert found.route.micro_tile.axis == ("m" if side == "lhs" else "n")
    assert found.route.micro_tile.extents == ((64, 1) if wide else (1, 64))
    beside = "kn" if found.transposed else "nk"  # as if all were turned
    assert found.options == {
        "bias": "bias" in options,
        "act": options.get("activation") or "none",
        "rhs_layout": found.rhs_layout if side == "lhs" else beside,
        "flip": side == "rhs",
    }


@pytest.mark.parametrize(
    ("spec", "sparse", "options"),
    [
        (pit_tvm.Mask(1, 16), "lhs", {}),
        (pit_tvm.Mask(1, 1024), "lhs", {}),
        (pit_tvm.Mask(4, 64), "lhs", {}),
        (pit_tvm.Mask(1, 64), "lhs", TURNED),
        (pit_tvm.Mask(64, 1), "rhs", LINEAR),
        (pit_tvm.Mask(64, 4), "rhs", {}),
        (pit_tvm.BlockMask(2, 64), "lhs", {}),
        (pit_tvm.Values(), "lhs", {}),
        (pit_tvm.Rows(), "lhs", {}),
        (pit_tvm.Mask(1, 64), "lhs", {"dtype": "float32"}),
        (pit_tvm.Mask(1, 64), "lhs", {"out_dtype": "float32"}),
    ],
)
def test_other_patterns_and_types_are_left_to_other_families(
    spec: SparsitySpec, sparse: str, options: dict[str, Any]
) -> None:
    assert form(spec, sparse, **options) is None


# --------------------------------------------------------------------------------------------
# Plans


@pytest.mark.parametrize(("side", "turns"), [("lhs", False), ("rhs", True)])
def test_plans_weigh_live_pieces_against_dense(side: str, turns: bool) -> None:
    made = operator(pit_tvm.Mask(*((64, 1) if turns else (1, 64))), side)
    assert isinstance(made._dispatcher, PiecesDispatcher)
    kinds, tiles = {}, {}
    for zeros in (0.0, 0.9, 0.99):
        live = np.random.default_rng(3).random((4096, 64)) >= zeros
        mask, sizes = live.repeat(64, axis=1), {"m": 4096, "n": 4096, "k": 4096}
        mask = mask.T if turns else mask
        plan = made.explain(sparsity=mask, sizes=sizes, library="torch")
        assert (dict(plan.candidates[0].parts)["turn"] > 0) == turns
        assert {c.kind for c in plan.candidates} == {"pit", "dense"}
        assert plan.candidates[0].covered == pytest.approx(live.mean())
        kinds[zeros], tiles[zeros] = plan.choice.kind, plan.candidates[0].tile
    assert kinds == {0.0: "dense", 0.9: "pit", 0.99: "pit"}
    assert tiles[0.9] != tiles[0.99]  # fewer live rows let a CTA hold more of them


def test_a_plan_is_made_before_any_count_is_known_and_without_any_depth() -> None:
    made = operator(pit_tvm.BlockMask(1, 64))._dispatcher
    layout = made.binder.layout_of({"m": 320, "n": 512, "k": 1000}, "torch")
    assert made.planner.plan(layout, None) is made.planner.plan(layout, None)
    assert {tile.family for tile in made.planner.likely_tiles(layout)} == {PIECES}
    hollow = made.binder.layout_of({"m": 320, "n": 512, "k": 0}, "torch")
    assert made.planner.plan(hollow, ()).choice.kind == "dense"


def test_building_asks_for_every_kernel_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(PiecesKernels, "_build", lambda self, func: asked.append("product"))
    made = operator(pit_tvm.Mask(64, 1), "rhs")
    monkeypatch.setattr(made._dispatcher, "modules", lambda name, make: asked.append(name))
    monkeypatch.setattr(made._dispatcher.kernels.cache, "get", lambda key, build: build())
    made.build({"m": 256, "n": 256, "k": 256})
    assert asked.count("product") == len(STARTING) + 1 and "cuda-blocks" in asked


# --------------------------------------------------------------------------------------------
# What a call hands to the kernels


def bits_of(words: np.ndarray) -> np.ndarray:
    """Live positions that lines of bits name."""
    return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(bool)


@pytest.mark.parametrize(
    ("spec", "side", "options"),
    [
        (pit_tvm.Mask(1, 64), "lhs", {}),
        (pit_tvm.BlockMask(1, 32), "lhs", {"bias": True}),
        (pit_tvm.Mask(64, 1), "lhs", {**TURNED, **LINEAR}),
        (pit_tvm.Mask(1, 64), "rhs", {**LINEAR, "bias": True}),
        (pit_tvm.BlockMask(32, 1), "rhs", TURNED),
    ],
)
def test_calls_hand_lines_of_bits_to_the_kernel(
    monkeypatch: pytest.MonkeyPatch, spec: Any, side: str, options: dict[str, Any]
) -> None:
    high, wide, k = 696, 24, 200  # pieces of a step, and what they are multiplied by
    rng, deep = np.random.default_rng(1), max(spec.extents)
    told = rng.random((high, -(-k // deep))) >= 0.7
    mask = told.repeat(deep, axis=1)[:, :k]
    live = np.add.reduceat(mask, np.arange(0, k, 64), axis=1).T > 0  # [steps, high]
    sparse, beside = rng.standard_normal((high, k)) * mask, rng.standard_normal((wide, k))
    lhs, rhs = (sparse, beside) if side == "lhs" else (beside, sparse)  # [m, k], [n, k]
    made = [lhs.T if "transpose_lhs" in options else lhs]
    made += [rhs if "transpose_rhs" in options else rhs.T]
    made += [rng.standard_normal(len(rhs))] * ("bias" in options)
    arrays = [torch.from_numpy(array.astype(np.float16, order="C")) for array in made]
    given = told if isinstance(spec, pit_tvm.BlockMask) else mask
    turns = spec.extents[0] > 1
    value = torch.from_numpy(np.ascontiguousarray(given.T if turns else given))
    turned = []

    def fold(address: int, *numbers: Any) -> None:
        assert address == value.data_ptr()
        packed = np.packbits(np.pad(live, ((0, 0), (0, 8))), axis=1, bitorder="little")
        numbers[-1].numpy()[...] = np.ascontiguousarray(packed).view(np.uint32)

    def turn(source: Any, lines: Any, grain: int, out: Any) -> None:
        assert grain == 1
        alive = bits_of(memory(lines))[:, :high].T.repeat(64, axis=1)[:, :k]
        memory(out)[...] = np.where(alive, memory(source).T, np.nan)
        turned.append(out)

    def product(self: Any, tile: Any, groups: int, **given: Any) -> Any:
        def run(lhs: Any, lines: Any, most: int, *rest: Any) -> None:
            left, words, right, *bias, out = map(memory, (lhs, lines, *rest))
            assert most % 32 == 0 and most <= tile.tile_m and words.shape == (4, 22)
            assert len(bias) == given["bias"] and given["flip"] == (side == "rhs")
            right = right if given["rhs_layout"] == "kn" else right.T
            sums = np.zeros((high, wide))
            for step, alive in enumerate(bits_of(words)):
                rows, depth = np.flatnonzero(alive), slice(step * 64, step * 64 + 64)
                sums[rows] += left[rows, depth].astype(np.float64) @ right[depth].astype(np.float64)
            out[...] = (sums.T if given["flip"] else sums) + (bias[0] if bias else 0.0)

        return run

    monkeypatch.setattr(CudaKernels, "mask", lambda self, name: fold)
    monkeypatch.setattr(PiecesKernels, "product", product)
    monkeypatch.setattr(PiecesKernels, "turn_live", lambda self, dtype, band: turn)
    monkeypatch.setattr(CountWatch, "due", lambda self: False)
    for module in (cuda_bind, cuda_detect):
        monkeypatch.setattr(module, "check_tensor", lambda *given, **options: None)
    out = torch.full((len(lhs), len(rhs)), torch.nan, dtype=torch.float16)
    operator(spec, side, **options)._dispatcher.run(arrays, value, out, choose=tiled)
    assert len(turned) == turns
    bias = arrays[2].double().numpy() if "bias" in options else 0.0
    want = lhs.astype(np.float16).astype(float) @ rhs.astype(np.float16).astype(float).T
    assert roundings(out, want + bias) < 2


# --------------------------------------------------------------------------------------------
# Results, on a GPU


CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (pit_tvm.Mask(1, 64), "lhs", {}),
    (pit_tvm.BlockMask(1, 32), "lhs", {**LINEAR, **FULL}),
    (pit_tvm.BitMask(1, 128), "lhs", FULL),
    (pit_tvm.Values(1, 64), "lhs", LINEAR),
    (pit_tvm.Mask(64, 1), "lhs", {**TURNED, **FULL}),
    (pit_tvm.Mask(1, 64), "rhs", {**LINEAR, **FULL}),
    (pit_tvm.BlockMask(64, 1), "rhs", {}),
    (pit_tvm.Mask(32, 1), "rhs", {**TURNED, "bias": True, "activation": "relu"}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "side", "options"), CASES)
def test_products_of_random_shapes_and_patterns(
    cache: KernelCache, spec: Any, side: str, options: dict[str, Any]
) -> None:
    made = operator(spec, side, cache, **options)
    rng = np.random.default_rng(max(spec.extents))
    fixed = [((1, 1, 1), 0.0), ((64, 8, 64), 0.0), ((264, 520, 72), 1.0), ((3000, 512, 900), 0.5)]
    drawn = [(tuple(int(x) for x in rng.integers(1, 700, 3)), z) for z in (0.3, 0.9, 0.97)]
    # Rows with and without slots, several walks of a tile, and several ranges of rows.
    high = [((4096, 4096, 192), 0.9), ((4096, 512, 2048), 0.975), ((9000, 136, 4096), 0.99)]
    for seed, (sizes, zeros) in enumerate([*fixed, *drawn, *high]):
        case = Case(spec, side, sizes, zeros, seed, **options)
        for at in range(len(STARTING)):
            case.out.fill_(torch.nan)
            run = made._dispatcher.run
            run(case.arrays, case.value, case.out, choose=lambda plan, at=at: tiled(plan, at))
            assert case.error() < 4, (sizes, zeros, at)


@pytest.mark.gpu
def test_calls_choose_agree_whatever_they_choose_and_repeat_themselves(cache: KernelCache) -> None:
    spec = pit_tvm.Mask(1, 64)
    made = operator(spec, "lhs", cache)
    for zeros in (0.99, 0.0):
        case = Case(spec, "lhs", (1024, 1024, 1024), zeros, 5)
        first = made(*case.arrays, sparsity=case.value)
        for _ in range(20):
            case.out = made(*case.arrays, sparsity=case.value)
        assert case.error() < 4
        assert zeros == 0.0 or torch.equal(first, case.out)  # sums have one order


@pytest.mark.gpu
def test_wrong_masks_and_operands_without_depth_are_refused(cache: KernelCache) -> None:
    spec = pit_tvm.Mask(1, 64)
    made = operator(spec, "lhs", cache, **FULL)
    case = Case(spec, "lhs", (512, 256, 448), 0.7, 1, **FULL)
    with pytest.raises(ShapeError, match="sparsity of lhs"):
        made._dispatcher.run(case.arrays, case.value[:4], case.out, choose=tiled)
    with pytest.raises(DTypeError, match="sparsity of lhs"):
        made._dispatcher.run(case.arrays, case.value.int(), case.out, choose=tiled)
    case = Case(spec, "lhs", (24, 16, 0), 0.0, 1, **FULL)
    with pytest.raises(ShapeError, match="extent k: expected at least 1"):
        made(*case.arrays, sparsity=case.value)
