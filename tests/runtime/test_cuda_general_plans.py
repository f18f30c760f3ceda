"""Plans of programs on CUDA cores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import ShapeError
from pit_tvm.schedules.cuda_contraction_space import PIECES, ROWS, starting_tiles
from pit_tvm.structs import BlockMask, Groups, Mask, Rows

H200 = "cuda -arch=sm_90a -model=h200"


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


def test_outputs_too_narrow_for_tensor_cores_have_tiles_of_float32() -> None:
    torch, block = pytest.importorskip("torch"), BlockMask(64, 64)
    before, costs = torch.get_float32_matmul_precision(), []
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            made = pit_tvm.compile(op.matmul(None, 256, 128), sparse={"out": block}, target=H200)
            every = made.explain(
                sparsity=np.ones((64, 4), bool), sizes={"m": 4096}, library="torch"
            ).candidates
            costs.append({str(c.tile): c.cost_us for c in every})
    finally:
        torch.set_float32_matmul_precision(before)
    exact, fast = ({tile: us for tile, us in each.items() if tile != "None"} for each in costs)
    assert exact == fast and len(exact) > 1
    assert costs[0]["None"] > costs[1]["None"]  # torch's, on tensor cores where it may


def test_plans_count_what_is_turned_or_gathered_by_elements() -> None:
    costs, turning = [], []
    for options, grain in (
        ({"transpose_lhs": True}, (1, 32)),  # rows of k are stored
        ({}, (32, 64)),  # live neighbours are turned, less is read for them
        ({}, (32, 1)),
        ({"transpose_rhs": True}, (32, 1)),  # both operands are turned
        ({"transpose_rhs": True, "dtype": "int8"}, (32, 64)),  # both come by sectors
        ({"transpose_rhs": True, "dtype": "int8"}, (32, 1)),  # both come by elements
    ):
        tensors = op.matmul(2048, 2048, 2048, **options)
        made = pit_tvm.compile(tensors, sparse={"lhs": Mask(*grain)}, target=H200)
        planner = made._dispatcher.planner
        layout = made._dispatcher.binder.layout_of({}, "torch")
        plan = planner.decide(layout, (205,) * 64)
        parts = dict(plan.candidates[0].parts)
        costs, turning = [*costs, parts["product"]], [*turning, parts["turn"]]
    assert costs[0] == costs[1] == costs[2] == costs[3] and costs[4] < costs[5]
    assert turning[0] == turning[4] == turning[5] == 0.0 < turning[1] < turning[2] < turning[3]


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


@pytest.mark.parametrize(("n", "k"), [(4096, 64), (64, 4096)], ids=["output", "input"])
def test_arrays_whose_places_pass_32_bits_are_refused(n: int, k: int) -> None:
    made = pit_tvm.compile(op.matmul(None, n, k), sparse={"lhs": Rows()}, target=H200)
    if k < n:  # explain looks at the operand's pattern, element by element
        with pytest.raises(ShapeError, match="fewer than 2147483648 elements"):
            made.explain(sparsity=np.zeros(1, np.int32), sizes={"m": 2**20}, library="torch")
    layout = made._dispatcher.binder.layout_of({"m": 2**20}, "torch")
    with pytest.raises(ShapeError, match="fewer than 2147483648 elements"):
        made._dispatcher.planner.decide(layout, (1,))
    with pytest.raises(ShapeError, match="fewer than 2147483648 elements"):
        made._dispatcher.planner.likely_tiles(layout)  # for build


def test_results_that_lists_have_room_for_are_counted_in_32_bits() -> None:
    def doubled(n: int) -> Any:
        data = te.placeholder((te.var("m"), n), "int8", "data")
        out = te.compute(data.shape, lambda m, n: (data[m, n] + data[m, n]).astype("int8"), "out")
        return pit_tvm.compile([data, out], sparse={"data": Rows()}, target=H200)._dispatcher

    for n, m in ((2**25 - 1, 1), (2**25 - 1, 64), (2**25, 1)):  # lists have room for 64
        made = doubled(n)
        layout = made.binder.layout_of({"m": m}, "torch")
        if n < 2**25:
            assert made.planner.decide(layout, (1,)).candidates
            continue
        with pytest.raises(ShapeError, match="fewer than 2147483648 results .*, got 2147483648"):
            made.planner.decide(layout, (1,))
        with pytest.raises(ShapeError, match="fewer than 2147483648 results"):
            made.planner.likely_tiles(layout)  # for build


def test_products_that_lists_have_room_for_fit_on_an_index_of_the_grid() -> None:
    made = pit_tvm.compile(op.batch_matmul(None, 1, 1, 1), sparse={"lhs": Rows()}, target=H200)
    planner, layout_of = made._dispatcher.planner, made._dispatcher.binder.layout_of
    size = str(made._dispatcher.program.inputs[0].shape[0])
    assert planner.decide(layout_of({size: 65472}, "torch"), (3,)).choice.kind == "pit"
    with pytest.raises(ShapeError, match="at most 65535 tiles beside, got 65536"):
        planner.decide(layout_of({size: 65473}, "torch"), (3,))


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
