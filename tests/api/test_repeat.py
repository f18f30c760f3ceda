"""Calls by a candidate of an earlier plan, and weights packed once for several operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm.errors import DTypeError, ShapeError, UnsupportedTarget
from pit_tvm.structs import Lengths, Mask, Rows, SparsitySpec, Values
from tests.api.cases import LINEAR, MATMUL, REDUCE_SUM, Case
from tests.api.patterns import zero_pattern
from tests.api.running import assert_close, compiled, poison, random_array, random_inputs, truth_of


@pytest.mark.parametrize("spec", [Values(8, 1), Mask()], ids=str)
def test_every_candidate_fits_other_patterns(spec: SparsitySpec, rng: np.random.Generator) -> None:
    operator = compiled(LINEAR, "float32", "lhs", spec)
    arrays = random_inputs(LINEAR, "float32", rng)
    shape = arrays["lhs"].shape
    dense = arrays["lhs"]
    given = np.ones(shape, bool) if isinstance(spec, Mask) else None
    plan = operator.explain(*arrays.values(), sparsity=given)
    for number, choice in enumerate(plan.candidates):
        for kind in ("random", "empty", "full"):
            mask, given = zero_pattern(spec, kind, shape, np.random.default_rng(number))
            arrays["lhs"] = np.where(mask, dense, 0).astype(np.float32)
            truth = truth_of(LINEAR, arrays)
            out = poison(truth.shape, "float32")
            found = operator.repeat(choice, *arrays.values(), sparsity=given, out=out)
            assert found is out
            assert_close(out, truth, f"{choice} {kind}")


@pytest.mark.parametrize("spec", [Rows(), Lengths()], ids=str)
def test_named_rows_may_be_others(spec: SparsitySpec, rng: np.random.Generator) -> None:
    operator = compiled(LINEAR, "float32", "lhs", spec)
    arrays = random_inputs(LINEAR, "float32", rng)
    rows = arrays["lhs"].shape[0]
    (choice,) = {operator.explain(*arrays.values(), sparsity=np.array([rows - 1])).choice}
    out = poison((rows, arrays["rhs"].shape[0]), "float32")
    given = np.array([2])  # one row, or as many
    operator.repeat(choice, *arrays.values(), sparsity=given, out=out)
    live = np.zeros(rows, bool)
    live[given if isinstance(spec, Rows) else slice(2)] = True
    assert_close(out[live], truth_of(LINEAR, arrays)[live])
    assert np.isnan(out[~live]).all()


@pytest.mark.parametrize("dead", ["skip", "zero"])
@pytest.mark.parametrize(("spec", "given"), [(Rows(), [1]), (Lengths(), [1])], ids=str)
def test_dense_candidate_needs_all_rows_alive(
    spec: SparsitySpec, given: list[int], dead: str, rng: np.random.Generator
) -> None:
    operator = compiled(LINEAR, "float32", "lhs", spec, dead=dead)
    arrays = random_inputs(LINEAR, "float32", rng)
    rows = arrays["lhs"].shape[0]
    whole = np.arange(rows) if isinstance(spec, Rows) else np.array([rows])
    plan = operator.explain(*arrays.values(), sparsity=whole)
    (dense,) = (c for c in plan.candidates if c.kind == "dense")
    truth = truth_of(LINEAR, arrays)
    assert_close(operator.repeat(dense, *arrays.values(), sparsity=whole), truth)
    out = poison(truth.shape, "float32")
    for result in (out, None):
        with pytest.raises(ShapeError, match="^choice: expected a candidate that writes live"):
            operator.repeat(dense, *arrays.values(), sparsity=np.array(given), out=result)
    assert np.isnan(out).all()


def test_repeated_calls_are_checked_as_calls_are(rng: np.random.Generator) -> None:
    operator = compiled(LINEAR, "float32", "lhs", Values())
    arrays = random_inputs(LINEAR, "float32", rng)
    choice = operator.explain(*arrays.values()).choice
    with pytest.raises(DTypeError, match="lhs"):
        operator.repeat(choice, arrays["lhs"].astype(np.float64), arrays["rhs"], arrays["bias"])
    empty = operator.repeat(choice, arrays["lhs"][:0], arrays["rhs"], arrays["bias"])
    assert empty.shape == (0, arrays["rhs"].shape[0])


@pytest.mark.parametrize("case", [LINEAR, REDUCE_SUM], ids=lambda case: case.name)
def test_candidates_read_this_call_s_mask(case: Case, rng: np.random.Generator) -> None:
    arrays = random_inputs(case, "float32", rng)
    name = next(iter(arrays))
    operator = compiled(case, "float32", name, Mask(), apply_mask=True)
    plan = operator.explain(*arrays.values(), sparsity=np.ones(arrays[name].shape, bool))
    assert {c.kind for c in plan.candidates} == {"pit", "dense"}
    mask = rng.random(arrays[name].shape) < 0.3
    truth = truth_of(case, {**arrays, name: np.where(mask, arrays[name], 0).astype(np.float32)})
    arrays[name][~mask] = np.nan
    for choice in plan.candidates:
        assert_close(operator.repeat(choice, *arrays.values(), sparsity=mask), truth, choice)
        with pytest.raises(ShapeError, match="expected shape"):
            operator.repeat(choice, *arrays.values(), sparsity=mask[1:])


def test_only_candidates_of_the_operator_are_repeated(rng: np.random.Generator) -> None:
    operator = compiled(LINEAR, "float32", "lhs", Mask())
    arrays = random_inputs(LINEAR, "float32", rng)
    mask = np.ones(arrays["lhs"].shape, bool)
    plan = operator.explain(*arrays.values(), sparsity=mask)
    data = np.ones((5, 7), np.float32)
    other = compiled(REDUCE_SUM, "float32", "data", Mask()).explain(data, sparsity=data > 0)
    others = [c for c in other.candidates if c.kind == "pit"]
    assert others
    for wrong in (None, plan, "dense", *others):
        with pytest.raises(ShapeError, match="^choice: expected a candidate of a plan of this"):
            operator.repeat(wrong, *arrays.values(), sparsity=mask)  # type: ignore[arg-type]


def test_gpus_repeat_nothing(rng: np.random.Generator) -> None:
    operator = pit_tvm.compile(
        pit_tvm.op.linear(None, 64, 64, dtype="float16"),
        sparse={"lhs": Rows()},
        target={"kind": "cuda", "arch": "sm_90a"},
    )
    choice = compiled(LINEAR, "float32", "lhs", Rows()).explain(
        *random_inputs(LINEAR, "float32", rng).values(), sparsity=[0]
    )
    with pytest.raises(UnsupportedTarget, match="repeat: expected a CPU target"):
        operator.repeat(choice.choice)


# --------------------------------------------------------------------------------------------
# Packed weights


def test_operators_of_one_expression_share_a_packed_weight(rng: np.random.Generator) -> None:
    first, second = (compiled(LINEAR, "float32", "lhs", s) for s in (Lengths(), Values()))
    arrays = random_inputs(LINEAR, "float32", rng)
    packed = first.pack(rhs=arrays["rhs"])
    shared = second.pack(rhs=packed)
    assert shared.packed is packed.packed and shared.array is packed.array
    assert_close(second(arrays["lhs"], shared, arrays["bias"]), truth_of(LINEAR, arrays))
    with pytest.raises(ShapeError, match="rhs: packed operand"):
        second(arrays["lhs"], packed, arrays["bias"])


def test_operators_for_other_numbers_of_threads_share_a_packed_weight(
    rng: np.random.Generator,
) -> None:
    how: dict[str, Any] = {"sparse": {"lhs": Rows()}, "dead": "zero"}
    one, two = (
        pit_tvm.compile(
            pit_tvm.op.linear(None, 48, 32), target={"kind": "llvm", "num-cores": number}, **how
        )
        for number in (1, 2)
    )
    weight = rng.standard_normal((48, 32), np.float32)
    shared = two.pack(rhs=one.pack(rhs=weight))
    lhs, bias = rng.standard_normal((5, 32), np.float32), np.zeros(48, np.float32)
    assert_close(two(lhs, shared, bias, sparsity=np.arange(5)), lhs @ weight.T)


def test_weights_of_other_expressions_are_refused(rng: np.random.Generator) -> None:
    linear = compiled(LINEAR, "float32", "lhs", Lengths())
    product = compiled(MATMUL, "float32", "lhs", Values())
    packed = linear.pack(rhs=random_inputs(LINEAR, "float32", rng)["rhs"])
    with pytest.raises(ShapeError, match="packed by an operator of the same expression"):
        product.pack(rhs=packed)
    half = compiled(LINEAR, "float16", "lhs", Lengths())
    shape = packed.array.shape
    with pytest.raises(ShapeError, match="packed by an operator of the same expression"):
        linear.pack(rhs=half.pack(rhs=random_array(shape, "float16", rng)))
