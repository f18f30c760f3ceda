"""The GPU's family of live blocks: which programs it takes, its plans, and on a GPU its results."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.runtime import cuda_bind, cuda_detect
from pit_tvm.runtime.cuda_block_form import BlocksForm, blocks_form
from pit_tvm.runtime.cuda_block_map import BlockMap, BlockMapper
from pit_tvm.runtime.cuda_blocks import BlocksDispatcher, BlocksKernels
from pit_tvm.runtime.cuda_fill import CudaFill, stepped
from pit_tvm.runtime.cuda_watch import CountWatch
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.program import analyse
from pit_tvm.schedules.hopper_block_parts import BLOCKS
from pit_tvm.structs import MicroTile, SparsitySpec
from tests.runtime.cuda_products import check_replays, memory, roundings, tiled

torch = pytest.importorskip("torch")

H200 = "cuda -arch=sm_90a -model=h200"
TURNED = {"transpose_lhs": True}
LINEAR = {"transpose_rhs": True}


def form(spec: SparsitySpec, sparse: str = "lhs", dtype: str = "float16", **options: Any) -> Any:
    return blocks_form(analyse(op.matmul(None, 64, None, dtype=dtype, **options), {sparse: spec}))


def operator(
    spec: SparsitySpec, side: str = "lhs", cache: Any = None, **options: Any
) -> pit_tvm.Operator:
    tensors = op.matmul(None, None, None, **{"dtype": "float16", **options})
    target = H200 if cache is None else "cuda"
    return pit_tvm.compile(tensors, sparse={side: spec}, target=target, cache=cache)


# --------------------------------------------------------------------------------------------
# Which programs


@pytest.mark.parametrize(
    ("spec", "sparse", "options", "height"),
    [
        (pit_tvm.Mask(64, 64), "lhs", {}, 64),
        (pit_tvm.BlockMask(256, 64), "lhs", {"bias": True, "activation": "gelu"}, 128),
        (pit_tvm.BitMask(96, 128), "lhs", LINEAR, 32),
        (pit_tvm.Values(64, 32), "lhs", TURNED, 32),
        (pit_tvm.Mask(64, 32), "rhs", {}, 32),
        (pit_tvm.BlockMask(256, 64), "rhs", {**LINEAR, "bias": True}, 256),
        (pit_tvm.Mask(64, 32), "rhs", {**TURNED, **LINEAR, "activation": "relu"}, 64),
    ],
)
def test_blocks_along_k_are_taken_on_either_side(
    spec: SparsitySpec, sparse: str, options: dict[str, Any], height: int
) -> None:
    found = form(spec, sparse, **options)
    assert isinstance(found, BlocksForm)
    assert (found.side, found.lhs, found.rhs) == (sparse, "lhs", "rhs")
    assert found.height == height
    assert found.transposed == ("transpose_lhs" in options)
    assert found.rhs_layout == ("nk" if "transpose_rhs" in options else "kn")
    assert found.route.micro_tile.axis == "k" and height in found.route.micro_tile.extents
    assert found.act == (options.get("activation") or "none")
    assert found.bias == ("bias" if options.get("bias") else "")


@pytest.mark.parametrize(
    ("spec", "sparse", "options"),
    [
        (pit_tvm.Mask(64, 1), "lhs", {}),
        (pit_tvm.Mask(64, 32), "lhs", {}),
        (pit_tvm.Mask(16, 64), "lhs", {}),
        (pit_tvm.Values(), "lhs", TURNED),
        (pit_tvm.Rows(), "lhs", {}),
        (pit_tvm.Mask(64, 1), "rhs", LINEAR),
        (pit_tvm.Mask(16, 64), "rhs", LINEAR),
        (pit_tvm.BlockMask(64, 32), "rhs", LINEAR),
        (pit_tvm.Mask(64, 64), "rhs", {"dtype": "float32"}),
        (pit_tvm.Mask(64, 64), "lhs", {"out_dtype": "float32"}),
    ],
)
def test_other_patterns_and_types_are_left_to_other_families(
    spec: SparsitySpec, sparse: str, options: dict[str, Any]
) -> None:
    assert form(spec, sparse, **options) is None


def test_places_in_a_block_mask_fit_32_bits() -> None:
    spec, micro_tile = pit_tvm.BlockMask(64, 64), MicroTile("lhs", "k", 1, (64, 1))
    mapper: Any = BlockMapper(print, spec, micro_tile)
    far = torch.empty_strided((64, 64), (2**26, 1), dtype=torch.bool, device="meta")
    for mask, size, places in (
        (far[:32], 31 * 2**26 + 64, (1, 1, 2**26, 1)),
        (far, 64 * 64, (1, 1, 64, 1)),  # of a copy
    ):
        found = mapper._given(spec, mask)
        assert (found.size, found.places) == (size, places)


# --------------------------------------------------------------------------------------------
# Plans


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_plans_weigh_live_blocks_against_dense(side: str) -> None:
    made = operator(pit_tvm.Mask(64, 64), side)
    kinds = {}
    for zeros in (0.0, 0.95):
        blocks = np.random.default_rng(3).random((32, 32)) >= zeros
        mask = blocks.repeat(64, axis=0).repeat(64, axis=1)
        sizes = {"m": 2048, "n": 2048, "k": 2048}
        plan = made.explain(sparsity=mask, sizes=sizes, library="torch")
        assert {c.kind for c in plan.candidates} == {"pit", "dense"}
        assert plan.candidates[0].covered == pytest.approx(blocks.mean())
        kinds[zeros] = plan.choice.kind
    assert kinds == {0.0: "dense", 0.95: "pit"}


def test_a_plan_is_made_before_any_count_is_known_and_kept_for_counts_alike() -> None:
    made = operator(pit_tvm.BlockMask(64, 64))._dispatcher
    assert isinstance(made, BlocksDispatcher)
    layout = made.binder.layout_of({"m": 320, "n": 512, "k": 1000}, "torch")
    planner = made.planner
    assert planner.plan(layout, None) is planner.plan(layout, None)
    assert planner.plan(layout, (2,) * 5) is not planner.plan(layout, (16,) * 5)
    assert {tile.family for tile in planner.likely_tiles(layout)} == {BLOCKS}


def test_a_block_mask_is_read_by_the_product_itself() -> None:
    sizes, index = {"m": 512, "n": 512, "k": 512}, {}
    for spec, shape in ((pit_tvm.Mask(64, 64), (512, 512)), (pit_tvm.BlockMask(64, 64), (8, 8))):
        plan = operator(spec).explain(sparsity=np.ones(shape, bool), sizes=sizes, library="torch")
        index[type(spec)] = dict(plan.candidates[0].parts)["index"]
    assert index[pit_tvm.BlockMask] == 0 < index[pit_tvm.Mask]


def test_building_asks_for_every_kernel_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(BlocksKernels, "_build", lambda self, func: asked.append("product"))
    made = operator(pit_tvm.Mask(128, 64), "rhs")
    monkeypatch.setattr(made._dispatcher, "modules", lambda name, make: asked.append(name))
    monkeypatch.setattr(made._dispatcher.kernels.cache, "get", lambda key, build: build())
    made.build({"m": 256, "n": 256, "k": 256})
    assert asked.count("product") == 2 and "cuda-blocks" in asked


TOLD = [
    (torch.float16, "map_blocks_16", 2, 0x7FFF7FFF),
    (torch.int16, "map_blocks_16", 2, -1),
    (torch.uint8, "map_blocks_8", 1, -1),
    (torch.bool, "map_blocks_8", 1, -1),
    (torch.float8_e4m3fn, "map_blocks_8", 1, 0x7F7F7F7F),
    (torch.float32, "map_blocks_8", 1, -1),  # by way of what is not zero
    (torch.float64, "map_blocks_8", 1, -1),
    (torch.int32, "map_blocks_8", 1, -1),
    (torch.int64, "map_blocks_8", 1, -1),
]


@pytest.mark.parametrize(("dtype", "kernel", "item", "keep"), TOLD)
def test_values_are_read_by_the_type_that_tells_them(
    dtype: Any, kernel: str, item: int, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def fold(name: str) -> Any:
        def launch(address: int, stride: int, *numbers: Any) -> None:
            size = 256 * 256 * item
            raw = np.frombuffer(ctypes.string_at(address, size), np.uint8)
            seen.append((name, stride, numbers[-2], raw.any()))

        return launch

    monkeypatch.setattr(cuda_detect, "check_tensor", lambda *given: None)
    made = operator(pit_tvm.Values(64, 64))._dispatcher
    assert isinstance(made, BlocksDispatcher)
    monkeypatch.setattr(made.mapper._kernels, "blocks", fold)
    told = torch.zeros(256, 256)
    told[200, 100] = 1
    found = made.mapper.map(told.to(dtype), (256, 256))
    assert found.tensor.shape == (4, 4) and seen == [(kernel, 256 * item, keep, True)]


@pytest.mark.parametrize("wide", [24, 20])  # rows of whole pieces of 16 bytes, and others
def test_calls_hand_the_map_to_the_kernel(monkeypatch: pytest.MonkeyPatch, wide: int) -> None:
    rng = np.random.default_rng(wide)
    lives = rng.random((3, 2)) < 0.5
    lhs = rng.standard_normal((192, 128)) * lives.repeat(64, axis=0).repeat(64, axis=1)
    rhs, bias = rng.standard_normal((128, wide)), rng.standard_normal(wide)
    arrays = [torch.from_numpy(array.astype(np.float16)) for array in (lhs, rhs, bias)]

    def product(self: Any, tile: Any, groups: int, **given: Any) -> Any:
        def run(own: Any, blocks: Any, *rest: Any) -> None:
            left, (right, (row,), out) = memory(own), map(memory, rest[-3:])
            assert blocks is found.views[0] and rest[:-3] == found.places
            out[...] = left.astype(float) @ right.astype(float) + row

        return run

    def padded(self: Any, array: Any) -> Any:
        made = torch.zeros(stepped(array.shape), dtype=array.dtype)
        made[: array.shape[0], : array.shape[1]] = array
        return made

    def pad_copy(self: Any, source: Any, made: Any) -> None:
        made[...] = source[:, : made.shape[1]]

    found = BlockMap(torch.from_numpy(lives), lives.size, (2, 1, 1, 1))
    monkeypatch.setattr(BlockMapper, "map", lambda *given: found)
    monkeypatch.setattr(CountWatch, "due", lambda self: False)
    monkeypatch.setattr(cuda_bind, "check_tensor", lambda *given, **options: None)
    monkeypatch.setattr(CudaFill, "padded", padded)
    monkeypatch.setattr(CudaFill, "pad_copy", pad_copy)
    monkeypatch.setattr(BlocksKernels, "product", product)
    out = torch.full((192, wide), torch.nan, dtype=torch.float16)
    made = operator(pit_tvm.BlockMask(64, 64), bias=True)
    made._dispatcher.run(arrays, torch.from_numpy(lives), out, choose=tiled)
    own, other, row = (array.double().numpy() for array in arrays)
    assert roundings(out, own @ other + row) < 2


# --------------------------------------------------------------------------------------------
# Results, on a GPU


class Case:
    """Random arrays; blocks of one operand live or die."""

    def __init__(
        self, spec: Any, side: str, sizes: tuple[int, int, int], zeros: float, seed: int, **o: Any
    ) -> None:
        m, n, k = sizes
        rng = np.random.default_rng(seed)
        self.spec, dtype = spec, getattr(torch, o.get("dtype", "float16"))
        lhs = rng.standard_normal((k, m) if o.get("transpose_lhs") else (m, k))
        rhs = rng.standard_normal((n, k) if o.get("transpose_rhs") else (k, n)) / k**0.5
        sparse = lhs if side == "lhs" else rhs
        blocks = [-(-s // e) for s, e in zip(sparse.shape, spec.extents, strict=True)]
        live = rng.random(blocks) >= zeros
        mask = live
        for axis, extent in enumerate(spec.extents):
            mask = mask.repeat(extent, axis)
        mask = np.ascontiguousarray(mask[: sparse.shape[0], : sparse.shape[1]])
        sparse *= mask
        told = live if isinstance(spec, pit_tvm.BlockMask) else mask
        if isinstance(spec, pit_tvm.BitMask):
            told = np.packbits(mask, axis=-1, bitorder="little")
        arrays = [lhs, rhs, *[rng.standard_normal(n)] * bool(o.get("bias"))]
        self.arrays = [torch.from_numpy(a).to(dtype).cuda() for a in arrays]
        self.value = torch.from_numpy(told).cuda()
        if isinstance(spec, pit_tvm.Values):
            self.value = self.arrays[0 if side == "lhs" else 1]
        left, right, *bias = (a.double().cpu().numpy() for a in self.arrays)
        left = left.T if o.get("transpose_lhs") else left
        self.want = left @ (right.T if o.get("transpose_rhs") else right)
        if bias:
            self.want = self.want + bias[0]
        if o.get("activation") == "relu":
            self.want = np.maximum(self.want, 0)
        self.out = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")

    def error(self) -> float:
        """Of the whole output."""
        return roundings(self.out, self.want)


FULL = {"dtype": "bfloat16", "bias": True, "activation": "relu"}
CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (pit_tvm.Mask(64, 64), "lhs", {}),
    (pit_tvm.BlockMask(64, 32), "lhs", {**TURNED, **LINEAR, **FULL}),
    (pit_tvm.BlockMask(256, 128), "lhs", {}),
    (pit_tvm.Values(32, 64), "rhs", {**LINEAR, **FULL}),
    (pit_tvm.BitMask(32, 64), "rhs", {}),
    (pit_tvm.BlockMask(256, 64), "rhs", LINEAR),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "side", "options"), CASES)
def test_products_of_random_shapes_and_patterns(
    cache: KernelCache, spec: Any, side: str, options: dict[str, Any]
) -> None:
    made = operator(spec, side, cache, **options)
    rng = np.random.default_rng(max(spec.extents))
    fixed = [((1, 1, 1), 0.0), ((64, 8, 64), 0.0), ((264, 520, 72), 1.0), ((300, 512, 9000), 0.5)]
    drawn = [(tuple(int(x) for x in rng.integers(1, 700, 3)), z) for z in (0.3, 0.9, 0.97)]
    for seed, (sizes, zeros) in enumerate([*fixed, *drawn, ((4096, 4096, 192), 0.9)]):
        case = Case(spec, side, sizes, zeros, seed, **options)
        for at in range(1 if spec.extents == (256, 64) else 2):
            case.out.fill_(torch.nan)
            run = made._dispatcher.run
            run(case.arrays, case.value, case.out, choose=lambda plan, at=at: tiled(plan, at))
            assert case.error() < 4, (sizes, zeros, at)


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_calls_choose_and_agree_whatever_they_choose(cache: KernelCache, side: str) -> None:
    made = operator(pit_tvm.Mask(64, 64), side, cache)
    for zeros in (0.99, 0.0):
        case = Case(pit_tvm.Mask(64, 64), side, (512, 512, 512), zeros, 5)
        for _ in range(20):
            case.out = made(*case.arrays, sparsity=case.value)
        assert case.error() < 4


@pytest.mark.gpu
def test_masks_of_any_strides_and_wrong_ones(cache: KernelCache) -> None:
    spec = pit_tvm.BlockMask(64, 64)
    made = operator(spec, "lhs", cache)
    case = Case(spec, "lhs", (512, 256, 448), 0.7, 1)
    strided = torch.zeros((7, 24), dtype=torch.bool, device="cuda").T[::3]
    strided.copy_(case.value)
    made._dispatcher.run(case.arrays, strided, case.out, choose=tiled)
    assert case.error() < 4
    with pytest.raises(ShapeError, match="sparsity of lhs"):
        made._dispatcher.run(case.arrays, strided[:4], case.out, choose=tiled)
    with pytest.raises(DTypeError, match="sparsity of lhs"):
        made._dispatcher.run(case.arrays, strided.int(), case.out, choose=tiled)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "side"),
    [
        *((pit_tvm.Mask(64, 32), "rhs"), (pit_tvm.BlockMask(64, 32), "rhs")),
        *((pit_tvm.Mask(1, 64), "lhs"), (pit_tvm.BlockMask(1, 64), "lhs")),  # of live pieces
    ],
)
def test_masks_change_in_a_graph_without_a_word_to_the_host(
    cache: KernelCache, spec: Any, side: str
) -> None:
    made = operator(spec, side, cache)
    cases = [Case(spec, side, (448, 520, 392), zeros, i) for i, zeros in enumerate((0.9, 0.2, 1))]
    check_replays(made, cases)
