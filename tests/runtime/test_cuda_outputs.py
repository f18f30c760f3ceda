"""Sparse outputs on a GPU: which programs, plans without one, and on one results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import te

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import ShapeError, UnsupportedTarget
from pit_tvm.runtime import cuda_bind
from pit_tvm.runtime.cuda_detect import CudaDetector
from pit_tvm.runtime.cuda_general_planner import GeneralPlanner
from pit_tvm.runtime.cuda_outputs import OutputsDispatcher, OutputsForm, outputs_form
from pit_tvm.runtime.cuda_rows import RowsKernels
from pit_tvm.runtime.cuda_watch import CountWatch
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.program import analyse
from pit_tvm.structs import BitMask, BlockMask, Candidate, Mask, Plan, SparsitySpec
from tests.runtime.cuda_products import check_replays, find_on_cpu, memory, roundings

torch = pytest.importorskip("torch")

H200 = "cuda -arch=sm_90a -model=h200"
LINEAR = {"transpose_rhs": True, "bias": True, "activation": "relu"}
TURNED = {"transpose_lhs": True}


def form(spec: SparsitySpec, operand: str = "out", **options: Any) -> OutputsForm | None:
    return outputs_form(analyse(op.matmul(None, None, 256, **options), {operand: spec}))


def operator(spec: SparsitySpec, dead: str = "skip", cache: Any = None, **o: Any) -> Any:
    tensors = op.matmul(None, None, None, **{"dtype": "float16", **o})
    target = H200 if cache is None else "cuda"
    return pit_tvm.compile(tensors, sparse={"out": spec}, dead=dead, target=target, cache=cache)


def plan(made: Any, zeros: float, sizes: tuple[int, int, int] = (4096, 4096, 4096)) -> Plan:
    m, n, _ = sizes
    live = np.random.default_rng(0).random((-(-m // 64), -(-n // 64))) >= zeros
    result: Plan = made.explain(sparsity=live, sizes=dict(zip("mnk", sizes, strict=True)))
    return result


@pytest.mark.parametrize(
    ("spec", "options", "slot"),
    [
        (BlockMask(64, 64), {}, 64),
        (Mask(1, 256), LINEAR, 128),
        (BitMask(), {"dtype": "bfloat16"}, 64),
        (Mask(16, 32), TURNED, 64),
    ],
)
def test_products_are_taken_in_slots_that_divide_the_blocks(
    spec: SparsitySpec, options: dict[str, Any], slot: int
) -> None:
    found = form(spec, **{"dtype": "float16", **options})
    assert found is not None and found.slot == slot == found.options["slot"]
    assert (found.lhs, found.rhs, found.bias) == ("lhs", "rhs", "bias" if "bias" in options else "")
    assert found.rhs_layout == ("nk" if "transpose_rhs" in options else "kn")
    assert found.transposed == found.turns == ("transpose_lhs" in options)
    assert found.route.micro_tile.extents == (1, slot) and found.route.micro_tile.axis == "m"


def test_programs_with_a_sparse_input_are_left_to_others() -> None:
    assert form(Mask(), "lhs", dtype="float16") is None


def precise() -> list[te.Tensor]:
    """A product in float64."""
    lhs, rhs = (te.placeholder((64, 64), "float64", name) for name in ("lhs", "rhs"))
    k = te.reduce_axis((0, 64), "k")
    sums = te.compute((64, 64), lambda m, n: te.sum(lhs[m, k] * rhs[k, n], axis=k), name="out")
    return [lhs, rhs, sums]


@pytest.mark.parametrize(
    ("tensors", "spec", "match"),
    [
        (op.batch_matmul(2, 64, 64, 64, dtype="float16"), Mask(), "over two dimensions"),
        (precise(), Mask(), "a sparse output of operands of one type"),
    ],
)
def test_other_outputs_say_what_would_work(tensors: Any, spec: Any, match: str) -> None:
    with pytest.raises(UnsupportedTarget, match=match):
        pit_tvm.compile(tensors, sparse={"out": spec}, target=H200)


@pytest.mark.parametrize(
    ("spec", "options", "target", "extents"),
    [
        (BlockMask(64, 64), {}, H200, (1, 64)),  # CUDA cores
        (Mask(8, 256), {"dtype": "int8", **TURNED}, H200, (1, 128)),
        (Mask(64, 1), {"dtype": "float16"}, H200, (64, 1)),  # columns are gathered
        (Mask(), {"dtype": "bfloat16"}, "cuda -arch=sm_80", (1, 64)),
    ],
)
def test_other_products_and_gpus_take_tiles_as_wide_as_a_piece(
    spec: SparsitySpec, options: dict[str, Any], target: str, extents: tuple[int, int]
) -> None:
    tensors = op.matmul(512, 512, 512, **options)
    made = pit_tvm.compile(tensors, sparse={"out": spec}, target=target)
    planner, sizes = made._dispatcher.planner, {"m": 512, "n": 512, "k": 512}
    assert isinstance(planner, GeneralPlanner)
    kinds = {}
    for zeros in (0.0, 0.95):
        grain = spec.extents or (1, 1)  # type: ignore[attr-defined]
        told = np.random.default_rng(1).random([512 // extent for extent in grain]) >= zeros
        if isinstance(spec, Mask):
            told = told.repeat(grain[0], axis=0).repeat(grain[1], axis=1)
        plan = made.explain(sparsity=told)
        tiles = {c.tile.tile_n for c in plan.candidates if c.tile}
        assert tiles == {max(extents)} == {planner.form.slot}
        assert plan.candidates[0].micro_tile.extents == extents
        kinds[zeros] = {c.kind for c in plan.candidates}
    assert kinds == {0.0: {"pit", "dense"}, 0.95: {"pit", "dense"}}
    layout = made._dispatcher.binder.layout_of(sizes, "torch")
    assert planner.plan(layout, None) and not planner.overwrites
    kept = planner.plan(layout, (3,) * (512 // max(extents)), fresh=False)
    assert {c.kind for c in kept.candidates} == {"pit"}


def test_plans_follow_the_counts_and_dense_is_for_new_outputs() -> None:
    made = operator(BlockMask(64, 64))
    assert plan(made, 0.0).choice.kind == "dense"
    tall = [plan(made, zeros).choice for zeros in (0.9, 0.95, 0.99)]
    assert [c.tile.tile_m for c in tall if c.tile] == [256, 128, 64]
    zeroed = plan(operator(BlockMask(64, 64), "zero"), 0.0)
    assert all(c.kind == "pit" for c in zeroed.candidates)
    assert dict(zeroed.choice.parts)["output"] > 0
    dispatcher = made._dispatcher
    assert isinstance(dispatcher, OutputsDispatcher)
    layout = dispatcher.binder.layout_of({"m": 128, "n": 200, "k": 64}, "torch")
    kept = dispatcher.planner.plan(layout, (0, 5, 128, 7), fresh=False)
    assert all(c.kind == "pit" for c in kept.candidates)
    assert kept is dispatcher.planner.plan(layout, (0, 5, 128, 7), fresh=False)


def test_kernels_take_so_many_slots_at_most() -> None:
    made = operator(BlockMask(64, 64))
    wide = plan(made, 0.99, (1024, 64 * 300, 1024)).choice
    assert wide.tile is not None and wide.tile.knob("most_groups") == 1024
    with pytest.raises(ShapeError, match="^out, sparse.*at most 65536 columns"):
        plan(made, 0.5, (64, 64 * 1025, 64))


class Case:
    """Random operands, a random pattern, and the float64 result; NaN where nothing is computed."""

    def __init__(
        self,
        spec: Any,
        sizes: tuple[int, int, int],
        zeros: float,
        seed: int,
        device: str = "cuda",
        **o: Any,
    ) -> None:
        (m, n, k), rng = sizes, np.random.default_rng(seed)
        high, wide = spec.extents or (1, 1)
        live = rng.random((-(-m // high), -(-n // wide))) >= zeros
        mask = np.ascontiguousarray(live.repeat(high, 0).repeat(wide, 1)[:m, :n])
        told = live if isinstance(spec, BlockMask) else mask
        if isinstance(spec, BitMask):
            told = np.packbits(mask, axis=-1, bitorder="little")
        slot = 128 if wide % 128 == 0 else 64
        starts = np.arange(0, n, slot)
        found = np.logical_or.reduceat(mask, starts, axis=1)
        pieces = found.repeat(slot, 1)[:, :n]
        arrays = [rng.standard_normal((m, k)), rng.standard_normal((k, n)) / k**0.5]
        arrays += [rng.standard_normal(n)] * bool(o.get("bias"))
        dtype = getattr(torch, o.get("dtype", "float16"))
        self.arrays = [torch.from_numpy(a).to(device, dtype) for a in arrays]
        left, right, *bias = (a.double().cpu().numpy() for a in self.arrays)
        want = np.maximum(left @ right + bias[0], 0) if bias else left @ right
        self.want, self.value = np.where(pieces, want, np.nan), torch.from_numpy(told).to(device)
        for place, name in enumerate(("transpose_lhs", "transpose_rhs")):
            if o.get(name):
                self.arrays[place] = self.arrays[place].t().contiguous()
        self.out = torch.full((m, n), torch.nan, dtype=dtype, device=device)

    def error(self) -> float:
        """Of the pieces; infinite if something else was written."""
        dead = torch.from_numpy(np.isnan(self.want)).to(self.out.device)
        if not self.out[dead].isnan().all():
            return float("inf")
        want = self.want[~np.isnan(self.want)]
        return roundings(self.out[~dead], want) if want.size else 0.0

    def zeroed(self) -> bool:
        """Whether dead pieces are zero; makes them NaN then."""
        dead = torch.from_numpy(np.isnan(self.want)).to(self.out.device)
        cleared = bool((self.out[dead] == 0).all())
        self.out[dead] = torch.nan
        return cleared


# --------------------------------------------------------------------------------------------
# What a call hands to the kernel


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take CPU tensors; lists and products are numpy's."""

    def product(self: Any, tile: Any, groups: int, **options: Any) -> Any:
        def run(*given: Any) -> None:
            lhs, ids, count, rhs, *bias, out = map(memory, given)
            assert rhs.shape[0] == 1 and len(bias) == options["bias"]
            right = rhs[0].T if options["rhs_layout"] == "nk" else rhs[0]
            for slot, live in enumerate(count):
                columns = slice(slot * options["slot"], (slot + 1) * options["slot"])
                rows = ids[slot, :live]
                sums = lhs[rows].astype(np.float32) @ right[:, columns].astype(np.float32)
                out[rows, columns] = np.maximum(sums + bias[0][0, columns], 0) if bias else sums

        return run

    monkeypatch.setattr(CudaDetector, "prepared", find_on_cpu)

    def turn(self: Any, dtype: str) -> Any:
        return lambda source, turned: turned.copy_(source.t())

    monkeypatch.setattr(RowsKernels, "product", product)
    monkeypatch.setattr(RowsKernels, "turn", turn)
    monkeypatch.setattr(CountWatch, "due", lambda self: False)
    monkeypatch.setattr(cuda_bind, "check_tensor", lambda *given, **options: None)


@pytest.mark.parametrize("options", [TURNED, LINEAR])
@pytest.mark.parametrize("dead", ["skip", "zero"])
def test_calls_hand_slots_to_the_kernel(on_cpu: None, dead: str, options: dict[str, Any]) -> None:
    made = operator(BlockMask(16, 128), dead, **options)
    case = Case(BlockMask(16, 128), (72, 328, 40), 0.5, 3, "cpu", **options)
    assert np.isnan(case.want).any()
    assert made(*case.arrays, sparsity=case.value, out=case.out) is case.out
    assert (dead == "skip" or case.zeroed()) and case.error() < 4
    assert made(*case.arrays, sparsity=torch.ones_like(case.value)).shape == (72, 328)


# --------------------------------------------------------------------------------------------
# Results, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "heights", "options"),
    [
        (BlockMask(64, 64), (256, 128, 64), {}),
        (BlockMask(5, 128), (64,), {**LINEAR, "dtype": "bfloat16"}),
        (Mask(), (64,), {}),
        (BitMask(3, 64), (64,), {"bias": True, "activation": "relu"}),
        (Mask(8, 64), (64,), {**TURNED, "dtype": "bfloat16"}),
    ],
)
def test_live_pieces_are_computed_and_no_others_written(
    cache: KernelCache, spec: Any, heights: tuple[int, ...], options: dict[str, Any]
) -> None:
    made = operator(spec, cache=cache, **options)
    rng = np.random.default_rng(1)
    fixed = [((1, 1, 1), 0.0), ((64, 8, 64), 0.0), ((300, 520, 72), 1.0), ((999, 9000, 64), 0.9)]
    drawn = [(tuple(int(x) for x in rng.integers(1, 700, 3)), z) for z in (0.3, 0.9, 0.97)]
    for seed, (sizes, zeros) in enumerate([*fixed, *drawn, ((4096, 4096, 192), 0.9)]):
        case = Case(spec, sizes, zeros, seed, **options)
        for height in heights:
            case.out.fill_(torch.nan)
            made._dispatcher.run(case.arrays, case.value, case.out, choose=as_high(height))
            assert case.error() < 4, (sizes, zeros, height)


def as_high(height: int) -> Callable[[Plan], Candidate]:
    """Chooses the candidate whose tile has so many rows."""
    return lambda plan: next(c for c in plan.candidates if c.tile and c.tile.tile_m == height)


@pytest.mark.gpu
def test_dead_pieces_become_zero_and_new_outputs_may_be_dense(cache: KernelCache) -> None:
    spec = BlockMask(64, 64)
    case = Case(spec, (500, 640, 256), 0.5, 3)
    for _ in range(20):
        operator(spec, "zero", cache)(*case.arrays, sparsity=case.value, out=case.out)
    assert case.zeroed() and case.error() < 4
    case = Case(spec, (500, 640, 256), 0.0, 3)
    for _ in range(20):
        case.out = operator(spec, cache=cache)(*case.arrays, sparsity=case.value)
    assert case.error() < 4


@pytest.mark.gpu
def test_patterns_change_in_a_graph_without_a_word_to_the_host(cache: KernelCache) -> None:
    spec = BlockMask(64, 64)
    made = operator(spec, cache=cache)
    cases = [Case(spec, (512, 640, 256), zeros, i) for i, zeros in enumerate((0.9, 0.3, 1.0))]
    check_replays(made, cases)
