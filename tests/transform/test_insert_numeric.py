"""Sparse forms computed as they are, and by the generic schedule, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as hs
from tvm import s_tir, te

from pit_tvm import op
from pit_tvm.reference import ops as reference
from pit_tvm.schedules import generic
from pit_tvm.structs import MicroTile
from pit_tvm.transform.insert_sread_swrite import SparseForm, insert_sread_swrite
from pit_tvm.transform.pipeline import lower
from tests.schedules import sparse
from tests.schedules.sparse import Case, masked, rows

N, K = 5, 7
CHAIN = ["add", "relu", ("mul", 0.5), "gelu"]


def conv(name: str) -> Callable[..., Any]:
    return masked(name, reference.conv2d, padding=1)


def image(m: int) -> list[tuple[int, ...]]:
    return [(m, 3, 5, 4), (N, 3, 3, 2)]


def matrices(m: int) -> list[tuple[int, ...]]:
    return [(m, K), (K, N)]


def batches(m: int) -> list[tuple[int, ...]]:
    return [(3, m, K), (3, K, N)]


def product(dtype: str, out: str | None = None) -> list[te.Tensor]:
    return op.matmul(None, N, K, dtype=dtype, out_dtype=out)


LHS, RHS = masked("lhs", reference.matmul), masked("rhs", reference.matmul)
BATCH = masked("lhs", reference.batch_matmul)
LHS_M, LHS_K = MicroTile("lhs", "m", 0, (1, 0)), MicroTile("lhs", "k", 1, (3, 1))
LHS_SPLIT = MicroTile("lhs", "m", 0, (1, 4))

CASES: dict[str, Case] = {
    **{
        f"matmul {dtype} {micro_tile} on {micro_tile.axis}": Case(
            product(dtype, out),
            micro_tile,
            matrices,
            LHS,
            promised,
            sums,
        )
        for dtype, out, accumulator in (
            ("float32", None, "float32"),
            ("float16", "float16", "float32"),
            ("bfloat16", "bfloat16", "float32"),
            ("int8", "int32", "int32"),
        )
        for micro_tile, promised, sums in (
            (LHS_M, rows, ""),
            (LHS_K, None, ""),
            (LHS_SPLIT, None, accumulator),
        )
    },
    "matmul whole columns": Case(
        product("float32"), MicroTile("lhs", "k", 1, (0, 1)), matrices, LHS
    ),
    "matmul staged rows": Case(
        product("float16", "float32"),
        LHS_M,
        matrices,
        LHS,
        rows,
    ),
    "matmul staged steps": Case(product("float32"), LHS_K, matrices, LHS),
    "matmul columns of rhs": Case(
        product("float32"),
        MicroTile("rhs", "n", 1, (0, 1)),
        matrices,
        RHS,
        lambda mask: mask.any(axis=0),
    ),
    "matmul steps of rhs": Case(
        product("float32"), MicroTile("rhs", "k", 0, (1, 2)), matrices, RHS
    ),
    "linear with bias and gelu": Case(
        op.linear(None, N, K, activation="gelu"),
        LHS_M,
        lambda m: [(m, K), (N, K), (N,)],
        masked("lhs", reference.linear, activation="gelu"),
        rows,
    ),
    "batch elements": Case(
        op.batch_matmul(None, 6, N, K),
        MicroTile("lhs", "b", 0, (1, 0, 0)),
        lambda m: [(m, 6, K), (m, K, N)],
        BATCH,
        rows,
    ),
    "rows of a batch": Case(
        op.batch_matmul(3, None, N, K), MicroTile("lhs", "m", 1, (1, 1, 0)), batches, BATCH, rows
    ),
    "steps of a batch": Case(
        op.batch_matmul(3, None, N, K), MicroTile("lhs", "k", 2, (1, 3, 1)), batches, BATCH
    ),
    "rows of a sum": Case(
        op.reduce_sum(None, K),
        MicroTile("data", "p", 0, (1, 0)),
        lambda m: [(m, K)],
        masked("data", reference.reduce_sum),
        lambda mask: mask.any(axis=1),
    ),
    "terms of a sum": Case(
        op.reduce_sum(None, K, dtype="float16"),
        MicroTile("data", "l", 1, (2, 1)),
        lambda m: [(m, K)],
        masked("data", reference.reduce_sum),
    ),
    "rows of a chain": Case(
        op.elementwise((None, N), CHAIN),
        MicroTile("data", "p", 0, (1, 0)),
        lambda m: [(m, N), (m, N)],
        lambda data, rhs, mask: reference.elementwise(CHAIN, data, rhs, data_mask=mask),
        rows,
    ),
    "elements of a staged chain": Case(
        op.elementwise((None, N), CHAIN),
        MicroTile("data", "p", 0, (1, 2)),
        lambda m: [(m, N), (m, N)],
        lambda data, rhs, mask: reference.elementwise(CHAIN, data, rhs, data_mask=mask),
        lambda mask: mask,
    ),
    "images": Case(
        op.conv2d(None, 3, N, 5, 4, (3, 2), padding=1),
        MicroTile("data", "n", 0, (1, 0, 0, 0)),
        image,
        conv("data"),
        lambda mask: mask.any(axis=(1, 2, 3), keepdims=True),
    ),
    "filters": Case(
        op.conv2d(None, 3, N, 5, 4, (3, 2), padding=1),
        MicroTile("weight", "f", 0, (1, 0, 0, 0)),
        image,
        conv("weight"),
        lambda mask: mask.any(axis=(1, 2, 3))[:, None, None],
    ),
    "channels of the data": Case(
        op.conv2d(None, 3, N, 5, 4, (3, 2), padding=1),
        MicroTile("data", "c", 1, (1, 1, 0, 0)),
        image,
        conv("data"),
    ),
    "channels of the weight": Case(
        op.conv2d(None, 3, N, 5, 4, (3, 2), padding=1),
        MicroTile("weight", "c", 1, (0, 1, 0, 0)),
        image,
        conv("weight"),
    ),
}


STAGED = {
    "matmul staged rows": ("lhs",),
    "matmul staged steps": ("lhs",),
    "elements of a staged chain": ("data",),
}


def as_it_is(func: Any) -> tvm.IRModule:
    return lower(tvm.IRModule({"main": func}))


def scheduled(func: Any) -> tvm.IRModule:
    sch = s_tir.Schedule(func)
    generic.apply(sch)
    return lower(sch.mod)


@pytest.fixture(scope="module", params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=[as_it_is, scheduled])
def kernel(request: pytest.FixtureRequest, name: str) -> Callable[..., None]:
    case = CASES[name]
    form = SparseForm(4, staged=STAGED.get(name, ()), stage_dtype=case.sums or "float32")
    func = insert_sread_swrite(te.create_prim_func(case.tensors), case.micro_tile, form)
    return sparse.build(request.param(func))


@given(
    m=hs.integers(0, 9),
    pattern=hs.sampled_from(sparse.PATTERNS),
    before=hs.booleans(),
    seed=hs.integers(0, 2**32),
)
@settings(max_examples=10, deadline=None)
def test_live_micro_tiles_alone_are_read_and_their_promise_is_kept(
    name, kernel, m, pattern, before, seed
):
    sparse.check(CASES[name], kernel, seed, m, pattern, before)
