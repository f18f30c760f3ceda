"""Dense products of whole operands by numpy and by torch."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.runtime.arrays import as_numpy
from pit_tvm.runtime.library import library_matmul
from tests.runtime.test_arrays import make

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("library", ["numpy", "torch", "dlpack"])
@pytest.mark.parametrize(
    "dtype, out_dtype, limit",
    [
        ("float32", "float32", 1e-5),
        ("float16", "float16", 1e-3),
        ("bfloat16", "bfloat16", 8e-3),
        ("float16", "float32", 1e-5),
        ("bfloat16", "float32", 1e-5),
        ("int8", "int32", 0.0),
    ],
)
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True)])
def test_library_product_accumulates_wide(rng, library, dtype, out_dtype, limit, batch, transposed):
    lhs_shape, rhs_shape = [(11, 4097), (4097, 5)]
    lhs_shape = lhs_shape[::-1] if transposed[0] else lhs_shape
    rhs_shape = rhs_shape[::-1] if transposed[1] else rhs_shape
    scale = 100 if dtype == "int8" else 1
    values = [rng.uniform(0, 1, (*batch, *shape)) * scale for shape in (lhs_shape, rhs_shape)]
    lhs, rhs = (make(library, value, dtype) for value in values)
    out = make(library, np.full((*batch, 11, 5), 85), out_dtype)
    result = library_matmul(lhs, rhs, out, transpose_lhs=transposed[0], transpose_rhs=transposed[1])
    assert result is out
    left, right = (as_numpy(array).astype(np.float64) for array in (lhs, rhs))
    left = left.swapaxes(-1, -2) if transposed[0] else left
    right = right.swapaxes(-1, -2) if transposed[1] else right
    truth = left @ right
    assert np.abs(as_numpy(out).astype(np.float64) - truth).max() <= limit * np.abs(truth).max()


def test_library_product_takes_mixed_and_read_only_arrays(rng):
    lhs = torch.nn.Parameter(torch.randn(4, 6))
    rhs = rng.standard_normal((6, 5)).astype(np.float32)
    rhs.flags.writeable = False
    out = np.full((4, 5), np.nan, np.float32)
    library_matmul(lhs, rhs, out)
    np.testing.assert_allclose(out, lhs.detach().numpy() @ rhs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_library_product_is_none_of_autocasts(rng, dtype, batch):
    lhs, rhs = (make("torch", rng.uniform(0, 1, (*batch, *s)), dtype) for s in ((8, 512), (512, 4)))
    plain, cast = torch.empty(*batch, 8, 4), torch.empty(*batch, 8, 4)
    library_matmul(lhs, rhs, plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        library_matmul(lhs, rhs, cast)
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("value", [-128, 127])
def test_library_product_of_integers_wraps_as_kernels_do(library, value):
    depth = 140_001  # at -128 * 127 more than 31 bits either way
    lhs = make(library, np.full((2, depth), -128), "int8")
    rhs = make(library, np.full((depth, 3), value), "int8")
    out = make(library, np.zeros((2, 3)), "int32")
    library_matmul(lhs, rhs, out)
    exact = np.array(depth * -128 * value, np.int64)
    assert (as_numpy(out) == exact.astype(np.int32)).all()
