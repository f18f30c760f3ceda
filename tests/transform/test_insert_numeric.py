"""Sparse forms computed as they are, and by the generic schedule, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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

Arrays = dict[str, np.ndarray]
N, K = 5, 7
CHAIN = ["add", "relu", ("mul", 0.5), "gelu"]


@dataclass(frozen=True)
class Case:
    """An operator, its sparse operand, and what its result is for inputs of ``shapes(m)``."""

    tensors: list[te.Tensor]
    micro_tile: MicroTile
    shapes: Callable[[int], list[tuple[int, ...]]]
    truth: Callable[..., np.ndarray]  # (*inputs, mask)
    promised: Callable[[np.ndarray], np.ndarray] | None = None
    sums: str = ""  # element type of the sums, if they are added to the result
    form: SparseForm = field(default_factory=lambda: SparseForm(4))


def masked(name: str, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *arrays: function(*arrays[:-1], **{f"{name}_mask": arrays[-1]}, **options)


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


def rows(mask: np.ndarray) -> np.ndarray:
    return mask.any(axis=-1, keepdims=True)


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
            SparseForm(4, stage_dtype=accumulator),
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
        form=SparseForm(4, staged=("lhs",)),
    ),
    "matmul staged steps": Case(
        product("float32"), LHS_K, matrices, LHS, form=SparseForm(4, staged=("lhs",))
    ),
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
        form=SparseForm(4, staged=("data",)),
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


def as_it_is(func: Any) -> tvm.IRModule:
    return lower(tvm.IRModule({"main": func}))


def scheduled(func: Any) -> tvm.IRModule:
    sch = s_tir.Schedule(func)
    generic.apply(sch)
    return lower(sch.mod)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module", params=[as_it_is, scheduled])
def kernel(request: pytest.FixtureRequest, case: Case) -> Callable[..., None]:
    func = insert_sread_swrite(te.create_prim_func(case.tensors), case.micro_tile, case.form)
    return sparse.build(request.param(func))


@given(
    m=hs.integers(0, 9),
    pattern=hs.sampled_from(sparse.PATTERNS),
    before=hs.booleans(),
    seed=hs.integers(0, 2**32),
)
@settings(max_examples=12, deadline=None)
def test_live_micro_tiles_alone_are_read_and_their_promise_is_kept(
    case, kernel, m, pattern, before, seed
):
    rng = np.random.default_rng(seed)
    inputs = {
        tensor.op.name: sparse.random(rng, shape, str(tensor.dtype))
        for tensor, shape in zip(case.tensors[:-1], case.shapes(m), strict=True)
    }
    operand = inputs[case.micro_tile.operand]
    index = sparse.lists(rng, pattern, operand.shape, case.micro_tile)
    truth = case.truth(*inputs.values(), index.mask)
    sparse.bury(operand, index.mask)
    out = sparse.poisoned(truth.shape, case.sums or str(case.tensors[-1].dtype))
    if case.sums:
        out[...] = 0
    arrays = [sparse.fenced(a, before) for a in (*inputs.values(), index.ids, index.count, out)]
    kernel(*arrays)
    sparse.assert_promise(arrays[-1], truth, case.promised and case.promised(index.mask))
