"""The reference of attention and layer norm against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.reference import attention as reference
from pit_tvm.windows import CAUSAL, FULL, Window

torch = pytest.importorskip("torch")


def tensor(array):
    return torch.from_numpy(np.asarray(array, np.float64))


@pytest.mark.parametrize("window", [FULL, CAUSAL, Window(1, 0), Window(0, 2)], ids=str)
def test_attention_of_sequences(window):
    rng = np.random.default_rng()
    starts = [0, 4, 4, 5, 11]
    q, k, v = (rng.standard_normal((13, 3, 7)) for _ in range(3))
    place = np.array([0, 1, 2, 5, 9, 0, 1, 2, 3, 4, 5, 0, 1])
    got = reference.attention(q, k, v, starts, 0.3, window=window, position=place)
    for begin, end in zip(starts[:-1], starts[1:], strict=True):
        parts = [tensor(x[begin:end]).transpose(0, 1) for x in (q, k, v)]
        apart = place[begin:end, None] - place[begin:end]
        before, after = (99 if far is None else far for far in (window.before, window.after))
        seen = torch.from_numpy((apart <= before) & (-apart <= after))
        expected = torch.nn.functional.scaled_dot_product_attention(
            *parts, attn_mask=seen, scale=0.3
        )
        np.testing.assert_allclose(got[begin:end], expected.transpose(0, 1).numpy(), atol=1e-12)
    assert np.isnan(got[11:]).all()


def test_sinks_take_their_part_of_the_weight():
    rng = np.random.default_rng()
    q, k, v = (rng.standard_normal((3, 2, 4)) for _ in range(3))
    sinks = rng.standard_normal(2)
    keys, values = (np.concatenate([x, np.zeros((1, 2, 4))]) for x in (k, v))
    got = reference.attention(q, k, v, [0, 3], 1.0, sinks=sinks)
    for head in range(2):
        scores = q[:, head] @ keys[:, head].T
        scores[:, 3] = sinks[head]
        weights = torch.softmax(torch.from_numpy(scores), -1).numpy()
        np.testing.assert_allclose(got[:, head], weights @ values[:, head], atol=1e-12)


def test_layer_norm():
    rng = np.random.default_rng()
    x, gamma, beta = (rng.standard_normal(shape) for shape in [(5, 9), (9,), (9,)])
    expected = torch.nn.functional.layer_norm(
        tensor(x), (9,), tensor(gamma), tensor(beta), eps=1e-3
    )
    np.testing.assert_allclose(
        reference.layer_norm(x, gamma, beta, 1e-3), expected.numpy(), atol=1e-12
    )
