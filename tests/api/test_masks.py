"""Masks, bits, blocks and values: every operator, operand and axis gives the dense result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pit_tvm
from pit_tvm import op
from pit_tvm.structs import BitMask, BlockMask, Candidate, Grid, Mask, Plan, SparsitySpec, Values
from pit_tvm.target import runs_here
from tests.api.cases import LEGAL, MATMUL, Legal
from tests.api.patterns import PATTERNS, zero_pattern
from tests.api.running import (
    assert_close,
    compiled,
    empty_database,
    every_candidate,
    poison,
    random_array,
    random_inputs,
    result_dtype,
    truth_of,
)

KINDS: dict[str, Callable[[int], SparsitySpec]] = {
    "bits": lambda rank: BitMask(),
    "block mask": lambda rank: BlockMask(*(1,) * (rank - 2), 4, 7),
    "values": lambda rank: Values(),
    "granular": lambda rank: Mask(*(1,) * (rank - 2), 3, 5),
}


def check(
    legal: Legal, spec: SparsitySpec, dtype: str, pattern: str, rng: np.random.Generator
) -> set[str]:
    """All candidates on one pattern; returns the axes that ran, dense as ""."""
    case, operand = legal.case, legal.operand
    arrays = random_inputs(case, dtype, rng)
    mask, sparsity = zero_pattern(spec, pattern, arrays[operand].shape, rng)
    arrays[operand] = np.where(mask, arrays[operand], 0).astype(arrays[operand].dtype)
    truth = truth_of(case, arrays)
    operator = compiled(case, dtype, operand, spec)
    axes = set()
    runs = every_candidate(
        operator, tuple(arrays.values()), sparsity, truth.shape, result_dtype(dtype)
    )
    for candidate, out in runs:
        axes.add(candidate.micro_tile.axis if candidate.micro_tile else "")
        assert_close(out, truth, f"{candidate}, {[a.shape for a in arrays.values()]}")
    return axes


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    ("legal", "dtype"), [(each, dtype) for each in LEGAL for dtype in each.dtypes], ids=str
)
def test_masked_operand_gives_the_dense_result_by_every_candidate(
    legal: Legal, dtype: str, pattern: str, rng: np.random.Generator
) -> None:
    axes = check(legal, Mask(), dtype, pattern, rng)
    assert "" in axes  # dense is always a candidate
    assert len(axes) == 1 + len(legal.axes)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("legal", LEGAL, ids=str)
def test_every_kind_of_zero_pattern_gives_the_dense_result(
    legal: Legal, kind: str, pattern: str, rng: np.random.Generator
) -> None:
    spec = KINDS[kind](len(legal.case.inputs[legal.operand]))
    check(legal, spec, "float32", pattern, rng)


@pytest.mark.parametrize(
    ("legal", "granularity"),
    [(LEGAL[0], (8, 16)), (LEGAL[0], (24, 128)), (LEGAL[1], (16, 8)), (LEGAL[1], (64, 96))],
    ids=str,
)
def test_granularity_with_micro_tiles_of_its_own_gives_the_dense_result(
    legal: Legal, granularity: tuple[int, int], rng: np.random.Generator
) -> None:
    for pattern in PATTERNS:
        check(legal, Mask(*granularity), "float32", pattern, rng)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_random_sizes_and_densities_give_the_dense_result(data: st.DataObject) -> None:
    m, n, k = (data.draw(st.integers(1, 200), name) for name in "mnk")
    operand = data.draw(st.sampled_from(["lhs", "rhs"]), "operand")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    density = data.draw(st.floats(0, 1), "density")
    arrays = {
        "lhs": random_array((m, k), "float32", rng),
        "rhs": random_array((k, n), "float32", rng),
    }
    mask = rng.random(arrays[operand].shape) < density
    arrays[operand] = arrays[operand] * mask
    truth = truth_of(MATMUL, arrays)
    operator = compiled(MATMUL, "float32", operand, Mask())
    for candidate, out in every_candidate(
        operator, tuple(arrays.values()), mask, truth.shape, "float32"
    ):
        assert_close(out, truth, str(candidate))


@pytest.mark.parametrize("target", ["llvm", "llvm -mcpu=x86-64-v3", "llvm -mcpu=x86-64"])
def test_every_instruction_set_gives_the_dense_result(
    target: str, rng: np.random.Generator
) -> None:
    """Several tiles in every direction; one folder holds the kernels of all targets."""
    tensors = op.matmul(None, None, None)  # for the CPU that this one is, compiled above
    operator = pit_tvm.compile(
        tensors, sparse={"lhs": Mask()}, target=target, database=empty_database()
    )
    if not runs_here(operator._dispatcher.target):
        pytest.skip(reason=f"this CPU does not run {target}")
    check_product(operator, (250, 300, 700), rng)


def test_every_tile_of_the_shipped_records_gives_the_dense_result(
    rng: np.random.Generator,
) -> None:
    operator = pit_tvm.compile(op.matmul(None, None, None), sparse={"lhs": Mask()})
    check_product(operator, (97, 71, 131), rng)


def on_both_axes(plan: Plan) -> Candidate:
    """The first candidate that gathers rows and columns."""
    return next(c for c in plan.candidates if c.micro_tile and c.micro_tile.also)


@pytest.mark.parametrize(
    ("legal", "dtype", "apply_mask"),
    [(LEGAL[0], "float32", False), (LEGAL[5], "bfloat16", False), (LEGAL[2], "int8", True)],
    ids=str,
)
def test_live_rows_and_columns_are_gathered_at_once(
    legal: Legal, dtype: str, apply_mask: bool, rng: np.random.Generator
) -> None:
    case, operand = legal.case, legal.operand
    operator = compiled(case, dtype, operand, Grid(), apply_mask=apply_mask)
    for shares in ((0.4, 0.3), (0.0, 0.5), (0.5, 0.0), (1.0, 1.0), (0.05, 0.05)):
        arrays = random_inputs(case, dtype, rng)
        shape = arrays[operand].shape
        mask = np.outer(*(rng.random(s) < share for s, share in zip(shape, shares, strict=True)))
        live = np.where(mask, arrays[operand], 0).astype(arrays[operand].dtype)
        truth = truth_of(case, {**arrays, operand: live})
        if not apply_mask:
            arrays[operand] = live
        out = poison(truth.shape, result_dtype(dtype))
        run = operator._dispatcher.run
        _, plan = run(list(arrays.values()), mask, out, choose=on_both_axes)
        assert plan is not None and "*x1" in str(plan.choice) and "1x*" in str(plan.choice)
        assert_close(out, truth, f"{shares} of {shape}")


def test_selection_gathers_both_axes_where_few_rows_and_few_columns_live() -> None:
    operator = pit_tvm.compile(
        op.matmul(None, 1024, 1024), sparse={"lhs": Grid()}, database=empty_database()
    )
    lives = np.random.default_rng(2).random((2, 1024))
    chosen = []
    for rows, columns in ((0.3, 0.3), (0.3, 1.0), (1.0, 1.0)):
        mask = np.outer(lives[0] < rows, lives[1] < columns)
        plan = operator.explain(sparsity=mask, sizes={"m": 1024})
        assert on_both_axes(plan).covered == pytest.approx(rows * columns, abs=0.1)
        chosen.append(str(plan.choice.micro_tile) if plan.choice.micro_tile else "dense")
    assert chosen == ["1x* and *x1", "1x*", "dense"]


def check_product(
    operator: pit_tvm.Operator, sizes: tuple[int, int, int], rng: np.random.Generator
) -> None:
    """All candidates of a product of ``sizes`` m, n, k whose ``lhs`` has a mask."""
    m, n, k = sizes
    mask = rng.random((m, k)) < 0.02
    lhs, rhs = random_array((m, k), "float32", rng) * mask, random_array((k, n), "float32", rng)
    truth = truth_of(MATMUL, {"lhs": lhs, "rhs": rhs})
    for candidate, out in every_candidate(operator, (lhs, rhs), mask, truth.shape, "float32"):
        assert_close(out, truth, str(candidate))
