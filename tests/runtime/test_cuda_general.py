"""Programs on CUDA cores: which axis they gather on, their plans, and their kernels' code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import ShapeError, UnsupportedTarget
from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.runtime.cuda_general import GeneralKernels
from pit_tvm.runtime.cuda_general_form import GeneralForm, banded, general_form, turned
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.program import Program, analyse
from pit_tvm.schedules.cuda_contraction_space import PIECES, ROWS, starting_tiles
from pit_tvm.structs import BlockMask, Groups, Lengths, Mask, Rows, SparsitySpec, Values

H200 = "cuda -arch=sm_90a -model=h200"


def program(tensors: Any, spec: SparsitySpec, operand: str = "lhs") -> Program:
    return analyse(tensors, {operand: spec})


def form(tensors: Any, spec: SparsitySpec, operand: str = "lhs") -> GeneralForm:
    return general_form(program(tensors, spec, operand))


@pytest.mark.parametrize(
    ("tensors", "spec", "operand", "axis", "extents"),
    [
        (op.matmul(None, 64, 32), Rows(), "lhs", "rows", (1, 0)),
        (op.matmul(None, 64, 32), Lengths(1), "lhs", "depth", (0, 1)),
        (op.matmul(None, 64, 32), Values(), "lhs", "rows", (1, 0)),
        (op.matmul(64, 64, 64), Mask(32, 1), "lhs", "depth", (32, 1)),
        (op.matmul(64, 64, 64, transpose_lhs=True), Mask(1, 64), "lhs", "depth", (1, 64)),
        (op.matmul(None, 256, 64), Mask(32, 256), "rhs", "depth", (1, 128)),
        (op.linear(None, 256, 64), BlockMask(96, 64), "rhs", "depth", (32, 1)),
        (op.linear(None, 256, 64), Rows(), "rhs", "rows", (1, 0)),
        (op.matmul(None, 64, 192), Mask(1, 64), "lhs", "pieces", (1, 64)),
        (op.linear(None, 64, None), BlockMask(2, 96), "lhs", "pieces", (1, 96)),
        (op.matmul(64, 64, 512, transpose_lhs=True), Mask(256, 1), "lhs", "pieces", (256, 1)),
        (op.matmul(None, 64, 64), Mask(1, 64), "lhs", "rows", (1, 0)),  # whole rows
        (op.matmul(None, 64, 192), Mask(1, 16), "lhs", "rows", (1, 0)),
        (op.linear(None, 64, 192), Mask(1, 64), "rhs", "rows", (1, 0)),  # columns of the output
        (op.batch_matmul(None, 8, 9, 10), Rows(), "lhs", "batch", (1, 0, 0)),
        (op.batch_matmul(None, 8, 9, 10), Rows(1), "lhs", "rows", (0, 1, 0)),
        (op.grouped_matmul(None, 8, 9, 3), Groups(3), "lhs", "rows", (1, 0)),
        (op.reduce_sum(None, 7), Mask(), "data", "", (1, 0)),
        (op.conv2d(2, 3, 4, 5, 6, 3), Rows(1), "data", "", (0, 1, 0, 0)),
        (op.matmul(None, 8, 8, dtype="int8"), Rows(), "lhs", "rows", (1, 0)),
    ],
)
def test_the_axis_is_the_one_on_which_zeros_are_one_wide(
    tensors: Any, spec: SparsitySpec, operand: str, axis: str, extents: tuple[int, ...]
) -> None:
    found = form(tensors, spec, operand)
    assert (found.axis, found.route.micro_tile.extents) == (axis, extents)


@pytest.mark.parametrize(
    ("tensors", "act", "bias", "library"),
    [
        (op.matmul(None, 64, 32), "none", "", True),
        (op.linear(None, 64, 32, activation="gelu"), "gelu", "bias", True),
        (op.matmul(None, 64, 32, dtype="bfloat16", activation="silu"), "silu", "", True),
        (op.matmul(None, 64, 32, dtype="float16", out_dtype="float32"), "none", "", False),
        (op.matmul(None, 64, 32, dtype="int8"), "none", "", False),
    ],
)
def test_the_library_computes_what_it_has_an_epilogue_for(
    tensors: Any, act: str, bias: str, library: bool
) -> None:
    found = form(tensors, Rows())
    assert (found.act, found.bias, found.library) == (act, bias, library)


def test_an_epilogue_that_no_library_has_leaves_the_dense_form_to_us() -> None:
    lhs, rhs, out = op.matmul(None, 64, 32)
    twice = te.compute(out.shape, lambda i, j: out[i, j] * 2.0 + 1.0, name="twice")
    assert not form([lhs, rhs, twice], Rows()).library


def test_sums_in_a_fixed_order_gather_whole_rows() -> None:
    own = program(op.matmul(None, 64, 192), Mask(1, 64))
    assert [general_form(own, fixed).axis for fixed in (False, True)] == ["pieces", "rows"]


@pytest.mark.parametrize(
    ("tensors", "apart"),
    [
        (op.matmul(None, 64, 192), False),
        (op.linear(None, 64, 192, bias=True), False),  # stands in the output before
        (op.linear(None, 64, 192, activation="relu"), True),
        (op.matmul(None, 64, 192, dtype="float16"), True),
        (op.matmul(None, 64, 192, dtype="float16", out_dtype="float32"), False),
    ],
)
def test_tiles_of_pieces_add_to_the_output_unless_more_follows(tensors: Any, apart: bool) -> None:
    assert form(tensors, Mask(1, 64)).apart == apart


def test_masks_over_more_dimensions_are_refused() -> None:
    with pytest.raises(UnsupportedTarget, match="a mask over two dimensions"):
        form(op.batch_matmul(None, 8, 9, 10), Mask())


@pytest.mark.parametrize(
    ("options", "operand", "grain", "turns", "band"),
    [
        ({"transpose_rhs": True, "bias": True}, "lhs", (32, 1), ("lhs", "rhs"), 32),
        ({"transpose_rhs": True}, "lhs", (256, 8), ("lhs",), 128),  # rhs is gathered by sectors
        ({"activation": "relu"}, "lhs", (64, 1), ("lhs",), 64),
        ({"transpose_lhs": True}, "lhs", (1, 32), (), 0),
        ({"activation": "relu"}, "rhs", (1, 64), ("lhs",), 0),
        ({"transpose_lhs": True, "transpose_rhs": True}, "rhs", (64, 1), ("rhs",), 64),
    ],
)
def test_operands_are_turned_where_rows_of_the_depth_are_not_stored(
    options: dict[str, Any], operand: str, grain: tuple[int, int], turns: tuple[str, ...], band: int
) -> None:
    own = program(op.matmul(None, 96, 64, **options), Mask(*grain), operand)
    found = general_form(own)
    assert (found.turns, banded(found)) == (turns, band)
    if not turns:
        return
    same, micro_tile = turned(own, found)
    stored = {
        **{name: value for name, value in options.items() if not name.startswith("transpose")},
        "transpose_lhs": options.get("transpose_lhs", False) ^ ("lhs" in turns),
        "transpose_rhs": options.get("transpose_rhs", False) ^ ("rhs" in turns),
    }
    spec = Mask(*(grain[::-1] if operand in turns else grain))
    other = program(op.matmul(None, 96, 64, **stored), spec, operand)
    tvm.ir.assert_structural_equal(same.func, other.func, map_free_vars=True)
    assert micro_tile == general_form(other).route.micro_tile
    assert form(op.matmul(None, 96, 64, dtype="int8", **options), spec, operand).turns == ()


def test_pieces_of_an_operand_stored_by_columns_are_turned_first() -> None:
    options: dict[str, Any] = {"bias": True, "activation": "relu"}
    own = program(op.matmul(None, 96, 192, transpose_lhs=True, **options), Mask(64, 1), "lhs")
    found = general_form(own)
    same, micro_tile = turned(own, found)
    other = program(op.matmul(None, 96, 192, **options), Mask(1, 64), "lhs")
    assert found.turns == ("lhs",) and banded(found) == 64 and not general_form(other).turns
    assert micro_tile == general_form(other).route.micro_tile != found.route.micro_tile
    tvm.ir.assert_structural_equal(same.func, other.func, map_free_vars=True)
    whole = op.matmul(None, 96, 192, transpose_lhs=True, dtype="int8")
    assert form(whole, Mask(64, 1)).axis == "pieces" and not form(whole, Mask(64, 1)).turns


# --------------------------------------------------------------------------------------------
# Plans


def test_plans_weigh_live_positions_against_dense() -> None:
    made = pit_tvm.compile(op.matmul(None, 2048, 2048), sparse={"lhs": Rows()}, target=H200)
    kinds = []
    for live in (2048, 100):
        ids = np.arange(live, dtype=np.int32)
        plan = made.explain(sparsity=ids, sizes={"m": 2048}, library="torch")
        assert {c.kind for c in plan.candidates} == {"pit", "dense"}
        assert {c.tile.family for c in plan.candidates if c.tile} == {ROWS}
        kinds.append(plan.choice.kind)
    assert kinds == ["dense", "pit"]


def test_plans_weigh_live_pieces_against_dense() -> None:
    kinds, sparse, rng = [], {"lhs": Mask(1, 64)}, np.random.default_rng()
    for fixed, live in ((False, 0.1), (False, 0.9), (True, 0.1)):
        made = pit_tvm.compile(
            op.matmul(None, 1024, 1024), sparse=sparse, target=H200, deterministic=fixed
        )
        mask = np.repeat(rng.random((512, 16)) < live, 64, axis=1)
        plan = made.explain(sparsity=mask, sizes={"m": 512}, library="torch")
        kinds.append((plan.choice.kind, {c.tile.family for c in plan.candidates if c.tile}))
    assert kinds == [("pit", {PIECES}), ("dense", {PIECES}), ("dense", {ROWS})]


def test_plans_know_that_tensor_cores_add_less_at_once() -> None:
    torch, costs = pytest.importorskip("torch"), {}
    before = torch.get_float32_matmul_precision()
    try:
        for precision, target in (
            ("highest", H200),
            ("high", H200),
            ("high", "cuda -arch=sm_80"),
        ):
            torch.set_float32_matmul_precision(precision)
            tensors, sparse = op.matmul(4096, 4096, 4096), {"lhs": Mask(1, 64)}
            made = pit_tvm.compile(tensors, sparse=sparse, target=target)._dispatcher
            plan = made.planner.decide(made.binder.layout_of({}, "torch"), (410,) * 64)
            costs[precision, target] = dict(plan.candidates[0].parts)["product"]
            assert plan.choice.kind == ("pit" if target == H200 else "dense")
    finally:
        torch.set_float32_matmul_precision(before)
    exact, fast, slow = costs.values()
    # On one H200 294 us in TF32 where 96 % of the time were additions, 444 in float32.
    assert fast == pytest.approx(294, rel=0.15) and fast < slow < exact * 1.5


@pytest.mark.parametrize(
    ("dtype", "transpose_rhs", "tile", "added"),
    [
        ("float32", False, "float32", "pit_add4"),
        ("float32", True, "float32", "atomic_add"),  # a thread's columns lie apart
        ("float32", False, "tf32", "pit_add2"),
        ("float32", True, "tf32", "pit_add2"),
        ("float16", False, "float16", "pit_add2"),
        ("int8", False, "int8", "atomic_add"),  # of integers there are no vectors
        ("int8", True, "int8", "atomic_add"),
    ],
)
def test_neighbours_are_added_at_once_where_a_gpu_can(
    dtype: str, transpose_rhs: bool, tile: str, added: str
) -> None:
    wide = "int32" if dtype == "int8" else None
    for width, arch in ((256, "sm_90a"), (256, "sm_80"), (250, "sm_90a")):
        options: dict[str, Any] = {"dtype": dtype, "out_dtype": wide}
        tensors = op.matmul(None, width, 256, transpose_rhs=transpose_rhs, **options)
        own = program(tensors, Mask(1, 64))
        found = general_form(own)
        kernels = GeneralKernels(own, found, KernelCache(), arch)
        (first,) = starting_tiles(arch, tile, family=PIECES)
        text = str(kernels._made(found.route.micro_tile, first))
        vectors = (width, arch) == (256, "sm_90a")
        assert (added if vectors else "atomic_add") in text
        assert ("pit_add" in text) == (vectors and added.startswith("pit"))


def test_plans_count_what_is_turned_or_gathered_by_elements() -> None:
    costs, turning = [], []
    for options, grain in (
        ({"transpose_lhs": True}, (1, 32)),  # rows of k are stored
        ({}, (32, 64)),  # live neighbours are turned, less is read for them
        ({}, (32, 1)),
        ({"transpose_rhs": True}, (32, 1)),  # both operands are turned
        ({"transpose_rhs": True}, (32, 64)),  # one comes by sectors
        ({"transpose_rhs": True, "dtype": "int8"}, (32, 1)),  # both come by elements
    ):
        tensors = op.matmul(2048, 2048, 2048, **options)
        made = pit_tvm.compile(tensors, sparse={"lhs": Mask(*grain)}, target=H200)
        planner = made._dispatcher.planner
        layout = made._dispatcher.binder.layout_of({}, "torch")
        plan = planner.decide(layout, (205,) * 64)
        parts = dict(plan.candidates[0].parts)
        costs, turning = [*costs, parts["product"]], [*turning, parts["turn"]]
    assert costs[0] == costs[1] == costs[2] == costs[3] < costs[4] < 2 * costs[0] < costs[5] - 40
    assert turning[0] == turning[5] == 0.0 < turning[1] == turning[4] < turning[2] < turning[3]


@pytest.mark.parametrize(
    ("tensors", "operand", "dim"),
    [
        (op.batch_matmul(4, 64, 48, 96), "lhs", 2),
        (op.batch_matmul(4, 64, 48, 96), "rhs", 1),
        (op.batch_matmul(4, 64, 48, 96, transpose_rhs=True), "rhs", 2),
    ],
)
def test_named_slices_of_a_batch_of_reductions_have_plans(
    tensors: Any, operand: str, dim: int
) -> None:
    made = pit_tvm.compile(tensors, sparse={operand: Rows(dim)}, dead="skip", target=H200)
    layout = made._dispatcher.binder.layout_of({}, "torch")
    plan = made._dispatcher.planner.decide(layout, (10,))
    assert {candidate.kind for candidate in plan.candidates} == {"pit"}


@pytest.mark.parametrize(("dtype", "tuned"), [("float32", True), ("int8", False)])
def test_plans_say_whether_tiles_were_measured(dtype: str, tuned: bool) -> None:
    made = pit_tvm.compile(
        op.matmul(None, 512, 512, dtype=dtype), sparse={"lhs": Rows()}, target=H200
    )
    plan = made.explain(sparsity=np.arange(9, dtype=np.int32), sizes={"m": 64}, library="torch")
    tiles = [c for c in plan.candidates if c.tile is not None]
    assert plan.tuned == tuned and len(tiles) == (
        4 if tuned else len(starting_tiles("sm_90a", dtype))
    )
    dense = next(c for c in plan.candidates if c.kind == "dense")
    if not dense.note:  # by our own kernel, of the first tile
        assert dense.cost_us > min(c.cost_us for c in tiles)


def test_nothing_dense_where_dead_rows_must_become_zero() -> None:
    made = pit_tvm.compile(
        op.matmul(None, 64, 64), sparse={"lhs": Rows()}, target=H200, dead="zero"
    )
    plan = made.explain(sparsity=np.arange(3, dtype=np.int32), sizes={"m": 64}, library="torch")
    assert {c.kind for c in plan.candidates} == {"pit"}


@pytest.mark.parametrize("dead", ["skip", "zero"])
def test_nothing_dense_where_dead_slices_would_enter_a_sum(dead: Any) -> None:
    tensors, sparse = op.matmul(None, 64, 64), {"lhs": Rows(1)}
    made = pit_tvm.compile(tensors, sparse=sparse, target=H200, dead=dead)
    plan = made.explain(sparsity=np.arange(64, dtype=np.int32), sizes={"m": 8}, library="torch")
    assert {c.kind for c in plan.candidates} == {"pit"}


def test_arrays_whose_places_pass_32_bits_are_refused() -> None:
    made = pit_tvm.compile(op.matmul(None, 4096, 4096), sparse={"lhs": Rows()}, target=H200)
    with pytest.raises(ShapeError, match="fewer than 2147483648 elements"):
        made.explain(sparsity=np.zeros(1, np.int32), sizes={"m": 2**20}, library="torch")
    layout = made._dispatcher.binder.layout_of({"m": 2**20}, "torch")
    with pytest.raises(ShapeError, match="fewer than 2147483648 elements"):
        made._dispatcher.planner.likely_tiles(layout)  # for build


@pytest.mark.parametrize(("n", "narrowest"), [(4032, 64), (4096, 128), (16128, 256), (16384, 0)])
def test_columns_of_all_groups_fit_on_an_index_of_the_grid(n: int, narrowest: int) -> None:
    tensors = op.grouped_matmul(None, n, 8, 1024, dtype="float32")
    made = pit_tvm.compile(tensors, sparse={"lhs": Groups(1024)}, target=H200)._dispatcher
    layout = made.binder.layout_of({"m": 16}, "torch")
    if not narrowest:
        with pytest.raises(ShapeError, match="at most 65535 tiles beside, got 262144"):
            made.planner.decide(layout, (1,) * 1024)
        return
    plan = made.planner.decide(layout, (1,) * 1024)
    assert min(c.tile.tile_n for c in plan.candidates) == narrowest
    assert min(tile.tile_n for tile in made.planner.likely_tiles(layout)) == narrowest


# --------------------------------------------------------------------------------------------
# Code


def test_kernels_of_one_expression_are_kept_apart_by_the_sparse_operand(tmp_path: Path) -> None:
    tensors = op.elementwise((None, 8), ["add", ("add", 2)])

    class Keys(KernelCache):
        def get(self, key: str, build: Any) -> Any:
            asked.append(key)

    asked: list[str] = []
    for operand in ("data", "rhs"):
        own = program(tensors, Mask(), operand)
        GeneralKernels(own, general_form(own), Keys(tmp_path), "sm_90a").dead()
    assert len(set(asked)) == 2


def source(tensors: Any, spec: SparsitySpec, operand: str = "lhs", arch: str = "sm_90a") -> str:
    own = program(tensors, spec, operand)
    found = general_form(own)
    kernels = GeneralKernels(own, found, KernelCache(), arch)
    height = max(found.route.micro_tile.extents) if found.axis == "depth" else 0
    tile = starting_tiles(arch, found.dtype, height)[-1] if found.rhs else None
    return cuda_source(kernels._made(found.route.micro_tile, tile), arch, pipelined=True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_rows_are_gathered_asynchronously_on_every_architecture(arch: str) -> None:
    text = source(op.linear(None, 256, 128, activation="gelu"), Rows(), arch=arch)
    assert "cp_async" in text and "wait_group" in text
    assert "return;" in text  # CTAs behind the live rows


def test_both_operands_are_gathered_along_k_up_to_the_live_count() -> None:
    text = source(op.matmul(256, 256, 128, transpose_lhs=True), Mask(1, 32))
    assert text.count("ids_ptr[") >= 2 and "cp_async" in text


@pytest.mark.parametrize(
    ("tensors", "arch", "vectors"),
    [
        (op.matmul(None, 256, 128), "sm_90", True),
        (op.matmul(None, 256, 128), "sm_80", False),
        (op.linear(None, 256, 128), "sm_90", False),  # a thread's results are no neighbours
    ],
)
def test_tiles_of_pieces_are_added_in_vectors_where_they_can_be(
    tensors: Any, arch: str, vectors: bool
) -> None:
    text = source(tensors, Mask(1, 64), arch=arch)
    assert ("red.global.add.v4.f32" in text) == vectors
    assert ("tvm_builtin_cuda_atomic_add((&" in text) != vectors
    assert "cp_async" in text and "return;" not in text
    assert "count_ptr[((int)blockIdx.x)]" in text  # one CTA takes all tiles of a piece


@pytest.mark.parametrize(
    ("tensors", "spec", "operand"),
    [
        (op.matmul(None, None, None), Rows(), "lhs"),
        (op.matmul(None, 203, 101, dtype="float16"), Rows(1), "rhs"),
        (op.batch_matmul(3, 8, 9, 10, dtype="bfloat16", activation="relu"), Rows(), "rhs"),
        (op.grouped_matmul(None, 96, 64, 4), Groups(4), "lhs"),
        (op.conv2d(2, 3, 4, 5, 6, 3, bias=True), Rows(1), "weight"),
        (op.reduce_sum(None, 7), Lengths(1), "data"),
        (op.matmul(None, 8, 8, dtype="int8"), Mask(), "rhs"),
    ],
)
def test_every_operator_has_a_kernel(tensors: Any, spec: SparsitySpec, operand: str) -> None:
    assert "__global__" in source(tensors, spec, operand)
