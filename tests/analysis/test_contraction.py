"""Which blocks are contractions, and what their axes are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tvm import te, tirx
from tvm.script import tirx as T

from pit_tvm import op
from pit_tvm.analysis.contraction import Contraction, contraction_of

M, N, K, B = 6, 5, 7, 3


def tensor(name: str, *shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape, dtype, name)


def product(
    value: Callable[..., Any] | None = None, reduce: Any = te.sum, shape: tuple[int, ...] = (M, N)
) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """``acc = reduce(value(lhs, rhs, indices, k))``; lhs @ rhs by default."""
    lhs, rhs = tensor("lhs", M, K), tensor("rhs", K, N)
    k = te.reduce_axis((0, K), "k")

    def element(*index: Any) -> Any:
        if value is None:
            return reduce(lhs[index[0], k] * rhs[k, index[1]], axis=k)
        return reduce(value(lhs, rhs, *index, k), axis=k)

    return (
        lhs,
        rhs,
        te.compute(shape, element, name="acc", varargs_names=["m", "n", "o"][: len(shape)]),
    )


def found(tensors: Any, operand: str = "lhs") -> Contraction | None:
    func = tensors if isinstance(tensors, tirx.PrimFunc) else te.create_prim_func(list(tensors))
    return contraction_of(func, operand)


PLAIN = Contraction(
    block="out",
    sparse="lhs",
    dense="rhs",
    row="m",
    column="n",
    reduce="k",
    batch=(),
    group="",
    sparse_axes=("m", "k"),
    dense_axes=("k", "n"),
    out_axes=("m", "n"),
    accumulator="float32",
)


def test_matmul():
    assert found(op.matmul(M, N, K)) == PLAIN


def test_names_follow_the_sparse_operand():
    con = found(op.matmul(M, N, K), "rhs")
    assert (con.sparse, con.dense, con.row, con.column) == ("rhs", "lhs", "n", "m")
    assert (con.sparse_axes, con.dense_axes) == (("k", "n"), ("m", "k"))


@pytest.mark.parametrize("lhs", [False, True])
@pytest.mark.parametrize("rhs", [False, True])
def test_transposed_layouts(lhs, rhs):
    con = found(op.matmul(M, N, K, transpose_lhs=lhs, transpose_rhs=rhs))
    assert con.sparse_axes == (("k", "m") if lhs else ("m", "k"))
    assert con.dense_axes == (("n", "k") if rhs else ("k", "n"))
    assert (con.row, con.column, con.reduce) == ("m", "n", "k")


def test_batch_axes():
    con = found(op.batch_matmul(B, M, N, K))
    assert con.batch == ("b",)
    assert (con.sparse_axes, con.dense_axes) == (("b", "m", "k"), ("b", "k", "n"))


def test_group_of_a_row():
    con = found(op.grouped_matmul(M, N, K, B, bias=True))
    assert (con.group, con.dense_axes, con.batch) == ("group_ids", ("", "k", "n"), ())
    assert found(op.grouped_matmul(M, N, K, B), "rhs") is None


@pytest.mark.parametrize(
    ("dtype", "accumulator"),
    [("float32", "float32"), ("float16", "float32"), ("bfloat16", "float32"), ("int8", "int32")],
)
def test_type_of_the_sums(dtype, accumulator):
    assert found(op.linear(M, N, K, dtype=dtype, activation="relu")).accumulator == accumulator


def test_epilogue_is_a_block_of_its_own():
    con = found(op.linear(M, N, K, activation="gelu"))
    assert con.block == "acc"


def test_epilogue_in_stages_that_broadcasts_and_transposes():
    lhs, rhs, acc = product()
    w, v = tensor("w", N), tensor("v", B)
    scale = te.compute((N,), lambda n: w[n] * 2.0, name="scale")
    gate = te.compute((N, M), lambda j, i: acc[i, j] * scale[j], name="gate")
    out = te.compute((B, M, N), lambda b, i, j: v[b] * gate[j, i] + acc[i, j], name="out")
    con = found([lhs, rhs, w, v, out])
    assert (con.block, con.row, con.column) == ("acc", "m", "n")
    assert con.out_axes == ("", "m", "n")
    turned = te.compute((N, M), lambda j, i: acc[i, j] * w[j], name="out")
    con = found([lhs, rhs, w, turned])
    assert con.out_axes == con.axes_of("out") == ("n", "m") and con.axes_of("lhs") == ("m", "k")


def test_symbolic_extents():
    assert found(op.matmul(None, None, None)) == PLAIN


# --------------------------------------------------------------------------------------------
# Not recognised


def third(lhs: Any, rhs: Any, m: Any, n: Any, k: Any) -> Any:
    return lhs[m, k] * rhs[k, n] * rhs[k, n]


def stencil(lhs: Any, rhs: Any, m: Any, n: Any, k: Any) -> Any:
    return lhs[(m + k) % M, k] * rhs[k, n]


def sum_of_two(lhs: Any, rhs: Any, m: Any, n: Any, k: Any) -> Any:
    return lhs[m, k] + rhs[k, n]


def constant(lhs: Any, rhs: Any, m: Any, n: Any, k: Any) -> Any:
    return lhs[m, k] * rhs[k, 0]


def chosen(lhs: Any, rhs: Any, m: Any, n: Any, k: Any) -> Any:
    zero = tirx.const(0, "float32")
    return te.if_then_else(k < 3, lhs[m, k], zero) * rhs[k, n]


@pytest.mark.parametrize("value", [third, stencil, sum_of_two, constant, chosen])
def test_values_that_are_no_product_of_two_bare_loads(value):
    assert found(product(value)) is None


def test_reducer_that_is_no_sum():
    assert found(product(reduce=te.max)) is None


def test_product_of_an_operand_with_itself():
    lhs = tensor("lhs", M, K)
    k = te.reduce_axis((0, K), "k")
    out = te.compute((M, M), lambda i, j: te.sum(lhs[i, k] * lhs[j, k], axis=k), name="out")
    assert found([lhs, out]) is None


def test_second_reduction_axis():
    lhs, rhs = tensor("lhs", M, K, B), tensor("rhs", K, B, N)
    k, b = te.reduce_axis((0, K), "k"), te.reduce_axis((0, B), "b")
    out = te.compute(
        (M, N), lambda m, n: te.sum(lhs[m, k, b] * rhs[k, b, n], axis=[k, b]), name="out"
    )
    assert found([lhs, rhs, out]) is None


def test_second_column_and_missing_row():
    lhs, rhs = tensor("lhs", M, K), tensor("rhs", K, N, B)
    k = te.reduce_axis((0, K), "k")
    out = te.compute(
        (M, N, B), lambda m, n, o: te.sum(lhs[m, k] * rhs[k, n, o], axis=k), name="out"
    )
    assert found([lhs, rhs, out]) is None
    vector = tensor("vector", K)
    out = te.compute((M,), lambda m: te.sum(lhs[m, k] * vector[k], axis=k), name="out")
    assert found([lhs, vector, out]) is None


def test_reduction_of_one_operand_alone():
    lhs, rhs = tensor("lhs", M, K), tensor("rhs", N)
    k = te.reduce_axis((0, K), "k")
    out = te.compute((M, N), lambda m, n: te.sum(lhs[m, k] * rhs[n], axis=k), name="out")
    assert found([lhs, rhs, out]) is None


def test_axis_twice_in_an_operand():
    lhs, rhs = tensor("lhs", K, K, M), tensor("rhs", K, N)
    k = te.reduce_axis((0, K), "k")
    out = te.compute((M, N), lambda m, n: te.sum(lhs[k, k, m] * rhs[k, n], axis=k), name="out")
    assert found([lhs, rhs, out]) is None


@pytest.mark.parametrize("name", ["lhs", "rhs"])
def test_operand_that_another_block_reads_too(name):
    lhs, rhs, acc = product()
    again = {"lhs": lambda m, n: lhs[m, 0], "rhs": lambda m, n: rhs[0, n]}[name]
    out = te.compute((M, N), lambda m, n: acc[m, n] + again(m, n), name="out")
    assert found([lhs, rhs, out], "lhs") is None
    assert found([lhs, rhs, out], "rhs") is None


@pytest.mark.parametrize("short", ["m", "n", "k"])
def test_product_of_a_part_of_an_operand(short):
    lhs, rhs = tensor("lhs", M, K), tensor("rhs", K, N)
    sizes = {"m": M, "n": N, "k": K}
    sizes[short] -= 1
    k = te.reduce_axis((0, sizes["k"]), "k")
    shape = (sizes["m"], sizes["n"])
    out = te.compute(shape, lambda m, n: te.sum(lhs[m, k] * rhs[k, n], axis=k), name="out")
    assert found([lhs, rhs, out]) is None


def test_operand_that_is_computed():
    lhs, raw = tensor("lhs", M, K), tensor("raw", K, N)
    rhs = te.compute((K, N), lambda k, n: raw[k, n] * 2.0, name="rhs")
    k = te.reduce_axis((0, K), "k")
    out = te.compute((M, N), lambda m, n: te.sum(lhs[m, k] * rhs[k, n], axis=k), name="out")
    assert found([lhs, raw, out]) is None


def row_maximum(acc: te.Tensor) -> te.Tensor:
    r = te.reduce_axis((0, N), "r")
    return te.compute((M,), lambda m: te.max(acc[m, r], axis=r), name="out")


@pytest.mark.parametrize(
    "out",
    [
        lambda acc: te.compute((M - 1, N), lambda m, n: acc[m, n] - acc[m + 1, n], name="out"),
        lambda acc: te.compute((M, M), lambda i, j: acc[i, 0] * acc[j, 0], name="out"),
        lambda acc: te.compute((N, N), lambda i, j: acc[i, j] + acc[j, i], name="out"),
        lambda acc: te.compute((M - 1, N), lambda m, n: acc[m, n] * 2.0, name="out"),
        row_maximum,
    ],
    ids=["shift", "pairs", "transpose of itself", "part", "maximum"],
)
def test_epilogue_that_mixes_elements_or_leaves_some_out(out):
    lhs, rhs, acc = product()
    assert found([lhs, rhs, out(acc)]) is None


@T.prim_func(s_tir=True)
def from_a_bias(
    lhs: T.Buffer((6, 7), "float32"),
    rhs: T.Buffer((7, 5), "float32"),
    out: T.Buffer((6, 5), "float32"),
):
    for m, n, k in T.grid(6, 5, 7):
        with T.sblock("out"):
            i, j, c = T.axis.remap("SSR", [m, n, k])
            with T.init():
                out[i, j] = T.float32(1)
            out[i, j] = out[i, j] + lhs[i, c] * rhs[c, j]


@T.prim_func(s_tir=True)
def conditional(
    lhs: T.Buffer((6, 7), "float32"),
    rhs: T.Buffer((7, 5), "float32"),
    out: T.Buffer((6, 5), "float32"),
):
    for m, n, k in T.grid(6, 5, 7):
        with T.sblock("out"):
            i, j, c = T.axis.remap("SSR", [m, n, k])
            with T.init():
                out[i, j] = T.float32(0)
            if c < 3:
                out[i, j] = out[i, j] + lhs[i, c] * rhs[c, j]


@pytest.mark.parametrize("func", [from_a_bias, conditional])
def test_sum_that_starts_elsewhere_or_skips_terms(func):
    assert found(func) is None


@pytest.mark.parametrize("name", ["bias", "out", "nothing"])
def test_operand_that_is_no_factor(name):
    assert found(op.linear(M, N, K), name) is None
