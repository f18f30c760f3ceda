"""Operators that several tests of the analysis share, as TE tensors or TVMScript."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx
from tvm.script import tirx as T


def tensor(name: str, *shape: Any, dtype: str = "float32") -> Any:
    return te.placeholder(shape, dtype, name=name)


def reduce_sum() -> list[Any]:
    a, axis = tensor("A", 4, 5), te.reduce_axis((0, 5), "l")
    return [a, te.compute((4,), lambda p: te.sum(a[p, axis], axis=axis), name="C")]


def add() -> list[Any]:
    a, b = tensor("A", 4), tensor("B", 4)
    return [a, b, te.compute((4,), lambda p: a[p] + b[p], name="C")]


def matmul(m: Any = 4, n: Any = 5, k: Any = 6, transposed: bool = False) -> list[Any]:
    a, b = tensor("A", m, k), tensor("B", *((n, k) if transposed else (k, n)))
    axis = te.reduce_axis((0, k), "k")

    def product(i: Any, j: Any) -> Any:
        return te.sum(a[i, axis] * (b[j, axis] if transposed else b[axis, j]), axis=axis)

    return [a, b, te.compute((m, n), lambda m, n: product(m, n), name="C")]


def batch_matmul() -> list[Any]:
    a, b, axis = tensor("A", 2, 4, 6), tensor("B", 2, 6, 5), te.reduce_axis((0, 6), "k")
    out = te.compute(
        (2, 4, 5), lambda b_, m, n: te.sum(a[b_, m, axis] * b[b_, axis, n], axis=axis), name="C"
    )
    return [a, b, out]


def conv2d(stride: int = 1, dilation: int = 1) -> list[Any]:
    a, w = tensor("A", 2, 4, 9, 9), tensor("W", 3, 4, 3, 3)
    c, i, j = (te.reduce_axis((0, e), name) for e, name in ((4, "c"), (3, "i"), (3, "j")))
    size = (9 - 2 * dilation - 1) // stride + 1

    def at(x: Any, i: Any) -> Any:
        return x * stride + i * dilation

    def body(n: Any, f: Any, x: Any, y: Any) -> Any:
        return te.sum(a[n, c, at(x, i), at(y, j)] * w[f, c, i, j], axis=[c, i, j])

    return [a, w, te.compute((2, 3, size, size), lambda n, f, x, y: body(n, f, x, y), name="C")]


def depthwise(fused: bool) -> list[Any]:
    a, i = tensor("A", 2, 6, 9), te.reduce_axis((0, 3), "i")
    w = tensor("W", 3, 2, 3) if fused else tensor("W", 6, 3)

    def body(n: Any, c: Any, x: Any) -> Any:
        weight = w[c // 2, c % 2, i] if fused else w[c, i]
        return te.sum(a[n, c, x + i] * weight, axis=i)

    return [a, w, te.compute((2, 6, 7), lambda n, c, x: body(n, c, x), name="C")]


def attention_scores(predicate: Any) -> list[Any]:
    q, k = tensor("Q", 2, 3, 4, 5), tensor("K", 2, 3, 4, 5)
    d = te.reduce_axis((0, 5), "d")

    def body(b: Any, h: Any, i: Any, j: Any) -> Any:
        product = q[b, h, i, d] * k[b, h, j, d]
        return te.sum(tirx.if_then_else(predicate(i, j), product, 0.0), axis=d)

    return [q, k, te.compute((2, 3, 4, 4), lambda b, h, i, j: body(b, h, i, j), name="C")]


def softmax() -> list[Any]:
    """Over n of ``S[m, n]``, as four blocks."""
    s, n1, n2 = tensor("S", 4, 6), te.reduce_axis((0, 6), "n"), te.reduce_axis((0, 6), "n")
    high = te.compute((4,), lambda m: te.max(s[m, n1], axis=n1), name="high")
    e = te.compute((4, 6), lambda m, n: te.exp(s[m, n] - high[m]), name="e")
    total = te.compute((4,), lambda m: te.sum(e[m, n2], axis=n2), name="total")
    return [s, te.compute((4, 6), lambda m, n: e[m, n] / total[m], name="P")]


def layer_norm() -> list[Any]:
    """Over h of ``X[t, h]`` with scale and shift; mean and square by one tuple reducer."""
    x, scale, shift = tensor("X", 4, 6), tensor("scale", 6), tensor("shift", 6)
    h = te.reduce_axis((0, 6), "h")
    both = te.comm_reducer(
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        lambda t, u: (tirx.const(0, t), tirx.const(0, u)),
    )
    s, q = te.compute((4,), lambda t: both((x[t, h], x[t, h] * x[t, h]), axis=h), name="moments")

    def body(t: Any, h: Any) -> Any:
        mean = s[t] / 6.0
        return (x[t, h] - mean) * te.rsqrt(q[t] / 6.0 - mean * mean + 1e-5) * scale[h] + shift[h]

    return [x, scale, shift, te.compute((4, 6), lambda t, h: body(t, h), name="Y")]


def argmax() -> list[Any]:
    """Position operand and values; of equal values the first wins."""
    position, value = tensor("position", 6, dtype="int32"), tensor("value", 4, 6, dtype="int32")
    k = te.reduce_axis((0, 6), "k")
    first = te.comm_reducer(
        lambda a, b: (
            tirx.Select(a[1] >= b[1], a[0], b[0]),
            tirx.Select(a[1] >= b[1], a[1], b[1]),
        ),
        lambda t, u: (tirx.const(-1, t), tirx.min_value(u)),
    )
    outs = te.compute((4,), lambda i: first((position[k], value[i, k]), axis=k), name="best")
    return [position, value, *outs]


@T.prim_func(s_tir=True)
def cumsum(A: T.Buffer((3, 6), "int32"), B: T.Buffer((3, 6), "int32")):
    for b in range(3):
        with T.sblock("first"):
            vb = T.axis.spatial(3, b)
            B[vb, 0] = A[vb, 0]
    for b, k in T.grid(3, 5):
        with T.sblock("scan"):
            vb, vk = T.axis.remap("SS", [b, k])
            B[vb, vk + 1] = B[vb, vk] + A[vb, vk + 1]


@T.prim_func(s_tir=True)
def running_sum(A: T.Buffer((6,), "int32"), B: T.Buffer((6,), "int32"), S: T.Buffer((1,), "int32")):
    for t in range(6):
        with T.sblock("scan"):
            vt = T.axis.spatial(6, t)
            S[0] = S[0] + A[vt]
            B[vt] = S[0]


@T.prim_func(s_tir=True)
def recurrence(A: T.Buffer((6,), "int32"), B: T.Buffer((6,), "int32")):
    for t in range(6):
        with T.sblock("B"):
            vt = T.axis.spatial(6, t)
            B[vt] = B[0] + A[vt]


@T.prim_func(s_tir=True)
def two_block_recurrence(
    A: T.Buffer((6,), "int32"), B: T.Buffer((6,), "int32"), S: T.Buffer((1,), "int32")
):
    for t in range(6):
        with T.sblock("out"):
            vt = T.axis.spatial(6, t)
            B[vt] = S[0] * 2 + A[vt]
        with T.sblock("carry"):
            vt = T.axis.spatial(6, t)
            S[0] = B[vt]


@T.prim_func(s_tir=True)
def scatter(
    A: T.Buffer((6, 4), "int32"),
    idx: T.Buffer((6,), "int32"),
    B: T.Buffer((6, 4), "int32"),
    C: T.Buffer((6, 4), "int32"),
):
    for i, j in T.grid(6, 4):
        with T.sblock("overwrite"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[idx[vi], vj] = A[vi, vj]
    for i, j in T.grid(6, 4):
        with T.sblock("accumulate"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[idx[vi], vj] = C[idx[vi], vj] + A[vi, vj]
