"""Operators for targets that this machine does not run: explained, never called."""

from __future__ import annotations

import numpy as np
import pytest

import pit_tvm
from pit_tvm import Mask, op
from pit_tvm.errors import UnsupportedTarget

FOREIGN = {
    "llvm -mtriple=x86_64-pc-windows-msvc": "windows",
    "llvm -mtriple=aarch64-linux-gnu": "aarch64",
    "llvm -mcpu=diamondrapids": "amx",
}


@pytest.mark.parametrize("target", FOREIGN)
def test_foreign_operators_are_explained_and_not_called(target: str) -> None:
    if not pit_tvm.target.lacking(pit_tvm.target.resolve_target(target)):
        pytest.skip(reason=f"this machine runs {target}")
    operator = pit_tvm.compile(op.matmul(None, 24, 40), sparse={"lhs": Mask()}, target=target)
    lhs, rhs = np.ones((9, 40), np.float32), np.ones((40, 24), np.float32)
    mask = np.ones(lhs.shape, bool)
    plan = operator.explain(sparsity=mask, sizes={"m": 9})
    assert plan.candidates
    with pytest.raises(UnsupportedTarget, match=FOREIGN[target]):
        operator(lhs, rhs, sparsity=mask)
    with pytest.raises(UnsupportedTarget, match=FOREIGN[target]):
        operator.pack(rhs=rhs)
    with pytest.raises(UnsupportedTarget, match=FOREIGN[target]):
        operator.repeat(plan.choice, lhs, rhs, sparsity=mask)
