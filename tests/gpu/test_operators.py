"""On a GPU: every operator, operand, axis and type gives what the interface promises."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.structs import BitMask, BlockMask, Lengths, Mask, Rows, SparsitySpec, Values
from tests.api import test_groups, test_masks, test_slices
from tests.api.cases import DTYPES, LEGAL, Legal
from tests.api.patterns import PATTERNS
from tests.api.test_slices import AXES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]


FLAT = [
    (legal, dtype)
    for legal in LEGAL
    for dtype in (*legal.dtypes, *legal.on_gpus)
    if len(legal.case.inputs[legal.operand]) == 2
]


@pytest.mark.parametrize(("legal", "dtype"), FLAT, ids=str)
def test_masks_give_the_dense_result(legal: Legal, dtype: str, rng: np.random.Generator) -> None:
    for pattern in PATTERNS:
        test_masks.check(legal, Mask(), dtype, pattern, rng)


@pytest.mark.parametrize("spec", [Mask(1, 32), Mask(64, 1), BlockMask(32, 16), BitMask(), Values()])
@pytest.mark.parametrize("legal", LEGAL[:4], ids=str)
def test_other_masks_give_the_dense_result(
    legal: Legal, spec: SparsitySpec, rng: np.random.Generator
) -> None:
    for pattern in PATTERNS:
        test_masks.check(legal, spec, "float32", pattern, rng)


@pytest.mark.parametrize(("legal", "axis"), AXES, ids=str)
def test_named_slices_are_right_and_the_others_as_promised(
    legal: Legal, axis: str, rng: np.random.Generator
) -> None:
    dim = legal.case.inputs[legal.operand].index(axis)
    for pattern in PATTERNS:
        test_slices.check(legal, axis, Rows(dim), "float32", pattern, "skip", rng)
        test_slices.check(legal, axis, Lengths(dim), "float32", pattern, "zero", rng)


@pytest.mark.parametrize("kind", test_groups.ASSIGNMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_meet_their_group(dtype: str, kind: str, rng: np.random.Generator) -> None:
    check = test_groups.test_live_slices_meet_their_group_and_dead_ones_are_untouched
    check(dtype, kind, rng)
