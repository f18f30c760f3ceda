"""The reference against torch in float64 and against loops: two readings of each definition."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.errors import DTypeError
from pit_tvm.reference import ops

torch = pytest.importorskip("torch")
functional = torch.nn.functional


def tensor(array):
    return torch.from_numpy(np.asarray(array, np.float64))


def assert_same(got, expected):
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "activation, theirs",
    [
        ("relu", functional.relu),
        ("relu2", lambda x: functional.relu(x).square()),
        ("gelu", functional.gelu),
        ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
        ("silu", functional.silu),
    ],
)
def test_linear_with_every_activation(rng, activation, theirs):
    lhs, rhs, bias = (rng.standard_normal(shape) for shape in [(9, 7), (5, 7), (5,)])
    expected = theirs(functional.linear(tensor(lhs), tensor(rhs), tensor(bias)))
    assert_same(ops.linear(lhs, rhs, bias, activation=activation), expected)


def test_gelu_keeps_its_negative_tail():
    # erfc from tables: Phi(-10) = 7.619853024160527e-24
    np.testing.assert_allclose(ops.activate(np.array([-10.0]), "gelu"), -7.619853024160527e-23)


def test_matmul_layouts_agree(rng):
    lhs, rhs = rng.standard_normal((4, 6)), rng.standard_normal((6, 5))
    plain = ops.matmul(lhs, rhs)
    assert_same(plain, tensor(lhs) @ tensor(rhs))
    turned = ops.matmul(lhs.T, rhs.T, transpose_lhs=True, transpose_rhs=True)
    np.testing.assert_array_equal(turned, plain)


def test_a_mask_makes_its_operand_zero(rng):
    lhs, rhs = rng.standard_normal((4, 6)), rng.standard_normal((6, 5))
    lhs_mask, rhs_mask = rng.random((4, 6)) < 0.5, rng.random((6, 1)) < 0.5
    got = ops.matmul(lhs, rhs, lhs_mask=lhs_mask, rhs_mask=rhs_mask)
    np.testing.assert_array_equal(got, ops.matmul(lhs * lhs_mask, rhs * rhs_mask))


def test_a_mask_hides_what_is_not_a_number():
    data = np.array([[1.0, np.nan], [np.inf, 2.0]])
    got = ops.reduce_sum(data, data_mask=np.array([[1, 0], [0, 1]]))
    np.testing.assert_array_equal(got, [1.0, 2.0])


def test_batch_matmul(rng):
    lhs, rhs = rng.standard_normal((3, 4, 6)), rng.standard_normal((3, 5, 6))
    expected = torch.bmm(tensor(lhs), tensor(rhs).mT)
    assert_same(ops.batch_matmul(lhs, rhs, transpose_rhs=True), expected)


def test_grouped_matmul_is_one_product_per_row_and_dead_rows_are_nan(rng):
    lhs, rhs = rng.standard_normal((5, 6)), rng.standard_normal((3, 6, 4))
    bias, groups = rng.standard_normal((3, 4)), np.array([2, 0, -1, 2, 1])
    got = ops.grouped_matmul(lhs, rhs, bias, groups, activation="relu")
    for row, group in enumerate(groups):
        if group < 0:
            assert np.isnan(got[row]).all()
        else:
            np.testing.assert_allclose(got[row], np.maximum(lhs[row] @ rhs[group] + bias[group], 0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"dilation": (2, 1), "padding": (2, 0)},
        {"stride": (3, 2), "dilation": 2, "padding": (1, 3)},
    ],
)
def test_conv2d(rng, options):
    data, weight = rng.standard_normal((2, 3, 11, 9)), rng.standard_normal((4, 3, 3, 2))
    bias = rng.standard_normal(4)
    expected = functional.conv2d(tensor(data), tensor(weight), tensor(bias), **options)
    assert_same(ops.conv2d(data, weight, bias, **options), expected)


def test_elementwise_chain(rng):
    data, first, second = (rng.standard_normal((3, 4)) for _ in range(3))
    got = ops.elementwise(["add", "relu", ("mul", 0.5), "max"], data, first, second)
    np.testing.assert_array_equal(got, np.maximum(np.maximum(data + first, 0) * 0.5, second))


def test_an_unknown_activation_is_refused():
    with pytest.raises(DTypeError, match="^activation"):
        ops.activate(np.zeros(1), "swish")
