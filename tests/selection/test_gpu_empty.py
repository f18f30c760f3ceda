"""Plans of products without rows, columns or depth: numbers, without warnings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import ShapeError
from pit_tvm.structs import Grid, Mask, SparsitySpec, Values

H200 = "cuda -arch=sm_90a -model=h200"


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (Mask(), {}),
        (Mask(), {"transpose_lhs": True, "transpose_rhs": True}),
        (Mask(64, 64), {}),
        (Mask(1, 64), {}),
        (Grid(), {}),
        (Values(), {}),
        (Values(), {"transpose_rhs": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(0, 64, 64), (64, 0, 64), (64, 64, 0), (0, 0, 0)])
def test_empty_products_have_plans(
    spec: SparsitySpec, options: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    tensors = op.matmul(None, None, None, dtype="float16", **options)
    made = pit_tvm.compile(tensors, sparse={"lhs": spec}, target=H200)
    m, _, k = sizes
    shape = (k, m) if options.get("transpose_lhs") else (m, k)
    told = np.zeros(shape, np.float16 if isinstance(spec, Values) else np.bool_)
    known = dict(zip("mnk", sizes, strict=True))
    try:
        plan = made.explain(sparsity=told, sizes=known, library="torch")
    except ShapeError:  # a family may refuse it
        assert k == 0
        return
    assert all(math.isfinite(candidate.cost_us) for candidate in plan.candidates)
