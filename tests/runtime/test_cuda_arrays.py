"""Products by the library of torch, which take tensors of any device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from pit_tvm.runtime.cuda_arrays import dense_product

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("act", ["none", "relu", "gelu", "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_new_output_is_as_one_that_is_given(
    act: str, bias: bool, turned: bool, autocast: bool
) -> None:
    lhs, rhs = torch.randn(6, 16), torch.nn.Parameter(torch.randn(16, 8))
    row = torch.randn(8) if bias else None
    right: Any = rhs.mT.contiguous() if turned else rhs
    want = lhs.double() @ rhs.detach().double() + (row.double() if row is not None else 0.0)
    functional = torch.nn.functional
    want = getattr(functional, act)(want) if act != "none" else want
    region: Any = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with region:
        for out in (None, torch.full((6, 8), torch.nan)):
            found = dense_product(lhs, right, row, act, out, transpose_rhs=turned)
            assert out is None or found is out
            assert found.dtype == torch.float32 and not found.requires_grad
            assert (found.double() - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("turned", [False, True])
def test_matrices_beside_each_other(turned: bool) -> None:
    lhs, rhs = torch.randn(3, 6, 16), torch.randn(3, 16, 8)
    right = rhs.mT.contiguous() if turned else rhs
    for out in (None, torch.full((3, 6, 8), torch.nan)):
        found = dense_product(lhs, right, None, "none", out, transpose_rhs=turned)
        assert torch.allclose(found, lhs @ rhs, atol=1e-5)
