"""Masks, bits, blocks and values: every operator, operand, axis and type equals the dense result."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.structs import BitMask, BlockMask, Mask, SparsitySpec, Values
from tests.api.cases import CASES, DTYPES, LEGAL, Case
from tests.api.patterns import PATTERNS, zero_pattern
from tests.api.running import (
    assert_close,
    compiled,
    every_candidate,
    random_inputs,
    result_dtype,
    truth_of,
)

OPERANDS = [(case, operand) for case, operand, _ in LEGAL]
names = [f"{case.name}-{operand}" for case, operand in OPERANDS]


def check(
    case: Case,
    operand: str,
    spec: SparsitySpec,
    dtype: str,
    pattern: str,
    rng: np.random.Generator,
) -> set[str]:
    """All candidates on one pattern; returns the axes that ran, dense as ""."""
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
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "operand"), OPERANDS, ids=names)
def test_masked_operand_gives_the_dense_result_by_every_candidate(
    case: Case, operand: str, dtype: str, pattern: str, rng: np.random.Generator
) -> None:
    axes = check(case, operand, Mask(), dtype, pattern, rng)
    legal = next(axes for c, o, axes in LEGAL if c is case and o == operand)
    # The operators name some axes otherwise than the cases do.
    assert len(axes) == len(legal) + 1 and "" in axes


# A granularity that gives micro-tiles of its own (8x1, 1x16), and two that no tile divides.
KINDS = (
    ("granular", lambda rank: Mask(*(1,) * (rank - 2), 8, 16)),
    ("odd blocks", lambda rank: Mask(*(1,) * (rank - 2), 3, 5)),
    ("bits", lambda rank: BitMask()),
    ("block mask", lambda rank: BlockMask(*(1,) * (rank - 2), 4, 7)),
    ("values", lambda rank: Values()),
)


@pytest.mark.parametrize("kind", KINDS, ids=[name for name, _ in KINDS])
@pytest.mark.parametrize(("case", "operand"), OPERANDS, ids=names)
def test_other_kinds(case, operand, kind, rng) -> None:
    spec = kind[1](len(case.inputs[operand]))
    for pattern in PATTERNS:
        check(case, operand, spec, "float32", pattern, rng)
