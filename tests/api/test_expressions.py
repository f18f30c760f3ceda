"""Tensor expressions that are none of `pit_tvm.op`: what the analysis accepts, runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import te, tirx

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import AxisError
from pit_tvm.reference import ops as reference
from pit_tvm.structs import Lengths, Mask, Rows, SparsitySpec, Values
from tests.api.running import assert_close, every_candidate, poison, random_array, untouched

M, N, K = 43, 17, 29


def row_maximum() -> list[te.Tensor]:
    """``out[m] = max_k data[m, k]``."""
    data = te.placeholder((te.var("m"), K), "float32", "data")
    k = te.reduce_axis((0, K), "k")
    return [data, te.compute((data.shape[0],), lambda m: te.max(data[m, k], axis=k), "out")]


def outer_product() -> list[te.Tensor]:
    """``out[m, n] = left[m] * right[n]``."""
    left = te.placeholder((te.var("m"),), "float32", "left")
    right = te.placeholder((N,), "float32", "right")
    shape = (left.shape[0], N)
    return [left, right, te.compute(shape, lambda m, n: left[m] * right[n], "out")]


def weighted_product() -> list[te.Tensor]:
    """``out[m, n] = sum_k left[m, k] * weight[k] * right[k, n]``: three operands."""
    left = te.placeholder((te.var("m"), K), "float32", "left")
    weight = te.placeholder((K,), "float32", "weight")
    right = te.placeholder((K, N), "float32", "right")
    k = te.reduce_axis((0, K), "k")
    out = te.compute(
        (left.shape[0], N),
        lambda m, n: te.sum(left[m, k] * weight[k] * right[k, n], axis=k),
        "out",
    )
    return [left, weight, right, out]


def lookup() -> list[te.Tensor]:
    """``out[m, n] = table[tokens[m], n]``: a gather by an index operand."""
    table = te.placeholder((K, N), "float32", "table")
    tokens = te.placeholder((te.var("m"),), "int32", "tokens")
    shape = (tokens.shape[0], N)
    return [table, tokens, te.compute(shape, lambda m, n: table[tokens[m], n], "out")]


def row_norm() -> list[te.Tensor]:
    """``out[m, k] = data[m, k] / sqrt(sum_k data[m, k] ** 2)``: the operand is read twice."""
    data = te.placeholder((te.var("m"), K), "float32", "data")
    k = te.reduce_axis((0, K), "k")
    total = te.compute((data.shape[0],), lambda m: te.sum(data[m, k] * data[m, k], axis=k), "total")
    shape = data.shape
    return [data, te.compute(shape, lambda m, k: data[m, k] / tirx.sqrt(total[m]), "out")]


def cut_columns() -> list[te.Tensor]:
    """``out[m, k] = data[m, k] if k < 5 else 7``: a predicate of the expression itself."""
    data = te.placeholder((te.var("m"), K), "float32", "data")
    seven = tirx.const(7, "float32")
    return [
        data,
        te.compute(data.shape, lambda m, k: tirx.if_then_else(k < 5, data[m, k], seven), "out"),
    ]


def cut_sum() -> list[te.Tensor]:
    """``out[m] = sum_k (data[m, k] if k < 5 else 7)``."""
    data = te.placeholder((te.var("m"), K), "float32", "data")
    k, seven = te.reduce_axis((0, K), "k"), tirx.const(7, "float32")
    out = te.compute(
        (data.shape[0],),
        lambda m: te.sum(tirx.if_then_else(k < 5, data[m, k], seven), axis=k),
        "out",
    )
    return [data, out]


def cut_product() -> list[te.Tensor]:
    """``out[m, n] = (left @ right)[m, n] if n < 5 else 7``: a predicate after a contraction."""
    left = te.placeholder((te.var("m"), K), "float32", "left")
    right = te.placeholder((K, N), "float32", "right")
    k, seven = te.reduce_axis((0, K), "k"), tirx.const(7, "float32")
    shape = (left.shape[0], N)
    acc = te.compute(shape, lambda m, n: te.sum(left[m, k] * right[k, n], axis=k), "acc")
    out = te.compute(shape, lambda m, n: tirx.if_then_else(n < 5, acc[m, n], seven), "out")
    return [left, right, out]


def two_products() -> list[te.Tensor]:
    """``out = left @ right @ back``: both blocks call their axes i and j."""
    left = te.placeholder((te.var("m"), K), "float32", "left")
    right = te.placeholder((K, N), "float32", "right")
    back = te.placeholder((N, K), "float32", "back")
    k, n, shape = te.reduce_axis((0, K), "k"), te.reduce_axis((0, N), "n"), left.shape
    acc = te.compute((shape[0], N), lambda i, j: te.sum(left[i, k] * right[k, j], axis=k), "acc")
    out = te.compute(shape, lambda i, j: te.sum(acc[i, n] * back[n, j], axis=n), "out")
    return [left, right, back, out]


def cut(array: np.ndarray) -> np.ndarray:
    """``array`` with 7 from the fifth column on."""
    return np.where(np.arange(array.shape[1]) < 5, array, 7)


ROWS: tuple[tuple[Callable[[], list[te.Tensor]], str, Callable[..., np.ndarray]], ...] = (
    (row_maximum, "data", lambda data: data.max(axis=1)),
    (outer_product, "left", np.outer),
    (weighted_product, "left", lambda left, weight, right: (left * weight) @ right),
    (lookup, "tokens", lambda table, tokens: table[tokens.astype(int)]),
    (row_norm, "data", lambda data: data / np.sqrt((data**2).sum(axis=1, keepdims=True))),
    (cut_columns, "data", cut),
    (cut_sum, "data", lambda data: cut(data).sum(axis=1)),
    (cut_product, "left", lambda left, right: cut(left @ right)),
    (two_products, "left", lambda left, right, back: left @ right @ back),
)


def inputs_of(tensors: list[te.Tensor], rng: np.random.Generator) -> list[np.ndarray]:
    """Random arrays for the inputs, M rows where the extent is symbolic."""
    arrays = []
    for tensor in tensors[:-1]:
        shape = tuple(int(e) if isinstance(e, tirx.IntImm) else M for e in tensor.shape)
        arrays.append(
            rng.integers(0, K, shape).astype(np.int32)
            if tensor.dtype == "int32"
            else random_array(shape, str(tensor.dtype), rng)
        )
    return arrays


def wide(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [a.astype(np.float64) for a in arrays]


@pytest.mark.parametrize("spec", [Rows(), Lengths()], ids=["rows", "lengths"])
@pytest.mark.parametrize(("build", "operand", "truth"), ROWS, ids=[b.__name__ for b, _, _ in ROWS])
def test_named_rows_of_any_accepted_expression_are_right(
    build: Callable[[], list[te.Tensor]],
    operand: str,
    truth: Callable[..., np.ndarray],
    spec: SparsitySpec,
    rng: np.random.Generator,
) -> None:
    tensors = build()
    arrays = inputs_of(tensors, rng)
    live = rng.random(M) < 0.5
    sparsity = rng.permutation(np.flatnonzero(live))
    if isinstance(spec, Lengths):
        sparsity = np.array([int(rng.integers(M + 1))])
        live = np.arange(M) < sparsity[0]
    wanted = truth(*wide(arrays))
    operator = pit_tvm.compile(tensors, sparse={operand: spec})
    for candidate, out in every_candidate(operator, arrays, sparsity, wanted.shape, "float32"):
        assert untouched(out[~live])
        assert_close(out[live], wanted[live], str(candidate))


@pytest.mark.parametrize("spec", [Mask(), Values()], ids=["mask", "values"])
@pytest.mark.parametrize("operand", ["left", "weight", "right"])
def test_mask_on_any_of_three_factors_gives_the_dense_result(
    operand: str, spec: SparsitySpec, rng: np.random.Generator
) -> None:
    tensors = weighted_product()
    arrays = inputs_of(tensors, rng)
    place = ["left", "weight", "right"].index(operand)
    mask = rng.random(arrays[place].shape) < 0.3
    arrays[place] = arrays[place] * mask
    left, weight, right = wide(arrays)
    wanted = (left * weight) @ right
    operator = pit_tvm.compile(tensors, sparse={operand: spec})
    given = mask if isinstance(spec, Mask) else None
    for candidate, out in every_candidate(operator, arrays, given, wanted.shape, "float32"):
        assert_close(out, wanted, str(candidate))


@pytest.mark.parametrize(
    ("kernel", "padding", "stride"), [(1, 1, 1), (3, 1, 1), (2, (0, 3), 1), (1, (2, 0), (3, 2))]
)
@pytest.mark.parametrize(("operand", "dim"), [("data", 0), ("data", 1), ("weight", 0)])
def test_padding_of_an_image_is_zero_and_written(
    operand: str, dim: int, kernel: int, padding: Any, stride: Any, rng: np.random.Generator
) -> None:
    """The borders of the result, where the kernel sees padding alone, are results too."""
    geometry: Any = {"padding": padding, "stride": stride}
    tensors = op.conv2d(None, 3, 5, 7, 6, kernel, **geometry)
    operator = pit_tvm.compile(tensors, sparse={operand: Rows(dim)})
    arrays = {
        "data": random_array((4, 3, 7, 6), "float32", rng),
        "weight": random_array((5, 3, kernel, kernel), "float32", rng),
    }
    ids = np.arange(arrays[operand].shape[dim])[1:]
    kept = np.zeros_like(arrays[operand])
    chosen = (slice(None),) * dim + (ids,)
    kept[chosen] = arrays[operand][chosen]
    inputs = {**arrays, operand: kept}
    wanted = reference.conv2d(inputs["data"], inputs["weight"], **geometry)
    place = {("data", 0): (ids,), ("weight", 0): (slice(None), ids)}.get((operand, dim), ())
    for candidate, out in every_candidate(
        operator, tuple(arrays.values()), ids, wanted.shape, "float32"
    ):
        assert_close(out[place], wanted[place], str(candidate))


def test_prim_func_compiles_as_its_tensors_do(rng: np.random.Generator) -> None:
    func = te.create_prim_func(op.matmul(None, N, K, activation="relu"))
    operator = pit_tvm.compile(func, sparse={"lhs": Rows()})
    lhs, rhs = random_array((M, K), "float32", rng), random_array((K, N), "float32", rng)
    ids = rng.permutation(M)[: M // 2]
    out = operator(lhs, rhs, sparsity=ids, out=poison((M, N), "float32"))
    wanted = np.maximum(lhs.astype(np.float64) @ rhs, 0)
    assert_close(out[ids], wanted[ids])


def outer_sum() -> list[te.Tensor]:
    """``out[p, q] = data[p] + data[q]``: the second read is of no dead element."""
    data = te.placeholder((te.var("p"),), "float32", "data")
    shape = (data.shape[0], data.shape[0])
    return [data, te.compute(shape, lambda p, q: data[p] + data[q], "out")]


def two_blocks() -> list[te.Tensor]:
    """``out[p, q] = 2 * data[p] + data[q]``, the first term a block of its own."""
    data = te.placeholder((te.var("p"),), "float32", "data")
    double = te.compute(data.shape, lambda p: data[p] * tirx.const(2, "float32"), "double")
    shape = (data.shape[0], data.shape[0])
    return [data, te.compute(shape, lambda p, q: double[p] + data[q], "out")]


def weighted_by_itself() -> list[te.Tensor]:
    """``out[p] = sum_k data[k] * data[p]``: every term vanishes with either factor."""
    data = te.placeholder((te.var("p"),), "float32", "data")
    k = te.reduce_axis((0, data.shape[0]), "k")
    return [data, te.compute(data.shape, lambda p: te.sum(data[k] * data[p], axis=k), "out")]


@pytest.mark.parametrize(
    ("build", "truth"),
    [
        (outer_sum, lambda data: data[:, None] + data),
        (two_blocks, lambda data: 2 * data[:, None] + data),
        (weighted_by_itself, lambda data: data * data.sum()),
    ],
    ids=["one block", "two blocks", "reduction"],
)
def test_operand_that_is_read_at_two_places_is_dead_at_one(
    build: Callable[[], list[te.Tensor]],
    truth: Callable[[np.ndarray], np.ndarray],
    rng: np.random.Generator,
) -> None:
    tensors = build()
    operator = pit_tvm.compile(tensors, sparse={"data": Mask()})
    mask = rng.random(M) < 0.5
    data = random_array((M,), "float32", rng) * mask
    wanted = truth(data.astype(np.float64))
    for candidate, out in every_candidate(operator, [data], mask, wanted.shape, "float32"):
        assert_close(out, wanted, str(candidate))


@pytest.mark.parametrize("first", [False, True])
def test_sum_that_a_dead_element_leaves_something_of_is_refused(first: bool) -> None:
    """``sum_k data[k] + data[p]``: without the first term the second is still there."""
    data = te.placeholder((te.var("p"),), "float32", "data")
    k = te.reduce_axis((0, data.shape[0]), "k")

    def term(p: Any) -> Any:
        return data[p] + data[k] if first else data[k] + data[p]

    tensors = [data, te.compute(data.shape, lambda p: te.sum(term(p), axis=k), "out")]
    with pytest.raises(AxisError, match="sparse.*data.*sum of products"):
        pit_tvm.compile(tensors, sparse={"data": Mask()})


def test_mask_on_a_maximum_is_refused() -> None:
    with pytest.raises(AxisError, match="sparse.*data.*sum of products"):
        pit_tvm.compile(row_maximum(), sparse={"data": Mask()})


def test_two_operators_of_one_expression_do_not_mix(rng: np.random.Generator) -> None:
    """Names of kernels come from their content: other constants, other kernels."""
    data, mask = random_array((M, N), "float32", rng), np.ones((M, N), bool)
    for factor in (2.0, 3.0):
        tensors = op.elementwise((None, None), [("mul", factor)])
        operator = pit_tvm.compile(tensors, sparse={"data": Mask()})
        wanted = factor * data.astype(np.float64)
        for _, out in every_candidate(operator, [data], mask, (M, N), "float32"):
            assert_close(out, wanted)


@pytest.mark.parametrize(
    ("left", "right", "sums"),
    [
        ("float32", "int32", "int32"),  # what is cast has a fraction
        ("float32", "float32", "float64"),
        ("int8", "float32", "float32"),
        ("float32", "int8", "float32"),
        ("int32", "int32", "int32"),  # terms of more bits than float64 has
        ("bool", "bool", "int32"),
    ],
)
def test_dense_product_is_that_of_the_types_that_operands_are_cast_to(
    left: str, right: str, sums: str, rng: np.random.Generator
) -> None:
    lhs = te.placeholder((te.var("m"), K), left, "lhs")
    rhs = te.placeholder((K, N), right, "rhs")
    k, shape = te.reduce_axis((0, K), "k"), (lhs.shape[0], N)
    out = te.compute(
        shape, lambda m, n: te.sum(lhs[m, k].astype(sums) * rhs[k, n].astype(sums), axis=k), "out"
    )
    operator = pit_tvm.compile([lhs, rhs, out], sparse={"lhs": Mask()})
    mask = rng.random((M, K)) < 0.5
    drawn = {
        dtype: rng.integers(-(2**30), 2**30) if dtype == "int32" else 3 * rng.standard_normal()
        for dtype in (left, right)
    }
    arrays = [
        (drawn[dtype] * rng.uniform(-1, 1, size)).astype(dtype)
        for dtype, size in ((left, (M, K)), (right, (K, N)))
    ]
    arrays[0] = (arrays[0] * mask).astype(left)
    cast = [array.astype(sums) for array in arrays]
    wanted = np.einsum("mk,kn->mn", *cast)  # in the type of the sums, where integers wrap
    plan = operator.explain(*arrays, sparsity=mask)
    (dense,) = (c for c in plan.candidates if c.kind == "dense")
    got = operator.repeat(dense, *arrays, sparsity=mask)
    assert got.dtype == sums
    limit = {"float32": 1e-5, "float64": 1e-13}.get(sums, 0.0) * np.abs(wanted).max()
    assert np.abs(got.astype("float64") - wanted.astype("float64")).max() <= limit


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_divisor_that_is_zero_gives_what_the_dense_quotient_is(
    rng: np.random.Generator, dtype: str
) -> None:
    left = te.placeholder((te.var("m"), K), dtype, "left")
    right = te.placeholder((K,), dtype, "right")
    out = te.compute(left.shape, lambda m, k: left[m, k] / right[k], "out")
    operator = pit_tvm.compile([left, right, out], sparse={"right": Mask()})
    mask = rng.random(K) < 0.3
    arrays = [random_array((M, K), dtype, rng), random_array((K,), dtype, rng)]
    arrays[1][~mask] = 0  # not -0
    with np.errstate(divide="ignore"):
        wanted = arrays[0].astype(np.float32) / arrays[1].astype(np.float32)
    for candidate, found in every_candidate(operator, arrays, mask, (M, K), dtype):
        live = np.broadcast_to(arrays[1] != 0, found.shape)
        np.testing.assert_array_equal(found[~live], wanted[~live], str(candidate))
        np.testing.assert_allclose(found[live], wanted.astype(dtype)[live], rtol=1e-2)
