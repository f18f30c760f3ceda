"""The reference of attention and layer norm against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.reference import attention as reference

torch = pytest.importorskip("torch")


def tensor(array):
    return torch.from_numpy(np.asarray(array, np.float64))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_sequences(causal):
    rng = np.random.default_rng()
    starts = [0, 4, 4, 5, 11]
    q, k, v = (rng.standard_normal((13, 3, 7)) for _ in range(3))
    got = reference.attention(q, k, v, starts, 0.3, causal=causal)
    for begin, end in zip(starts[:-1], starts[1:], strict=True):
        parts = [tensor(x[begin:end]).transpose(0, 1) for x in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(
            *parts, is_causal=causal, scale=0.3
        )
        np.testing.assert_allclose(got[begin:end], expected.transpose(0, 1).numpy(), atol=1e-12)
    assert np.isnan(got[11:]).all()


def test_layer_norm():
    rng = np.random.default_rng()
    x, gamma, beta = (rng.standard_normal(shape) for shape in [(5, 9), (9,), (9,)])
    expected = torch.nn.functional.layer_norm(
        tensor(x), (9,), tensor(gamma), tensor(beta), eps=1e-3
    )
    np.testing.assert_allclose(
        reference.layer_norm(x, gamma, beta, 1e-3), expected.numpy(), atol=1e-12
    )
