"""``apply_mask=True``: outside its mask the operand may hold anything, and counts as zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import AxisError, ShapeError, UnsupportedTarget
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
from tests.api.cases import LEGAL, LINEAR, MATMUL, REDUCE_SUM, Legal
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
    untouched,
)

KINDS: dict[str, Callable[[int], SparsitySpec]] = {
    "mask": lambda rank: Mask(),
    "bits": lambda rank: BitMask(),
    "blocks": lambda rank: BlockMask(*(1,) * (rank - 2), 4, 7),
}


def spoilt(operand: np.ndarray, mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """``operand`` with NaN, infinities and large numbers outside ``mask``."""
    if operand.dtype.kind == "i":
        return operand  # whole numbers outside are as wrong as they can be
    foul = rng.choice(np.array([np.nan, np.inf, -np.inf, 1e4]), operand.shape)
    return np.where(mask, operand, foul.astype(operand.dtype))


def check(
    legal: Legal, spec: SparsitySpec, dtype: str, pattern: str, rng: np.random.Generator
) -> None:
    """All candidates equal the truth of ``where(mask, operand, 0)``."""
    case, operand = legal.case, legal.operand
    arrays = random_inputs(case, dtype, rng)
    mask, sparsity = zero_pattern(spec, pattern, arrays[operand].shape, rng)
    clean = np.where(mask, arrays[operand], 0).astype(arrays[operand].dtype)
    truth = truth_of(case, {**arrays, operand: clean})
    arrays[operand] = spoilt(arrays[operand], mask, rng)
    operator = compiled(case, dtype, operand, spec, apply_mask=True)
    runs = every_candidate(
        operator, tuple(arrays.values()), sparsity, truth.shape, result_dtype(dtype)
    )
    for candidate, out in runs:
        assert_close(out, truth, f"{candidate}, {[a.shape for a in arrays.values()]}")


# How zeros are told is the same for all operators, which tell them in turn; matmul in every way.
# A linear layer is a matmul transposed but for its activation, which sees no mask.
OPERATORS = [legal for legal in LEGAL if legal.case is not LINEAR]
TOLD = [(legal, list(KINDS)[i % len(KINDS)]) for i, legal in enumerate(OPERATORS)]


@pytest.mark.parametrize(
    ("legal", "kind"), [*TOLD, (LEGAL[0], "bits"), (LEGAL[0], "blocks")], ids=str
)
def test_every_operator_and_route_sees_zeros_outside(
    legal: Legal, kind: str, rng: np.random.Generator
) -> None:
    spec = KINDS[kind](len(legal.case.inputs[legal.operand]))
    for pattern in PATTERNS:
        check(legal, spec, "float32", pattern, rng)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float16", "bits"), ("bfloat16", "mask"), ("int8", "blocks")]
)
@pytest.mark.parametrize("legal", [LEGAL[0], LEGAL[12]], ids=str)
def test_every_type_sees_zeros_outside(
    legal: Legal, dtype: str, kind: str, rng: np.random.Generator
) -> None:
    check(legal, KINDS[kind](2), dtype, "random", rng)


@pytest.mark.parametrize(
    ("legal", "extents"),
    [
        (LEGAL[0], (32, 64)),  # those along both axes lie in blocks
        (LEGAL[0], (8, 16)),  # no large ones do
        (LEGAL[2], (64, 1)),  # transposed; those along m alone
        (LEGAL[2], (16, 64)),  # those along k, and small ones along m
    ],
    ids=str,
)
def test_blocks_that_hold_micro_tiles_are_as_right_as_others(
    legal: Legal, extents: tuple[int, int], rng: np.random.Generator
) -> None:
    """Kernels whose micro-tiles lie in blocks read no mask; edges are cut off there too."""
    for pattern in PATTERNS:
        check(legal, BlockMask(*extents), "float32", pattern, rng)


def test_kernels_read_the_mask_only_where_it_decides() -> None:
    operator = compiled(MATMUL, "float32", "lhs", BlockMask(32, 64), apply_mask=True)
    program = operator._dispatcher.program
    read = {str(r.micro_tile): program.reads_mask(r.micro_tile) for r in program.routes}
    assert read == {"1x*": True, "1x64": False, "32x1": False}
    assert program.reads_mask(None)
    plain = compiled(MATMUL, "float32", "lhs", BlockMask(32, 64))._dispatcher.program
    assert not any(plain.reads_mask(r.micro_tile) for r in plain.routes)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_random_sizes_and_densities_see_zeros_outside(data: st.DataObject) -> None:
    m, n, k = (data.draw(st.integers(1, 200), name) for name in "mnk")
    spec = data.draw(st.sampled_from([Mask(), BitMask(), BlockMask(4, 7)]), "spec")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    blocks = -(-m // 4), -(-k // 7)
    told: Any = rng.random(blocks if isinstance(spec, BlockMask) else (m, k)) < data.draw(
        st.floats(0, 1), "density"
    )
    mask = told
    if isinstance(spec, BlockMask):
        mask = np.repeat(np.repeat(told, 4, axis=0), 7, axis=1)[:m, :k]
    if isinstance(spec, BitMask):
        told = np.packbits(mask, axis=-1, bitorder="little")
    lhs, rhs = random_array((m, k), "float32", rng), random_array((k, n), "float32", rng)
    truth = np.where(mask, lhs, 0).astype(np.float64) @ rhs
    lhs = spoilt(lhs, mask, rng)
    operator = compiled(MATMUL, "float32", "lhs", spec, apply_mask=True)
    for candidate, out in every_candidate(operator, (lhs, rhs), told, truth.shape, "float32"):
        assert_close(out, truth, str(candidate))


def read_again() -> list[te.Tensor]:
    """``out[p, q] = sum_l data[p, l] + data[q, 0]``: read where no list leads, dead rows too."""
    p, size = te.var("p"), 7
    data = te.placeholder((p, size), "float32", "data")
    axis = te.reduce_axis((0, size), "l")
    total = te.compute((p,), lambda i: te.sum(data[i, axis], axis=axis), name="total")
    out = te.compute((p, p), lambda i, j: total[i] + data[j, 0], name="out")
    return [data, out]


def test_operand_that_is_read_twice_is_masked_twice(rng: np.random.Generator) -> None:
    operator = pit_tvm.compile(read_again(), sparse={"data": Mask()}, apply_mask=True)
    data = random_array((23, 7), "float32", rng)
    mask = (rng.random((23, 7)) < 0.5) & (rng.random((23, 1)) < 0.5)
    clean = np.where(mask, data, 0).astype(np.float64)
    truth = clean.sum(axis=1)[:, None] + clean[:, 0]
    data = spoilt(data, mask, rng)
    kinds = set()
    for candidate, out in every_candidate(operator, [data], mask, (23, 23), "float32"):
        kinds.add(candidate.kind)
        assert_close(out, truth, str(candidate))
    assert kinds == {"pit", "dense"}


def test_vector_in_blocks_is_masked_wherever_it_is_read(rng: np.random.Generator) -> None:
    """``out[p, q] = data[p] * 2 + data[q]``: its micro-tiles lie in blocks, and yet."""
    data = te.placeholder((te.var("p"),), "float32", "data")
    first = te.compute(data.shape, lambda i: data[i] * 2.0, name="first")
    out = te.compute((*data.shape, *data.shape), lambda i, j: first[i] + data[j], name="out")
    spec = BlockMask(4)
    operator = pit_tvm.compile([data, out], sparse={"data": spec}, apply_mask=True)
    blocks = np.array([True, False, True, False, True, False])
    mask = np.repeat(blocks, 4)[:22]
    value = random_array((22,), "float32", rng)
    clean = np.where(mask, value, 0).astype(np.float64)
    value = spoilt(value, mask, rng)
    for candidate, got in every_candidate(operator, [value], blocks, (22, 22), "float32"):
        assert_close(got, 2 * clean[:, None] + clean, str(candidate))


def test_array_called_like_the_mask_is_no_mask(rng: np.random.Generator) -> None:
    m, k = te.var("m"), te.reduce_axis((0, 19), "k")
    lhs = te.placeholder((m, 19), "float32", "lhs")
    other = te.placeholder((19, 11), "float32", "lhs_mask")
    out = te.compute((m, 11), lambda i, j: te.sum(lhs[i, k] * other[k, j], axis=k), "out")
    operator = pit_tvm.compile([lhs, other, out], sparse={"lhs": Mask()}, apply_mask=True)
    left, right = random_array((13, 19), "float32", rng), random_array((19, 11), "float32", rng)
    mask = rng.random((13, 19)) < 0.5
    truth = np.where(mask, left, 0).astype(np.float64) @ right
    left = spoilt(left, mask, rng)
    assert operator.inputs == ("lhs", "lhs_mask")
    for candidate, got in every_candidate(operator, (left, right), mask, (13, 11), "float32"):
        assert_close(got, truth, str(candidate))


@pytest.mark.parametrize("target", ["llvm -mcpu=x86-64-v3", "llvm -mcpu=x86-64"])
def test_every_instruction_set_sees_zeros_outside(target: str, rng: np.random.Generator) -> None:
    from pit_tvm.target import runs_here

    operator = pit_tvm.compile(
        op.matmul(None, None, None),  # for the CPU that this one is, compiled above
        sparse={"lhs": Mask()},
        target=target,
        apply_mask=True,
        database=empty_database(),
    )
    if not runs_here(operator._dispatcher.target):
        pytest.skip(reason=f"this CPU does not run {target}")
    lhs, rhs = random_array((97, 700), "float32", rng), random_array((700, 300), "float32", rng)
    mask = rng.random(lhs.shape) < 0.02
    truth = np.where(mask, lhs, 0).astype(np.float64) @ rhs
    lhs = spoilt(lhs, mask, rng)
    for candidate, out in every_candidate(operator, (lhs, rhs), mask, truth.shape, "float32"):
        assert_close(out, truth, str(candidate))


# --------------------------------------------------------------------------------------------
# Arrays and patterns of every kind


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_are_masked_alike(dtype: str, rng: np.random.Generator) -> None:
    operator = compiled(MATMUL, dtype, "lhs", Mask(), apply_mask=True)
    element = getattr(torch, dtype)
    shapes = (61, 131), (131, 71)
    arrays = [torch.from_numpy(random_array(s, "float32", rng)).to(element) for s in shapes]
    mask = torch.from_numpy(rng.random(shapes[0]) < 0.4)
    wide = [a.double().numpy() for a in arrays]
    truth = MATMUL.truth(np.where(mask.numpy(), wide[0], 0), wide[1])
    arrays[0][~mask] = torch.nan
    count = len(operator.explain(*arrays, sparsity=mask).candidates)
    for number in range(count):
        out, plan = operator._dispatcher.run(
            arrays, mask, None, choose=lambda plan, n=number: plan.candidates[n]
        )
        found = out.double().numpy()
        limit = 1e-5 if dtype == "float32" else 1.6e-2
        assert np.abs(found - truth).max() <= limit * np.abs(truth).max(), str(plan)


def test_mask_may_be_a_list_bytes_or_read_only() -> None:
    operator = compiled(MATMUL, "float32", "lhs", Mask(), apply_mask=True)
    lhs = np.array([[1, np.nan, 2], [np.nan, 3, np.inf]], np.float32)
    live = [[True, False, True], [False, True, False]]
    frozen = np.array(live)
    frozen.flags.writeable = False
    for mask in (live, np.array(live, np.uint8) * 255, frozen, torch.tensor(live)):
        for _, out in every_candidate(
            operator, (lhs, np.ones((3, 4), np.float32)), mask, (2, 4), "float32"
        ):
            np.testing.assert_array_equal(out, [[3] * 4, [3] * 4])


def test_sums_and_rows_of_nothing_are_right() -> None:
    operator = compiled(MATMUL, "float32", "lhs", Mask(), apply_mask=True)
    for m, n, k in [(0, 3, 5), (4, 0, 5), (4, 3, 0)]:
        lhs, rhs = np.full((m, k), np.nan, np.float32), np.ones((k, n), np.float32)
        mask = np.zeros((m, k), bool)
        assert (operator(lhs, rhs, sparsity=mask) == 0).all()
    nothing = compiled(REDUCE_SUM, "float32", "data", Mask(), apply_mask=True)
    data = np.full((9, 5), np.nan, np.float32)
    out = nothing(data, sparsity=np.zeros((9, 5), bool), out=poison((9,), "float32"))
    assert (out == 0).all()


def test_operand_itself_is_left_alone(rng: np.random.Generator) -> None:
    operator = compiled(MATMUL, "float32", "lhs", Mask(), apply_mask=True)
    lhs = np.full((37, 131), np.nan, np.float32)
    rhs, mask = random_array((131, 29), "float32", rng), np.zeros((37, 131), bool)
    for _ in every_candidate(operator, (lhs, rhs), mask, (37, 29), "float32"):
        assert np.isnan(lhs).all()


# --------------------------------------------------------------------------------------------
# What is said and refused


def test_promise_is_not_checked_because_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIT_TVM_CHECK", "1")
    operator = compiled(MATMUL, "float32", "lhs", Mask(), apply_mask=True)
    lhs, rhs = np.full((37, 131), np.nan, np.float32), np.ones((131, 29), np.float32)
    assert (operator(lhs, rhs, sparsity=np.zeros(lhs.shape, bool)) == 0).all()


def test_plan_says_that_the_mask_is_applied_and_counts_it() -> None:
    size = 640
    shapes = {"m": size, "n": size, "k": size}
    mask = np.ones((size, size), bool)
    for spec, told in ((Mask(), mask), (BlockMask(32, 64), mask[::32, ::64].copy())):
        plain, applied = (
            compiled(MATMUL, "float32", "lhs", spec, apply_mask=apply).explain(
                sizes=shapes, sparsity=told
            )
            for apply in (False, True)
        )
        assert "mask applied" in str(applied) and "mask applied" not in str(plain)
        pairs = zip(plain.candidates, applied.candidates, strict=True)
        more = {str(a.micro_tile): a.cost_us > p.cost_us for p, a in pairs}
        free = isinstance(spec, BlockMask)
        assert more == {"1x*": True, "1x64": not free, "32x1": not free, "None": True}


@pytest.mark.parametrize("spec", [Values(), Rows(), Lengths()], ids=str)
def test_pattern_without_a_mask_is_refused(spec: SparsitySpec) -> None:
    with pytest.raises(AxisError, match="^apply_mask.*Mask, BitMask or BlockMask"):
        pit_tvm.compile(op.matmul(None, 5, 7), sparse={"lhs": spec}, apply_mask=True)


def test_groups_have_no_mask_to_apply() -> None:
    with pytest.raises(AxisError, match="^apply_mask.*Groups"):
        pit_tvm.compile(
            op.grouped_matmul(None, 5, 7, 3), sparse={"lhs": Groups(3)}, apply_mask=True
        )


def test_mask_is_applied_on_the_cpu_only() -> None:
    with pytest.raises(UnsupportedTarget, match="^apply_mask.*llvm.*cuda"):
        pit_tvm.compile(
            op.matmul(None, 5, 7),
            sparse={"lhs": Mask()},
            target="cuda -arch=sm_90a",
            apply_mask=True,
        )


@pytest.mark.parametrize("shape", [(131, 37), (37, 130), (37,)])
def test_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    operator = compiled(MATMUL, "float32", "lhs", Mask(), apply_mask=True)
    out = poison((37, 29), "float32")
    lhs, rhs = np.ones((37, 131), np.float32), np.ones((131, 29), np.float32)
    with pytest.raises(ShapeError, match="^sparsity.*Mask"):
        operator(lhs, rhs, sparsity=np.ones(shape, bool), out=out)
    assert untouched(out)
