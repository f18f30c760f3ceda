"""What ``compile`` refuses, and what ``explain`` and ``profile`` tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import te
from tvm.ir import Var
from tvm.tirx import const

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import (
    AxisError,
    BackendUnavailable,
    DatabaseError,
    DTypeError,
    PitError,
    ShapeError,
    UnsupportedTarget,
)
from pit_tvm.structs import (
    BitMask,
    BlockMask,
    Groups,
    Lengths,
    Mask,
    Rows,
    SparsitySpec,
    Values,
)
from pit_tvm.tile_db.store import TileStore
from tests.api.cases import LINEAR, MATMUL, REDUCE_SUM
from tests.api.running import compiled

MATMUL_TENSORS = op.matmul(None, 29, 131)
CONV_TENSORS = op.conv2d(None, 3, 5, 9, 9, 3)


@pytest.mark.parametrize(
    ("tensors", "sparse", "error", "match"),
    [
        (MATMUL_TENSORS, {}, AxisError, "^sparse.*one sparse operand"),
        (MATMUL_TENSORS, {"lhs": Mask(), "rhs": Mask()}, AxisError, "^sparse.*one sparse operand"),
        (MATMUL_TENSORS, {"weight": Mask()}, AxisError, "^sparse.*lhs.*rhs.*weight"),
        (MATMUL_TENSORS, Mask(), AxisError, "^sparse.*dictionary.*Mask"),
        (MATMUL_TENSORS, {"lhs": Rows("0")}, ShapeError, "^Rows.dim of lhs"),  # type: ignore[arg-type]
        (MATMUL_TENSORS, {"lhs": (32, 1)}, AxisError, "^sparse.*lhs.*Mask.*tuple"),
        (MATMUL_TENSORS, {"lhs": Mask}, AxisError, r"^sparse.*lhs.*Grid.*write Mask\(\.\.\.\)"),
        (MATMUL_TENSORS, {"lhs": Mask(32)}, ShapeError, "^Mask of lhs.*2 extents"),
        (MATMUL_TENSORS, {"lhs": BlockMask(1, 2, 3)}, ShapeError, "^BlockMask of lhs.*2 extents"),
        (MATMUL_TENSORS, {"lhs": Rows(2)}, ShapeError, "^Rows.dim of lhs"),
        (MATMUL_TENSORS, {"lhs": Rows(True)}, ShapeError, "^Rows.dim of lhs.*got True"),
        (MATMUL_TENSORS, {"lhs": Lengths(False)}, ShapeError, "^Lengths.dim of lhs.*got False"),
        (MATMUL_TENSORS, {"lhs": Groups(3, dim=True)}, ShapeError, "^Groups.dim of lhs.*got True"),
        (MATMUL_TENSORS, {"lhs": Lengths(-1)}, ShapeError, "^Lengths.dim of lhs"),
        (MATMUL_TENSORS, {"lhs": Groups(3)}, AxisError, "^sparse.*lhs.*grouped product"),
        (CONV_TENSORS, {"data": Rows(2)}, AxisError, "^sparse.*data.*PIT axis.*x"),
        (CONV_TENSORS, {"weight": Lengths(3)}, AxisError, "^sparse.*weight.*PIT axis"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(
    tensors: Any, sparse: Any, error: type[PitError], match: str
) -> None:
    with pytest.raises(error, match=match):
        pit_tvm.compile(tensors, sparse=sparse)


def scaled(factor: Any, dtype: str = "float32", extent: Any = 4) -> list[Any]:
    """``out[i, j] = data[i] * factor``, a number among the arguments unless it is a constant."""
    data = te.placeholder((te.var("m"),), dtype, "data")
    shape = (data.shape[0], extent)
    numbers = [factor] if isinstance(factor, Var) else []
    return [data, *numbers, te.compute(shape, lambda i, j: data[i] * factor, "out")]


@pytest.mark.parametrize(
    ("tensors", "error", "match"),
    [
        (scaled(te.var("alpha", "float32")), AxisError, "^tensors.*arrays only.*number alpha"),
        (scaled(const(2, "float32"), extent=te.var("n")), AxisError, "^tensors.*input, got n,"),
        (scaled(const(2, "int4"), dtype="int4"), DTypeError, "^data.*elements of.*got int4"),
    ],
)
def test_what_no_call_could_pass_is_refused_when_it_is_compiled(
    tensors: Any, error: type[PitError], match: str
) -> None:
    with pytest.raises(error, match=match):
        pit_tvm.compile(tensors, sparse={"data": Rows()})


@pytest.mark.parametrize(
    "make", [lambda: Mask(0), lambda: Mask(True), lambda: BlockMask(), lambda: Groups(-1)]
)
def test_specification_checks_its_own_numbers(make: Any) -> None:
    with pytest.raises(ShapeError, match="expected"):
        make()


@pytest.mark.parametrize("dead", ["", "nan", None, True])
def test_unknown_fate_of_dead_rows_is_refused(dead: Any) -> None:
    with pytest.raises(AxisError, match="^dead.*skip.*zero"):
        pit_tvm.compile(MATMUL_TENSORS, sparse={"lhs": Rows()}, dead=dead)


@pytest.mark.parametrize("option", ["deterministic", "apply_mask", "library"])
@pytest.mark.parametrize("value", ["numpy", np.zeros(2), None, 1])
def test_options_that_are_neither_true_nor_false_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ShapeError, match=f"^{option}: expected True or False, got"):
        pit_tvm.compile(MATMUL_TENSORS, sparse={"lhs": Mask(1, 1)}, **{option: value})


@pytest.mark.parametrize(
    "target", ["cuda -arch=sm_70", "llvm -mcpu=pentium-9000", "", 7, {"kind": "rocm"}]
)
def test_unknown_target_is_refused(target: Any) -> None:
    with pytest.raises(UnsupportedTarget, match="^target"):
        pit_tvm.compile(MATMUL_TENSORS, sparse={"lhs": Rows()}, target=target)


def test_missing_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="database.*nowhere"):
        pit_tvm.compile(MATMUL_TENSORS, sparse={"lhs": Rows()}, database=tmp_path / "nowhere")


def test_corrupt_database_is_refused_with_its_path_and_line(tmp_path: Path) -> None:
    device = pit_tvm.compile(MATMUL_TENSORS, sparse={"lhs": Mask()})._dispatcher.target.device
    (tmp_path / device).mkdir()
    (tmp_path / device / "tiles.json").write_text("{\n", encoding="utf-8")
    with pytest.raises(DatabaseError, match=r"tiles\.json.*1"):
        operator = pit_tvm.compile(MATMUL_TENSORS, sparse={"lhs": Mask()}, database=tmp_path)
        operator.explain(sizes={"m": 64}, sparsity=np.ones((64, 131), bool))


def test_a_database_lies_over_the_shipped_one_and_a_store_is_alone(tmp_path: Path) -> None:
    def tuned(database: Any) -> bool:
        operator = pit_tvm.compile(
            MATMUL_TENSORS,
            sparse={"lhs": Lengths()},
            target="llvm -mcpu=x86-64-v3",  # whose instruction set has shipped records
            database=database,
        )
        return operator.explain(sizes={"m": 64}, sparsity=np.array([32])).tuned

    assert tuned(None) and tuned(tmp_path)
    assert not tuned(TileStore.open(tmp_path))


# --------------------------------------------------------------------------------------------
# explain and profile


def untuned(tmp_path: Path, spec: SparsitySpec) -> pit_tvm.Operator:
    """An operator whose database is empty, and alone."""
    tensors = op.linear(None, 71, 131, activation="relu")
    return pit_tvm.compile(tensors, sparse={"lhs": spec}, database=TileStore.open(tmp_path))


def test_an_operator_says_what_it_takes() -> None:
    fc = pit_tvm.compile(op.linear(None, 5, 131), sparse={"lhs": Mask(32, 1)})
    arrays = "lhs float32[m, 131], rhs float32[5, 131], bias float32[5] -> out float32[m, 5]"
    assert repr(fc) == f"<Operator {arrays}; lhs by {Mask(32, 1)}; llvm>"


def test_explain_lists_every_candidate_and_dense_and_says_untuned(tmp_path: Path) -> None:
    operator = untuned(tmp_path, Mask())
    plan = operator.explain(sizes={"m": 640}, sparsity=np.ones((640, 131), bool))
    kinds = [(c.kind, str(c.micro_tile)) for c in plan.candidates]
    assert kinds == [
        ("pit", "1x*"),
        ("pit", "1x64"),
        ("pit", "32x1"),
        ("dense", "None"),
    ]
    assert plan.choice in plan.candidates
    assert plan.choice.kind == "dense"  # nothing is saved where everything lives
    assert all(c.cost_us > 0 and c.parts for c in plan.candidates)
    assert not plan.tuned
    text = str(plan)
    assert len(text.splitlines()) == len(plan.candidates) + 3
    assert "untuned" in text and "dense (numpy)" in text
    assert text.count("*") >= 1 and all(str(c) in text for c in plan.candidates)


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (BitMask(), np.full((640, 17), 0xFF, np.uint8)),
        (BlockMask(32, 1), np.ones((20, 131), bool)),
        (Rows(), np.arange(640)),
        (Lengths(), [128] * 5),
    ],
    ids=["bits", "blocks", "rows", "lengths"],
)
def test_explain_knows_every_kind_of_pattern(
    tmp_path: Path, spec: SparsitySpec, pattern: Any
) -> None:
    plan = untuned(tmp_path, spec).explain(sizes={"m": 640}, sparsity=pattern)
    assert {c.kind for c in plan.candidates} == {"pit", "dense"}
    assert all(c.covered == 1.0 for c in plan.candidates)


def test_dense_is_no_candidate_where_rows_are_missing(tmp_path: Path) -> None:
    """It would write rows that do not exist."""
    operator = untuned(tmp_path, Rows())
    plan = operator.explain(sizes={"m": 640}, sparsity=np.arange(639))
    assert {c.kind for c in plan.candidates} == {"pit"}


def test_explain_with_arrays_counts_the_packing_that_they_need() -> None:
    operator = compiled(LINEAR, "float32", "lhs", Lengths())
    arrays = [np.ones(s, np.float32) for s in ((64, 131), (71, 131), (71,))]
    plain = operator.explain(*arrays, sparsity=[40])
    packed = operator.explain(arrays[0], operator.pack(rhs=arrays[1]), arrays[2], sparsity=[40])
    assert plain.choice.cost_us > packed.choice.cost_us
    assert packed == operator.explain(sizes={"m": 64}, sparsity=[40])


def test_explain_needs_the_symbolic_sizes() -> None:
    operator = compiled(MATMUL, "float32", "lhs", Lengths())
    with pytest.raises(ShapeError, match="^size k.*pass"):
        operator.explain(sizes={"m": 64, "n": 3}, sparsity=[40])


def test_explain_names_sizes_that_no_extent_has() -> None:
    operator = compiled(LINEAR, "float32", "lhs", Lengths())
    with pytest.raises(ShapeError, match=r"^sizes: expected symbolic .*\(m\), got rows, q$"):
        operator.explain(sizes={"m": 64, "rows": 3, "q": 3}, sparsity=[40])


def test_explain_takes_integers_of_any_library() -> None:
    operator = compiled(LINEAR, "float32", "lhs", Lengths())
    sizes = {name: 64 for name in operator._dispatcher.program.extents}
    plan = operator.explain(sizes=sizes, sparsity=[40])
    for wide in (np.int64, np.uint8):
        assert operator.explain(sizes={n: wide(64) for n in sizes}, sparsity=[40]) == plan


@pytest.mark.parametrize("size", [-1, 2.0, None, True, np.True_, 2**31, 2**70])
def test_explain_needs_sizes_that_are_lengths(size: Any) -> None:
    operator = compiled(LINEAR, "float32", "lhs", Lengths())
    with pytest.raises(ShapeError, match="^size m: expected an integer of 0 to 2147483647"):
        operator.explain(sizes={"m": size}, sparsity=[40])


def test_explain_knows_two_libraries() -> None:
    operator = compiled(LINEAR, "float32", "lhs", Lengths())
    with pytest.raises(BackendUnavailable, match="^library.*numpy.*torch.*jax"):
        operator.explain(sizes={"m": 64}, sparsity=[40], library="jax")


def test_explain_is_told_sizes_and_library_once() -> None:
    operator = compiled(LINEAR, "float32", "lhs", Lengths())
    arrays = [np.ones(s, np.float32) for s in ((64, 131), (71, 131), (71,))]
    for name, value in {"library": "torch", "sizes": {"m": 64}}.items():
        with pytest.raises(ShapeError, match=f"^{name}: expected none beside arrays, .* got "):
            operator.explain(*arrays, sparsity=[40], **{name: value})  # type: ignore[arg-type]


def test_explain_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIT_TVM_CACHE", str(tmp_path / "kernels"))
    operator = untuned(tmp_path, Mask())
    operator.explain(sizes={"m": 64}, sparsity=np.ones((64, 131), bool))
    assert operator.stats.builds <= 1  # what samples the mask


def test_denser_patterns_cost_more(tmp_path: Path) -> None:
    operator = untuned(tmp_path, Mask())
    costs = []
    for live in (0, 64, 256, 640):
        mask = np.zeros((640, 131), bool)
        mask[:live] = True
        plan = operator.explain(sizes={"m": 640}, sparsity=mask)
        costs.append([c.cost_us for c in plan.candidates if c.kind == "pit"])
    table = np.array(costs)
    assert (np.diff(table, axis=0) >= 0).all() and (table[-1] > table[0]).all()


def test_profile_times_its_parts() -> None:
    operator = compiled(LINEAR, "float32", "lhs", Lengths())
    arrays = [np.ones(s, np.float32) for s in ((64, 131), (71, 131), (71,))]
    profile = operator.profile(*arrays, sparsity=[40])
    parts = (profile.index_us, profile.select_us, profile.kernel_us)
    assert min(parts) >= 0 and profile.kernel_us > 0
    assert sum(parts) <= profile.total_us * 1.01
    assert profile.plan is not None and profile.kernel == str(profile.plan.choice)


def test_inputs_are_named_in_order() -> None:
    assert compiled(LINEAR, "float32", "lhs", Rows()).inputs == ("lhs", "rhs", "bias")
    assert compiled(REDUCE_SUM, "float32", "data", Values()).inputs == ("data",)


def test_an_operand_that_nothing_reads_is_named() -> None:
    with pytest.raises(AxisError, match="^data: expected an input that is read, got one that no"):
        pit_tvm.compile(op.elementwise((4, 5), [("mul", 0)], dtype="int8"), sparse={"data": Rows()})
