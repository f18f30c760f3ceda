"""Layer norm of rows, of the sum of two, and of embeddings, on every instruction set of x86."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

from pit_tvm.errors import DTypeError, ShapeError, TileNotFound
from pit_tvm.memory import numpy_dtype
from pit_tvm.reference import attention as reference
from pit_tvm.schedules.cpu_rows import SERIAL_ELEMENTS, embedding_norm, residual_norm
from pit_tvm.target import resolve_target
from tests.schedules import sparse

EPS = 1e-5
FORMS = [
    (384, "float32", True, "llvm"),
    (37, "float16", True, "llvm"),
    (133, "bfloat16", False, "llvm -mcpu=x86-64-v3"),
    (1, "float32", False, "llvm -mcpu=x86-64"),
]


@functools.cache
def kernel(width: int, dtype: str, residual: bool, target: str) -> Callable[..., None]:
    """One compiled kernel, for three threads."""
    info = resolve_target(f"{target} -num-cores=3")
    made = residual_norm(width, dtype, EPS, residual, target=info)
    return sparse.build(tvm.IRModule({"main": made}), info)


def operands(
    width: int, dtype: str, residual: bool, rows: int, seed: int, shift: float = 0.0
) -> list[np.ndarray]:
    """x, y if there is one, gamma, beta."""
    rng = np.random.default_rng(seed)
    shapes = [(rows, width)] * (1 + residual) + [(width,)] * 2
    arrays = [sparse.random(rng, shape, dtype) for shape in shapes]
    arrays[0] = (arrays[0].astype(np.float64) + shift).astype(numpy_dtype(dtype))
    return arrays


def truth_of(arrays: list[np.ndarray]) -> np.ndarray:
    *rows, gamma, beta = (array.astype(np.float64) for array in arrays)
    return reference.layer_norm(sum(rows), gamma, beta, EPS)


def check(form: tuple[int, str, bool, str], rows: int, seed: int) -> None:
    arrays = operands(*form[:3], rows, seed)
    truth = truth_of(arrays)
    fenced = [sparse.fenced(a) for a in [*arrays, sparse.poisoned(truth.shape, form[1])]]
    kernel(*form)(*fenced)
    sparse.assert_promise(fenced[-1], truth)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("many", [False, True])
def test_rows(form, many):
    for rows in (SERIAL_ELEMENTS // form[0] + 1,) if many else (0, 1, 5):
        check(form, rows, rows)


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(0, 300), seed=st.integers(0, 2**32 - 1))
def test_any_number_of_rows(rows, seed):
    check(FORMS[0], rows, seed)


@functools.cache
def table_kernel(
    width: int, dtype: str, id_dtypes: tuple[str, ...], arrays: int
) -> Callable[..., None]:
    """One compiled kernel of embeddings, for three threads."""
    info = resolve_target("llvm -num-cores=3")
    made = embedding_norm(width, dtype, EPS, id_dtypes, arrays, target=info)
    return sparse.build(tvm.IRModule({"main": made}), info)


TABLES = [
    (384, "float32", ("int32", "int64", "int64"), 0),
    (21, "bfloat16", ("int32",), 0),
    (40, "float32", ("int64",) * 5, 2),
    (16, "float16", (), 3),
]


def check_embeddings(form: tuple[int, str, tuple[str, ...], int], rows: int, seed: int) -> None:
    width, dtype, id_dtypes, arrays = form
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 50, rows).astype(one) for one in id_dtypes]
    tables = [sparse.random(rng, (50, width), dtype) for _ in id_dtypes]
    others = [sparse.random(rng, (rows, width), dtype) for _ in range(arrays)]
    scales = [sparse.random(rng, (width,), dtype) for _ in range(2)]
    chosen = [table[one] for table, one in zip(tables, ids, strict=True)]
    truth = truth_of([*chosen, *others, *scales])
    if rows and len(ids) > 1:
        ids[0][0], ids[1][0] = 2**31 - 1, -7  # outside: the nearest rows
        first = [tables[0][-1:], tables[1][:1], *(row[:1] for row in (*chosen[2:], *others))]
        truth[0] = truth_of([*first, *scales])[0]
    pairs = [array for pair in zip(ids, tables, strict=True) for array in pair]
    arrays_ = [*pairs, *others, *scales, sparse.poisoned(truth.shape, dtype)]
    fenced = [sparse.fenced(array) for array in arrays_]
    table_kernel(*form)(*fenced)
    sparse.assert_promise(fenced[-1], truth)


@pytest.mark.parametrize("form", TABLES, ids=str)
@pytest.mark.parametrize("many", [False, True])
def test_embeddings(form, many):
    for rows in (2 * SERIAL_ELEMENTS // form[0],) if many else (0, 1, 7):
        check_embeddings(form, rows, rows)


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(0, 300), seed=st.integers(0, 2**32 - 1))
def test_embeddings_of_any_number_of_rows(rows, seed):
    check_embeddings(TABLES[0], rows, seed)


def test_a_large_mean_costs_no_more_than_its_own_rounding():
    arrays = operands(384, "float32", True, 4, 0, shift=1000.0)
    got = np.full((4, 384), np.nan, np.float32)
    kernel(*FORMS[0])(*arrays, got)
    # elements near 1000 are rounded to 6e-5, their squares would be to 0.06
    assert np.abs(got - truth_of(arrays)).max() <= 1e-3


def test_what_is_no_number_stays_in_its_row():
    arrays = operands(384, "float32", True, 5, 1)
    arrays[1][2, 7] = np.nan
    got = np.zeros((5, 384), np.float32)
    kernel(*FORMS[0])(*arrays, got)
    assert np.isnan(got[2]).all() and not np.isnan(np.delete(got, 2, axis=0)).any()


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (ShapeError, {"width": 0}),
        (ShapeError, {"eps": -1.0}),
        (ShapeError, {"eps": math.inf}),
        (DTypeError, {"dtype": "float64"}),
        (TileNotFound, {"target": resolve_target("cuda -arch=sm_90a")}),
    ],
)
def test_refuses(error, change):
    given = {"width": 8, "dtype": "float32", "eps": EPS, "residual": True}
    given["target"] = resolve_target("llvm")
    with pytest.raises(error, match=next(iter(change)) if error is not TileNotFound else "isa"):
        residual_norm(**(given | change))


def test_embeddings_refuse():
    info = resolve_target("llvm")
    with pytest.raises(DTypeError, match="id_dtypes"):
        embedding_norm(8, "float32", EPS, ("int32", "int16"), 0, target=info)
    with pytest.raises(ShapeError, match="tables and arrays"):
        embedding_norm(8, "float32", EPS, (), 0, target=info)
