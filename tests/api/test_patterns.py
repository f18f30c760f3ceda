"""Bad patterns: a typed error that names the pattern, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm import Operator, op
from pit_tvm.errors import DTypeError, PatternError, PitError, ShapeError
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
from tests.api.cases import MATMUL
from tests.api.running import assert_close, compiled, poison, untouched

M, N, K = 36, 29, 131


def matmul(spec: SparsitySpec) -> Operator:
    return compiled(MATMUL, "float32", "lhs", spec)


def good() -> tuple[np.ndarray, np.ndarray]:
    """lhs and rhs."""
    rng = np.random.default_rng()
    lhs = rng.standard_normal((M, K)).astype(np.float32)
    return lhs, rng.standard_normal((K, N)).astype(np.float32)


def refused(operator: Operator, sparsity: Any, error: type[PitError], match: str) -> None:
    """The call raises ``error``, whose text begins with ``sparsity``; nothing is written."""
    out = poison((M, N), "float32")
    with pytest.raises(error, match=rf"^sparsity.*{match}.*expected .*, got "):
        operator(*good(), sparsity=sparsity, out=out)
    assert untouched(out)


@pytest.mark.parametrize("spec", [Mask(), BitMask(), BlockMask(2, 2), Rows(), Lengths()])
def test_pattern_is_required(spec: SparsitySpec) -> None:
    refused(matmul(spec), None, ShapeError, "")


@pytest.mark.parametrize("thing", [3, "mask", object()])
def test_pattern_must_be_an_array(thing: Any) -> None:
    refused(matmul(Mask()), thing, DTypeError, "")


@pytest.mark.parametrize(
    ("spec", "given"), [(Mask(), np.ones((M, K), bool)), (Rows(), [1, 3]), (Lengths(), [2, 9])]
)
def test_masked_array_is_no_pattern(spec: SparsitySpec, given: Any) -> None:
    operator, plain = matmul(spec), np.asarray(given)
    for _ in range(2):
        refused(operator, np.ma.masked_array(plain, plain > 2), DTypeError, "")
        operator(*good(), sparsity=plain)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_mask_must_be_boolean(dtype: str) -> None:
    refused(matmul(Mask()), np.ones((M, K), dtype), DTypeError, "Mask")


def test_nan_in_a_floating_point_mask_is_refused_by_its_type() -> None:
    refused(matmul(Mask()), np.full((M, K), np.nan, np.float32), DTypeError, "Mask")


@pytest.mark.parametrize("shape", [(K, M), (M, K - 1), (M,), (1, M, K), (0, K)])
def test_mask_must_have_the_shape_of_the_operand(shape: tuple[int, ...]) -> None:
    refused(matmul(Mask()), np.ones(shape, bool), ShapeError, "Mask")


def test_mask_must_be_contiguous() -> None:
    refused(matmul(Mask()), np.ones((K, M), bool).T, ShapeError, "Mask")


def test_bits_must_be_bytes_of_the_right_number() -> None:
    right = np.zeros((M, -(-K // 8)), np.uint8)
    refused(matmul(BitMask()), right.astype(bool), DTypeError, "BitMask")
    refused(matmul(BitMask()), right[:, :-1].copy(), ShapeError, "BitMask")
    refused(matmul(BitMask()), np.ones((M, K), np.uint8), ShapeError, "BitMask")


def test_block_mask_must_have_one_element_for_each_block() -> None:
    operator = matmul(BlockMask(8, 16))
    refused(operator, np.ones((M // 8, K // 16), bool), ShapeError, "BlockMask")
    refused(operator, np.ones((M, K), bool), ShapeError, "BlockMask")
    refused(operator, np.ones((5, 9), np.float32), DTypeError, "BlockMask")


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float32", "int16"])
def test_row_ids_must_be_integers(dtype: str) -> None:
    refused(matmul(Rows()), np.ones(3, dtype), DTypeError, "row ids")


@pytest.mark.parametrize("ids", [[0, M], [-1, 3], [3, 2**31 - 1], [-(2**31)]])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_row_ids_must_lie_in_the_operand(ids: list[int], dtype: type) -> None:
    refused(matmul(Rows()), np.array(ids, dtype), ShapeError, "row ids")


def test_row_ids_beyond_32_bits_do_not_wrap() -> None:
    refused(matmul(Rows()), np.array([2**32 + 1]), ShapeError, "row ids")


def test_row_ids_must_be_a_vector() -> None:
    refused(matmul(Rows()), np.zeros((2, 2), np.int32), ShapeError, "row ids")


def test_more_row_ids_than_rows_are_refused() -> None:
    refused(matmul(Rows()), np.zeros(500, np.int32), ShapeError, "row ids")


def test_repeated_row_ids_are_found_if_checks_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIT_TVM_CHECK", "1")
    refused(matmul(Rows()), np.array([5, 2, 5]), ShapeError, "row ids")


def test_repeated_row_ids_stay_inside_the_buffers_without_checks() -> None:
    lhs, rhs = good()
    out = matmul(Rows())(lhs, rhs, sparsity=np.array([5, 2, 5, 5]), out=poison((M, N), "float32"))
    assert_close(out[[2, 5]], (lhs.astype(np.float64) @ rhs)[[2, 5]])
    assert untouched(np.delete(out, [2, 5], axis=0))


def test_no_row_ids_may_be_an_empty_list() -> None:
    out = matmul(Rows())(*good(), sparsity=[], out=poison((M, N), "float32"))
    assert untouched(out)


@pytest.mark.parametrize(
    "lengths",
    [
        [9, 10, 9, 9],  # beyond the padded length
        [9, -1, 9, 9],
        [2**40, 0, 0, 0],
        [1] * 7,  # 36 rows are no 7 sequences
        [],
        [[9, 9], [9, 9]],
    ],
    ids=["beyond", "negative", "huge", "indivisible", "none", "two dimensions"],
)
def test_lengths_must_fit_the_padded_rows(lengths: list[Any]) -> None:
    refused(matmul(Lengths()), np.array(lengths, np.int64), ShapeError, "lengths")


@pytest.mark.parametrize(
    "sums",
    [
        [0, 9, 19, 28, 37],  # 10 rows in a sequence of 9
        [0, 9, 8, 17, 20],
        [1, 9, 10, 11, 12],
        [0],
        [],
    ],
    ids=["beyond", "falling", "not from 0", "no sequence", "none"],
)
def test_running_sums_must_fit_the_padded_rows(sums: list[int]) -> None:
    operator = matmul(Lengths(cumulative=True))
    refused(operator, np.array(sums, np.int64), ShapeError, "")


def test_lengths_must_be_integers() -> None:
    refused(matmul(Lengths()), np.ones(4, np.float32), DTypeError, "lengths")


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (np.array([0, 3, 1], np.int32), ShapeError),
        (np.array([0, -2, 1], np.int32), ShapeError),
        (np.array([0, 1], np.int32), ShapeError),
        (np.zeros((3, 1), np.int32), ShapeError),
        (np.zeros(3, np.float32), DTypeError),
    ],
    ids=["beyond", "below -1", "too few", "two dimensions", "floating point"],
)
def test_group_ids_must_name_groups(ids: np.ndarray, error: type[PitError]) -> None:
    operator = pit_tvm.compile(op.grouped_matmul(None, 5, 7, 3), sparse={"lhs": Groups(3)})
    arrays = np.ones((3, 7), np.float32), np.ones((3, 7, 5), np.float32), np.zeros(3, np.int32)
    out = poison((3, 5), "float32")
    with pytest.raises(error, match="^sparsity.*group ids.*expected.*got"):
        operator(*arrays, sparsity=ids, out=out)
    assert untouched(out)


def test_bits_beyond_the_last_element_never_leave_the_buffers() -> None:
    """Padding bits should be 0; set ones must not become positions of the operand."""
    lhs, rhs = good()
    bits = np.full((M, -(-K // 8)), 0xFF, np.uint8)
    for operator in (matmul(BitMask()), compiled(MATMUL, "float32", "lhs", BitMask(), "zero")):
        out = operator(lhs, rhs, sparsity=bits, out=poison((M, N), "float32"))
        assert_close(out, lhs.astype(np.float64) @ rhs)


# --------------------------------------------------------------------------------------------
# PIT_TVM_CHECK=1


@pytest.mark.parametrize(
    ("spec", "tell"),
    [
        (Mask(), lambda mask: mask),
        (BitMask(), lambda mask: np.packbits(mask, axis=-1, bitorder="little")),
        (BlockMask(1, 1), lambda mask: mask),
    ],
    ids=["mask", "bits", "blocks"],
)
@pytest.mark.parametrize("value", [1e-30, np.nan, np.inf])
def test_values_outside_the_pattern_are_found_if_checks_are_on(
    spec: SparsitySpec,
    tell: Callable[[np.ndarray], np.ndarray],
    value: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIT_TVM_CHECK", "1")
    lhs, rhs = good()
    mask = np.random.default_rng().random((M, K)) < 0.5
    mask[7, 11] = False
    lhs[~mask] = 0
    out = poison((M, N), "float32")
    operator = matmul(spec)
    assert_close(operator(lhs, rhs, sparsity=tell(mask), out=out), lhs.astype(np.float64) @ rhs)
    lhs[7, 11] = value
    out = poison((M, N), "float32")
    choice = operator.explain(lhs, rhs, sparsity=tell(mask)).choice
    for call in (operator, partial(operator.repeat, choice)):
        with pytest.raises(PatternError, match="^lhs.*outside its pattern.*1 other"):
            call(lhs, rhs, sparsity=tell(mask), out=out)
        assert untouched(out)


def test_checks_are_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    lhs, rhs = good()
    for value in ("", "0"):
        monkeypatch.setenv("PIT_TVM_CHECK", value)
        matmul(Mask())(lhs, rhs, sparsity=np.zeros((M, K), bool))
    for value in ("true", "2", " 1"):
        monkeypatch.setenv("PIT_TVM_CHECK", value)
        with pytest.raises(ShapeError, match=f"^PIT_TVM_CHECK: expected 1, 0 .*, got '{value}'"):
            matmul(Mask())


def test_values_are_always_inside_their_own_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIT_TVM_CHECK", "1")
    lhs, rhs = good()
    lhs[::2] = 0
    out = matmul(Values())(lhs, rhs, out=poison((M, N), "float32"))
    assert_close(out, lhs.astype(np.float64) @ rhs)


def test_values_take_no_other_pattern() -> None:
    lhs, rhs = good()
    operator = matmul(Values())
    for told in (lhs != 0, lhs.copy(), [1]):
        for call in (operator, operator.profile):
            with pytest.raises(ShapeError, match=r"^sparsity: expected None.*lhs.*Mask\(\)"):
                call(lhs, rhs, sparsity=told)
    assert_close(operator(lhs, rhs, sparsity=lhs), lhs.astype(np.float64) @ rhs)


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (Mask(), np.ones((M, K - 1), bool)),
        (BitMask(), np.ones((M, 3), np.uint8)),
        (BlockMask(8, 16), np.ones((1, 1), bool)),
    ],
    ids=["mask", "bits", "blocks"],
)
def test_checks_name_a_wrong_pattern_too(
    spec: SparsitySpec, pattern: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIT_TVM_CHECK", "1")
    refused(matmul(spec), pattern, ShapeError, type(spec).__name__)
